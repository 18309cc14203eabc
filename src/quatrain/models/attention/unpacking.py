"""Packed sequences in rows of their own, for attention alone: what lets a plain causal kernel serve them.

Data flow: segment and branch ids of packed buffers -> `unpacking`, on the host -> `Unpacking`, an input of
the compiled programs -> `unpacked_attention` in each layer. Linear layers compute each token of a buffer
once. In attention, a prefix that several sequences share stands in the row of each of them: its keys and
values are the same in all, and its results are taken from the first.

Shapes: B buffers of T tokens, S rows per buffer, one per sequence, of L columns, N query heads, K key/value
heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.models.layers import BRANCHES_PER_GROUP
from quatrain.ops.ladder import round_up_coarsely

FEWEST_COLUMNS = 128
"""Least number of columns of a row: the block size of the kernels."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unpacking:
    """Where the tokens of a buffer stand in rows of whole sequences, and the other way round."""

    rows: jax.Array  # [B, S, L] int32: the index in its buffer of each token of each sequence; 0 on padding
    places: jax.Array  # [B, T] int32: the index of each token in the S x L columns; 0 on padding


def unpacking(segment_ids: np.ndarray, branch_ids: np.ndarray) -> Unpacking:
    """The `Unpacking`, as host arrays, of buffers with `segment_ids` and `branch_ids` [B, T].

    A sequence is the tokens of a branch after those of the branches that it continues
    (`layers.attention_mask`); the tokens of a branch are neighbours. The numbers of rows and of columns are
    rounded up to a few sizes.
    """
    sequences = [_sequences(*buffer) for buffer in zip(segment_ids, branch_ids, strict=True)]
    count = round_up_coarsely(max(map(len, sequences)))
    longest = max((len(row) for rows in sequences for row in rows), default=1)
    columns = round_up_coarsely(longest, FEWEST_COLUMNS)
    rows = np.zeros((len(sequences), count, columns), np.int32)
    places = np.zeros(segment_ids.shape, np.int32)
    for buffer, whole in enumerate(sequences):
        # Later rows first, so that the place of a shared token is in the first row that has it.
        for row, tokens in reversed(list(enumerate(whole))):
            rows[buffer, row, : len(tokens)] = tokens
            places[buffer, tokens] = row * columns + np.arange(len(tokens))
    return Unpacking(rows, places)  # type: ignore[arg-type]  # host arrays until they are placed


def _sequences(segments: np.ndarray, branches: np.ndarray) -> list[np.ndarray]:
    """The indices of the tokens of each sequence of a buffer [T]."""
    starts = np.flatnonzero(np.diff(segments, prepend=0) | np.diff(branches, prepend=0))
    spans = {
        (int(segments[span[0]]), int(branches[span[0]])): span
        for span in np.split(np.arange(len(segments)), starts)
        if len(span) and segments[span[0]]
    }
    prefixes = {branch: _prefixes(*branch) & spans.keys() for branch in spans}
    continued = set().union(*prefixes.values())
    return [
        np.concatenate([spans[each] for each in (*sorted(prefixes[branch]), branch)])
        for branch in spans
        if branch not in continued
    ]


def _prefixes(segment: int, branch: int) -> set[tuple[int, int]]:
    """The branches of a segment that `branch` continues: the common prefix and that of its group."""
    group = branch - branch % BRANCHES_PER_GROUP
    return {(segment, 0), (segment, group)} - {(segment, branch)}


def unpacked_attention(
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    layout: Unpacking,
) -> jax.Array:
    """Attention [B, T, N, H] of packed buffers by `attend`, causal attention of rows [B x S, L, heads, H].

    Results on padding are those of another token.
    """
    B, S, L = layout.rows.shape

    def taken(x_BTNH: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_BTNH, indices[:, :, None, None], axis=1, mode="promise_in_bounds")

    def whole(x_BTNH: jax.Array) -> jax.Array:
        return taken(x_BTNH, layout.rows.reshape(B, S * L)).reshape(B * S, L, *x_BTNH.shape[2:])

    # A key or value of a shared prefix has a gradient from each of its rows: they are added in float32.
    keys, values = (whole(x.astype(jnp.float32)).astype(x.dtype) for x in (k_BTKH, v_BTKH))
    y = attend(whole(q_BTNH), keys, values).reshape(B, S * L, *q_BTNH.shape[2:])
    return taken(y, layout.places)
