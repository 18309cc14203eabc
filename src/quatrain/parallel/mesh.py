"""Devices as a mesh with the axes `dp`, `fsdp`, `tp`, and arrays laid out on it.

Data flow: `MeshShape` (config) -> `jax.sharding.Mesh` -> where parameters, batches and results lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quatrain.config.mesh import MeshShape

DATA_AXES = ("dp", "fsdp")
"""A batch is spread over both: each data shard is one place on them."""


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `shape` over `devices`, by default all of all processes, near ones side by side."""
    if devices is None:
        return Mesh(mesh_utils.create_device_mesh(shape, allow_split_physical_axes=True), MeshShape._fields)
    return Mesh(np.array(devices).reshape(shape), MeshShape._fields)


@cache
def one_device() -> Mesh:
    """The mesh of this process's first device."""
    return make_mesh(MeshShape(1, 1, 1), jax.local_devices()[:1])


def mesh_shape(mesh: Mesh) -> MeshShape:
    """The sizes of its axes."""
    return MeshShape(**mesh.shape)


def data_sharding(mesh: Mesh) -> NamedSharding:
    """Rows spread over the data shards."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXES))


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """`array`, which every process has alike, laid out as `sharding`: each process keeps its own part."""
    if len(sharding.device_set) == 1:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def moved(arrays: Any, places: Any) -> Any:
    """The tree `arrays` laid out as the tree `places` of shardings says, from device to device.

    Arrays that lie there already are given back as they are.
    """
    old, structure = jax.tree.flatten(arrays)
    new = jax.tree.leaves(places)
    away = [i for i, x in enumerate(old) if not x.sharding.is_equivalent_to(new[i], x.ndim)]
    there = tuple(new[i] for i in away)
    if all(old[i].sharding.device_set == new[i].device_set for i in away):
        arrived = _exchange(there)([old[i] for i in away])
    else:
        arrived = jax.device_put([old[i] for i in away], list(there))
    for i, x in zip(away, arrived, strict=True):
        old[i] = x
    return jax.tree.unflatten(structure, old)


@cache
def _exchange(places: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Devices exchange parts of arrays until each of `places` has its own."""
    return jax.jit(lambda arrays: arrays, out_shardings=list(places))


def whole(array: jax.Array) -> np.ndarray:
    """`array` on the host, in every process that has a part of it; all of them have to ask."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The tree `specs` of partition specs as shardings on `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
