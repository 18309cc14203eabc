"""The advantage stage: per-sequence estimates over completion tokens, and what it reports."""

import numpy as np
import pytest

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.schema import AdvantageConfig
from quatrain.types import RewardedBatch, RolloutBatch


def rewarded(rewards, group_ids, mask):
    mask = np.array(mask, bool)
    rewards = np.array(rewards, np.float32)
    rollouts = RolloutBatch(
        input_ids=np.ones(mask.shape, np.int32),
        attention_mask=np.ones(mask.shape, bool),
        completion_mask=mask,
        rollout_logprobs=np.zeros(mask.shape, np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.full(len(mask), "stop"),
        group_ids=np.array(group_ids, np.int64),
        prompts=("p",) * len(mask),
        completions=("c",) * len(mask),
    )
    return RewardedBatch(rollouts, rewards, rewards[None], ("f",))


MASK = [[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0]]


def test_each_completion_token_has_the_advantage_of_its_sequence():
    batch = rewarded([1, 3, 2, 2, np.nan], [5, 5, 8, 8, 8], MASK)
    advantaged = AdvantageEstimator(AdvantageConfig(estimator="dr_grpo")).estimate(batch)
    assert advantaged.advantages.tolist() == [[0, -1, -1, -1], [0, 1, 0, 1], [0] * 4, [0] * 4, [0] * 4]
    assert advantaged.advantages.dtype == np.float32
    assert advantaged.rewarded is batch
    results = {name: metric.result() for name, metric in advantaged.metrics.items()}
    assert results == {
        "advantage/mean": 0.0,
        "advantage/std": pytest.approx(np.sqrt(0.5)),  # over the four sequences with a reward
        "advantage/min": -1.0,
        "advantage/max": 1.0,
        "advantage/zero_signal_fraction": 0.5,
    }


def test_a_batch_without_signal_is_no_error():
    batch = rewarded([1, 1, 0, 0, 0], [0, 0, 1, 1, 1], MASK)
    advantaged = AdvantageEstimator(AdvantageConfig()).estimate(batch)
    assert not advantaged.advantages.any()
    assert advantaged.metrics["advantage/zero_signal_fraction"].result() == 1.0


def test_a_batch_without_rewards_is_no_error():
    batch = rewarded([np.nan] * 5, [0, 0, 1, 1, 1], MASK)
    advantaged = AdvantageEstimator(AdvantageConfig(estimator="reinforce")).estimate(batch)
    assert not advantaged.advantages.any()
    assert list(advantaged.metrics) == ["advantage/zero_signal_fraction"]


def test_the_scale_is_the_configured_one():
    batch = rewarded([0, 4, 1, 1, 1], [0, 0, 1, 1, 1], MASK)
    by_scale = {
        scale: AdvantageEstimator(AdvantageConfig(estimator="grpo", scale=scale))
        .estimate(batch)
        .advantages[1, 1]
        for scale in (None, "group", "batch", "none")
    }
    std = np.std([0, 4, 1, 1, 1])
    assert by_scale == pytest.approx({None: 1, "group": 1, "batch": 2 / std, "none": 2}, rel=2e-4)


def test_a_scale_the_estimator_does_not_know_is_refused_at_once():
    with pytest.raises(
        ValueError, match=r"advantage\.scale='group' does not go with .*'reinforce': use batch or none"
    ):
        AdvantageEstimator(AdvantageConfig(estimator="reinforce", scale="group"))
