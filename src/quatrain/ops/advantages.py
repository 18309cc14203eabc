"""Advantage estimators: rewards and explicit group ids in, one advantage per sequence or per token out.

Data flow: rewards -> here (host-side numpy) -> `advantage/estimate.py`, which gives each completion token the
advantage of its sequence where an estimator returns one advantage per sequence.

All of them: group ids may be any integers, in any order, with any number of rows each. A row whose reward
is NaN (every reward function abstained) is left out of all statistics and has advantage 0. Computed in
float64, returned as float32. Permuting the rows permutes the result and renaming the ids changes nothing,
both to the last bit: sums over rows or over the tokens of several rows run in the order of the values, never
in the order of the rows.

Estimators per token see the completion tokens of a row only: positions outside the completion mask (prompt,
padding, tokens that an environment wrote) are skipped as if they did not exist, and have advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quatrain.ops.masked import mean_and_std, segment_means, segment_sizes, segment_stds

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

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
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
    return _apply(lambda rewards, groups, _: rewards - segment_means(rewards, groups), rewards, group_ids)


def rloo(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "none") -> np.ndarray:
    """A_i = r_i - mean of the other rewards in the group = n / (n - 1) (r_i - mean_g).

    REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740). Arguments, result and errors as
    `grpo`; `scale` can only be `none`. A group of one has no others and advantage 0.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        sizes = segment_sizes(groups)
        return (rewards - segment_means(rewards, groups)) * (sizes / np.maximum(sizes - 1, 1))

    check_scale("rloo", scale)
    return _apply(formula, rewards, group_ids)


def reinforce(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "batch") -> np.ndarray:
    """A = (r - mean) / (std + 1e-4) over the whole batch, or A = r (REINFORCE; Williams, 1992).

    Arguments, result and errors as `grpo`; `scale` is `batch` (whitened) or `none` (the raw reward). Groups
    play no part: this is not a group-relative estimator, and a group of one keeps its advantage.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        if scale == "none":
            return rewards
        everyone = _everyone(rewards)
        return (rewards - segment_means(rewards, everyone)) / (segment_stds(rewards, everyone) + STD_EPS)

    check_scale("reinforce", scale)
    return _apply(formula, rewards, group_ids)


def opo(
    rewards: np.ndarray, group_ids: np.ndarray, completion_mask: np.ndarray, scale: str = "none"
) -> np.ndarray:
    """A_i = r_i - sum_j n_j r_j / sum_j n_j over the group, n the number of completion tokens.

    On-policy RL with optimal reward baseline (OPO, arXiv 2505.23585): the baseline of least variance, if the
    squared norm of a sequence's gradient is proportional to its length. Arguments, result and errors as
    `grpo`; `scale` can only be `none`. A group of one has advantage 0 (verl: its reward).

    Args:
        completion_mask: [B, T] bool, True on completion tokens.
    """
    check_scale("opo", scale)
    return _apply(
        lambda rewards, groups, lengths: rewards - segment_means(rewards, groups, lengths),
        rewards,
        group_ids,
        completion_mask.sum(axis=1),
    )


def remax(rewards: np.ndarray, baseline_rewards: np.ndarray, scale: str = "none") -> np.ndarray:
    """A = r - r_greedy, the reward of the greedy completion of the same prompt (ReMax, arXiv 2310.10505).

    A row whose reward or greedy reward is NaN has advantage 0. Groups play no part: a group of one keeps its
    advantage.

    Args:
        rewards: [B] floats, NaN where nothing was scored.
        baseline_rewards: [B] floats, NaN where the greedy completion was not scored.
        scale: `none`.

    Returns:
        [B] float32.
    """
    check_scale("remax", scale)
    difference = rewards.astype(np.float64) - baseline_rewards
    return np.where(np.isnan(difference), 0, difference).astype(np.float32)


def gpg(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "none") -> np.ndarray:
    """A = (r - mean_g) x (number of groups / number of groups with unequal rewards).

    Group policy gradient (GPG, arXiv 2504.02546): the factor makes up for the groups without signal, whose
    tokens count in the loss but add no gradient. Arguments, result and errors as `grpo`; `scale` can only be
    `none`. A group of one has advantage 0 and counts as a group without signal; without any signal the
    factor is irrelevant, because every advantage is 0.

    Deviations: the paper counts samples, which is the same for groups of equal size. verl counts the samples
    whose reward is not 0 instead, which depends on the choice of the rewards' zero.
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        centred = rewards - segment_means(rewards, groups)
        num_with_signal = len(np.unique(groups[centred != 0]))
        return centred * (len(np.unique(groups)) / max(num_with_signal, 1))

    check_scale("gpg", scale)
    return _apply(formula, rewards, group_ids)


