"""The keys and values of tokens already seen, so that a new token costs one token.

Data flow: the rollout makes it, `decode_step.py` writes and reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from quatrain.models.families import Architecture
from quatrain.parallel.mesh import DATA_AXES

CACHE_SPEC = PartitionSpec(DATA_AXES, "tp")
"""Rows over the replicas of the sampler, heads over the devices of each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachePart:
    """Keys and values of every layer without their positions, which the reader knows.

    Keys are [B, KV, H, S], values [B, KV, S, H]: on a CPU the products of a decode step take half the
    time that they take with keys [B, KV, S, H].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def columns(self) -> int:
        """S."""
        return self.values[0].shape[2]


def empty_cache(arch: Architecture, rows: int, columns: int, dtype: DTypeLike, mesh: Mesh) -> CachePart:
    """`rows` on each replica of `mesh`."""
    heads, size = cached_heads(arch, mesh.shape["tp"]), arch.head_dim
    rows *= mesh.shape["dp"] * mesh.shape["fsdp"]
    place = NamedSharding(mesh, CACHE_SPEC)
    keys, values = (
        tuple(jnp.zeros((rows, heads, *shape), dtype, device=place) for _ in range(arch.num_layers))
        for shape in ((size, columns), (columns, size))
    )
    return CachePart(keys, values)


def cached_heads(arch: Architecture, tp: int) -> int:
    """Key/value heads that `tp` devices keep: one each where they are more than there are."""
    return max(arch.num_kv_heads, tp)


def bytes_per_column(arch: Architecture, dtype: DTypeLike, tp: int = 1) -> int:
    """Memory of one cached token in all layers, on each of `tp` devices."""
    heads = cached_heads(arch, tp) // tp
    return 2 * arch.num_layers * heads * arch.head_dim * jnp.dtype(dtype).itemsize


def write(buffer: jax.Array, new: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    """`buffer` with `new` at start, start+1, ... along `axis`, the same columns in each row."""
    return lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), start, axis)
