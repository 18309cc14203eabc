"""Decode steps with drafts: the tokens are those without, and a step gives several where drafts are right.

What moves in the cache, and when, with drafts: `test_session_turns.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import of_golden

from quatrain.config.schema import RolloutConfig
from quatrain.engine import session as sessions
from quatrain.engine.engine import num_drafts, work_metrics
from quatrain.engine.session import Session, SessionSettings
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

PROMPTS = [[5, 9, 200, 5, 9], [17, 17], [3, 3, 3, 3, 3, 8], [120, 7], [250, 1, 40, 6, 250, 1]]
N, MOST, DRAFTS = 3, 40, 4
STOP_IDS = tuple(range(0, 290, 13))


@pytest.fixture
def sampled(small_arch, small_params, tokenizer):
    """sampled(drafts, ...) -> (completions of PROMPTS, stats)."""

    def run(
        drafts, *, arch=small_arch, params=small_params, stop_ids=STOP_IDS, most=None, settings=None, **how
    ):
        where = "xla", one_device(), 1 << 28
        given = {"num_drafts": drafts, **(settings or {})}
        made = SessionSettings(arch, tokenizer, stop_ids, 11, jnp.dtype("float32"), *where, **given)
        sampling = Sampling(**{"n": N, "max_new_tokens": MOST, "temperature": 0.0, **how})
        session = Session(made, sampling, most)
        tickets = session.submit([Prompt(i, np.array(ids, np.int32), "") for i, ids in enumerate(PROMPTS)], 3)
        while not session.finished(tickets):
            session.advance(params, 1)
        return session.take(tickets), session.stats

    return run


@pytest.fixture
def steps(monkeypatch):
    """The steps of calls with drafts: (tokens that a slot got, the last of them, those that it then had)."""
    seen, call = [], Session._call

    def noted(self, ring, program, sharing, params, drafts, slots, step=0):
        decoded = call(self, ring, program, sharing, params, drafts, slots, step)
        if decoded.ends is not None:
            table, ends = np.asarray(decoded.tokens), np.asarray(decoded.ends)
            for slot, row in enumerate(ends[:, : int(decoded.num_steps)]):
                for begin, end in zip([0, *row], row):
                    if end > begin:
                        length = int(slots.lengths[slot]) + int(end)
                        seen.append((int(end - begin), int(table[slot, end - 1]), length))
        return decoded

    monkeypatch.setattr(sessions.Session, "_call", noted)
    return seen


def check_same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)
        assert one.columns.keys() == other.columns.keys()
        for name in one.columns:
            rows = [np.concatenate(each.rows(name, 0, 99)) for each in (one, other)]
            assert len(rows[0]) >= len(one.tokens)
            # Words that are as likely may come in another order.
            sets = [[None if x is None else sorted(np.ravel(x).tolist()) for x in each] for each in rows]
            assert sets[0] == sets[1]


@pytest.mark.parametrize(
    ("scale", "how"),
    [(1.0, {}), (1.5, {"temperature": 1.0, "top_k": 20, "replays": True})],
    ids=["greedy", "sampled"],
)
def test_drafts_change_no_token(sampled, small_params, steps, scale, how):
    """Greedy and sampled groups, of which some samples begin when others have ended.

    Fails if a draft is kept that is not the token drawn at its place, or one behind a stop token or beyond
    the most tokens; if a place is drawn with the random number of another, or from logits of another; or if
    a log-probability, or the words that a token was drawn from, are those of another place.
    """
    how = {**how, "params": {**small_params, "embed": scale * small_params["embed"]}}
    expected, plain = sampled(0, most=4, **how)
    found, stats = sampled(DRAFTS, most=4, **how)
    check_same(found, expected)
    within = [step for step in steps if 1 < step[0] <= DRAFTS]
    assert any(last in STOP_IDS for _, last, _ in within)
    assert any(length == MOST for _, _, length in within)
    assert stats.step_tokens == plain.step_tokens == plain.useful_slot_steps
    assert stats.step_tokens > 1.3 * stats.useful_slot_steps
    assert stats.drafts > stats.step_tokens - stats.useful_slot_steps > 0


def test_a_repetition_draws_the_same_bits(sampled):
    """Fails if drafts, and so the tokens of a step, depend on anything but the sequences: time, or a table of
    the call before. Of other samples a draft may come as soon as they have tokens."""
    first, second = (sampled(DRAFTS, most=4, temperature=1.0) for _ in range(2))
    assert [c.tokens for c in first[0]] == [c.tokens for c in second[0]]
    assert [c.logprobs for c in first[0]] == [c.logprobs for c in second[0]]
    assert first[1].drafts == second[1].drafts


def test_a_stop_string_cuts_within_a_step(sampled, tokenizer):
    """Fails if what a step drew behind a stop string stays, or counts as tokens that drafts have given."""
    word = tokenizer.decode([53])
    expected, _ = sampled(0, stop=(3 * word,))
    found, stats = sampled(DRAFTS, stop=(3 * word,))
    check_same(found, expected)
    cut = [c for c in found if c.finish_reason == "stop" and c.tokens[-1] == 53]
    assert cut
    assert stats.step_tokens == sum(len(c.tokens) - 1 for c in found)
    assert stats.useful_slot_steps < stats.step_tokens


@pytest.mark.parametrize(
    "case", ["gpt_oss", *(pytest.param(case, marks=pytest.mark.slow) for case in ("gemma2", "gemma4_text"))]
)
def test_of_every_attention(sampled, small_arch, case):
    """With sinks, windows, soft caps, experts and keys of other layers, which cut into prompt and turn.

    Fails if a token sees a draft behind it, or a window, a sink or a borrowed key is that of another place,
    or if a recorded route is that of a rejected draft.
    """
    arch = of_golden(case, longest=64, vocab_size=small_arch.vocab_size)
    params = init_params(arch, jax.random.key(3))
    params = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params)
    how = {"arch": arch, "params": params, "settings": {"records_routes": arch.routes is not None}}
    expected, _ = sampled(0, **how)
    found, stats = sampled(DRAFTS, **how)
    check_same(found, expected, 1e-4)
    assert stats.step_tokens > 1.1 * stats.useful_slot_steps
    assert ("routes" in found[0].columns) == (arch.routes is not None)


def test_models_with_states_are_refused(small_arch):
    """Fails if a model whose states cannot be taken back samples with drafts, which would stay in them."""
    arch = of_golden("qwen3_5_text", vocab_size=290)
    with pytest.raises(ValueError, match=r"rollout.speculate must be 0 for a model with DeltaNet layers"):
        num_drafts(RolloutConfig(speculate=2), arch)
    assert num_drafts(RolloutConfig(speculate=2), small_arch) == 2


def test_metrics_count_tokens_and_drafts(sampled):
    """Fails if the metrics are there without drafts, or if one of them has another denominator."""
    _, plain = sampled(0)
    _, stats = sampled(DRAFTS)
    assert "rollout/tokens_per_decode_step" not in work_metrics(plain, 1.0)
    found = work_metrics(stats, 1.0)
    steps, tokens = stats.useful_slot_steps, stats.step_tokens
    assert found["rollout/tokens_per_decode_step"].result() == tokens / steps
    assert found["rollout/draft_accept_fraction"].result() == (tokens - steps) / stats.drafts
    assert 0 <= found["rollout/wasted_decode_fraction"].result() < 1