def passk(rewards: np.ndarray, group_ids: np.ndarray, scale: str = "group") -> np.ndarray:
    """A = (r_max - r_second_max) / (std + 1e-4) for the best of a group, and 0 for all others.

    Policy gradient of the expected maximum reward of a group (arXiv 2503.19595), which for rewards of 0 and 1
    is pass@k with k = n. `scale` is `group` (population standard deviation of the group's rewards; the
    default, as in verl) or `none` (not divided, as in the paper). Other arguments, result and errors as
    `grpo`. Where several rows share the maximum all advantages of the group are 0, so the order of rows
    decides nothing. A group of one has advantage 0 (verl: an error).
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        order = np.lexsort((rewards, groups))
        last = np.flatnonzero(np.diff(groups[order], append=-1))
        best, second = order[last], order[last - 1]
        gap = np.where(groups[best] == groups[second], rewards[best] - rewards[second], 0)
        advantages = np.zeros(len(rewards))
        advantages[best] = gap if scale == "none" else gap / (segment_stds(rewards, groups)[best] + STD_EPS)
        return advantages

    check_scale("passk", scale)
    return _apply(formula, rewards, group_ids)


class TokenAdvantages(NamedTuple):
    """Advantages per token, with the returns that a critic is trained on; what `gae` returns."""

    advantages: np.ndarray
    """[B, T] float32."""
    returns: np.ndarray
    """[B, T] float32."""


def reinforce_pp(
    rewards: np.ndarray,
    completion_mask: np.ndarray,
    token_rewards: np.ndarray,
    gamma: float = 1.0,
    scale: str = "batch",
) -> np.ndarray:
    """G_t = sum_l gamma^l rho_{t+l} over completion tokens, and A = (G - mean) / (std + 1e-4).

    REINFORCE++ (arXiv 2501.03262). rho is `rewards_of_tokens`. Mean and standard deviation are over all
    completion tokens of the batch whose sequence has a reward, so a long sequence counts more. Groups play no
    part. Deviations from verl: population standard deviation, 1e-4 added to it.

    Args:
        rewards: [B] floats, NaN where nothing was scored.
        completion_mask: [B, T] bool, True on completion tokens; holes are skipped.
        token_rewards: [B, T] floats, rewards of single tokens beside that of the sequence.
        gamma: discount per completion token, in [0, 1].
        scale: `batch` (whitened, as above) or `none` (A = G).

    Returns:
        [B, T] float32.

    Raises:
        ValueError: for another `scale`, a `gamma` outside [0, 1], or shapes that do not fit.
    """
    check_scale("reinforce_pp", scale)
    _check_fraction("gamma", gamma)
    rho = rewards_of_tokens(rewards, completion_mask, token_rewards)
    # The discounted return is the generalised advantage without values, with lam 1.
    returns = _generalised_advantages(rho, np.zeros_like(rho), completion_mask, gamma, 1.0)
    return _scaled(returns, _counted(rewards, completion_mask), scale).astype(np.float32)


def reinforce_pp_baseline(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    completion_mask: np.ndarray,
    token_rewards: np.ndarray,
    gamma: float = 1.0,
    scale: str = "batch",
) -> np.ndarray:
    """`reinforce_pp` of r - mean_g in place of the reward r (REINFORCE++-baseline, arXiv 2501.03262).

    Arguments, result and errors as `reinforce_pp`, with `group_ids` as in `grpo`. A group of one is left out
    of the whitening and has advantage 0 (verl: its reward). A group of equal rewards has a small advantage
    all the same, because the mean over tokens that whitening subtracts is rarely 0. Token rewards are not
    centred (verl centres their sum over the sequence).
    """

    def formula(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray) -> np.ndarray:
        return np.where(segment_sizes(groups) > 1, rewards - segment_means(rewards, groups), np.nan)

    check_scale("reinforce_pp_baseline", scale)
    centred = np.where(np.isnan(rewards), np.nan, _apply(formula, rewards, group_ids))
    return reinforce_pp(centred, completion_mask, token_rewards, gamma, scale)


def gae(
    rewards: np.ndarray,
    completion_mask: np.ndarray,
    token_rewards: np.ndarray,
    values: np.ndarray,
    gamma: float = 1.0,
    lam: float = 1.0,
    scale: str = "batch",
) -> TokenAdvantages:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, with delta_t = rho_t + gamma v_{t+1} - v_t, then whitened.

    Generalised advantage estimation (arXiv 1506.02438) of the values v of a critic; rho is
    `rewards_of_tokens`. The value after the last completion token is 0. The returns are A + v before
    whitening: (A - mean) / (std + 1e-4) over all completion tokens of the batch whose sequence has a reward.
    A sequence without a reward has advantage 0 and so returns v: a critic that is trained on them stays
    where it is. Deviations from verl: population standard deviation, 1e-4 added to it.

    Args:
        rewards: [B] floats, NaN where nothing was scored.
        completion_mask: [B, T] bool, True on completion tokens; holes are skipped.
        token_rewards: [B, T] floats, rewards of single tokens beside that of the sequence.
        values: [B, T] floats, the critic's estimate of the return at each completion token.
        gamma: discount per completion token, in [0, 1].
        lam: weight of later deltas, in [0, 1]: 1 is the return minus v, 0 is delta.
        scale: `batch` (whitened, as above) or `none` (not whitened).

    Returns:
        Advantages and returns, each [B, T] float32, 0 outside the mask.

    Raises:
        ValueError: for another `scale`, a `gamma` or `lam` outside [0, 1], or shapes that do not fit.
    """
    check_scale("gae", scale)
    _check_fraction("gamma", gamma)
    _check_fraction("lam", lam)
    rho = rewards_of_tokens(rewards, completion_mask, token_rewards)
    counted = _counted(rewards, completion_mask)
    values = np.where(completion_mask, values, 0.0)
    advantages = np.where(counted, _generalised_advantages(rho, values, completion_mask, gamma, lam), 0.0)
    return TokenAdvantages(
        _scaled(advantages, counted, scale).astype(np.float32), (advantages + values).astype(np.float32)
    )


