"""Attention of whole rows, padded or packed, through the implementation that was chosen.

Called by the decoder where there is no cache. What a query sees is the same in all of them: keys of its own
segment, at its position or before, within the window; they differ in what they can run on (`kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from quatrain.backend import BlockSizes
from quatrain.models.attention import kernels
from quatrain.models.attention.blocks import BlockPattern, block_attention, block_pattern

AttentionPattern = BlockPattern | jax.Array
"""What an implementation needs to know of the rows: made once, used by all layers with the same window."""

_KERNELS: dict[str, Callable[..., jax.Array]] = {
    "cudnn": kernels.cudnn_attention,
    "pallas": kernels.pallas_attention,
    "splash": kernels.splash_attention,
}


def supports_shared_prefixes(name: str) -> bool:
    """Whether the implementation `name` computes segments with branches."""
    return name == "xla"


def attention_pattern(
    name: str,
    positions: jax.Array,
    segment_ids: jax.Array,
    branch_ids: jax.Array | None,
    window: int | None,
    sizes: BlockSizes,
) -> AttentionPattern:
    """What `self_attention` by the implementation `name` needs to know of rows [B, T].

    `sizes` are those of block attention, the implementation `xla`.
    """
    if supports_shared_prefixes(name):
        branches = jnp.zeros_like(segment_ids) if branch_ids is None else branch_ids
        return block_pattern(positions, segment_ids, branches, window, sizes)
    assert branch_ids is None, "the kernels know segments, not branches: choose_attention refuses them"
    return segment_ids


def self_attention(
    name: str,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    pattern: AttentionPattern,
    *,
    window: int | None,
    cap: float | None,
) -> jax.Array:
    """Grouped-query attention [B, T, N, H] of queries that are scaled already; finite on padding."""
    if isinstance(pattern, BlockPattern):
        return block_attention(q_BTNH, k_BTKH, v_BTKH, pattern, window, cap)
    return _KERNELS[name](q_BTNH, k_BTKH, v_BTKH, pattern, window=window, cap=cap)
