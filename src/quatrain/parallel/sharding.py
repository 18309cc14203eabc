"""The rule that assigns mesh axes to the dimensions of a parameter.

Data flow: logical axes of a parameter (`models.params`) and `MeshShape` -> `PartitionSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from quatrain.config.mesh import MeshShape

TENSOR_PARALLEL = frozenset({"vocab", "heads", "kv_heads", "mlp"})
"""Logical axes that are sharded over `tp`, if their size is divisible by it."""
FULLY_SHARDED = "embed"
"""The logical axis to shard over `fsdp`; if not divisible, the largest divisible dimension is sharded."""

UNSHARDED = frozenset({"norm", "rank"})
"""Logical axes of dimensions that are never sharded."""


def partition_spec(shape: Sequence[int], axes: Sequence[str], mesh: MeshShape) -> PartitionSpec:
    """The partition spec on `mesh` of a parameter of `shape` with the logical `axes` of its dimensions.

    A parameter is replicated over a mesh axis if none of its dimensions can be sharded over it. Dimensions
    with the logical axis `norm` or `rank` are not sharded over `fsdp`, because they are small.
    """
    split: list[str | None] = [
        "tp" if mesh.tp > 1 and axis in TENSOR_PARALLEL and size % mesh.tp == 0 else None
        for size, axis in zip(shape, axes, strict=True)
    ]
    fitting = [
        (axis == FULLY_SHARDED, size, dim)
        for dim, (size, axis) in enumerate(zip(shape, axes, strict=True))
        if mesh.fsdp > 1 and split[dim] is None and axis not in UNSHARDED and size % mesh.fsdp == 0
    ]
    if fitting:
        split[max(fitting)[2]] = "fsdp"
    return PartitionSpec(*split)
