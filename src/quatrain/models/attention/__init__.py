"""Self-attention of whole rows, padded or packed, by one of several implementations.

Called by the decoder's forward pass and by the prefill, where queries do not read a KV cache. All
implementations compute the same mask (`layers.attention_mask`); they differ in the devices, dtypes and
architectures that they support (`kernels.py`), and in how they take a packed row: `xla` skips blocks that are
fully masked, `splash` takes the mask itself, and the others, as `splash` for long rows, get each sequence in
a row of its own (`unpacking.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from quatrain.backend import Backend, BlockSizes
from quatrain.models.attention import kernels
from quatrain.models.attention.blockwise import BlockPattern, block_attention, block_pattern
from quatrain.models.attention.unpacking import Unpacking, unpacked_attention
from quatrain.models.layers import attention_mask

AttentionPattern = BlockPattern | Unpacking | jax.Array | None
"""The mask of the rows as an implementation takes it: a `BlockPattern` for `xla`; for kernels, where the
sequences of packed rows are (`Unpacking`), their mask [B, T, T], or None if each row is one sequence.

Computed once per forward pass and sliding window, and used by all layers with that window."""

_CAUSAL: dict[str, Callable[..., jax.Array]] = {
    "cudnn": kernels.cudnn_attention,
    "tokamax": kernels.tokamax_attention,
    "splash": kernels.splash_attention,
}
"""Attention of rows of one sequence each, with padding behind it."""


MOST_MASKED = 8192
"""Tokens of a packed row whose mask [T, T] `splash` takes: 64 MiB. Longer rows are unpacked."""


def unpacks_above(name: str) -> int | None:
    """Packed rows of more tokens need an `Unpacking` for the implementation `name`; None: none do."""
    return {"cudnn": 0, "tokamax": 0, "splash": MOST_MASKED}.get(name)


def longest_buffer(name: str, backend: Backend) -> int | None:
    """Most tokens of a packed buffer for the implementation `name`; None: any number."""
    return backend.line_tokens if name == "splash" else None


def attention_pattern(
    name: str,
    positions: jax.Array,
    segment_ids: jax.Array,
    branch_ids: jax.Array | None,
    window: int | None,
    sizes: BlockSizes,
    *,
    packed: bool = True,
    layout: Unpacking | None = None,
) -> AttentionPattern:
    """The mask of rows [B, T] in the form that `self_attention` with the implementation `name` takes.

    `sizes` are the block sizes of the implementation `xla`. `packed`: rows may hold several sequences; an
    implementation may then need their `layout` (`unpacks_above`).
    """
    branches = jnp.zeros_like(segment_ids) if branch_ids is None else branch_ids
    if name == "xla":
        return block_pattern(positions, segment_ids, branches, window, sizes)
    if not packed:
        return None
    if layout is not None:
        return layout
    # A causal kernel on a packed row would let sequences see those before them, without an error.
    assert segment_ids.shape[1] <= (unpacks_above(name) or 0), f"{name} needs the layout of packed rows"
    return attention_mask(
        positions,
        positions,
        segment_ids,
        segment_ids,
        window,
        None if branch_ids is None else (branches,) * 2,
    )


def self_attention(
    name: str,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    pattern: AttentionPattern,
    *,
    window: int | None,
    cap: float | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention [B, T, N, H]. Queries must be scaled already; results on padding are finite.

    `sinks` [N] float32 are one more score of each head, without a value; `xla` alone has them.
    """
    if isinstance(pattern, BlockPattern):
        return block_attention(q_BTNH, k_BTKH, v_BTKH, pattern, window, cap, sinks)
    assert sinks is None, f"{name} has no sinks"
    causal = partial(_CAUSAL[name], window=window, cap=cap)
    if isinstance(pattern, Unpacking):
        return unpacked_attention(causal, q_BTNH, k_BTKH, v_BTKH, pattern)
    if pattern is not None:
        return kernels.splash_masked_attention(q_BTNH, k_BTKH, v_BTKH, pattern, cap=cap)
    return causal(q_BTNH, k_BTKH, v_BTKH)
