"""Per-token estimators of KL(policy || reference) from the log-probabilities of the sampled tokens.

Data flow: policy and reference log-probabilities -> here -> the loss, weighted by `update.kl_coef`.

With d = log pi(x) - log ref(x) for x sampled from pi. Source: J. Schulman, "Approximating KL Divergence"
(2020). Value and gradient are different matters: an unbiased value does not make an unbiased gradient
when the estimator is differentiated as a loss term (arXiv 2506.09477); each docstring says which it is.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0
"""Exponents stop here: exp(20) is 4.9e8, far beyond any useful ratio and safe in float32."""


def k1(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k1 = d: unbiased, of either sign, high variance. Any shape in, the same shape out, in nats.

    Gradient: that of log pi, whose expectation over the policy's own samples is zero. As a loss term it
    does not pull towards the reference at all; it is for measuring, or for the reward.
    """
    return logprobs - ref_logprobs


def k2(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k2 = d^2 / 2: biased, never negative, low variance. Any shape in, the same shape out, in nats.

    Gradient: d times that of log pi, which on the policy's own samples is the unbiased gradient of
    KL(policy || reference). It grows without bound with |d|.
    """
    return 0.5 * jnp.square(logprobs - ref_logprobs)


def k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k3 = exp(-d) - 1 + d: unbiased, never negative, low variance (the KL term of arXiv 2402.03300).

    Any shape in, the same shape out, in nats. d is held at -20 from below, so that exp cannot overflow;
    where it is held the gradient is zero. There is no upper bound: exp(-d) is harmless there.

    Gradient: (1 - exp(-d)) times that of log pi, which on the policy's own samples is the gradient of
    KL(reference || policy), the other direction. The two agree to first order in d; far from the
    reference this one pulls weakly where d is large (factor at most 1) and hard where d is negative.
    """
    log_ratio = jnp.maximum(logprobs - ref_logprobs, -MAX_LOG_RATIO)
    return jnp.expm1(-log_ratio) + log_ratio


def adapted_kl_coef(coef: float, kl: float, *, target: float, num_sequences: int, horizon: int) -> float:
    """The next coefficient of the KL in the reward, which moves the measured KL towards `target`.

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_sequences / horizon), where `kl` and `target` are in
    nats per token, `kl` the mean over the `num_sequences` of the batch, whose rewards had `coef`, and
    `horizon` is a number of sequences. Source: Ziegler et al., arXiv 1909.08593, section 2.2, as in verl.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_sequences / horizon)


def k3_straight(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """The value of `k3` with the gradient of `k2`: k2 - sg(k2) + sg(k3), sg stopping the gradient.

    Any shape in, the same shape out, in nats. On the policy's own samples the value is an unbiased estimate
    of KL(policy || reference), and the gradient is its unbiased gradient (arXiv 2506.09477; `k3+` in verl).
    """
    straight = k2(logprobs, ref_logprobs)
    value = k3(logprobs, ref_logprobs)
    return straight - jax.lax.stop_gradient(straight) + jax.lax.stop_gradient(value)


KL_ESTIMATORS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    function.__name__: function for function in (k1, k2, k3, k3_straight)
}
