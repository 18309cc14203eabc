"""`ppo_clip` without a few tokens of high covariance (Clip-Cov)."""

import jax.numpy as jnp

from quatrain.ops.covariance import tokens_between_covariances
from quatrain.ops.losses.ppo_clip import ppo_clip
from quatrain.ops.tokens import ScoredTokens, TokenLoss, with_mini_batch_columns


@with_mini_batch_columns(tokens_between_covariances)
def clip_cov(
    tokens: ScoredTokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> TokenLoss:
    """`ppo_clip`, with loss and gradient 0 for a few tokens of high covariance (Clip-Cov, arXiv 2505.22617).

    The tokens are drawn from the whole mini-batch: `ops/covariance.py:tokens_between_covariances`, which
    also says what differs from verl.

    Args:
        tokens: reads `logprobs`, `old_logprobs`, `advantages` and the column `high_covariance`.
        clip_low, clip_high, dual_clip: as for `ppo_clip`.
        clip_cov_ratio: fraction of the completion tokens that are drawn, in [0, 1]; at least one is.
        clip_cov_lb, clip_cov_ub: covariances among which tokens are drawn.

    Returns:
        As `ppo_clip`, and as a mean the fraction of tokens drawn, `high_covariance_fraction`.
    """
    clipped = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    chosen = tokens.column("high_covariance")
    return TokenLoss(
        jnp.where(chosen > 0, 0, clipped.loss), {**clipped.means, "high_covariance_fraction": chosen}
    )
