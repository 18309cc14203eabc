"""Generalised advantage estimation with a critic (GAE)."""

import numpy as np

from quatrain.ops.advantages._shared import TokenAdvantages, check_fraction, check_scale, with_critic

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
    where it is. With `lam` 1, A is the return minus v, with 0 it is delta; with `scale` `none`, it is not
    whitened. Both are 0 outside the mask. Deviations from verl: population standard deviation, 1e-4 added.
    """
    check_scale("gae", scale, SCALES)
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    return with_critic(rewards, completion_mask, token_rewards, values, gamma=gamma, lam=lam, scale=scale)
