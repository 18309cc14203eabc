"""Advantage estimators: one reward per sequence and explicit group ids in, one advantage per sequence out.

Data flow: rewards -> here (host-side numpy) -> broadcast over completion tokens by `advantage/estimate.py`.

All of them: group ids may be any integers, in any order, with any number of rows each. A row whose reward
is NaN (every reward function abstained) is left out of all statistics and has advantage 0. Computed in
float64, returned as float32. Permuting the rows permutes the result and renaming the ids changes nothing,
both to the last bit: sums run in the order of the rewards, never in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quatrain.ops.masked import segment_means, segment_sizes, segment_stds

STD_EPS = 1e-4
"""Added to the standard deviation that divides."""


def grpo(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "group") -> np.ndarray:
    """A = (r - mean_g) / (std + 1e-4), the group-relative advantage of GRPO (arXiv 2402.03300).

    `scale` chooses std: `group` is the population standard deviation of the rewards of the row's group, as
    in the paper; `batch` that of all rewards (arXiv 2508.08221); `none` divides by 1, which is Dr. GRPO. A
    group of one, and a group of equal rewards, has advantage 0.

    Args:
        rewards: [B] floats, NaN where nothing was scored.
        group_ids: [B] integers; equal where the prompt is the same.
        scale: `group`, `batch` or `none`.

    Returns:
        [B] float32.

    Raises:
        ValueError: for another `scale`, or shapes that do not fit.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        centred = rewards - segment_means(rewards, groups)
        if scale == "none":
            return centred
        return centred / (segment_stds(rewards, groups if scale == "group" else _everyone(rewards)) + STD_EPS)

    check_scale("grpo", scale)
    return _apply(formula, rewards, group_ids)


def dr_grpo(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "none") -> np.ndarray:
    """A = r - mean_g, not divided by a standard deviation (Dr. GRPO, arXiv 2503.20783).

    Arguments, result and errors as `grpo`; `scale` can only be `none`. A group of one has advantage 0.
    """
    check_scale("dr_grpo", scale)
    return _apply(lambda rewards, groups: rewards - segment_means(rewards, groups), rewards, group_ids)


def rloo(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "none") -> np.ndarray:
    """A_i = r_i - mean of the other rewards in the group = n / (n - 1) (r_i - mean_g).

    REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740). Arguments, result and errors as
    `grpo`; `scale` can only be `none`. A group of one has no others and advantage 0.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        sizes = segment_sizes(groups)
        return (rewards - segment_means(rewards, groups)) * (sizes / np.maximum(sizes - 1, 1))

    check_scale("rloo", scale)
    return _apply(formula, rewards, group_ids)


def reinforce(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "batch") -> np.ndarray:
    """A = (r - mean) / (std + 1e-4) over the whole batch, or A = r (REINFORCE; Williams, 1992).

    Arguments, result and errors as `grpo`; `scale` is `batch` (whitened) or `none` (the raw reward). Groups
    play no part: this is not a group-relative estimator, and a group of one keeps its advantage.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
        if scale == "none":
            return rewards
        everyone = _everyone(rewards)
        return (rewards - segment_means(rewards, everyone)) / (segment_stds(rewards, everyone) + STD_EPS)

    check_scale("reinforce", scale)
    return _apply(formula, rewards, group_ids)


ADVANTAGE_SCALES: dict[str, tuple[str, ...]] = {
    "grpo": ("group", "batch", "none"),
    "dr_grpo": ("none",),
    "rloo": ("none",),
    "reinforce": ("batch", "none"),
}
"""The values of `scale` each estimator knows, its default first."""

ADVANTAGE_ESTIMATORS: dict[str, Callable[[np.ndarray, np.ndarray, str], np.ndarray]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
}


def check_scale(estimator: str, scale: str) -> None:
    """Raises ValueError for a `scale` that `estimator` does not know."""
    known = ADVANTAGE_SCALES[estimator]
    if scale not in known:
        raise ValueError(
            f"advantage.scale={scale!r} does not go with advantage.estimator={estimator!r}: "
            f"use {' or '.join(known)}, or leave it null"
        )


def _everyone(rewards: np.ndarray) -> np.ndarray:
    return np.zeros(len(rewards), np.int64)


def _apply(
    formula: Callable[[np.ndarray, np.ndarray], np.ndarray], rewards: np.ndarray, group_ids: np.ndarray
) -> np.ndarray:
    """`formula(rewards, segments)` over the rows with a reward, in the order of the rewards; 0 elsewhere."""
    if rewards.ndim != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"expected rewards [B] and group_ids [B], got shapes {rewards.shape} and {group_ids.shape}"
        )
    order = np.argsort(rewards, kind="stable")
    order = order[~np.isnan(rewards[order])]
    _, segments = np.unique(group_ids[order], return_inverse=True)
    advantages = np.zeros(len(rewards), np.float32)
    advantages[order] = formula(rewards[order].astype(np.float64), segments)
    return advantages
