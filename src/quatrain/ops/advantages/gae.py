"""Generalised advantage estimation with a critic (GAE)."""

from __future__ import annotations

import numpy as np

from quatrain.ops.advantages._shared import (
    TokenAdvantages,
    check_fraction,
    check_scale,
    counted_tokens,
    generalised_advantages,
    rewards_of_tokens,
    scaled,
)

SCALES = ("batch", "none")


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
    check_scale("gae", scale, SCALES)
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    rho = rewards_of_tokens(rewards, completion_mask, token_rewards)
    counted = counted_tokens(rewards, completion_mask)
    values = np.where(completion_mask, values, 0.0)
    advantages = np.where(counted, generalised_advantages(rho, values, completion_mask, gamma, lam), 0.0)
    return TokenAdvantages(
        scaled(advantages, counted, scale).astype(np.float32), (advantages + values).astype(np.float32)
    )
