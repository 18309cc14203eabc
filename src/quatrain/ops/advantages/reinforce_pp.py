"""REINFORCE++: discounted returns of tokens, whitened over the batch."""

import numpy as np

from quatrain.ops.advantages._shared import (
    check_fraction,
    check_scale,
    counted_tokens,
    generalised_advantages,
    rewards_of_tokens,
    scaled,
)

SCALES = ("batch", "none")


def reinforce_pp(
    rewards: np.ndarray,
    completion_mask: np.ndarray,
    token_rewards: np.ndarray,
    gamma: float = 1.0,
    scale: str = "batch",
) -> np.ndarray:
    """G_t = sum_l gamma^l rho_{t+l} over completion tokens, and A = (G - mean) / (std + 1e-4).

    REINFORCE++ (arXiv 2501.03262). rho is `rewards_of_tokens`. Mean and standard deviation are over all
    completion tokens of the batch whose sequence has a reward, so a long sequence counts more; with `scale`
    `none`, A = G. Groups play no part. Deviations from verl: population standard deviation, 1e-4 added to it.
    """
    check_scale("reinforce_pp", scale, SCALES)
    check_fraction("gamma", gamma)
    rho = rewards_of_tokens(rewards, completion_mask, token_rewards)
    # The discounted return is the generalised advantage without values, with lam 1.
    returns = generalised_advantages(rho, np.zeros_like(rho), completion_mask, gamma, 1.0)
    return scaled(returns, counted_tokens(rewards, completion_mask), scale).astype(np.float32)
