"""The mesh axes for JAX code: their names, those of a batch, and those of a parameter's dimensions.

Data flow: the table of `config/axes.py`, logical axes of a parameter (`models.params`) and `MeshShape` ->
`PartitionSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from quatrain.config.axes import AXES, DATA_AXES, DP, FSDP, TP
from quatrain.config.mesh import MeshShape

__all__ = ["DATA_AXES", "DP", "FSDP", "TP", "partition_spec"]

FULLY_SHARDED = "embed"
"""The logical axis that an axis with `splits_largest` prefers."""
UNSHARDED = frozenset({"norm", "rank"})
"""Logical axes that are too small for it."""


def partition_spec(shape: Sequence[int], axes: Sequence[str], mesh: MeshShape) -> PartitionSpec:
    """The partition spec on `mesh` of a parameter of `shape` with the logical `axes` of its dimensions.

    A parameter is replicated over a mesh axis if none of its dimensions can be sharded over it.
    """
    split: list[str | None] = [None] * len(shape)
    dims = list(enumerate(zip(shape, axes, strict=True)))
    wide = [(axis, getattr(mesh, axis.name)) for axis in AXES if getattr(mesh, axis.name) > 1]
    for mesh_axis, devices in wide:
        for dim, (size, axis) in dims:
            if axis in mesh_axis.logical_axes and size % devices == 0:
                split[dim] = mesh_axis.name
    for mesh_axis, devices in wide:
        fitting = [
            (axis == FULLY_SHARDED, size, dim)
            for dim, (size, axis) in dims
            if split[dim] is None and axis not in UNSHARDED and size % devices == 0
        ]
        if mesh_axis.splits_largest and fitting:
            split[max(fitting)[2]] = mesh_axis.name
    return PartitionSpec(*split)
