"""Group-relative advantages without a standard deviation (Dr. GRPO)."""

import numpy as np

from quatrain.ops.advantages._shared import by_rows, check_scale
from quatrain.ops.masked import segment_means

SCALES = ("none",)
COMPARES_SAMPLES = True
AGGREGATION = "seq_mean_token_sum_norm"


def dr_grpo(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "none") -> np.ndarray:
    """A = r - mean_g, not divided by a standard deviation (Dr. GRPO, arXiv 2503.20783).

    A group of one has advantage 0.
    """
    check_scale("dr_grpo", scale, SCALES)
    return by_rows(lambda rewards, groups, _: rewards - segment_means(rewards, groups), rewards, group_ids)
