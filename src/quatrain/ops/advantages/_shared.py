"""What several advantage estimators are made of."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quatrain.ops.masked import mean_and_std

STD_EPS = 1e-4
"""Added to the standard deviation that divides."""


class TokenAdvantages(NamedTuple):
    """Advantages per token, with the returns that a critic is trained on; what `gae` returns."""

    advantages: np.ndarray
    """[B, T] float32."""
    returns: np.ndarray
    """[B, T] float32."""


def check_scale(estimator: str, scale: str, known: Sequence[str]) -> None:
    """Raises ValueError for a `scale` that `estimator` does not know."""
    if scale not in known:
        raise ValueError(
            f"advantage.scale={scale!r} does not go with advantage.estimator={estimator!r}: "
            f"use {' or '.join(known)}, or leave it null"
        )


def check_fraction(name: str, value: float) -> None:
    """Raises ValueError for an argument `name` outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}; set advantage.args.{name}")


def one_segment(rewards: np.ndarray) -> np.ndarray:
    """The segments of statistics over all rows."""
    return np.zeros(len(rewards), np.int64)


def by_rows(
    formula: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    rewards: np.ndarray,
    group_ids: np.ndarray,
    lengths: np.ndarray | None = None,
    episode_ids: np.ndarray | None = None,
) -> np.ndarray:
    """`formula(rewards, segments, lengths)` over the rows with a reward, in the order of the rewards.

    Returns [B] float32, 0 for the rows without a reward. Rows of equal rewards are in the order of `lengths`.
    Rows with one of `episode_ids` in common are one row for the formula, which is as long as all of them.
    """
    if rewards.ndim != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"expected rewards [B] and group_ids [B], got shapes {rewards.shape} and {group_ids.shape}"
        )
    lengths = np.ones(len(rewards), np.int64) if lengths is None else lengths
    if episode_ids is not None:
        _, first_rows, of_row = np.unique(episode_ids, return_index=True, return_inverse=True)
        lengths = np.bincount(of_row, lengths).astype(np.int64)
        return by_rows(formula, rewards[first_rows], group_ids[first_rows], lengths)[of_row]
    order = np.lexsort((lengths, rewards))
    order = order[~np.isnan(rewards[order])]
    _, segments = np.unique(group_ids[order], return_inverse=True)
    advantages = np.zeros(len(rewards), np.float32)
    advantages[order] = formula(rewards[order].astype(np.float64), segments, lengths[order])
    return advantages


def rewards_of_tokens(
    rewards: np.ndarray, completion_mask: np.ndarray, token_rewards: np.ndarray
) -> np.ndarray:
    """rho_t: the token's own reward and, at the last completion token, the reward of the sequence.

    A sequence without completion tokens has no rho; a sequence without a reward (NaN) has its token rewards
    alone. [B, T] float64, 0 outside the mask.
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


def generalised_advantages(
    rho: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float | np.ndarray
) -> np.ndarray:
    """`gae` before whitening, [B, T] float64: each row alone, from its last completion token to its first.

    `lam` is one number, or [B]: one for each row.
    """
    advantages = np.zeros(mask.shape)
    advantage, next_value = np.zeros(len(mask)), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        delta = rho[:, t] + gamma * next_value - values[:, t]
        advantage = np.where(mask[:, t], delta + gamma * lam * advantage, advantage)
        next_value = np.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    return np.where(mask, advantages, 0.0)


def with_critic(
    rewards: np.ndarray,
    completion_mask: np.ndarray,
    token_rewards: np.ndarray,
    values: np.ndarray,
    *,
    gamma: float,
    lam: float | np.ndarray,
    critic_lam: float | None = None,
    scale: str,
) -> TokenAdvantages:
    """Generalised advantages with `lam`, `scaled`, and the returns A + v before that, with `critic_lam`.

    `critic_lam` None: the returns are those of `lam`. A row without a reward has advantage 0 and returns v.
    """
    rho = rewards_of_tokens(rewards, completion_mask, token_rewards)
    counted = counted_tokens(rewards, completion_mask)
    values = np.where(completion_mask, values, 0.0)

    def raw(lam: float | np.ndarray) -> np.ndarray:
        return np.where(counted, generalised_advantages(rho, values, completion_mask, gamma, lam), 0.0)

    advantages = raw(lam)
    returns = values + (advantages if critic_lam is None else raw(critic_lam))
    return TokenAdvantages(scaled(advantages, counted, scale).astype(np.float32), returns.astype(np.float32))


def counted_tokens(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[B, T] bool: the completion tokens of the sequences with a reward."""
    return mask & ~np.isnan(rewards)[:, None]


def scaled(advantages: np.ndarray, counted: np.ndarray, scale: str) -> np.ndarray:
    """`advantages` [B, T], whitened over the tokens in `counted` where `scale` is `batch`; 0 elsewhere."""
    if scale == "batch":
        mean, std = mean_and_std(advantages[counted])
        advantages = (advantages - mean) / (std + STD_EPS)
    return np.where(counted, advantages, 0.0)
