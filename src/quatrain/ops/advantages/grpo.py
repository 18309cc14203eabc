"""Group-relative advantages (GRPO)."""

import numpy as np

from quatrain.ops.advantages._shared import STD_EPS, by_rows, check_scale, one_segment
from quatrain.ops.masked import segment_means, segment_stds

SCALES = ("group", "batch", "none")
COMPARES_SAMPLES = True


def grpo(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "group") -> np.ndarray:
    """A = (r - mean_g) / (std + 1e-4), the group-relative advantage of GRPO (arXiv 2402.03300).

    `scale` chooses std: `group` is the population standard deviation of the rewards of the row's group, as
    in the paper; `batch` that of all rewards (arXiv 2508.08221); `none` divides by 1, which is Dr. GRPO. A
    group of one, and a group of equal rewards, has advantage 0.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        centred = rewards - segment_means(rewards, groups)
        if scale == "none":
            return centred
        segments = groups if scale == "group" else one_segment(rewards)
        return centred / (segment_stds(rewards, segments) + STD_EPS)

    check_scale("grpo", scale, SCALES)
    return by_rows(formula, rewards, group_ids)
