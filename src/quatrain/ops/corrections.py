"""Weights that correct the policy loss of tokens which an older or differently rounded policy sampled.

Data flow: log-probabilities of the policy at the start of the training step and of the sampler -> a weight
for each token's policy loss (`update/objective.py`), of the token or of its sequence, and the tokens of
sequences that are rejected.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from quatrain.ops.kl import MAX_LOG_RATIO
from quatrain.ops.tokens import ScoredTokens

Correction = Literal["truncate", "mask"]
Rejections = tuple[tuple[str, tuple[float, ...]], ...]
"""Names of rules of `rejected_tokens`, each with its bounds."""


def behaviour_weights(
    log_ratios: jax.Array, *, correction: Correction, cap: float, floor: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Importance weights of tokens, from the policy at the start of the step to the one that sampled them.

    `log_ratios` are old minus rollout log-probabilities of the tokens, or the sums of these over their
    sequences. With rho = exp(clamp(log_ratio, -20, 20)):
    `truncate`: w = min(rho, cap), biased towards 0 where rho is above the cap;
    `mask`: w = rho where floor <= rho <= cap, else 0: the token's loss counts for nothing. In a loss that
    couples the tokens of a sequence, as `gmpo` does, the token still has a gradient through the others.
    `cap` >= 1; `floor` in [0, 1], None: 1 / cap.

    Returns w, float32, through which no gradient flows, and 1.0 where the bound changed the weight, else 0.0.
    Source: decoupled PPO (AReaL, arXiv 2505.24298) with truncated importance sampling (IMPALA, 1802.01561);
    `mask` is that of IcePop. The loss per token is w times the loss whose ratio is taken to the old
    log-probabilities.
    """
    rho = jax.lax.stop_gradient(jnp.exp(jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)))
    if correction == "truncate":
        return jnp.minimum(rho, cap), (rho > cap).astype(jnp.float32)
    outside = (rho > cap) | (rho < (1 / cap if floor is None else floor))
    return jnp.where(outside, 0.0, rho), outside.astype(jnp.float32)


def rejected_tokens(tokens: ScoredTokens, rules: Rejections, *, before: bool = False) -> dict[str, jax.Array]:
    """[R, K] bool for each of `rules`: the tokens of the sequences that it rejects.

    With d = old minus rollout log-probability of a token, and means and sums over the sequence:
    `geometric` (low, high): exp(mean d) is outside;
    `product` (low, high): exp(clamp(sum d, -20, 20)) is outside;
    `k3` (high,): mean (exp(d) - 1 - d), an estimate of KL(rollout || old), is above;
    `negative_kl` (high,): mean (rollout minus current log-probability) is above, and the token's advantage
    is negative (DeepSeek-V3.2, arXiv 2512.02556: old samples may encourage, and not discourage). The policy
    moves from one optimizer step of a training step to the next; with `before`, the old log-probabilities
    stand for the current ones, which are not computed yet.

    Reads `old_logprobs`, `rollout_logprobs` and, for `negative_kl`, `logprobs` and `advantages`. No gradient
    flows. Source: verl's `rollout_correction`; TRL's `off_policy_mask_threshold` for the last.
    """
    rollout = tokens.rollout_logprobs
    gaps = jax.lax.stop_gradient(tokens.old_logprobs - rollout)
    found = {}
    for name, bounds in rules:
        if name == "k3":
            bounded = jnp.clip(gaps, -MAX_LOG_RATIO, MAX_LOG_RATIO)
            found[name] = tokens.sequence_mean(jnp.expm1(bounded) - bounded) > bounds[0]
        elif name == "negative_kl":
            now = gaps if before else jax.lax.stop_gradient(tokens.logprobs - rollout)
            found[name] = (tokens.sequence_mean(-now) > bounds[0]) & (tokens.advantages < 0)
        else:
            of_sequence = tokens.sequence_mean if name == "geometric" else tokens.sequence_sum
            ratio = jnp.exp(jnp.clip(of_sequence(gaps), -MAX_LOG_RATIO, MAX_LOG_RATIO))
            found[name] = (ratio < bounds[0]) | (ratio > bounds[1])
    return found
