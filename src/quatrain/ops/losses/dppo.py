"""Policy gradient without the tokens that have left a trust region in total variation (DPPO)."""

import jax
import jax.numpy as jnp

from quatrain.ops.losses._shared import check_bounds, trust_region
from quatrain.ops.tokens import ScoredTokens, TokenLoss


def dppo(tokens: ScoredTokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """loss = -r A, and 0 where the token's probability has moved too far from the sampler's, with A's sign.

    Divergence PPO with the binary total variation (DPPO, arXiv 2602.04879; prime-rl's default loss, verl's
    `dppo_tv`): the trust region is |pi - mu| of the sampled token, with mu the probability that the sampler
    gave it, in place of a bound of the ratio. A ratio of 3 from 0.01 to 0.03 stays; one of 1.3 from 0.7 to
    0.91 does not.

    Args:
        tokens: reads `logprobs`, `old_logprobs`, `rollout_logprobs` and `advantages`. The ratio r is that to
            the old log-probabilities: with `update.old_logprobs: rollout`, to mu, as in the paper.
        clip_low, clip_high: how far the probability may fall where A < 0, and rise where A > 0, in [0, 1].

    Returns:
        The token loss, and as means the fractions of tokens left out: `clip_low_fraction` (A < 0),
        `clip_high_fraction` (A > 0) and their sum, `clip_fraction`.

    Raises:
        ValueError: for a bound outside of [0, 1].
    """
    check_bounds(1, clip_low=clip_low, clip_high=clip_high)
    moved = jax.lax.stop_gradient(jnp.exp(tokens.logprobs) - jnp.exp(tokens.rollout_logprobs))
    return trust_region(tokens, moved < -clip_low, moved > clip_high)
