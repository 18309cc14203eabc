"""Invariant 4: the sampler's log-probabilities are the trainer's, at the sampling temperature."""

import numpy as np
import pytest
from rollouts import local_rollouts

from quatrain.config.schema import RolloutConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.types.batches import Prompt


@pytest.mark.parametrize(
    ("temperature", "n", "slots"),
    [
        (0.6, 4, 3),
        (1.7, 1, None),
        *(
            pytest.param(temperature, *sizes, marks=pytest.mark.slow)
            for temperature, *sizes in ((0.6, 4, None), (1.7, 4, 3), (1.0, 1, 4), (1.0, 4, 6), (1.0, 1, None))
        ),
    ],
)
def test_sampler_and_trainer_agree(small_arch, small_params, tokenizer, temperature, n, slots):
    """With prompts shared (n of 4) or not, and slots refilled (fewer than sequences) or not."""
    config = RolloutConfig(n=n, max_new_tokens=12, temperature=temperature, max_concurrency=slots)
    engine = local_rollouts(small_arch, config, tokenizer, stop_ids=tuple(range(0, 290, 13)), seed=1)
    engine.sync_weights(small_params, 0)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 290, rng.integers(1, 12)).astype(np.int32) for _ in range(20 // n)]
    prompts = [Prompt(i, row, "") for i, row in enumerate(ids)]
    batch = engine.generate(prompts)
    table = TokenTable(batch.input_ids, batch.attention_mask, batch.completion_mask, {})
    policy = PolicySpec(small_arch, temperature=temperature, remat="layer")
    trained = predict_tokens(small_params, table, model=policy, planner=MicroBatchPlanner(rows=6))
    gap = np.abs(trained - batch.rollout_logprobs)
    assert len(np.unique(batch.completion_lengths)) > 2
    assert gap.max() < 1e-4
