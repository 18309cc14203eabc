"""Rewards of the turns of an episode as rewards of tokens, for estimators that read those.

Data flow: `RewardedBatch` of episodes -> `turn_rewards` -> `AdvantageEstimator`.
"""

from __future__ import annotations

import numpy as np

from quatrain.types.batches import ENVIRONMENT, FAULTS, RewardedBatch


def turn_rewards(rewarded: RewardedBatch) -> np.ndarray:
    """[B, T] float32: the part of `rewards` that each turn earned, at its last token; 0 elsewhere.

    It is the weighted reward of the turn by its environment. An episode has none if a fault ended it, or if
    the function `environment` did not score it.
    """
    rollouts = rewarded.rollouts
    earned = np.zeros(rollouts.completion_mask.shape, np.float32)
    if not rewarded.environment_weight:
        return earned
    raw = rewarded.rewards_per_function[rewarded.function_names.index(ENVIRONMENT)]
    whole = np.array(rollouts.columns["environment_reward"], np.float32)
    mask = np.pad(rollouts.completion_mask, ((0, 0), (0, 1)))
    last = mask[:, :-1] & ~mask[:, 1:]
    for row, rewards in enumerate(rollouts.columns["turn_rewards"]):
        ends = np.flatnonzero(last[row])
        if len(ends) == len(rewards) and raw[row] == whole[row] and rollouts.finish_reason[row] not in FAULTS:
            earned[row, ends] = rewarded.environment_weight * np.array(rewards)
    return earned
