"""Rewards to per-token advantages, with the configured estimator.

Line 3 of a training step: `RewardedBatch` -> `AdvantageEstimator.estimate` -> `AdvantagedBatch`.
"""

from __future__ import annotations

import numpy as np

from quatrain.config.schema import AdvantageConfig
from quatrain.metrics import Metric, describe
from quatrain.ops.advantages import ADVANTAGE_ESTIMATORS, ADVANTAGE_SCALES, check_scale
from quatrain.types import AdvantagedBatch, RewardedBatch


class AdvantageEstimator:
    """The estimator named in `config`, with its scale; null is the estimator's own default.

    Raises ValueError for a scale the estimator does not know.
    """

    def __init__(self, config: AdvantageConfig):
        self._estimator = ADVANTAGE_ESTIMATORS[config.estimator]
        self._scale = config.scale or ADVANTAGE_SCALES[config.estimator][0]
        check_scale(config.estimator, self._scale)

    def estimate(self, rewarded: RewardedBatch) -> AdvantagedBatch:
        """One advantage per sequence by its group, the same for each of its completion tokens.

        A batch in which every group has zero signal is no error: its advantages are all 0 and
        `advantage/zero_signal_fraction` is 1. The other metrics are over the sequences with a reward.
        """
        rollouts = rewarded.rollouts
        per_sequence = self._estimator(rewarded.rewards, rollouts.group_ids, self._scale)
        advantages = np.where(rollouts.completion_mask, per_sequence[:, None], np.float32(0))
        scored = per_sequence[~np.isnan(rewarded.rewards)]
        metrics = describe("advantage", scored, ("mean", "std", "min", "max"))
        metrics["advantage/zero_signal_fraction"] = _zero_signal(per_sequence, rollouts.group_ids)
        return AdvantagedBatch(rewarded, advantages, metrics)


def _zero_signal(advantages: np.ndarray, group_ids: np.ndarray) -> Metric:
    """Groups whose advantages are all zero, over groups."""
    ids, groups = np.unique(group_ids, return_inverse=True)
    with_signal = np.unique(groups[advantages != 0])
    return Metric(len(ids) - len(with_signal), len(ids))
