"""What devices that compute together tell each other, in functions mapped over a mesh by `shard_map`.

Called by the model, the gradient and the sampler. Outside of such a function every axis has one device, and
each of these gives back what it is given: there is one model code for one device and for many.

The gradients are those of a loss that is the sum over the data shards of what each computes, and that the
devices of a `tp` axis compute alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.config.mesh import MeshShape
from quatrain.parallel.mesh import DATA_AXES


def shard_mapped(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` of what each device of `mesh` has, as one of arrays that lie on it."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def axis_size(axis: str) -> int:
    """Devices along `axis` of the mesh that the function is mapped over."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return 1


def axis_index(axis: str) -> jax.Array | int:
    """Which of them this device is."""
    return lax.axis_index(axis) if axis_size(axis) > 1 else 0


def current_mesh() -> MeshShape:
    """The mesh that the function is mapped over."""
    return MeshShape(*(axis_size(axis) for axis in MeshShape._fields))


def all_gather_shards(tree: Any) -> Any:
    """The arrays of all data shards, joined along their first dimension."""
    return tree if num_data_shards() == 1 else lax.all_gather(tree, DATA_AXES, tiled=True)


def any_shard(flag: jax.Array) -> jax.Array:
    """Whether `flag` is true on a data shard."""
    return flag if num_data_shards() == 1 else lax.pmax(flag.astype(jnp.int32), DATA_AXES) > 0


def num_data_shards() -> int:
    """Data shards of the mesh here."""
    return current_mesh().num_data_shards


def from_first_device(x: jax.Array, axis: str) -> jax.Array:
    """The `x` of the first device of `axis`, on all: for what has to be the same to the last bit."""
    return x if axis_size(axis) == 1 else lax.psum(jnp.where(axis_index(axis) == 0, x, 0), axis)


def psum_forward(x: jax.Array, axis: str) -> jax.Array:
    """The sum of every device's `x`, where the gradient of the sum is that of each."""
    return x if axis_size(axis) == 1 else _sum(x, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(x: jax.Array, axis: str) -> jax.Array:
    return lax.psum(x, axis)


_sum.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, dy: (dy,))


def psum_backward(x: jax.Array, axis: str) -> jax.Array:
    """`x`, alike on all devices of `axis`, each of which uses it for its own part: gradients are added up."""
    return x if axis_size(axis) == 1 else _shared(x, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _shared(x: jax.Array, axis: str) -> jax.Array:
    return x


_shared.defvjp(lambda x, axis: (x, None), lambda axis, _, dy: (lax.psum(dy, axis),))


def all_gather(x: jax.Array, axis: str, dim: int, dtype: DTypeLike | None = None) -> jax.Array:
    """The devices' parts of `x` joined along `dim`; they travel in `dtype`, gradients add up in float32."""
    return x if axis_size(axis) == 1 else _gather(x, axis, dim, jnp.dtype(dtype or x.dtype), x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: jax.Array, axis: str, dim: int, dtype: jnp.dtype, own: jnp.dtype) -> jax.Array:
    return lax.all_gather(x.astype(dtype), axis, axis=dim, tiled=True)


def _scatter(
    axis: str, dim: int, dtype: jnp.dtype, own: jnp.dtype, _: None, dy: jax.Array
) -> tuple[jax.Array]:
    dx = lax.psum_scatter(dy.astype(jnp.float32), axis, scatter_dimension=dim, tiled=True)
    return (dx.astype(own),)


_gather.defvjp(lambda x, axis, dim, dtype, own: (_gather(x, axis, dim, dtype, own), None), _scatter)
