"""The table of mesh axes, and the only place that writes their names.

Data flow: `AXES` -> `MeshShape` (`config/mesh.py`), the shardings (`parallel/axes.py`, where JAX code reads
this table) and the plan. It stands here, without JAX, because the configuration reads it too.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the device mesh: what is split over its devices."""

    name: str
    splits_batch: bool = False
    """Whether its devices hold different sequences."""
    logical_axes: frozenset[str] = frozenset()
    """Logical axes of parameters that are sharded over it, where its size divides theirs."""
    splits_largest: bool = False
    """Whether parameters not sharded over it by their logical axes are, along one dimension that its
    size divides: `embed`, else the largest that is not sharded already."""


DP, FSDP, TP, CP, EP = "dp", "fsdp", "tp", "cp", "ep"
AXES = (
    MeshAxis(DP, splits_batch=True),
    MeshAxis(FSDP, splits_batch=True, splits_largest=True),
    MeshAxis(TP, logical_axes=frozenset({"vocab", "heads", "kv_heads", "mlp", "experts"})),
    MeshAxis(CP, splits_largest=True),
    MeshAxis(EP, splits_batch=True, logical_axes=frozenset({"experts"}), splits_largest=True),
)
"""The axes from the slowest to the fastest connection between devices. An axis that is added comes after
these: it has size 1 where a mesh in the configuration does not name it."""
NUM_IN_TEXT = 3
"""Sizes that the text of a mesh, such as `1,-1,1`, has at least."""

DATA_AXES = tuple(axis.name for axis in AXES if axis.splits_batch)
"""The mesh axes that batches are sharded over: there are dp x fsdp x ep data shards."""


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that an entry of a partition spec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
