"""Which axis of the mesh each dimension of an array is split over.

Data flow: logical axes of a parameter (`models.params`) + `MeshShape` -> `PartitionSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from quatrain.config.mesh import MeshShape

TENSOR_PARALLEL = frozenset({"vocab", "heads", "kv_heads", "mlp"})
"""Logical axes that `tp` splits, where it divides them."""
FULLY_SHARDED = "embed"
"""The logical axis that `fsdp` splits, where it divides it; elsewhere the largest dimension that it does."""


def partition_spec(shape: Sequence[int], axes: Sequence[str], mesh: MeshShape) -> PartitionSpec:
    """How a parameter of `shape`, with the logical `axes` of its dimensions, lies on `mesh`.

    What no axis divides is copied. `norm` axes are too small to be split.
    """
    split: list[str | None] = [
        "tp" if mesh.tp > 1 and axis in TENSOR_PARALLEL and size % mesh.tp == 0 else None
        for size, axis in zip(shape, axes, strict=True)
    ]
    fitting = [
        (axis == FULLY_SHARDED, size, dim)
        for dim, (size, axis) in enumerate(zip(shape, axes, strict=True))
        if mesh.fsdp > 1 and split[dim] is None and axis != "norm" and size % mesh.fsdp == 0
    ]
    if fitting:
        split[max(fitting)[2]] = "fsdp"
    return PartitionSpec(*split)
