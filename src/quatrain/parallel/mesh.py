"""Device meshes, and moving arrays to, between and from their devices.

Data flow: `MeshShape` (config) -> `jax.sharding.Mesh` -> shardings of parameters, batches and results.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from quatrain.config.mesh import MeshShape
from quatrain.config.roles import Role
from quatrain.parallel.axes import DATA_AXES


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of `shape` over `devices`, in the given order."""
    return Mesh(np.array(devices).reshape(shape), MeshShape._fields)


def role_mesh(role: Role) -> Mesh:
    """The mesh over the devices that `role` uses in each process.

    If `dp` is a multiple of the number of processes, the devices that share one copy of the model (`fsdp` and
    `tp`) are in the same process.
    """
    by_process: dict[int, list[jax.Device]] = {}
    # By id, not in the order of this process: every process must build the same mesh.
    for device in sorted(jax.devices(), key=lambda device: device.id):
        by_process.setdefault(device.process_index, []).append(device)
    groups = [[by_process[process][k] for k in role.devices] for process in sorted(by_process)]
    # Copies of the model that do not divide among processes: the mesh is then laid over all devices.
    if role.mesh.dp % len(groups):
        groups = [list(chain.from_iterable(groups))]
    part = role.mesh._replace(dp=role.mesh.dp // len(groups))
    near = [mesh_utils.create_device_mesh(part, each, allow_split_physical_axes=True) for each in groups]
    return make_mesh(role.mesh, [device for devices in near for device in devices.flat])


@cache
def one_device() -> Mesh:
    """A mesh of one device, the first of this process."""
    return make_mesh(MeshShape(), jax.local_devices()[:1])


def mesh_shape(mesh: Mesh) -> MeshShape:
    """The sizes of the axes of `mesh`."""
    return MeshShape(**mesh.shape)


def data_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: its first dimension is split over the data shards."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXES))


def device_put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """`array` on devices with `sharding`; every process passes the same array and stores its own shards."""
    if len(sharding.device_set) == 1:
        return jax.device_put(array, sharding)
    # `jax.device_put` would first compare the arrays of all processes, which have the same.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@partial(jax.jit, static_argnames=("shape", "value", "dtype", "sharding"))
def full(shape: tuple[int, ...], value: float, dtype: DTypeLike, sharding: NamedSharding) -> jax.Array:
    """`jnp.full` with `sharding`; each device creates its own shard."""
    return jax.lax.with_sharding_constraint(jnp.full(shape, value, dtype), sharding)


def reshard(arrays: Any, places: Any) -> Any:
    """The tree `arrays` with the shardings in the tree `places`, copied from device to device.

    The shardings may be on other devices, or in another memory (device or pinned host) of the same devices.
    Arrays that already have an equivalent sharding are returned unchanged.
    """
    return jax.tree.map(_reshard, arrays, places)


def copy_if_aliased(placed: jax.Array, source: jax.Array) -> jax.Array:
    """`placed`, which was made of `source`, copied if it may be the buffer of `source`."""
    alike = placed.dtype == source.dtype and placed.sharding.is_equivalent_to(source.sharding, source.ndim)
    return jnp.copy(placed) if alike else placed


def _reshard(array: jax.Array, place: NamedSharding) -> jax.Array:
    if array.sharding.is_equivalent_to(place, array.ndim):
        return array
    if array.sharding.device_set != place.device_set:
        return _to_other_devices(array, place)
    if array.sharding.memory_kind != place.memory_kind:
        return jax.device_put(array, place)
    return _resharding_program(place)(array)


@cache
def _resharding_program(place: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A jitted identity with the output sharding `place`.

    It is called for one array at a time, because the exchange needs memory for the array in both shardings.
    """
    return jax.jit(lambda array: array, out_shardings=place)


def _to_other_devices(array: jax.Array, place: NamedSharding) -> jax.Array:
    """`array` on other devices: replicated on its devices, then copied to the new devices per process."""
    assert isinstance(array.sharding, NamedSharding)
    together = _resharding_program(NamedSharding(array.sharding.mesh, PartitionSpec()))(array)
    here = together.addressable_data(0)
    parts = [
        jax.device_put(here[index], device)
        for device, index in place.addressable_devices_indices_map(array.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, place, parts)


def to_memory(where: Literal["device", "host"], arrays: Any) -> Any:
    """The tree `arrays` in device memory, or in pinned memory of the devices' host.

    Raises ValueError if the devices have no pinned host memory.
    """
    device = jax.local_devices()[0]
    kind = device.default_memory().kind if where == "device" else "pinned_host"
    there = [memory.kind for memory in device.addressable_memories()]
    if kind not in there:
        raise ValueError(
            f"offloading needs devices with pinned host memory; devices of this kind ({device.device_kind}) "
            f"have the memory kinds {', '.join(there)}; set all keys of `offload` to false"
        )
    return reshard(arrays, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), arrays))


def check_held(arrays: Any, what: str, remedy: str) -> None:
    """Raises ValueError, with the remedy, if arrays of a tree were given away to an update (donated)."""
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(arrays)):
        raise ValueError(
            f"{what} were taken over by update.init or update.step, which use their memory for the new ones; "
            f"{remedy}"
        )


def to_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """The whole `array` on the host. All processes that hold a shard of it must call this together."""
    if isinstance(array, np.ndarray) or array.is_fully_addressable:
        return np.asarray(array)
    # From device memory: collectives do not read the memory of hosts.
    return np.asarray(multihost_utils.process_allgather(to_memory("device", array), tiled=True))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The tree `specs` of partition specs as a tree of `NamedSharding`s on `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
