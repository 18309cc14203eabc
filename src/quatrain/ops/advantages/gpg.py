"""Group policy gradient (GPG)."""

import numpy as np

from quatrain.ops.advantages._shared import by_rows, check_scale
from quatrain.ops.masked import segment_means

SCALES = ("none",)
COMPARES_SAMPLES = True


def gpg(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "none") -> np.ndarray:
    """A = (r - mean_g) x (number of groups / number of groups with unequal rewards).

    Group policy gradient (GPG, arXiv 2504.02546): the factor makes up for the groups without signal, whose
    tokens count in the loss but add no gradient. A group of one has advantage 0 and counts as a group without
    signal; without any signal the factor is irrelevant, because every advantage is 0.

    Deviations: the paper counts samples, which is the same for groups of equal size. verl counts the samples
    whose reward is not 0 instead, which depends on the choice of the rewards' zero.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        centred = rewards - segment_means(rewards, groups)
        num_with_signal = len(np.unique(groups[centred != 0]))
        return centred * (len(np.unique(groups)) / max(num_with_signal, 1))

    check_scale("gpg", scale, SCALES)
    return by_rows(formula, rewards, group_ids)
