"""Group-relative advantages of each reward function, summed (GDPO)."""

import numpy as np

from quatrain.ops.advantages._shared import STD_EPS, by_rows, check_scale, one_segment
from quatrain.ops.advantages.grpo import grpo
from quatrain.ops.masked import segment_stds

SCALES = ("batch", "none")
COMPARES_SAMPLES = True


def gdpo(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    function_rewards: np.ndarray,
    function_weights: np.ndarray,
    scale: str = "batch",
) -> np.ndarray:
    """A = S / (std of S over the batch + 1e-4), S = sum_f w_f (r_f - mean_g) / (std_g + 1e-4).

    Group reward-decoupled policy optimization (GDPO, arXiv 2601.05242): each reward function is normalised in
    its group before the weighted sum, so that different combinations of rewards keep different advantages. A
    function that abstained on a sample (NaN) adds nothing to it, and the sample is left out of that
    function's statistics. The mean of S over the batch is 0 and is not subtracted, so that a group of equal
    rewards, and a group of one, has advantage 0 exactly. With `scale` `none`, A = S.

    Deviations from TRL (`multi_objective_aggregation: normalize_then_sum`): population standard deviations.
    """
    check_scale("gdpo", scale, SCALES)
    by_function = [grpo(values, group_ids) for values in function_rewards.T]
    total = np.zeros(len(rewards))
    for weight, advantages in zip(function_weights, by_function, strict=True):
        total += float(weight) * advantages
    total = np.where(np.isnan(rewards), np.nan, total)

    def formula(sums: np.ndarray, _groups: np.ndarray, _lengths: np.ndarray) -> np.ndarray:
        return sums if scale == "none" else sums / (segment_stds(sums, one_segment(sums)) + STD_EPS)

    return by_rows(formula, total, group_ids)
