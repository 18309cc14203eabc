"""Device mesh shapes: the size of each axis in the table of mesh axes (`config/mesh_axes.py`).

Data flow: the user's mesh specification and the number of devices -> `MeshShape` -> the batch plan and the
shardings of arrays. This module does not import JAX.
"""

from __future__ import annotations

import math
import re
from collections import namedtuple
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from quatrain.config.errors import listed, shown
from quatrain.config.mesh_axes import AXES, DATA_AXES, DP, FSDP, NUM_IN_TEXT

MAX_DEVICES = 2**20
"""Of a run, in all its processes."""
_NAMES = [axis.name for axis in AXES]
IN_TEXT = (
    ",".join(_NAMES[:NUM_IN_TEXT])
    + "".join(f"[,{name}" for name in _NAMES[NUM_IN_TEXT:])
    + "]" * (len(AXES) - NUM_IN_TEXT)
)
"""The form of a mesh as text, `dp,fsdp,tp[,cp[,ep]]`: axes in brackets may be left out."""

if TYPE_CHECKING:

    class _Sizes(NamedTuple):
        dp: int = 1
        fsdp: int = 1
        tp: int = 1
        cp: int = 1
        ep: int = 1

else:
    _Sizes = namedtuple("_Sizes", [axis.name for axis in AXES], defaults=[1] * len(AXES))


class MeshShape(_Sizes):
    """Size of each mesh axis, in the order of the table; 1 for those that are left out."""

    __slots__ = ()

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh, over all processes."""
        return math.prod(self)

    @property
    def num_data_shards(self) -> int:
        """Number of parts that a batch is split into; the devices of one part hold the same data."""
        return math.prod(getattr(self, axis) for axis in DATA_AXES)

    def __str__(self) -> str:
        """The configuration's notation, `dp,fsdp,tp[,cp[,ep]]`."""
        extra = max((n for n, size in enumerate(self, 1) if size > 1), default=0)
        return ",".join(map(str, self[: max(extra, NUM_IN_TEXT)]))


def resolve_mesh(
    spec: str | Mapping[str, int], num_devices: int, num_processes: int = 1, *, name: str = "mesh"
) -> MeshShape:
    """The mesh shape that `spec` specifies for `num_devices` devices of `num_processes` processes in total.

    Args:
        spec: "dp,fsdp,tp[,cp[,ep]]" such as "1,-1,1"; a mapping from axis names to sizes; or "auto": fsdp
            over the devices of each process, dp over the processes. Axes that are left out have size 1; one
            size may be -1, which uses all remaining devices.
        name: configuration key of the mesh, for error messages.

    Raises:
        ValueError: if `spec` has another form, or the product of its sizes is not `num_devices`.
    """
    in_process = devices_of_process(num_devices, num_processes)
    if spec == "auto":
        return MeshShape(**{DP: num_processes, FSDP: in_process})
    sizes = axis_sizes(spec, name)
    has_open_axis = -1 in sizes.values()
    known = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % known or (not has_open_axis and known != num_devices):
        remedy = "change a number" + " or set one axis to -1" * (not has_open_axis)
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
            f"from its lower to its higher number, without blanks; got {shown(spec)}; write e.g. 0-3 or 0,2,5"
        )
    return tuple(numbers)


def _device_range(text: str) -> range:
    """The numbers of "3" or "0-3"; none for another form."""
    form = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text)
    numbers = range(int(form[1]), int(form[2] or form[1]) + 1) if form else range(0)
    return numbers if numbers.stop <= MAX_DEVICES else range(0)


def axis_sizes(spec: Any, name: str = "mesh") -> dict[str, int]:
    """The axis sizes of a spec other than "auto"; raises ValueError or TypeError for another form."""
    if isinstance(spec, str):
        sizes = _sizes_in(spec, name)
    elif isinstance(spec, Mapping):
        unknown = [str(axis) for axis in spec if axis not in MeshShape._fields]
        if unknown:
            raise ValueError(f"the axes of {name} are {', '.join(MeshShape._fields)}; got {listed(unknown)}")
        sizes = {axis: spec.get(axis, 1) for axis in MeshShape._fields}
    else:
        raise TypeError(f"{name} must be text or a mapping of axes; got {shown(spec)}")
    if list(sizes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(
            f"each axis size of {name} must be at least 1, or -1 for at most one axis; got {_format(sizes)}"
        )
    if max(sizes.values()) > MAX_DEVICES:
        raise ValueError(f"each axis size of {name} must be at most {MAX_DEVICES}; got {_format(sizes)}")
    return sizes


def _sizes_in(text: str, name: str) -> dict[str, int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not NUM_IN_TEXT <= len(numbers) <= len(AXES):
        raise ValueError(f'{name} must be "auto" or sizes "{IN_TEXT}" such as "1,-1,1"; got {shown(text)}')
    return MeshShape(*numbers)._asdict()


def _format(sizes: Mapping[str, int]) -> str:
    """Without further axes of size 1, as `MeshShape` is written."""
    shown_sizes = (each for n, each in enumerate(sizes.items()) if n < NUM_IN_TEXT or each[1] != 1)
    return ", ".join(f"{axis} {shown(size)}" for axis, size in shown_sizes)
