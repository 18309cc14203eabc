"""Decode steps with drafts: the tokens are those without, and a step gives several where drafts are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import of_golden

from quatrain.engine.session import Session, SessionSettings
from quatrain.models.kv_cache import bytes_per_position
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

PROMPTS = [[5, 9, 200, 5, 9], [17, 17], [3, 3, 3, 3, 3, 8], [120, 7], [250, 1, 40, 6, 250, 1]]
N, MOST, DRAFTS = 3, 40, 3
STOP_IDS = tuple(range(0, 290, 29))


@pytest.fixture(scope="module")
def sharp_params(small_params):
    """Weights whose next token is often the same, so that what was written before is written again."""
    return {**small_params, "embed": small_params["embed"] * 2}


@pytest.fixture
def sampled(small_arch, tokenizer, sharp_params):
    """sampled(drafts, ...) -> (completions of PROMPTS, stats)."""

    def run(drafts, *, arch=small_arch, params=sharp_params, memory=1 << 28, most=None, stop_ids=STOP_IDS, **how):
        where = "xla", one_device(), memory
        settings = SessionSettings(arch, tokenizer, stop_ids, 11, jnp.dtype("float32"), *where, num_drafts=drafts)
        sampling = Sampling(**{"n": N, "max_new_tokens": MOST, "temperature": 0.7, **how})
        session = Session(settings, sampling, most)
        tickets = session.submit([Prompt(i, np.array(ids, np.int32), "") for i, ids in enumerate(PROMPTS)], 3)
        while not session.finished(tickets):
            session.advance(params, 1)
        return session.take(tickets), session.stats

    return run


def check_same(found: Any, expected: Any) -> None:
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_same(sampled, temperature):
    a, sa = sampled(0, temperature=temperature)
    b, sb = sampled(DRAFTS, temperature=temperature)
    print(sa, sb)
    print([c.tokens for c in a][:4])
    check_same(b, a)
    assert sb.step_tokens > 1.2 * sb.useful_slot_steps
    assert len({len(c.tokens) for c in a}) > 3
