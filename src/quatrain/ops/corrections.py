"""Weights that correct the policy loss of tokens which an older or differently rounded policy sampled.

Data flow: log-probabilities of the policy at the start of the training step and of the sampler -> a weight
for each token's policy loss (`update/objective.py`).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from quatrain.ops.kl import MAX_LOG_RATIO

Correction = Literal["truncate", "mask"]


def behaviour_weights(
    old_logprobs: jax.Array,
    rollout_logprobs: jax.Array,
    *,
    correction: Correction,
    cap: float,
    floor: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Importance weights of tokens, from the policy at the start of the step to the one that sampled them.

    With rho = exp(clamp(old_logprobs - rollout_logprobs, -20, 20)):
    `truncate`: w = min(rho, cap), biased towards 0 where rho is above the cap;
    `mask`: w = rho where floor <= rho <= cap, else 0: the token's loss counts for nothing. In a loss that
    couples the tokens of a sequence, as `gmpo` does, the token still has a gradient through the others.
    `cap` >= 1; `floor` in [0, 1], None: 1 / cap.

    Returns w, float32, through which no gradient flows, and 1.0 where the bound changed the weight, else 0.0.
    Source: decoupled PPO (AReaL, arXiv 2505.24298) with truncated importance sampling (IMPALA, 1802.01561);
    `mask` is that of IcePop. The loss per token is w times the loss whose ratio is taken to `old_logprobs`.
    """
    log_ratio = jnp.clip(old_logprobs - rollout_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = jax.lax.stop_gradient(jnp.exp(log_ratio))
    if correction == "truncate":
        return jnp.minimum(rho, cap), (rho > cap).astype(jnp.float32)
    outside = (rho > cap) | (rho < (1 / cap if floor is None else floor))
    return jnp.where(outside, 0.0, rho), outside.astype(jnp.float32)
