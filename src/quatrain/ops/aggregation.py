"""Token weights, by which token losses are aggregated: on the host, before a mini-batch is cut.

Data flow: the completion mask of a mini-batch -> `token_weights` -> the weighted sum of token losses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


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
