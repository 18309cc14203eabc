"""Decode work without a token, of a real engine whose completions end where they are told to."""

from dataclasses import dataclass, replace
from functools import partial

import host_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import local_rollouts

from quatrain.config.schema import RolloutConfig
from quatrain.engine import session
from quatrain.engine.decode import Program
from quatrain.models.params import init_params
from quatrain.types.batches import Prompt

SEQUENCES, N, SLOTS, LONGEST = 256, 8, 32, 512
STOP_ID, OTHER_ID = 3, 5


@dataclass(frozen=True)
class ForcedProgram(Program):
    """Draws `STOP_ID` as token number `wanted[sequence id]` of a completion, and another token before."""

    wanted: tuple[int, ...] = ()

    def draw(self, token_logits, sampling, steps, sequence_ids, positions, masks=None):
        last = jnp.asarray(self.wanted, jnp.uint32)[sequence_ids] == positions + 1
        logprobs = jax.nn.log_softmax(token_logits)
        tokens = jnp.where(last, STOP_ID, OTHER_ID)
        return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0], None


@pytest.mark.parametrize("computed_by", ["host", pytest.param("jax", marks=pytest.mark.slow)])
def test_few_decode_steps_are_wasted(small_arch, tokenizer, monkeypatch, computed_by):
    """Log-normal lengths, median 64 tokens and sigma 1; batches that wait for their last row waste most."""
    drawn = np.random.default_rng(0).lognormal(np.log(64), 1.0, SEQUENCES)
    wanted = np.maximum(drawn.round(), 1).astype(int)
    lengths = np.minimum(wanted, LONGEST)

    def forced(self, sampling, i, step, sequence, position, *, deltas, masks):
        return (STOP_ID if wanted[sequence] == position + 1 else OTHER_ID), -1.0

    if computed_by == "host":
        host_model.use_host_model(monkeypatch)
        monkeypatch.setattr(host_model._Sequence, "draw", forced)
    monkeypatch.setattr(session, "Program", partial(ForcedProgram, wanted=tuple(wanted.tolist())))
    arch = replace(small_arch, layers=small_arch.layers[:1])
    config = RolloutConfig(n=N, max_new_tokens=LONGEST, max_concurrency=SLOTS)
    engine = local_rollouts(arch, config, tokenizer, stop_ids=(STOP_ID,), seed=0)
    engine.sync_weights(init_params(arch, jax.random.key(0)), 0)
    batch = engine.generate([Prompt(i, np.array([7, 9], np.int32), "") for i in range(SEQUENCES // N)])

    assert batch.completion_lengths.tolist() == lengths.tolist()
    assert (batch.finish_reason == np.where(wanted <= LONGEST, "stop", "length")).all()
    wasted = batch.metrics["rollout/wasted_decode_fraction"]
    in_slots = int((lengths - 1).sum())  # the first token of a completion comes with its prompt
    assert wasted.count - wasted.value == in_slots
    assert wasted.result() <= 0.1
    batches = lengths.reshape(-1, SLOTS) - 1
    until_the_last_row = 1 - in_slots / (SLOTS * batches.max(axis=1).sum())
    assert until_the_last_row >= 0.5
