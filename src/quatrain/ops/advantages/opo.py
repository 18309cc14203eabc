"""REINFORCE with the optimal reward baseline (OPO)."""

import numpy as np

from quatrain.ops.advantages._shared import by_rows, check_scale
from quatrain.ops.masked import segment_means

SCALES = ("none",)
COMPARES_SAMPLES = True


def opo(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    completion_mask: np.ndarray,
    episode_ids: np.ndarray | None = None,
    scale: str = "none",
) -> np.ndarray:
    """A_i = r_i - sum_j n_j r_j / sum_j n_j over the group, n the completion tokens of an episode.

    On-policy RL with optimal reward baseline (OPO, arXiv 2505.23585): the baseline of least variance, if the
    squared norm of a sequence's gradient is proportional to its length. A group of one has advantage 0 (verl:
    its reward).
    """
    check_scale("opo", scale, SCALES)
    return by_rows(
        lambda rewards, groups, lengths: rewards - segment_means(rewards, groups, lengths),
        rewards,
        group_ids,
        completion_mask.sum(axis=1),
        episode_ids,
    )
