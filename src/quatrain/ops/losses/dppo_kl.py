"""Policy gradient without the tokens that have left a trust region in binary KL (DPPO)."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from quatrain.ops.losses._shared import check_bounds, trust_region
from quatrain.ops.tokens import ScoredTokens, TokenLoss

LEAST_REST = 1e-7
"""Least probability of all words but the sampled one: log-probabilities in float32 do not resolve less."""


def dppo_kl(tokens: ScoredTokens, *, clip_low: float = 0.05, clip_high: float = 0.05) -> TokenLoss:
    """loss = -r A, and 0 where the token is too far from the sampler's distribution, on the side of A's sign.

    Divergence PPO with the binary KL (DPPO, arXiv 2602.04879; verl's `dppo_kl`). With mu and pi the
    probabilities that the sampler and the policy give the sampled token, and all other words as one,
    D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)). A token is left out where D > clip_high, A > 0
    and pi > mu, or D > clip_low, A < 0 and pi < mu. For small probabilities D is about (pi - mu)^2 / (2 mu):
    it bounds unlikely tokens less than a ratio does, and more than `dppo`. Near 1 it is the strictest: from
    0.9 to 0.99 it is 0.15.

    Args:
        tokens: reads `logprobs`, `old_logprobs`, `rollout_logprobs` and `advantages`. The ratio r is that to
            the old log-probabilities: with `update.old_logprobs: rollout`, to mu, as in the paper.
        clip_low, clip_high: bounds of D in nats where A < 0, and where A > 0, >= 0. The defaults are those
            that SkyRL recommends for the paper's method.

    Returns:
        The token loss, and as means D, `binary_kl`, and the fractions of tokens left out: `clip_low_fraction`
        (A < 0), `clip_high_fraction` (A > 0) and their sum, `clip_fraction`.

    Raises:
        ValueError: for a bound below 0.

    1 - mu and 1 - pi count as at least `LEAST_REST`; verl adds 1e-8 to both. verl and TRL cut the ratio at 20
    and 10 at most; here it ends at exp(20), as in every loss.
    """
    check_bounds(clip_low=clip_low, clip_high=clip_high)
    policy, sampler = jax.lax.stop_gradient(tokens.logprobs), tokens.rollout_logprobs
    divergence = _binary_kl(sampler, policy)
    low, high = (policy < sampler) & (divergence > clip_low), (policy > sampler) & (divergence > clip_high)
    result = trust_region(tokens, low, high)
    return replace(result, means={"binary_kl": divergence, **result.means})


def _binary_kl(sampler: jax.Array, policy: jax.Array) -> jax.Array:
    """KL(sampler || policy) of the sampled token against all others, from its two log-probabilities."""
    rests = [jnp.maximum(-jnp.expm1(logprobs), LEAST_REST) for logprobs in (sampler, policy)]
    return jnp.exp(sampler) * (sampler - policy) + rests[0] * (jnp.log(rests[0]) - jnp.log(rests[1]))