def rewards_of_tokens(
    rewards: np.ndarray, completion_mask: np.ndarray, token_rewards: np.ndarray
) -> np.ndarray:
    """rho_t: the token's own reward and, at the last completion token, the reward of the sequence.

    A sequence without completion tokens has no rho; a sequence without a reward (NaN) has its token rewards
    alone. Arguments as `reinforce_pp`.

    Returns:
        [B, T] float64, 0 outside the mask.

    Raises:
        ValueError: for shapes that do not fit.
    """
    mask = completion_mask
    if rewards.shape != mask.shape[:1] or mask.ndim != 2 or token_rewards.shape != mask.shape:
        raise ValueError(
            f"expected rewards [B], completion_mask [B, T] and token_rewards [B, T], got shapes "
            f"{rewards.shape}, {mask.shape} and {token_rewards.shape}"
        )
    rho = np.where(mask, token_rewards, 0.0)
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - mask[rows, ::-1].argmax(axis=1)
    rho[rows, last] += np.nan_to_num(rewards[rows].astype(np.float64))
    return rho


def _generalised_advantages(
    rho: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """`gae` before whitening, [B, T] float64: each row alone, from its last completion token to its first."""
    advantages = np.zeros(mask.shape)
    advantage, next_value = np.zeros(len(mask)), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        delta = rho[:, t] + gamma * next_value - values[:, t]
        advantage = np.where(mask[:, t], delta + gamma * lam * advantage, advantage)
        next_value = np.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    return np.where(mask, advantages, 0.0)


def _counted(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[B, T] bool: the completion tokens of the sequences with a reward."""
    return mask & ~np.isnan(rewards)[:, None]


def _scaled(advantages: np.ndarray, counted: np.ndarray, scale: str) -> np.ndarray:
    """`advantages` [B, T], whitened over the tokens in `counted` where `scale` is `batch`; 0 elsewhere."""
    if scale == "batch":
        mean, std = mean_and_std(advantages[counted])
        advantages = (advantages - mean) / (std + STD_EPS)
    return np.where(counted, advantages, 0.0)


ADVANTAGE_SCALES: dict[str, tuple[str, ...]] = {
    "grpo": ("group", "batch", "none"),
    "dr_grpo": ("none",),
    "rloo": ("none",),
    "reinforce": ("batch", "none"),
    "reinforce_pp": ("batch", "none"),
    "reinforce_pp_baseline": ("batch", "none"),
    "opo": ("none",),
    "remax": ("none",),
    "gpg": ("none",),
    "passk": ("group", "none"),
    "gae": ("batch", "none"),
}
"""The values of `scale` each estimator knows, its default first."""

ADVANTAGE_ESTIMATORS: dict[str, Callable[..., np.ndarray | TokenAdvantages]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "remax": remax,
    "gpg": gpg,
    "passk": passk,
    "gae": gae,
}
"""Functions of the inputs that they name, as `advantage/estimate.py` lists them, and of their arguments."""


def check_scale(estimator: str, scale: str) -> None:
    """Raises ValueError for a `scale` that `estimator` does not know."""
    known = ADVANTAGE_SCALES[estimator]
    if scale not in known:
        raise ValueError(
            f"advantage.scale={scale!r} does not go with advantage.estimator={estimator!r}: "
            f"use {' or '.join(known)}, or leave it null"
        )


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}; set advantage.args.{name}")


def _everyone(rewards: np.ndarray) -> np.ndarray:
    return np.zeros(len(rewards), np.int64)


def _apply(
    formula: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    rewards: np.ndarray,
    group_ids: np.ndarray,
    lengths: np.ndarray | None = None,
) -> np.ndarray:
    """`formula(rewards, segments, lengths)` over the rows with a reward, in the order of the rewards.

    Returns [B] float32, 0 for the rows without a reward. Rows of equal rewards are in the order of `lengths`.
    """
    if rewards.ndim != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"expected rewards [B] and group_ids [B], got shapes {rewards.shape} and {group_ids.shape}"
        )
    lengths = np.ones(len(rewards), np.int64) if lengths is None else lengths
    order = np.lexsort((lengths, rewards))
    order = order[~np.isnan(rewards[order])]
    _, segments = np.unique(group_ids[order], return_inverse=True)
    advantages = np.zeros(len(rewards), np.float32)
    advantages[order] = formula(rewards[order].astype(np.float64), segments, lengths[order])
    return advantages
