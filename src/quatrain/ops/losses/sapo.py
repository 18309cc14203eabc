"""Soft gate in place of clipping (SAPO)."""

import jax
import jax.numpy as jnp

from quatrain.ops.losses._shared import check_bounds, log_ratio
from quatrain.ops.tokens import ScoredTokens, TokenLoss

AGGREGATION = "seq_mean_token_mean"


def sapo(tokens: ScoredTokens, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """loss = -(4 / tau) sigmoid(tau (r - 1)) A, with tau = tau_pos where A > 0 and tau_neg elsewhere.

    Soft adaptive policy optimization (SAPO, arXiv 2511.20347): a smooth gate in place of clipping. At r = 1
    the gradient is that of REINFORCE with the advantage A; far from it, it falls to 0. The value at r = 1 is
    -(2 / tau) A, so it is not comparable with that of other losses.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        tau_pos, tau_neg: how fast the gradient falls with |r - 1|, > 0.

    Raises:
        ValueError: for a tau that is not above 0.
    """
    check_bounds(positive=True, tau_pos=tau_pos, tau_neg=tau_neg)
    taus = jnp.where(tokens.advantages > 0, jnp.float32(tau_pos), jnp.float32(tau_neg))
    gate = 4 / taus * jax.nn.sigmoid(taus * (jnp.exp(log_ratio(tokens)) - 1))
    return TokenLoss(-gate * tokens.advantages)
