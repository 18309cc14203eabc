"""Group-relative advantages divided by the group's mean reward (MaxRL)."""

import numpy as np

from quatrain.ops.advantages._shared import by_rows, check_scale
from quatrain.ops.masked import segment_means

SCALES = ("none",)
COMPARES_SAMPLES = True


def maxrl(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "none") -> np.ndarray:
    """A = (r - mean_g) / mean_g, and 0 where mean_g is 0: maximum-likelihood RL (MaxRL, arXiv 2602.02710).

    For rewards of 0 and 1 it estimates the gradient of the log-likelihood of a right answer, truncated at as
    many terms as the group has samples, where r - mean_g estimates that of its probability: hard prompts
    weigh more. A reward below 0 counts as 0, the reward of a wrong answer: the mean of a group with such
    rewards might be near 0 and divide by nothing. A group of one has advantage 0.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        rewards = np.maximum(rewards, 0)
        means = segment_means(rewards, groups)
        return (rewards - means) / np.where(means > 0, means, 1)

    check_scale("maxrl", scale, SCALES)
    return by_rows(formula, rewards, group_ids)
