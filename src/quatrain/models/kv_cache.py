"""The KV cache: keys and values of earlier tokens, so that a decode step computes one token per sequence.

Data flow: the rollout allocates the cache; `decode_step.py` writes and reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from quatrain.models.families import Architecture
from quatrain.parallel.axes import DATA_AXES, TP
from quatrain.parallel.mesh import mesh_shape

CACHE_SPEC = PartitionSpec(DATA_AXES, TP)
"""The sharding of a cache: rows over the replicas of the sampler, heads over a replica's `tp` devices."""

LayerCache = tuple[jax.Array, jax.Array]
"""Keys and values of one layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachePart:
    """Keys and values of every layer; the positions of the columns are not stored, the reader derives them.

    For each layer, keys are [B, KV, H, S] and values [B, KV, S, H] (B rows, KV key/value heads, H head size,
    S columns): on a CPU the matrix products of a decode step take half as long as with keys [B, KV, S, H].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def of_layers(cls, layers: Iterable[LayerCache]) -> CachePart:
        """The cache with these keys and values, layer after layer."""
        keys, values = zip(*layers, strict=True)
        return cls(keys, values)

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """Keys and values of each layer."""
        return tuple(zip(self.keys, self.values, strict=True))

    @property
    def columns(self) -> int:
        """The number of columns S: tokens that a row can hold."""
        return self.values[0].shape[2]


def empty_cache(arch: Architecture, rows: int, columns: int, dtype: DTypeLike, mesh: Mesh) -> CachePart:
    """A cache of zeros with `rows` rows on each replica (data shard) of `mesh`."""
    heads, size = cached_heads(arch, mesh.shape[TP]), arch.head_dim
    rows *= mesh_shape(mesh).num_data_shards
    place = NamedSharding(mesh, CACHE_SPEC)
    keys, values = (
        tuple(jnp.zeros((rows, heads, *shape), dtype, device=place) for _ in range(arch.num_layers))
        for shape in ((size, columns), (columns, size))
    )
    return CachePart(keys, values)


def cached_heads(arch: Architecture, tp: int) -> int:
    """Key/value heads in the caches of `tp` devices: with fewer heads than devices, each device has one."""
    return max(arch.num_kv_heads, tp)


def bytes_per_column(arch: Architecture, dtype: DTypeLike, tp: int = 1) -> int:
    """Bytes of one column (the keys and values of one token in all layers) on each of `tp` devices."""
    heads = cached_heads(arch, tp) // tp
    return 2 * arch.num_layers * heads * arch.head_dim * jnp.dtype(dtype).itemsize


def write(buffer: jax.Array, new: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    """`buffer` with `new` written at start, start + 1, ... along `axis`, the same columns in every row."""
    return lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), start, axis)
