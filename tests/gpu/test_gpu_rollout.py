"""Sampler and trainer on the real device: the same log-probabilities, and greedy is the likeliest token."""

import jax
import numpy as np
import pytest
from rollouts import local_rollouts

from quatrain.config.schema import RolloutConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.decoder import forward, logits
from quatrain.types.batches import Prompt

pytestmark = pytest.mark.gpu

LARGEST_GAP = 1e-4
"""In float32 with products at the highest precision; on such devices the default is TF32."""


class _WithoutText:
    def decode(self, tokens, skip_special_tokens):
        return ""


def _sampled(arch, params, n, attention, **config):
    """Completions of 16 sequences on eight slots, so that slots are refilled."""
    settings = RolloutConfig(n=n, max_new_tokens=40, max_concurrency=8, **config)
    stop_ids = tuple(range(0, arch.vocab_size, 50))
    engine = local_rollouts(arch, settings, _WithoutText(), stop_ids=stop_ids, seed=1, attention=attention)
    engine.sync_weights(params, 0)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, arch.vocab_size, rng.integers(1, 60)).astype(np.int32) for _ in range(16 // n)]
    return engine.generate([Prompt(i, row, "") for i, row in enumerate(ids)])


@pytest.mark.parametrize("n", [1, 4])
def test_sampler_and_trainer_agree(arch, params, n):
    """With prompts shared (n of 4) or not, both in slots that are refilled."""
    with jax.default_matmul_precision("highest"):
        batch = _sampled(arch, params, n, "xla", temperature=0.8)
        table = TokenTable(batch.input_ids, batch.attention_mask, batch.completion_mask, {})
        policy = PolicySpec(arch, temperature=0.8, attention="xla")
        trained = predict_tokens(params, table, model=policy, planner=MicroBatchPlanner(max_tokens=512))
    assert len(np.unique(batch.completion_lengths)) > 2
    assert trained[batch.completion_mask].std() > 0.5
    assert np.abs(trained - batch.rollout_logprobs).max() < LARGEST_GAP


def test_greedy_is_the_argmax_of_the_forward_pass(arch, params):
    with jax.default_matmul_precision("highest"):
        batch = _sampled(arch, params, 2, "xla", temperature=0.0)
        positions = np.broadcast_to(np.arange(batch.input_ids.shape[1]), batch.input_ids.shape)
        segments = batch.attention_mask.astype(np.int32)
        hidden = forward(params, arch, batch.input_ids, positions, segments).hidden
        scores = np.asarray(logits(params, arch, hidden))
    rows, columns = np.nonzero(batch.completion_mask)
    assert len(rows) > 100
    assert batch.input_ids[rows, columns].tolist() == scores[rows, columns - 1].argmax(-1).tolist()
