"""REINFORCE with a leave-one-out baseline (RLOO)."""

import numpy as np

from quatrain.ops.advantages._shared import by_rows, check_scale
from quatrain.ops.masked import segment_means, segment_sizes

SCALES = ("none",)
COMPARES_SAMPLES = True


def rloo(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "none") -> np.ndarray:
    """A_i = r_i - mean of the other rewards in the group = n / (n - 1) (r_i - mean_g).

    REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740). A group of one has no others and
    advantage 0.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        sizes = segment_sizes(groups)
        return (rewards - segment_means(rewards, groups)) * (sizes / np.maximum(sizes - 1, 1))

    check_scale("rloo", scale, SCALES)
    return by_rows(formula, rewards, group_ids)
