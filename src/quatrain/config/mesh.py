"""How devices are arranged: copies of the model, shards of its parameters, devices that share a layer.

Data flow: what the user wrote and the number of devices -> `MeshShape` -> the batch plan and the placement of
arrays. Imports no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class MeshShape(NamedTuple):
    """Devices along each axis: data parallel, fully sharded data parallel, tensor parallel."""

    dp: int
    fsdp: int
    tp: int

    @property
    def num_devices(self) -> int:
        """Of all processes."""
        return self.dp * self.fsdp * self.tp

    @property
    def num_data_shards(self) -> int:
        """Parts a batch is spread over; the `tp` devices of one share it."""
        return self.dp * self.fsdp


def resolve_mesh(
    spec: str | Mapping[str, int], num_devices: int, num_processes: int = 1, *, name: str = "mesh"
) -> MeshShape:
    """The mesh that `spec` asks for on `num_devices` devices of `num_processes` processes.

    Args:
        spec: "dp,fsdp,tp" as in "1,-1,1"; a mapping of axes to devices, 1 for those left out; or "auto":
            parameters are sharded over the devices of a process, and copied to each process. One number may
            be -1, for the devices that the others leave.
        name: what the user calls it, for errors.

    Raises:
        ValueError: for a spec of another form, and for one that does not multiply to the devices.
    """
    in_process = devices_of_process(num_devices, num_processes)
    if spec == "auto":
        return MeshShape(num_processes, in_process, 1)
    sizes = axis_sizes(spec, name)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % known or (not open_axes and known != num_devices):
        remedy = "change a number or set one axis to -1" if not open_axes else "change a number"
        raise ValueError(
            f"{name} multiplies to the number of devices; {_written(sizes)} does not make {num_devices}; "
            f"{remedy}, or change the number of devices"
        )
    return MeshShape(**{axis: num_devices // known if size == -1 else size for axis, size in sizes.items()})


def devices_of_process(num_devices: int, num_processes: int) -> int:
    """The devices that each process has; raises ValueError where they are not shared out evenly."""
    if num_devices < 1 or num_processes < 1 or num_devices % num_processes:
        raise ValueError(
            f"the devices are shared out evenly over the processes; got {num_devices} devices and "
            f"{num_processes} processes; take a number of devices that the processes divide"
        )
    return num_devices // num_processes


def device_numbers(spec: int | str) -> tuple[int, ...]:
    """The numbers that 3, "0-3" or "0,2,5" names, in order; raises ValueError for another form."""
    numbers: list[int] = []
    for part in str(spec).split(","):
        first, dash, last = part.partition("-")
        numbers += range(int(first), int(last if dash else first) + 1)
    if not numbers or min(numbers) < 0 or len(set(numbers)) != len(numbers):
        raise ValueError(f"devices are named once each, by their numbers from 0; got {spec!r}")
    return tuple(sorted(numbers))


def axis_sizes(spec: Any, name: str = "mesh") -> dict[str, int]:
    """The numbers of a spec other than "auto"; raises ValueError or TypeError for another form."""
    sizes = _given(spec, name)
    if list(sizes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(
            f"{name} has a number of devices of at least 1 for each axis, and -1 for one axis at most; "
            f"got {_written(sizes)}"
        )
    return sizes


def _given(spec: str | Mapping[str, int], name: str) -> dict[str, int]:
    if isinstance(spec, str):
        parts = spec.split(",")
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) != len(MeshShape._fields):
            raise ValueError(f'{name} is "auto" or three numbers "dp,fsdp,tp" such as "1,-1,1"; got {spec!r}')
        return dict(zip(MeshShape._fields, numbers, strict=True))
    unknown = [str(axis) for axis in spec if axis not in MeshShape._fields]
    if unknown:
        raise ValueError(f"the axes of {name} are {', '.join(MeshShape._fields)}; got {', '.join(unknown)}")
    return {axis: spec.get(axis, 1) for axis in MeshShape._fields}


def _written(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())
