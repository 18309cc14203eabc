"""REINFORCE, whitened over the batch."""

import numpy as np

from quatrain.ops.advantages._shared import STD_EPS, by_rows, check_scale, one_segment
from quatrain.ops.masked import segment_means, segment_stds

SCALES = ("batch", "none")


def reinforce(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "batch") -> np.ndarray:
    """A = (r - mean) / (std + 1e-4) over the whole batch, or A = r (REINFORCE; Williams, 1992).

    `scale` is `batch` (whitened) or `none` (the raw reward). Groups play no part: a group of one keeps its
    advantage.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        if scale == "none":
            return rewards
        batch = one_segment(rewards)
        return (rewards - segment_means(rewards, batch)) / (segment_stds(rewards, batch) + STD_EPS)

    check_scale("reinforce", scale, SCALES)
    return by_rows(formula, rewards, group_ids)
