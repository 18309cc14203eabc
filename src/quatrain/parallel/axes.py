"""The mesh axes: what is split over each of them, and how parameters are sharded.

To add a mesh axis, add a row to the table `AXES`, and its field to `config.mesh._Sizes`, which is for the
type checker: mesh, shardings, batches, errors and the plan read the table. It is in `config/mesh_axes.py`,
because the configuration reads it too and does not import JAX; all other code reads it here. For more than
one device along it, an axis also needs its collectives: of parameters in `models/blocks/layer_run.py`
(`gather_params`), of the work of a layer in `models/blocks/`, of gradients in `update/gradient.py`, of
predictions in `forward/predict.py`, and the layout of batches (`data_sharding`) and of the KV cache
(`models/kv_cache.py`). The tokens of a sequence are split
over `cp` (`models/decoder.py`), and the experts of a layer over `ep` (`models/blocks/experts.py`).

Data flow: the table, logical axes of a parameter (`models.params`) and `MeshShape` -> `PartitionSpec`.
"""

import functools
import math

from jax.sharding import PartitionSpec

from quatrain.config.mesh import MeshShape
from quatrain.config.mesh_axes import AXES, CP, DATA_AXES, DP, EP, FSDP, TP, MeshAxis, axes_of

__all__ = ["AXES", "CP", "DATA_AXES", "DP", "EP", "FSDP", "TP", "MeshAxis", "axes_of", "partition_spec"]

FULLY_SHARDED = "embed"
"""The logical axis that an axis with `splits_largest` prefers."""
UNSHARDED = frozenset({"norm", "rank"})
"""Logical axes that are too small for it."""


@functools.lru_cache(maxsize=4096)  # the layers of a model ask for the same again and again
def partition_spec(shape: tuple[int, ...], axes: tuple[str, ...], mesh: MeshShape) -> PartitionSpec:
    """The partition spec on `mesh` of a parameter of `shape` with the logical `axes` of its dimensions.

    A dimension may be sharded over several mesh axes, the first outermost. The axes with `splits_largest`
    share one dimension if their devices together divide one; else each takes another. A parameter is
    replicated over a mesh axis if none of its dimensions can be sharded over it.
    """
    split: list[tuple[str, ...]] = [()] * len(shape)
    dims = list(enumerate(zip(shape, axes, strict=True)))
    wide = [(axis, size) for axis, size in zip(AXES, mesh, strict=True) if size > 1]
    for mesh_axis, devices in wide:
        for dim, (size, axis) in dims:
            # Axes that split the same dimension divide what the ones before have left of it.
            before = math.prod(getattr(mesh, name) for name in split[dim])
            if axis in mesh_axis.logical_axes and size % (before * devices) == 0:
                split[dim] += (mesh_axis.name,)

    def largest(devices: int) -> int | None:
        """The dimension that these devices split."""
        fitting = [
            (axis == FULLY_SHARDED, size, dim)
            for dim, (size, axis) in dims
            if not split[dim] and axis not in UNSHARDED and size % devices == 0
        ]
        # Of equal sizes the last, in every process: their shardings must be the same.
        return max(fitting)[2] if fitting else None

    sharding = [
        (mesh_axis.name, devices)
        for mesh_axis, devices in wide
        if mesh_axis.splits_largest and not any(mesh_axis.name in names for names in split)
    ]
    # In one dimension if they fit: a parameter is then gathered by one collective, not by several.
    together = largest(math.prod(devices for _, devices in sharding))
    if len(sharding) > 1 and together is not None:
        split[together] = tuple(name for name, _ in sharding)
    else:
        for name, devices in sharding:
            if (alone := largest(devices)) is not None:
                split[alone] = (name,)
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in split))
