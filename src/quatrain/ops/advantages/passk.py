"""Policy gradient of a group's maximum reward (pass@k)."""

import numpy as np

from quatrain.ops.advantages._shared import STD_EPS, by_rows, check_scale
from quatrain.ops.masked import segment_stds

SCALES = ("group", "none")
COMPARES_SAMPLES = True


def passk(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "group") -> np.ndarray:
    """A = (r_max - r_second_max) / (std + 1e-4) for the best of a group, and 0 for all others.

    Policy gradient of the expected maximum reward of a group (arXiv 2503.19595), which for rewards of 0 and 1
    is pass@k with k = n. `scale` is `group` (population standard deviation of the group's rewards; the
    default, as in verl) or `none` (not divided, as in the paper). Where several rows share the maximum all
    advantages of the group are 0, so the order of rows decides nothing. A group of one has advantage 0 (verl:
    an error).
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        order = np.lexsort((rewards, groups))
        last = np.flatnonzero(np.diff(groups[order], append=-1))
        best, second = order[last], order[last - 1]
        gap = np.where(groups[best] == groups[second], rewards[best] - rewards[second], 0)
        advantages = np.zeros(len(rewards))
        advantages[best] = gap if scale == "none" else gap / (segment_stds(rewards, groups)[best] + STD_EPS)
        return advantages

    check_scale("passk", scale, SCALES)
    return by_rows(formula, rewards, group_ids)
