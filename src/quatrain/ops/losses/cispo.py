"""REINFORCE weighted with a clipped ratio (CISPO)."""

import jax
import jax.numpy as jnp

from quatrain.ops.losses._shared import check_bounds, fractions, log_ratio, selected
from quatrain.ops.tokens import ScoredTokens, TokenLoss


def cispo(tokens: ScoredTokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLoss:
    """loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs (CISPO, MiniMax-M1, arXiv 2506.13585).

    The clipped ratio is a weight: unlike in `ppo_clip`, no token loses its gradient.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: distances of the bounds of the weight from 1, >= 0. By default the weight is at
            most 5 and has no lower bound (1 - clip_low is 0), as in the paper, which names no upper bound.

    Returns:
        The token loss, and as means the fractions of tokens whose weight was clipped, whatever the sign of A:
        `clip_low_fraction`, `clip_high_fraction` and their sum, `clip_fraction`.

    Raises:
        ValueError: for a bound below 0.
    """
    check_bounds(clip_low=clip_low, clip_high=clip_high)
    ratio = jnp.exp(log_ratio(tokens))
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    weight = jax.lax.stop_gradient(selected(ratio, low, 1 - clip_low, high, 1 + clip_high))
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, fractions(clip_low=low, clip_high=high))
