"""Policy losses per token, and the token weights that aggregate them.

Data flow: log-probabilities and advantages -> token losses on the device; the completion mask -> token
weights on the host. The loss of a mini-batch is sum(weights * token_loss), however it is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from quatrain.ops.kl import MAX_LOG_RATIO
from quatrain.ops.tokens import ScoredTokens, TokenLoss


def ppo_clip(
    tokens: ScoredTokens, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    """Clipped surrogate loss of each token, with asymmetric bounds and an optional dual clip.

    With r = exp(clamp(logprobs - old_logprobs, -20, 20)):
    loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), and with a dual clip c, where A < 0,
    loss = min(that, -c A). A clipped token has gradient zero; a ratio exactly on a bound is not clipped.

    Args:
        tokens: reads `logprobs`, `old_logprobs` and `advantages`.
        clip_low, clip_high: distances of the bounds from 1, >= 0.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        The token loss, float32, and as means the fractions of tokens that were clipped: `clip_low_fraction`
        (A < 0 and r below its bound), `clip_high_fraction` (A > 0 and r above its bound) and
        `clip_dual_fraction` (A < 0 and r > c; zero without a dual clip), which exclude each other, and their
        sum, `clip_fraction`.

    Source: PPO (arXiv 1707.06347), asymmetric bounds DAPO (2503.14476), dual clip (1912.09729).
    """
    advantages = tokens.advantages
    log_ratio = jnp.clip(tokens.logprobs - tokens.old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = jnp.exp(log_ratio)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    dual = (advantages < 0) & (ratio > dual_clip) if dual_clip is not None else jnp.zeros_like(low)
    # Selecting the bound equals the max and min above, and gives exact gradients where the two sides tie.
    used = jnp.where(low, 1 - clip_low, jnp.where(high, 1 + clip_high, ratio))
    if dual_clip is not None:
        used = jnp.where(dual, dual_clip, used)
    clipped = {"clip_low": low, "clip_high": high, "clip_dual": dual}
    hits = {f"{name}_fraction": hit.astype(jnp.float32) for name, hit in clipped.items()}
    return TokenLoss(
        -used * advantages, {"clip_fraction": jnp.stack(list(hits.values())).sum(axis=0), **hits}
    )


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {"ppo_clip": ppo_clip}
"""(tokens, **arguments of its own) -> token loss; arguments without a default are keys of `update`."""


def token_mean(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """m / N: every completion token weighs the same (DAPO, arXiv 2503.14476)."""
    return mask / max(mask.sum(), 1)


def seq_mean_token_mean(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """m / (n_i B'): every completion weighs the same, shared by its tokens (GRPO, arXiv 2402.03300)."""
    lengths = mask.sum(axis=1, keepdims=True)
    return mask / (np.maximum(lengths, 1) * max((lengths > 0).sum(), 1))


def seq_mean_token_sum(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """m / B': the loss of a completion is the sum over its tokens; completions are averaged."""
    return mask / max(mask.any(axis=1).sum(), 1)


def seq_mean_token_sum_norm(mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """m / (B' L): `seq_mean_token_sum` over the constant L = max_new_tokens (Dr. GRPO, arXiv 2503.20783)."""
    return mask / (max(mask.any(axis=1).sum(), 1) * max_new_tokens)


LOSS_AGGREGATIONS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}


def token_weights(name: str, completion_mask: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Weight of each token in the loss of one mini-batch; 0 outside the mask.

    With m the mask, n_i its row sums, N = sum n_i and B' the rows with n_i > 0, the weight is m / N,
    m / (n_i B'), m / B' or m / (B' L): see `LOSS_AGGREGATIONS`. Computed from the whole mini-batch before
    it is cut, so that loss and gradient are plain sums over micro-batches and devices.

    Args:
        name: a key of `LOSS_AGGREGATIONS`.
        completion_mask: [B, T] bool, whole mini-batch. Any pattern; rows without tokens weigh nothing.
        max_new_tokens: L, the longest possible completion in tokens.

    Returns:
        [B, T] float32, computed in float64. All zero for a mini-batch without completion tokens.

    Raises:
        ValueError: for an unknown name, a mask that is not a boolean matrix, or L < 1.
    """
    if name not in LOSS_AGGREGATIONS:
        raise ValueError(f"unknown loss aggregation {name!r}; use one of {', '.join(LOSS_AGGREGATIONS)}")
    if completion_mask.ndim != 2 or completion_mask.dtype != np.bool_:
        raise ValueError(
            f"completion_mask must be bool [B, T], got {completion_mask.dtype.name} {completion_mask.shape}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    return LOSS_AGGREGATIONS[name](completion_mask, max_new_tokens).astype(np.float32)
