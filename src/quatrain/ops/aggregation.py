"""Token weights, by which token losses are aggregated: on the host, before a mini-batch is cut.

Data flow: the completion mask of a mini-batch -> `token_weights` -> the weighted sum of token losses.
"""

from collections.abc import Callable

import numpy as np


def token_mean(lengths: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """1 / N: every completion token weighs the same (DAPO, arXiv 2503.14476)."""
    return np.full(len(lengths), 1 / max(lengths.sum(), 1))


def seq_mean_token_mean(lengths: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """1 / (n_i B'): every completion weighs the same, shared by its tokens (GRPO, arXiv 2402.03300)."""
    return 1 / (np.maximum(lengths, 1) * max((lengths > 0).sum(), 1))


def seq_mean_token_sum(lengths: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """1 / B': the loss of a completion is the sum over its tokens; completions are averaged."""
    return np.full(len(lengths), 1 / max((lengths > 0).sum(), 1))


def seq_mean_token_sum_norm(lengths: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """1 / (B' L): `seq_mean_token_sum` over the constant L = max_new_tokens (Dr. GRPO, arXiv 2503.20783)."""
    return np.full(len(lengths), 1 / (max((lengths > 0).sum(), 1) * max_new_tokens))


LOSS_AGGREGATIONS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}
"""Functions of the lengths [E] of episodes, in completion tokens: the weight [E] of each of their tokens."""


def token_weights(
    name: str, completion_mask: np.ndarray, max_new_tokens: int, episode_ids: np.ndarray | None = None
) -> np.ndarray:
    """Weight of each token in the loss of one mini-batch; 0 outside the mask.

    With m the mask, n_i the completion tokens of the row's episode, N their sum and B' the episodes with
    n_i > 0, the weight is m / N, m / (n_i B'), m / B' or m / (B' L): see `LOSS_AGGREGATIONS`. Computed from
    the whole mini-batch before it is cut, so that loss and gradient are plain sums over micro-batches and
    devices.

    Args:
        name: a key of `LOSS_AGGREGATIONS`.
        completion_mask: [B, T] bool, whole mini-batch. Any pattern; rows without tokens weigh nothing.
        max_new_tokens: L, the longest possible completion in tokens.
        episode_ids: [B] integers, equal in the rows of one episode; None: each row is an episode.

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
    lengths, of_row = completion_mask.sum(axis=1), np.arange(len(completion_mask))
    if episode_ids is not None:
        _, of_row = np.unique(episode_ids, return_inverse=True)
        lengths = np.bincount(of_row, lengths)
    of_episode = LOSS_AGGREGATIONS[name](lengths, max_new_tokens)
    return np.where(completion_mask, of_episode[of_row][:, None], 0.0).astype(np.float32)
