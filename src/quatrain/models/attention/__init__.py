"""Self-attention of whole rows, padded or packed, by one of several implementations.

Called by the decoder's forward pass and by the prefill, where queries do not read a KV cache. All
implementations compute the same mask (`layers.attention_mask`); they differ in the devices, dtypes and
architectures that they support (`kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from quatrain.backend import BlockSizes
from quatrain.models.attention import kernels
from quatrain.models.attention.blocks import BlockPattern, block_attention, block_pattern

AttentionPattern = BlockPattern | jax.Array
"""The mask of the rows as an implementation takes it: segment ids [B, T] for kernels, else a `BlockPattern`.

Computed once per forward pass and sliding window, and used by all layers with that window."""

_KERNELS: dict[str, Callable[..., jax.Array]] = {
    "cudnn": kernels.cudnn_attention,
    "pallas": kernels.pallas_attention,
    "splash": kernels.splash_attention,
}


def supports_shared_prefixes(name: str) -> bool:
    """Whether the implementation `name` supports segments with branches, that is, shared prefixes."""
    return name == "xla"


def attention_pattern(
    name: str,
    positions: jax.Array,
    segment_ids: jax.Array,
    branch_ids: jax.Array | None,
    window: int | None,
    sizes: BlockSizes,
) -> AttentionPattern:
    """The mask of rows [B, T] in the form that `self_attention` with the implementation `name` takes.

    `sizes` are the block sizes of the implementation `xla`; the others do not use them.
    """
    if supports_shared_prefixes(name):
        branches = jnp.zeros_like(segment_ids) if branch_ids is None else branch_ids
        return block_pattern(positions, segment_ids, branches, window, sizes)
    assert branch_ids is None, "kernels do not support branches; choose_attention must not choose one here"
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
    """Grouped-query attention [B, T, N, H]. Queries must be scaled already; results on padding are finite."""
    if isinstance(pattern, BlockPattern):
        return block_attention(q_BTNH, k_BTKH, v_BTKH, pattern, window, cap)
    return _KERNELS[name](q_BTNH, k_BTKH, v_BTKH, pattern, window=window, cap=cap)
