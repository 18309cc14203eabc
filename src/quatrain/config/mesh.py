"""Device mesh shapes: sizes of the data-parallel, fully-sharded and tensor-parallel axes.

Data flow: the user's mesh specification and the number of devices -> `MeshShape` -> the batch plan and the
placement of arrays. This module does not import JAX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from quatrain.config.errors import listed, shown

MAX_DEVICES = 2**20
"""Of a run, in all its processes."""


class MeshShape(NamedTuple):
    """Size of each mesh axis: data parallel, fully sharded data parallel, tensor parallel."""

    dp: int
    fsdp: int
    tp: int

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh, over all processes."""
        return self.dp * self.fsdp * self.tp

    @property
    def num_data_shards(self) -> int:
        """Number of parts that a batch is split into; the `tp` devices of one part hold the same data."""
        return self.dp * self.fsdp


def resolve_mesh(
    spec: str | Mapping[str, int], num_devices: int, num_processes: int = 1, *, name: str = "mesh"
) -> MeshShape:
    """The mesh shape that `spec` specifies for `num_devices` devices of `num_processes` processes in total.

    Args:
        spec: "dp,fsdp,tp" such as "1,-1,1"; a mapping from axis names to sizes, 1 for axes left out; or
            "auto": fsdp over the devices of each process, dp over the processes. One size may be -1, which
            uses all remaining devices.
        name: configuration key of the mesh, for error messages.

    Raises:
        ValueError: if `spec` has another form, or the product of its sizes is not `num_devices`.
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
            f"the product of the axis sizes of {name} must be the number of devices; got {_format(sizes)} "
            f"for {num_devices} devices; {remedy}, or change the number of devices"
        )
    return MeshShape(**{axis: num_devices // known if size == -1 else size for axis, size in sizes.items()})


def devices_of_process(num_devices: int, num_processes: int) -> int:
    """Devices per process; raises ValueError if the devices cannot be divided evenly."""
    if num_devices > MAX_DEVICES:
        raise ValueError(f"a run has at most {MAX_DEVICES} devices; got {shown(num_devices)}; give fewer")
    if num_devices < 1 or num_processes < 1 or num_devices % num_processes:
        raise ValueError(
            f"every process must have the same number of devices; got {num_devices} devices and "
            f"{num_processes} processes; use a number of devices that is a multiple of {num_processes}"
        )
    return num_devices // num_processes


def device_numbers(spec: int | str) -> tuple[int, ...]:
    """The sorted device numbers given by 3, "0-3" or "0,2,5"; raises ValueError for another form."""
    ranges = [_device_range(part) for part in str(spec).split(",")]
    possible = all(ranges) and sum(map(len, ranges)) <= MAX_DEVICES
    numbers = sorted(chain.from_iterable(ranges)) if possible else []
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(
            f"devices are given by their numbers, from 0 to {MAX_DEVICES - 1}, each number once, a range "
            "from its lower to its higher number, without blanks; "
            f"got {shown(spec)}; write e.g. 0-3 or 0,2,5"
        )
    return tuple(numbers)


def _device_range(text: str) -> range:
    """The numbers of "3" or "0-3"; none for another form."""
    form = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text)
    found = range(int(form[1]), int(form[2] or form[1]) + 1) if form else range(0)
    return found if found.stop <= MAX_DEVICES else range(0)


def axis_sizes(spec: Any, name: str = "mesh") -> dict[str, int]:
    """The axis sizes of a spec other than "auto"; raises ValueError or TypeError for another form."""
    sizes = _parse_sizes(spec, name)
    if list(sizes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(
            f"each axis size of {name} must be at least 1, or -1 for at most one axis; got {_format(sizes)}"
        )
    if max(sizes.values()) > MAX_DEVICES:
        raise ValueError(f"each axis size of {name} must be at most {MAX_DEVICES}; got {_format(sizes)}")
    return sizes


def _parse_sizes(spec: str | Mapping[str, int], name: str) -> dict[str, int]:
    if isinstance(spec, str):
        parts = spec.split(",")
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) != len(MeshShape._fields):
            raise ValueError(
                f'{name} must be "auto" or three numbers "dp,fsdp,tp" such as "1,-1,1"; got {shown(spec)}'
            )
        return dict(zip(MeshShape._fields, numbers, strict=True))
    if not isinstance(spec, Mapping):
        raise TypeError(f"{name} must be text or a mapping of axes; got {shown(spec)}")
    unknown = [str(axis) for axis in spec if axis not in MeshShape._fields]
    if unknown:
        raise ValueError(f"the axes of {name} are {', '.join(MeshShape._fields)}; got {listed(unknown)}")
    return {axis: spec.get(axis, 1) for axis in MeshShape._fields}


def _format(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {shown(size)}" for axis, size in sizes.items())
