"""The KV cache: keys and values of earlier tokens, so that a decode step computes one token per sequence.

Data flow: the rollout allocates the cache; `decode_step.py` writes and reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from quatrain.models.architecture import Architecture
from quatrain.parallel.axes import DATA_AXES, TP
from quatrain.parallel.mesh import mesh_shape

CACHE_SPEC = PartitionSpec(DATA_AXES, TP)
"""The sharding of a cache: slots over the replicas of the sampler, heads over a replica's `tp` devices."""

LayerCache = tuple[jax.Array, jax.Array]
"""Keys and values of one layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachePart:
    """Keys and values of every layer that has its own. Which token of a sequence a position holds is not
    stored, the reader derives it.

    For each layer, keys are [B, KV, H, S] and values [B, KV, S, H] (B slots, KV key/value heads, H head size,
    S positions): on a CPU the matrix products of a decode step take half as long as with keys [B, KV, S, H].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def of_layers(cls, layers: Iterable[Sequence[jax.Array]]) -> CachePart:
        """The cache with these keys and values, layer after layer."""
        keys, values = zip(*layers, strict=True)
        return cls(keys, values)

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """Keys and values of each layer."""
        return tuple(zip(self.keys, self.values, strict=True))

    @property
    def positions(self) -> int:
        """The number of positions S: tokens that a slot can hold."""
        return self.values[0].shape[2]


def empty_layer(
    arch: Architecture, layer: int, slots: int, positions: int, dtype: DTypeLike, mesh: Mesh
) -> LayerCache:
    """Zeros for the layer with cache number `layer` (`Architecture.cached`), with `slots` slots on each
    replica (data shard) of `mesh`."""
    place = NamedSharding(mesh, CACHE_SPEC)
    slots *= mesh_shape(mesh).num_data_shards
    mixer = arch.layers[arch.cached.index(layer)].mixer
    state = mixer.state(slots, positions, mesh.shape[TP])
    keys, values = (jnp.zeros(shape, dtype, device=place) for shape in state)
    return keys, values


def empty_cache(arch: Architecture, slots: int, positions: int, dtype: DTypeLike, mesh: Mesh) -> CachePart:
    """A cache of zeros with `slots` slots on each replica (data shard) of `mesh`."""
    layers = range(arch.num_caches)
    return CachePart.of_layers(empty_layer(arch, i, slots, positions, dtype, mesh) for i in layers)


def bytes_per_position(arch: Architecture, dtype: DTypeLike, tp: int = 1) -> int:
    """Bytes of one position (the keys and values of one token in all layers) on each of `tp` devices."""
    shapes = (shape for kind in arch.layers for shape in kind.mixer.state(1, 1, tp))
    return sum(map(math.prod, shapes)) // tp * jnp.dtype(dtype).itemsize


def bytes_of_largest(arch: Architecture, dtype: DTypeLike, tp: int = 1) -> int:
    """Bytes of one position in the layer with the most of them, on each of `tp` devices."""
    layers = (sum(map(math.prod, kind.mixer.state(1, 1, tp))) for kind in arch.layers)
    return max(layers) // tp * jnp.dtype(dtype).itemsize


def write(buffer: jax.Array, new: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    """`buffer` with `new` written at start, start + 1, ... along `axis`, the same positions in every slot."""
    return lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), start, axis)
