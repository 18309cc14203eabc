"""Generalised advantage estimation whose lambda grows with the length (VAPO)."""

import numpy as np

from quatrain.ops.advantages._shared import TokenAdvantages, check_fraction, check_scale, with_critic

SCALES = ("batch", "none")


def length_adaptive_gae(
    rewards: np.ndarray,
    completion_mask: np.ndarray,
    token_rewards: np.ndarray,
    values: np.ndarray,
    gamma: float = 1.0,
    alpha: float = 0.05,
    critic_lam: float = 1.0,
    scale: str = "batch",
) -> TokenAdvantages:
    """`gae` with lambda = max(0, 1 - 1 / (alpha n)) for a sequence of n completion tokens, then whitened.

    Length-adaptive GAE (VAPO, arXiv 2504.05118): a reward at the end reaches the same part of a long and of a
    short sequence, about alpha n tokens. The returns, on which the critic is trained, have the lambda
    `critic_lam` (decoupled GAE, arXiv 2503.01491): with 1, that of both papers, they are discounted sums of
    rewards. n counts the tokens that the policy sampled; an episode of several rows has one for each row. Up
    to 1 / alpha tokens (20 with the paper's alpha, which is for thousands) lambda is 0, as in AReaL: the
    formula would be negative. The rest is that of `gae`.

    Raises ValueError for an `alpha` that is not above 0.
    """
    check_scale("length_adaptive_gae", scale, SCALES)
    check_fraction("gamma", gamma)
    check_fraction("critic_lam", critic_lam)
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}; set advantage.args.alpha")
    lengths = np.maximum(completion_mask.sum(axis=-1), 1)
    lam = np.maximum(1 - 1 / (alpha * lengths), 0.0)
    return with_critic(
        rewards,
        completion_mask,
        token_rewards,
        values,
        gamma=gamma,
        lam=lam,
        critic_lam=critic_lam,
        scale=scale,
    )
