"""The KV cache: keys and values of earlier tokens, so that a decode step computes one token per sequence.

A DeltaNet layer has a state of each sequence in their place, whose size does not grow with its tokens.

Data flow: the rollout allocates the cache; `decode_step.py` writes and reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from quatrain.models.architecture import Architecture
from quatrain.models.blocks.attention import Attention
from quatrain.models.blocks.delta import GatedDeltaNet
from quatrain.models.delta_rule import DeltaState
from quatrain.parallel.axes import DATA_AXES, TP
from quatrain.parallel.mesh import mesh_shape

CACHE_SPEC = PartitionSpec(DATA_AXES, TP)
"""The sharding of a cache: slots over the replicas of the sampler, heads over a replica's `tp` devices."""

LayerCache = tuple[jax.Array, jax.Array] | DeltaState
"""Keys and values of one layer, or states."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachePart:
    """The cache of every layer that has its own. Which token of a sequence a position holds is not stored,
    the reader derives it.

    Of attention, keys are [B, KV, H, S] and values [B, KV, S, H] (B slots, KV key/value heads, H head size,
    S positions): on a CPU the matrix products of a decode step take half as long as with keys [B, KV, S, H].
    A `DeltaState` has a row for each slot, and no positions.
    """

    layers: tuple[LayerCache, ...]

    @property
    def positions(self) -> int:
        """The number of positions S: tokens that a slot can hold."""
        return next(layer[1].shape[2] for layer in self.layers if not isinstance(layer, DeltaState))


def position_axes(layer: LayerCache) -> tuple[int | None, int | None]:
    """The axis of the positions in each of a layer's arrays."""
    return (None, None) if isinstance(layer, DeltaState) else (3, 2)


def empty_layer(
    arch: Architecture, layer: int, slots: int, positions: int, dtype: DTypeLike, mesh: Mesh
) -> LayerCache:
    """Zeros for the layer with cache number `layer` (`Architecture.cached`), with `slots` slots on each
    replica (data shard) of `mesh`."""
    place = NamedSharding(mesh, CACHE_SPEC)
    slots *= mesh_shape(mesh).num_data_shards
    mixer = arch.layers[arch.cached.index(layer)].mixer
    shapes = mixer.state(slots, positions, mesh.shape[TP])
    if isinstance(mixer, GatedDeltaNet):
        dtypes = dtype, jnp.float32
        conv, memory = (jnp.zeros(*each, device=place) for each in zip(shapes, dtypes, strict=True))
        return DeltaState(conv, memory)
    keys, values = (jnp.zeros(shape, dtype, device=place) for shape in shapes)
    return keys, values


def empty_cache(arch: Architecture, slots: int, positions: int, dtype: DTypeLike, mesh: Mesh) -> CachePart:
    """A cache of zeros with `slots` slots on each replica (data shard) of `mesh`."""
    layers = range(arch.num_caches)
    return CachePart(tuple(empty_layer(arch, i, slots, positions, dtype, mesh) for i in layers))


def bytes_per_position(arch: Architecture, dtype: DTypeLike, tp: int = 1) -> int:
    """Bytes of one position (the keys and values of one token in all layers) on each of `tp` devices."""
    mixers = (kind.mixer for kind in arch.layers if isinstance(kind.mixer, Attention))
    shapes = (shape for mixer in mixers for shape in mixer.state(1, 1, tp))
    return sum(map(math.prod, shapes)) // tp * jnp.dtype(dtype).itemsize


def bytes_per_state(arch: Architecture, dtype: DTypeLike, tp: int = 1) -> int:
    """Bytes of the state of one sequence in all DeltaNet layers, on each of `tp` devices."""
    states = (kind.mixer.state(1, 1, tp) for kind in arch.layers if isinstance(kind.mixer, GatedDeltaNet))
    sizes = jnp.dtype(dtype).itemsize, jnp.dtype(jnp.float32).itemsize
    return sum(math.prod(shape) // tp * size for state in states for shape, size in zip(state, sizes))


def bytes_of_largest(arch: Architecture, dtype: DTypeLike, tp: int = 1) -> int:
    """Bytes of one position in the layer with the most of them, on each of `tp` devices."""
    layers = (sum(map(math.prod, mixer.state(1, 1, tp))) for mixer in arch.attentions)
    return max(layers) // tp * jnp.dtype(dtype).itemsize


def write(buffer: jax.Array, new: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    """`buffer` with `new` written at start, start + 1, ... along `axis`, the same positions in every slot."""
    return lax.dynamic_update_slice_in_dim(buffer, new.astype(buffer.dtype), start, axis)
