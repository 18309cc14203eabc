"""Sessions whose samples have several turns: keys and values are kept between turns, or computed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import changed
from host_model import forward as host_forward

from quatrain.engine.session import Sampler, Session
from quatrain.models.decoder import forward, logits
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, Sampling

PROMPTS = [[5, 9, 200], [17], [3, 3, 3, 3, 3, 8], [120, 7], [250, 1, 40, 6]]
STOP_IDS = tuple(range(0, 290, 5))
TURNS = 4


@dataclass
class Episodes:
    """Each turn of a sample is followed by tokens that depend on the sample and the turn alone."""

    session: Session
    wait: Any = lambda turn, round: 0
    """Rounds that an answer takes, by the index of the turn and the number of the round."""
    preempt: Any = lambda who, round: False
    """Whether a sample loses its slot, or its place in the order of waiting, before a round."""
    of: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    done: dict[tuple[int, int], Completion] = field(default_factory=dict)

    def run(self, params: Any, prompts: list[list[int]] = PROMPTS) -> list[Completion]:
        given = [Prompt(i, np.array(ids, np.int32), "", {}) for i, ids in enumerate(prompts)]
        for number, ticket in enumerate(self.session.submit(given, step=3)):
            self.of |= {(ticket, n): (number, n) for n in range(self.session.sampling.n)}
        total, waiting, rounds = len(self.of), [], 0
        while len(self.done) < total:
            for _, suspended, sample, completion in [item for item in waiting if item[0] <= rounds]:
                self.of[suspended, 0] = sample
                self.session.resume(
                    suspended, answer(*sample, len(completion.turns)), self.session.sampling.max_new_tokens
                )
            waiting = [item for item in waiting if item[0] > rounds]
            for who in self.session._scheduler.placed:
                if self.preempt(who, rounds):
                    self.session._scheduler.preempt(*who)
            self.session.advance(params, 1)
            rounds += 1
            for end in self.session.take_ends():
                sample = self.of.pop((end.ticket, end.sample))
                if end.suspended is None:
                    self.done[sample] = end.completion
                else:
                    due = rounds + self.wait(sample[1], rounds)
                    waiting.append((due, end.suspended, sample, end.completion))
            assert rounds < 500
        assert not self.session.num_groups
        return [self.done[sample] for sample in sorted(self.done)]


def answer(prompt: int, number: int, turn: int) -> list[int]:
    size = 1 + (7 * prompt + 3 * number + turn) % 5
    if turn == 2 and number == 1:
        size = 140  # longer than one call computes
    return np.random.default_rng([prompt, number, turn]).integers(1, 280, size).tolist()


@pytest.fixture
def make_session(computed_by, small_arch, tokenizer):
    def make(*, arch=small_arch, most=None, memory=1 << 28, usual_prompt=1, **sampling):
        sampler = Sampler(
            arch,
            tokenizer,
            STOP_IDS,
            11,
            jnp.dtype("float32"),
            "xla",
            one_device(),
            memory,
            usual_prompt,
            more_context=400,
        )
        settings = Sampling(**{"n": 3, "max_new_tokens": 40, "temperature": 0.9, **sampling})

        def goes_on(completion: Completion) -> bool:
            left = settings.max_new_tokens - completion.num_sampled
            return completion.finish_reason == "stop" and len(completion.turns) < TURNS and left > 0

        return Session(sampler, settings, most, goes_on)

    return make


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
    ("most", "windows", "longest", "chance"),
    [
        (4, True, 40, 0.1),
        *(pytest.param(None, False, n, 0, marks=pytest.mark.slow) for n in (18, 20, 27, 40)),
        pytest.param(4, True, 28, 0, marks=pytest.mark.slow),
    ],
)
def test_tokens_of_every_turn_are_the_argmax_of_the_forward_pass(
    make_session, small_arch, most, windows, longest, chance
):
    """With slots refilled, a ring that grows, and turns that are computed again, by every program.

    The prompt cache has its final size from the beginning: each size of it compiles all programs anew.
    """
    if windows:
        small_arch = changed(small_arch, family="qwen2", windows=(5, None))
    params = init_params(small_arch, jax.random.key(3))
    params = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params)
    sizes = {"most": most, "usual_prompt": 200 if chance else 1}
    session = make_session(arch=small_arch, temperature=0.0, max_new_tokens=longest, **sizes)
    prompts = PROMPTS[:2] if chance else PROMPTS
    completions = Episodes(session, preempt=preempted(chance)).run(params, prompts)
    check_against_the_forward_pass(small_arch, params, completions, 3)
    assert max(len(completion.turns) for completion in completions) == TURNS
    assert bool(chance) == (session.stats.recomputed_tokens > 0)


@pytest.mark.parametrize("chance", [0, 0.2])
@pytest.mark.parametrize("longest", [18, 20, 27, 40])
@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_tokens_of_every_turn_follow_from_all_before_them(
    make_session, small_arch, small_params, most, longest, chance
):
    """As above, in caches of all sizes and with tokens in them for keys."""
    session = make_session(most=most, temperature=0.0, max_new_tokens=longest)
    completions = Episodes(session, preempt=preempted(chance)).run(small_params)
    check_against_the_host_model(small_arch, small_params, completions, 3)
    assert max(len(completion.turns) for completion in completions) == TURNS


def test_what_was_computed_is_not_computed_again(make_session, small_params):
    """Prompts, answers and the last token of each turn; all of it after a first turn of one token."""
    session = make_session()
    completions = Episodes(session).run(small_params)
    computed = sum(map(len, PROMPTS))
    for i, completion in enumerate(completions):
        for turn in range(1, len(completion.turns)):
            *_, before, begin = completion.turns[: turn + 1]
            answer_length = len(answer(i // 3, i % 3, turn))
            if begin - answer_length - before > 1 or turn > 1:
                computed += answer_length + 1
            else:
                computed += len(PROMPTS[i // 3]) + begin
    assert max(len(completion.turns) for completion in completions) == TURNS
    assert session.stats.prefilled_tokens == computed


def test_a_prefix_slot_that_others_need_is_computed_again(make_session, small_params):
    fast, slow = make_session(most=4), make_session(most=4)
    Episodes(fast).run(small_params)
    Episodes(slow, lambda number, rounds: 12).run(small_params)
    assert slow.stats.prefilled_tokens > fast.stats.prefilled_tokens


@pytest.mark.parametrize("slow", ["none", "some", "all"])
@pytest.mark.parametrize("most", [None, 2, 5])
def test_text_depends_neither_on_slots_nor_on_when_answers_come(make_session, small_params, most, slow):
    waits = {
        "none": lambda number, rounds: 0,
        "some": lambda number, rounds: 9 * (number == 1),
        "all": lambda number, rounds: (number * 7 + rounds * 5) % 6,
    }
    usual = Episodes(make_session()).run(small_params)
    other = Episodes(make_session(most=most), waits[slow]).run(small_params)
    assert [c.tokens for c in other] == [c.tokens for c in usual]
    assert [c.turns for c in other] == [c.turns for c in usual]
    for one, two in zip(other, usual):
        assert one.logprobs == pytest.approx(two.logprobs, abs=2e-5)


@pytest.mark.parametrize(
    ("positions", "rings"), [(700, ()), (2000, (32,)), (2000, ()), (1 << 20, ()), (1 << 20, (32,))]
)
def test_text_depends_neither_on_memory_nor_on_preemption(make_session, small_params, positions, rings):
    """With room for one sequence, for three, or for all and samples that lose their slots in any round."""
    usual = Episodes(make_session()).run(small_params)
    session = make_session(memory=positions * 256)
    session._admission.ring_positions = rings
    forced = positions > 2000
    other = Episodes(
        session,
        lambda number, rounds: (number * 7 + rounds * 5) % 6,
        preempted(0.2 * forced),
    ).run(small_params)
    assert [c.tokens for c in other] == [c.tokens for c in usual]
    assert [c.turns for c in other] == [c.turns for c in usual]
    for one, two in zip(other, usual):
        assert one.logprobs == pytest.approx(two.logprobs, abs=2e-5)
    assert session.stats.recomputed_tokens > 0
