"""Policy gradient with a KL penalty on a few tokens of high covariance (KL-Cov)."""

import jax.numpy as jnp

from quatrain.ops.covariance import tokens_of_highest_covariance
from quatrain.ops.losses._shared import check_bounds, log_ratio
from quatrain.ops.tokens import ScoredTokens, TokenLoss, with_mini_batch_columns


@with_mini_batch_columns(tokens_of_highest_covariance)
def kl_cov(tokens: ScoredTokens, *, kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 1.0) -> TokenLoss:
    """loss = -r A, plus ppo_kl_coef |d| for a few tokens of high covariance (KL-Cov, arXiv 2505.22617).

    Nothing is clipped. The tokens are chosen from the whole mini-batch:
    `ops/covariance.py:tokens_of_highest_covariance`, which also says what differs from verl.

    Args:
        tokens: reads `logprobs`, `old_logprobs`, `advantages` and the columns `high_covariance` and `moved`.
        kl_cov_ratio: fraction of the completion tokens that are chosen, in [0, 1]; at least one is.
        ppo_kl_coef: weight of their |d|, >= 0. |d| is `moved` x d: the sign, which is the gradient, is that
            of the whole mini-batch's log-probabilities. It is 0 in the first optimizer step of a training
            step, where d is the rounding error of a micro-batch, and for a |d| of at most `LEAST_DISTANCE`.

    Returns:
        The token loss, and as a mean the fraction of tokens chosen, `high_covariance_fraction`.

    Raises:
        ValueError: for a `ppo_kl_coef` below 0.
    """
    check_bounds(ppo_kl_coef=ppo_kl_coef)
    log_ratios = log_ratio(tokens)
    penalty = ppo_kl_coef * tokens.column("moved") * log_ratios
    return TokenLoss(
        -jnp.exp(log_ratios) * tokens.advantages + penalty,
        {"high_covariance_fraction": tokens.column("high_covariance")},
    )
