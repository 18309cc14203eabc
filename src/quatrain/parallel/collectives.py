"""Collective operations (psum, all-gather) between the devices of a mesh, for use inside `shard_map`.

Called by the model, the gradient and the sampler. On an axis of one device, and outside `shard_map`, where
every axis counts as one device, the collectives return their argument: one model code serves one device and
many.

The backward passes assume that the total loss is the sum of the losses of the data shards, and that the
devices of a `tp` axis compute the same loss redundantly.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from quatrain.config.mesh import MeshShape
from quatrain.parallel.axes import DATA_AXES


def shard_mapped(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` of `function` over `mesh`, without the check of replicated outputs."""
    # The check does not see that devices of `tp` compute the same numbers, and would refuse them.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def axis_size(axis: str) -> int:
    """The number of devices along `axis` of the current mesh; 1 outside `shard_map`."""
    try:
        return lax.axis_size(axis)
    # What JAX raises for an axis that no surrounding function is mapped over.
    except NameError:
        return 1


def axis_index(axis: str) -> jax.Array | int:
    """The index of this device along `axis` of the current mesh."""
    return lax.axis_index(axis) if axis_size(axis) > 1 else 0


def current_mesh() -> MeshShape:
    """The shape of the mesh that the calling function is mapped over; all sizes are 1 outside `shard_map`."""
    return MeshShape(*(axis_size(axis) for axis in MeshShape._fields))


def all_gather_shards(tree: Any) -> Any:
    """The arrays in `tree` of all data shards, concatenated along their first dimension (all-gather)."""
    return tree if current_mesh().num_data_shards == 1 else lax.all_gather(tree, DATA_AXES, tiled=True)


def any_shard(flag: jax.Array) -> jax.Array:
    """Whether `flag` is true on at least one data shard."""
    if current_mesh().num_data_shards == 1:
        return flag
    return lax.pmax(flag.astype(jnp.int32), DATA_AXES) > 0


def from_first_device(x: jax.Array, axis: str) -> jax.Array:
    """The `x` of the first device of `axis`, on all of its devices: values that must be bitwise equal."""
    # A sum with zeros rounds nothing: all devices get equal numbers, as from a broadcast.
    return x if axis_size(axis) == 1 else lax.psum(jnp.where(axis_index(axis) == 0, x, 0), axis)


def _along_axis(
    forward: Callable[[jax.Array, str], jax.Array], backward: Callable[[jax.Array, str], jax.Array]
) -> Callable[[jax.Array, str], jax.Array]:
    """A function (x, axis) that is `forward`, and whose gradient is `backward` of the result's."""
    function = jax.custom_vjp(forward, nondiff_argnums=(1,))
    function.defvjp(lambda x, axis: (forward(x, axis), None), lambda axis, _, dy: (backward(dy, axis),))
    return lambda x, axis: x if axis_size(axis) == 1 else function(x, axis)


psum_forward = _along_axis(lax.psum, lambda dy, axis: dy)
"""psum of `x` over `axis` in the forward pass; identity in the backward pass."""
psum_backward = _along_axis(lambda x, axis: x, lax.psum)
"""`x` itself in the forward pass; psum of the gradient over `axis` in the backward pass.

For an `x` that is the same on all devices of `axis` and that each device uses for its own part of the work.
"""
reduce_scatter_rows = _along_axis(partial(lax.psum_scatter, tiled=True), partial(lax.all_gather, tiled=True))
"""This device's rows [N, ...] of the sum of `x` [n N, ...] over the n devices of `axis`.

All-gather in the backward pass.
"""


Places = Sequence[tuple[tuple[str, ...], int]]
"""Mesh axes, and the dimension of an array that is split over their devices, the first axis outermost."""


def all_gather(x: jax.Array, places: Places, dtype: DTypeLike | None = None) -> jax.Array:
    """all-gather of `x`, concatenated as `places` say; reduce-scatter in the backward pass.

    `x` is cast to `dtype` (default: its own) before the all-gather. The reduce-scatter sums the gradient in
    float32.
    """
    wide = tuple((axes, dim) for axes, dim in places if any(axis_size(axis) > 1 for axis in axes))
    return _gather(x, wide, jnp.dtype(dtype or x.dtype), x.dtype) if wide else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, places: Places, dtype: jnp.dtype, own: jnp.dtype) -> jax.Array:
    x = x.astype(dtype)
    for axes, dim in places:
        x = lax.all_gather(x, axes, axis=dim, tiled=True)
    return x


def _scatter(places: Places, dtype: jnp.dtype, own: jnp.dtype, _: None, dy: jax.Array) -> tuple[jax.Array]:
    # Sums over many devices in bfloat16 would lose the small gradients.
    dx = dy.astype(jnp.float32)
    for axes, dim in places:
        dx = lax.psum_scatter(dx, axes, scatter_dimension=dim, tiled=True)
    return (dx.astype(own),)


_gather.defvjp(lambda x, places, dtype, own: (_gather(x, places, dtype, own), None), _scatter)


def gather_rows(x: jax.Array, axis: str) -> jax.Array:
    """The rows of `x` of all devices of `axis`, in their order; no gradient goes back through it."""
    return x if axis_size(axis) == 1 else lax.all_gather(lax.stop_gradient(x), axis, tiled=True)


def local_columns(x: jax.Array, axis: str) -> jax.Array:
    """The columns [B, T / n, ...] of `x` [B, T, ...] that this device of the n of `axis` computes.

    `x` is the same on all of them, and no gradient goes back through it.
    """
    devices = axis_size(axis)
    if devices == 1:
        return x
    width = x.shape[1] // devices
    return lax.dynamic_slice_in_dim(x, axis_index(axis) * width, width, 1)


def columns_to_heads(x: jax.Array, axis: str) -> jax.Array:
    """[B, T, N / n, H] of `x` [B, T / n, N, H]: all tokens of this device's heads (all-to-all)."""
    return x if axis_size(axis) == 1 else lax.all_to_all(x, axis, 2, 1, tiled=True)


def heads_to_columns(x: jax.Array, axis: str) -> jax.Array:
    """[B, T / n, N, H] of `x` [B, T, N / n, H]: the inverse of `columns_to_heads`."""
    return x if axis_size(axis) == 1 else lax.all_to_all(x, axis, 1, 2, tiled=True)
