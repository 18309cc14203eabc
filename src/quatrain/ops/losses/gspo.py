"""Clipped surrogate loss with the ratio of the whole sequence (GSPO)."""

import jax
import jax.numpy as jnp

from quatrain.ops.kl import MAX_LOG_RATIO
from quatrain.ops.losses._shared import check_bounds, surrogate
from quatrain.ops.tokens import ScoredTokens, TokenLoss

AGGREGATION = "seq_mean_token_mean"


def gspo(tokens: ScoredTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """`ppo_clip` with the ratio of the whole sequence: GSPO in its token form (arXiv 2507.18071).

    The ratio of a token is s = exp(clamp(sg(m) + logprobs - sg(logprobs), -20, 20)) with m the mean of
    logprobs - old_logprobs over the sequence: its value is the geometric mean of the sequence's ratios, its
    gradient s times that of the token's logprobs. loss = max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A).

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: distances of the bounds from 1, >= 0. The defaults are the paper's; a mean over
            a sequence varies far less than a ratio, so the keys of `update` are not used.

    Returns:
        As `ppo_clip`; with one advantage per sequence, all its tokens are clipped or none.

    Raises:
        ValueError: for a bound below 0.

    The paper's objective is a mean over sequences: `update.loss_aggregation: seq_mean_token_mean`. verl
    clamps the log-ratio at 10.
    """
    check_bounds(clip_low=clip_low, clip_high=clip_high)
    logprobs = tokens.logprobs
    mean = jax.lax.stop_gradient(tokens.sequence_mean(logprobs - tokens.old_logprobs))
    log_ratios = logprobs - jax.lax.stop_gradient(logprobs) + mean
    ratio = jnp.exp(jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return surrogate(ratio, tokens.advantages, clip_low, clip_high, None)
