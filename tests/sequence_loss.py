"""A policy loss whose tokens depend on their whole sequence: wrong wherever a sequence is cut."""

import jax.numpy as jnp

from quatrain.ops.tokens import ScoredTokens, TokenLoss


def sequence_ratio(tokens: ScoredTokens, *, bound: float = 0.3) -> TokenLoss:
    """The clipped surrogate of the geometric mean of a sequence's ratios, for each of its tokens."""
    log_ratio = tokens.sequence_mean(tokens.logprobs - tokens.old_logprobs)
    ratio = jnp.exp(jnp.clip(log_ratio, -20, 20))
    clipped = jnp.clip(ratio, 1 - bound, 1 + bound)
    loss = -jnp.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    return TokenLoss(loss, {"sequence_ratio": ratio}, {"longest": tokens.sequence_lengths})
