"""Geometric mean of a sequence's clipped ratios (GMPO)."""

import jax.numpy as jnp

from quatrain.ops.losses._shared import check_bounds, fractions, log_ratio, selected
from quatrain.ops.tokens import ScoredTokens, TokenLoss

AGGREGATION = "seq_mean_token_mean"


def gmpo(tokens: ScoredTokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """loss = -s A, with s the geometric mean of the sequence's clipped ratios (GMPO, arXiv 2507.20673).

    s = exp(mean of c over the sequence), with c = min(d, clip_high) where A > 0, c = max(d, -clip_low) where
    A < 0, and c = d where A = 0. The gradient of each token's loss flows through all tokens of its sequence.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: bounds of the log-ratio (not of the ratio), >= 0: ratios are clipped at
            exp(-clip_low) and exp(clip_high). The defaults are the paper's.

    Returns:
        The token loss, and as means the fractions of tokens that were clipped: `clip_low_fraction` (A < 0),
        `clip_high_fraction` (A > 0) and their sum, `clip_fraction`.

    Raises:
        ValueError: for a bound below 0.

    The paper's objective is a mean over sequences: `update.loss_aggregation: seq_mean_token_mean`. verl
    always takes the mean over the sequences of a micro-batch, and does not clamp the log-ratio.
    """
    check_bounds(clip_low=clip_low, clip_high=clip_high)
    advantages, log_ratios = tokens.advantages, log_ratio(tokens)
    low = (advantages < 0) & (log_ratios < -clip_low)
    high = (advantages > 0) & (log_ratios > clip_high)
    ratio = jnp.exp(tokens.sequence_mean(selected(log_ratios, low, -clip_low, high, clip_high)))
    return TokenLoss(-ratio * advantages, fractions(clip_low=low, clip_high=high))
