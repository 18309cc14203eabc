"""Clipped surrogate loss (PPO, DAPO, dual clip)."""

import jax.numpy as jnp

from quatrain.ops.losses._shared import log_ratio, surrogate
from quatrain.ops.tokens import ScoredTokens, TokenLoss


def ppo_clip(
    tokens: ScoredTokens, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """Clipped surrogate loss of each token, with asymmetric bounds and an optional dual clip.

    With r = exp(clamp(logprobs - old_logprobs, -20, 20)):
    loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), and with a dual clip c, where A < 0,
    loss = min(that, -c A). A clipped token has gradient zero; a ratio exactly on a bound is not clipped.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: distances of the bounds from 1, >= 0.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        The token loss, float32, and as means the fractions of tokens that were clipped: `clip_low_fraction`
        (A < 0 and r below its bound), `clip_high_fraction` (A > 0 and r above its bound) and
        `clip_dual_fraction` (A < 0 and r > c; zero without a dual clip), which exclude each other, and their
        sum, `clip_fraction`.

    Source: PPO (arXiv 1707.06347), asymmetric bounds DAPO (2503.14476), dual clip (1912.09729).
    """
    return surrogate(jnp.exp(log_ratio(tokens)), tokens.advantages, clip_low, clip_high, dual_clip)
