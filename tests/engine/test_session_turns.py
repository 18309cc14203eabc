"""Episodes whose turns are requests of their own: what was kept, or is computed again, gives the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import changed, of_golden
from host_model import forward as host_forward

from quatrain.engine.session import Session, SessionSettings
from quatrain.models.decoder import forward, logits
from quatrain.models.kv_cache import bytes_per_position, bytes_per_state
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.sampler import PerRequestSampling

PROMPTS = [[5, 9, 200], [17], [3, 3, 3, 3, 3, 8], [120, 7], [250, 1, 40, 6]]
STOP_IDS = tuple(range(0, 290, 5))
TURNS, SAMPLES = 4, 3


@dataclass
class Episodes:
    """Each turn of a sample is followed by tokens that depend on the sample and the turn alone."""

    session: Session
    wait: Any = lambda turn, round: 0
    """Rounds that an answer takes, by the number of the sample and that of the round."""
    preempt: Any = lambda who, round: False
    """Whether a sample loses its slot, or its place in the order of waiting, before a round."""
    done: dict[tuple[int, int], Completion] = field(default_factory=dict)

    def run(self, params: Any, prompts: list[list[int]] = PROMPTS, **sampling: Any) -> list[Completion]:
        settings = Sampling(**{"n": 1, "max_new_tokens": 40, "temperature": 0.9, **sampling})
        self.done = {(p, n): Completion() for p in range(len(prompts)) for n in range(SAMPLES)}
        live, rounds, due = {}, 0, dict.fromkeys(self.done, 0)
        while live or due:
            for sample in [each for each in due if due[each] <= rounds]:
                del due[sample]
                live[self._ask(*sample, prompts, settings)] = sample
            for who in self.session._scheduler.placed:
                if self.preempt(who, rounds):
                    self.session._scheduler.preempt(*who)
            if live:
                self.session.advance(params, 1)
            rounds += 1
            for ticket in [each for each in live if self.session.finished([each])]:
                sample = live.pop(ticket)
                [turn] = self.session.take([ticket])
                if self._goes_on(*sample, turn, settings):
                    due[sample] = rounds + self.wait(sample[1], rounds)
            assert rounds < 500
        assert not self.session.num_groups
        return list(self.done.values())

    def _ask(self, prompt: int, number: int, prompts: list[list[int]], settings: Sampling) -> int:
        before = self.done[prompt, number]
        left = replace(settings, max_new_tokens=settings.max_new_tokens - before.num_sampled)
        own = PerRequestSampling(
            left,
            seed=11,
            step=3,
            sequence_id=SAMPLES * prompt + number,
            offset=len(before.tokens),
            session=f"{prompt}/{number}",
        )
        context = np.array([*prompts[prompt], *before.tokens], np.int32)
        [ticket] = self.session.submit_own([Prompt(0, context, "")], [own])
        return ticket

    def _goes_on(self, prompt: int, number: int, turn: Completion, settings: Sampling) -> bool:
        completion = self.done[prompt, number]
        completion.append(turn, 0)
        left = settings.max_new_tokens - completion.num_sampled
        goes_on = turn.finish_reason == "stop" and len(completion.turns) < TURNS and left > 0
        if goes_on:
            completion.begin_turn(answer(prompt, number, len(completion.turns)))
        return goes_on


def answer(prompt: int, number: int, turn: int) -> list[int]:
    size = 1 + (7 * prompt + 3 * number + turn) % 5
    if turn == 2 and number == 1:
        size = 140  # longer than one call computes
    return np.random.default_rng([prompt, number, turn]).integers(1, 280, size).tolist()


@pytest.fixture
def make_session(computed_by, small_arch, tokenizer):
    def make(
        share=0.5, *, arch=small_arch, most=None, memory=1 << 28, usual_prompt=1, stop_ids=STOP_IDS, drafts=0
    ):
        where = "xla", one_device(), memory, usual_prompt
        settings = SessionSettings(
            arch, tokenizer, stop_ids, 11, jnp.dtype("float32"), *where, prefix_share=share, num_drafts=drafts
        )
        return Session(settings, Sampling(1, 40), most, per_request_sampling=True)

    return make


@pytest.fixture(scope="module")
def delta():
    """A model of a DeltaNet layer and one of attention, and its parameters."""
    arch = of_golden("qwen3_5_text", vocab_size=290)
    arch = replace(arch, layers=arch.layers[:2])  # one of each kind
    params = init_params(arch, jax.random.key(3))
    return arch, jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params)


@partial(jax.jit, static_argnames="arch")
def _scores(params, arch, ids, real):
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return logits(params, arch, forward(params, arch, ids, positions, real.astype(np.int32)).hidden)


def check_against_the_forward_pass(arch, params, completions, n, width=256, tolerance=1e-5):
    rows = [[*PROMPTS[i // n], *completion.tokens] for i, completion in enumerate(completions)]
    ids, real = np.zeros((2, len(rows), width), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)], real[i, : len(row)] = row, 1
    logprobs = np.asarray(jax.nn.log_softmax(_scores(params, arch, ids, real)))
    for i, completion in enumerate(completions):
        before = len(PROMPTS[i // n])
        for t, (token, logprob, version) in enumerate(
            zip(completion.tokens, completion.logprobs, completion.versions)
        ):
            if version >= 0:
                scores = logprobs[i, before + t - 1]
                assert token == scores.argmax()
                assert logprob == pytest.approx(scores[token], abs=tolerance)


def check_against_the_host_model(arch, params, completions, n):
    for i, completion in enumerate(completions):
        before = len(PROMPTS[i // n])
        tokens, logprobs, _ = host_forward(arch, params, [*PROMPTS[i // n], *completion.tokens])
        for t, version in enumerate(completion.versions):
            if version >= 0:
                assert completion.tokens[t] == tokens[before + t - 1]
                assert completion.logprobs[t] == pytest.approx(logprobs[before + t - 1], abs=1e-5)


def preempted(chance, seed=1):
    """Whether a sample loses its slot, or its place in the order of waiting, with this chance."""
    draw = np.random.default_rng(seed)
    return lambda who, rounds: draw.random() < chance


@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
@pytest.mark.parametrize(
    ("most", "share", "chance"),
    [
        (4, 0.5, 0.1),
        pytest.param(4, 0, 0.1, marks=pytest.mark.slow),
        pytest.param(None, 0.5, 0, marks=pytest.mark.slow),
    ],
)
def test_tokens_of_every_turn_are_the_argmax_of_the_forward_pass(
    make_session, small_arch, most, share, chance
):
    """With windows, slots refilled, and turns that are computed again, by every program.

    The prompt cache has its final size from the beginning: each size of it compiles all programs anew.
    """
    arch = changed(small_arch, family="qwen2", windows=(5, None))
    params = init_params(arch, jax.random.key(3))
    params = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params)
    session = make_session(share, arch=arch, most=most, usual_prompt=200)
    prompts = PROMPTS[:2] if chance else PROMPTS
    episodes = Episodes(session, preempt=preempted(chance))
    completions = episodes.run(params, prompts, temperature=0.0)
    check_against_the_forward_pass(arch, params, completions, SAMPLES)
    assert max(len(completion.turns) for completion in completions) == TURNS
    assert bool(chance) == (session.stats.recomputed_tokens > 0)
    assert bool(share) == (session.stats.cached_tokens > 0)


@pytest.mark.slow
@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
@pytest.mark.parametrize(("most", "preempts"), [(2, 4), (None, 0)])
def test_tokens_after_states_are_the_argmax_of_the_forward_pass(make_session, delta, most, preempts):
    """With slots refilled, states that are kept between turns, and turns of a round computed again."""
    session = make_session(arch=delta[0], most=most, usual_prompt=200)
    prompts = PROMPTS[:1] if preempts else PROMPTS
    episodes = Episodes(session, preempt=lambda who, rounds: preempts and rounds == preempts)
    completions = episodes.run(delta[1], prompts, temperature=0.0)
    check_against_the_forward_pass(*delta, completions, SAMPLES, tolerance=1e-4)
    assert max(len(completion.turns) for completion in completions) == TURNS
    assert bool(preempts) == (session.stats.recomputed_tokens > 0)


@pytest.mark.parametrize("model", ["attention", "delta"])
@pytest.mark.parametrize("chance", [0, 0.2])
@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_tokens_of_every_turn_follow_from_all_before_them(
    make_session, small_arch, small_params, delta, model, most, chance
):
    """As above, with tokens in the cache for keys, and hashes of all tokens for states."""
    arch, params = delta if model == "delta" else (small_arch, small_params)
    session = make_session(arch=arch, most=most)
    completions = Episodes(session, preempt=preempted(chance)).run(params, temperature=0.0)
    check_against_the_host_model(arch, params, completions, SAMPLES)
    assert max(len(completion.turns) for completion in completions) == TURNS


@pytest.mark.parametrize("slow", ["none", "some", "all"])
@pytest.mark.parametrize("most", [None, 2, 5])
def test_text_depends_neither_on_slots_nor_on_when_answers_come(make_session, small_params, most, slow):
    waits = {
        "none": lambda number, rounds: 0,
        "some": lambda number, rounds: 9 * (number == 1),
        "all": lambda number, rounds: (number * 7 + rounds * 5) % 6,
    }
    usual = Episodes(make_session(0)).run(small_params)
    _same(Episodes(make_session(most=most), waits[slow]).run(small_params), usual)


def _same(one: list[Completion], other: list[Completion], tolerance: float = 2e-5) -> None:
    assert [c.tokens for c in one] == [c.tokens for c in other]
    assert [c.turns for c in one] == [c.turns for c in other]
    for a, b in zip(one, other, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)


@pytest.mark.parametrize("model", ["attention", "delta"])
@pytest.mark.parametrize(
    ("sequences", "rings", "chance"),
    [(1.1, (), 0), (3, (32,), 0), (3, (), 0), (99, (), 0.2), (99, (32,), 0.2)],
)
def test_text_depends_neither_on_memory_nor_on_preemption(
    make_session, small_arch, small_params, delta, model, sequences, rings, chance
):
    """With room for one sequence, for three, or for all and samples that lose their slots in any round.

    Turns are longer than the first ring, which grows or is left for the next one.
    """
    arch, params = delta if model == "delta" else (small_arch, small_params)
    sizes = {"stop_ids": tuple(range(0, 290, 29)), "arch": arch}
    usual = Episodes(make_session(0, **sizes)).run(params, max_new_tokens=150)
    one = 450 * bytes_per_position(arch, "float32") + 2 * bytes_per_state(arch, "float32")
    session = make_session(memory=int(sequences * one), **sizes)
    session._admission.ring_positions = rings
    waits = lambda number, rounds: (number * 7 + rounds * 5) % 6  # noqa: E731
    _same(Episodes(session, waits, preempted(chance)).run(params, max_new_tokens=150), usual, 1e-4)
    stats = session.stats
    assert stats.recomputed_tokens > 0 or stats.evicted_tokens > 0
    assert sequences > 2 or stats.preempted > 0


@pytest.mark.parametrize(
    ("sequences", "rings", "chance", "most"),
    [(1.1, (), 0, None), (3, (32,), 0, None), (99, (32,), 0.2, None), (99, (), 0.2, 3)],
)
def test_text_does_not_depend_on_drafts(make_session, small_params, sequences, rings, chance, most):
    """With turns that are kept, that move to longer slots, and that are computed again.

    Fails if a token is written or read at another place than that of its number in the turn: what a wrong
    draft left in a slot would be read, or kept as a part of the turn.
    """
    sizes = {"stop_ids": tuple(range(0, 290, 29))}
    usual = Episodes(make_session(0, **sizes)).run(small_params, max_new_tokens=150)
    memory = int(sequences * 450 * bytes_per_position(make_session(0)._settings.arch, "float32"))
    session = make_session(memory=memory, most=most, drafts=3, **sizes)
    session._admission.ring_positions = rings
    waits = lambda number, rounds: (number * 7 + rounds * 5) % 6  # noqa: E731
    _same(Episodes(session, waits, preempted(chance)).run(small_params, max_new_tokens=150), usual, 1e-4)
    stats = session.stats
    assert stats.step_tokens > stats.useful_slot_steps > stats.step_tokens / 4
    assert bool(chance) <= (stats.recomputed_tokens > 0)


def test_a_turn_cut_at_a_stop_string_goes_on_from_a_state_before_it(
    computed_by, make_session, delta, tokenizer
):
    """The state of a slot has read tokens that were cut: kept as that of the turn, it gives other tokens."""
    words = [tokenizer.decode([token]) for token in range(40, 80)]
    stop = tuple(word for word in words if word.strip())
    session = make_session(arch=delta[0], stop_ids=(0,))
    completions = Episodes(session).run(delta[1], stop=stop, temperature=0.0)
    if computed_by == "host":
        check_against_the_host_model(*delta, completions, SAMPLES)
    else:
        check_against_the_forward_pass(*delta, completions, SAMPLES, tolerance=1e-4)
    assert max(len(completion.turns) for completion in completions) > 1
    cut = sum(
        completion.turns[i + 1] - len(answer(n // SAMPLES, n % SAMPLES, i + 1)) - begin > 1
        for n, completion in enumerate(completions)
        for i, begin in enumerate(completion.turns[:-1])
    )
    assert cut > 0


def test_a_cache_without_room_for_the_states_is_refused(make_session, delta):
    """A sequence of few tokens has states as large as those of a long one."""
    arch, _ = delta
    make_session(0, arch=arch, memory=600 * bytes_per_position(arch, "float32")).check_memory([])
    with pytest.raises(ValueError, match="must fit into the memory for it"):
        make_session(0, arch=arch, memory=2 * bytes_per_state(arch, "float32")).check_memory([])


def test_a_replica_without_a_slot_is_refused(make_session, monkeypatch):
    """Would fail if a session of fewer sequences than replicas waited for ever for its first slot."""
    monkeypatch.setattr(SessionSettings, "num_replicas", 4)
    assert make_session(most=4).num_live == 0
    with pytest.raises(ValueError, match="at least 1 for each replica of the sampler; got 3 and 4 replicas"):
        make_session(most=3)
