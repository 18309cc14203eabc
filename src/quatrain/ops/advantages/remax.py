"""REINFORCE with the greedy completion's reward as baseline (ReMax)."""

import numpy as np

from quatrain.ops.advantages._shared import check_scale

SCALES = ("none",)


def remax(rewards: np.ndarray, baseline_rewards: np.ndarray, scale: str = "none") -> np.ndarray:
    """A = r - r_greedy, the reward of the greedy completion of the same prompt (ReMax, arXiv 2310.10505).

    A row whose reward or greedy reward is NaN has advantage 0. Groups play no part: a group of one keeps its
    advantage.
    """
    check_scale("remax", scale, SCALES)
    difference = rewards.astype(np.float64) - baseline_rewards
    return np.where(np.isnan(difference), 0, difference).astype(np.float32)
