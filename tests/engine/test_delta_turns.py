"""Sessions of a model with DeltaNet layers: states go with slots, are kept between turns, and given up where
they cannot go back."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from architectures import of_golden
from test_session_turns import (
    PROMPTS,
    STOP_IDS,
    TURNS,
    Episodes,
    answer,
    check_against_the_forward_pass,
    check_against_the_host_model,
    preempted,
)

from quatrain.engine.session import Sampler, Session
from quatrain.models.kv_cache import bytes_per_position, bytes_per_state
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.rollouts import Completion, Sampling


@pytest.fixture(scope="module")
def model():
    arch = of_golden("qwen3_5_text", vocab_size=290)
    arch = replace(arch, layers=arch.layers[:2])  # one of each kind
    params = init_params(arch, jax.random.key(3))
    return arch, jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params)


@pytest.fixture
def make_session(computed_by, model, tokenizer):
    def make(*, most=None, memory=1 << 28, stop_ids=STOP_IDS, usual_prompt=1, **sampling):
        dtype = jnp.dtype("float32")
        where = "xla", one_device(), memory, usual_prompt
        sampler = Sampler(model[0], tokenizer, stop_ids, 11, dtype, *where, more_context=400)
        settings = Sampling(**{"n": 3, "max_new_tokens": 40, "temperature": 0.9, **sampling})

        def goes_on(completion: Completion) -> bool:
            left = settings.max_new_tokens - completion.num_sampled
            return completion.finish_reason == "stop" and len(completion.turns) < TURNS and left > 0

        return Session(sampler, settings, most, goes_on)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
@pytest.mark.parametrize(("most", "preempts"), [(2, 4), (None, 0), (4, 0)])
def test_tokens_of_every_turn_are_the_argmax_of_the_forward_pass(make_session, model, most, preempts):
    """With slots refilled, turns kept in prefix slots, and turns of round `preempts` computed again."""
    sizes = {"usual_prompt": 200, "max_new_tokens": 24} if preempts else {}
    session = make_session(most=most, temperature=0.0, **sizes)
    prompts = PROMPTS[:1] if preempts else PROMPTS
    completions = Episodes(session, preempt=lambda who, rounds: rounds == preempts).run(model[1], prompts)
    check_against_the_forward_pass(*model, completions, 3, tolerance=1e-4)
    assert max(len(completion.turns) for completion in completions) == TURNS
    assert bool(preempts) <= (session.stats.recomputed_tokens > 0)


@pytest.mark.parametrize("chance", [0, 0.2])
@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_tokens_of_every_turn_follow_from_all_before_them(make_session, model, most, chance):
    """As above, in caches of all sizes, with hashes of all tokens for states."""
    completions = Episodes(make_session(most=most, temperature=0.0), preempt=preempted(chance)).run(model[1])
    check_against_the_host_model(*model, completions, 3)
    assert max(len(completion.turns) for completion in completions) == TURNS


def _same(one: list[Completion], other: list[Completion]) -> None:
    assert [c.tokens for c in one] == [c.tokens for c in other]
    assert [c.turns for c in one] == [c.turns for c in other]
    for a, b in zip(one, other, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("sequences", "rings", "chance"),
    [(99, (), 0.2), (3, (32,), 0), (1.1, (), 0), (3, (), 0)],
)
def test_text_depends_neither_on_memory_nor_on_preemption(make_session, model, sequences, rings, chance):
    usual = Episodes(make_session(temperature=0.0)).run(model[1])
    one = 600 * bytes_per_position(model[0], "float32") + 2 * bytes_per_state(model[0], "float32")
    session = make_session(memory=int(sequences * one), temperature=0.0)
    session._admission.ring_positions = rings
    waits = lambda number, rounds: (number * 7 + rounds * 5) % 6  # noqa: E731
    other = Episodes(session, waits, preempted(chance)).run(model[1])
    _same(other, usual)
    assert session.stats.recomputed_tokens > 0


def test_a_turn_cut_at_a_stop_string_is_computed_again_and_counted(
    computed_by, make_session, model, tokenizer
):
    """A turn that ends with a token goes on from its state; one cut before the last token does not."""
    words = [tokenizer.decode([token]) for token in range(40, 80)]
    stop = tuple(word for word in words if word.strip())
    session = make_session(stop_ids=(0,), stop=stop, temperature=0.0)
    completions = Episodes(session).run(model[1])
    if computed_by == "host":
        check_against_the_host_model(*model, completions, 3)
    else:
        check_against_the_forward_pass(*model, completions, 3, tolerance=1e-4)
    assert max(len(completion.turns) for completion in completions) > 1
    cut = sum(
        completion.turns[i + 1] - len(answer(n // 3, n % 3, i + 1)) - begin > 1
        for n, completion in enumerate(completions)
        for i, begin in enumerate(completion.turns[:-1])
    )
    assert cut > 0
    assert session.stats.recomputed_tokens > 10 * cut


def test_a_cache_without_room_for_the_states_is_refused(make_session, model):
    arch, _ = model
    positions = 600 * bytes_per_position(arch, "float32")
    session = make_session(memory=positions)
    session.check_memory([])  # one short prompt: its positions and two states fit
    with pytest.raises(ValueError, match="must fit into the memory for it"):
        make_session(memory=2 * bytes_per_state(arch, "float32")).check_memory([])
