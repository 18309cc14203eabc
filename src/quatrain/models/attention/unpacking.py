"""Packed sequences in rows of their own, for attention alone: what lets a plain causal kernel serve them.

Data flow: segment and branch ids of packed buffers -> `unpacking`, on the host -> `Unpacking`, an input of
the compiled programs -> `unpacked_attention` in each layer. Linear layers compute each token of a buffer
once. In attention, a prefix that several sequences share stands in the row of each of them: its keys, values
and results are the same in all.

Shapes: B buffers of T tokens; for each buffer, S rows of L columns in a block, a row per sequence; N query
heads, K key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.models.prefix_tree import prefixes_of, spans_of_nodes
from quatrain.ops.shape_buckets import round_up_coarsely

FEWEST_COLUMNS = 128
"""Least number of columns of a row: the block size of the kernels."""
HALVINGS = 5
"""Rows of short sequences may have the columns of the longest, halved this often at most."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unpacking:
    """Where the tokens of a buffer stand in rows of whole sequences, and the other way round.

    There are one or two blocks of rows, each with columns for its longest sequence, so that one long sequence
    does not widen the rows of all others.
    """

    blocks: tuple[jax.Array, ...]
    """[B, S, L] int32 each: the index in its buffer of each token of each sequence; 0 on padding."""
    places: jax.Array
    """[B, T] int32: the index of each token in the columns of all rows of all blocks; 0 on padding."""


def unpacking(segment_ids: np.ndarray, branch_ids: np.ndarray) -> Unpacking:
    """The `Unpacking`, as host arrays, of buffers with `segment_ids` and `branch_ids` [B, T].

    A sequence is the tokens of a branch after those of the branches that it continues
    (`layers.attention_mask`); the tokens of a branch are neighbours. The numbers of rows and of columns are
    rounded up (`round_up_coarsely`).
    """
    sequences = [_sequences(*buffer) for buffer in zip(segment_ids, branch_ids, strict=True)]
    columns = _columns([[len(row) for row in rows] for rows in sequences])
    places = np.zeros(segment_ids.shape, np.int32)
    blocks, before, shorter = [], 0, 0
    for most in columns:
        held = [[row for row in rows if shorter < len(row) <= most] for rows in sequences]
        blocks.append(_block(held, most, places, before))
        before, shorter = before + blocks[-1][0].size, most
    return Unpacking(tuple(blocks), places)  # type: ignore[arg-type]  # host arrays until they are placed


def _block(sequences: list[list[np.ndarray]], columns: int, places: np.ndarray, before: int) -> np.ndarray:
    """The rows [B, S, L] of `sequences`; writes the places of their tokens, `before` on, into `places`."""
    rows = np.zeros((len(sequences), round_up_coarsely(max(map(len, sequences))), columns), np.int32)
    for buffer, whole in enumerate(sequences):
        # A shared token gets the place in the last row that has it: it is computed alike in all of them.
        for row, tokens in enumerate(whole):
            rows[buffer, row, : len(tokens)] = tokens
            places[buffer, tokens] = before + row * columns + np.arange(len(tokens))
    return rows


def _columns(lengths: list[list[int]]) -> list[int]:
    """The columns of the blocks, ascending, that need the least memory for sequences of these lengths."""
    longest = round_up_coarsely(max((max(each, default=1) for each in lengths), default=1), FEWEST_COLUMNS)
    shorter = (longest >> k for k in range(1, HALVINGS + 1))
    # At most two widths, halves of the longest: each pair of widths is a program to compile.
    choices = [[longest], *([short, longest] for short in shorter if short >= FEWEST_COLUMNS)]

    def size(columns: list[int]) -> int:
        least = [0, *columns]
        counts = (
            max(sum(low < n <= high for n in each) for each in lengths) for low, high in pairwise(least)
        )
        return sum(round_up_coarsely(count) * each for count, each in zip(counts, columns, strict=True))

    return min(choices, key=size)


def _sequences(segments: np.ndarray, branches: np.ndarray) -> list[np.ndarray]:
    """The indices of the tokens of each sequence of a buffer [T]."""
    spans = spans_of_nodes(segments, branches)
    prefixes = {branch: prefixes_of(*branch) & spans.keys() for branch in spans}
    continued = set().union(*prefixes.values())
    return [
        np.concatenate([spans[each] for each in (*sorted(prefixes[branch]), branch)])
        for branch in spans
        if branch not in continued
    ]


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
    keys_values = (k_BTKH, v_BTKH)

    def attended(rows: jax.Array) -> jax.Array:
        B, S, L = rows.shape

        def whole(x_BTNH: jax.Array) -> jax.Array:
            return _taken(x_BTNH, rows.reshape(B, S * L)).reshape(B * S, L, *x_BTNH.shape[2:])

        # A key or value of a shared prefix has a gradient from each of its rows: they are added in float32.
        keys, values = (whole(x.astype(jnp.float32)).astype(x.dtype) for x in keys_values)
        return attend(whole(q_BTNH), keys, values).reshape(B, S * L, *q_BTNH.shape[2:])

    y = jnp.concatenate([attended(rows) for rows in layout.blocks], axis=1)
    return _taken(y, layout.places)


def _taken(x_BTNH: jax.Array, indices: jax.Array) -> jax.Array:
    # The host made the indices within bounds; they need not be clamped.
    return jnp.take_along_axis(x_BTNH, indices[:, :, None, None], axis=1, mode="promise_in_bounds")
