"""What lies on a device, as numbers, tables and JSON.

Data flow: `placement.placement` makes it -> `render` or `Placement.to_dict`, for `quatrain plan --params`.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quatrain.config.mesh import MeshShape
from quatrain.config.roles import Roles
from quatrain.plan.batches import GAP, WIDTH

UNITS = {"": 1} | {f"{p}{i}": (1024 if i else 1000) ** k for k, p in enumerate("KMGT", 1) for i in ("", "i")}
TRAIN, REFERENCE = "train", "reference"
PHASES = ROLLOUT, GRADIENT, STEP = "rollout", "gradient", "optimizer_step"


@dataclass(frozen=True)
class ParameterKind:
    """Parameters that are alike in all `count` layers; `num_bytes` of all of them on one device."""

    name: str
    count: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spec: tuple[str | None, ...]
    num_bytes: int


@dataclass(frozen=True)
class Part:
    """Something that takes memory on each device of `role`, in the stages `phases` of a training step."""

    key: str
    num_bytes: int
    why: str
    phases: tuple[str, ...] = PHASES
    role: str = TRAIN


@dataclass(frozen=True)
class Placement:
    """Parameters, parts and what they come to; bytes are those of one device, alike on all of a role."""

    roles: Roles
    parameters: tuple[ParameterKind, ...]
    parts: tuple[Part, ...]
    device_memory: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[tuple[str, ...], ...]:
        """The roles that share their devices, together."""
        named = {TRAIN: self.roles.train, ROLLOUT: self.roles.rollout, REFERENCE: self.roles.reference}
        together: dict[tuple[int, ...], tuple[str, ...]] = {}
        for name, role in named.items():
            together[role.devices] = (*together.get(role.devices, ()), name)
        return tuple(together.values())

    def there(self, phase: str, roles: tuple[str, ...]) -> list[Part]:
        """What is on the devices of `roles` in `phase`."""
        return [part for part in self.parts if phase in part.phases and part.role in roles]

    def totals(self) -> dict[str, tuple[str, tuple[str, ...], int]]:
        """Phase, roles and bytes on one of their devices, by key; without those that hold nothing."""
        one = len(self.hosts) == 1
        found = {}
        for phase in PHASES:
            for roles in self.hosts:
                size = sum(part.num_bytes for part in self.there(phase, roles))
                if size:
                    where = "" if one else f"_on_{'_'.join(roles)}"
                    found[f"total_in_{phase}{where}"] = (phase, roles, size)
        return found

    @property
    def peak(self) -> int:
        """Bytes on the device, in the phase, that needs most."""
        return max(size for _, _, size in self.totals().values())

    def to_dict(self) -> dict[str, Any]:
        """Bytes by part, totals by phase, a list of the parameters, formulas and warnings."""
        return {
            "mesh": self.roles.train.mesh._asdict(),
            "rollout_mesh": self.roles.rollout.mesh._asdict(),
            "parameters": [
                {
                    "name": kind.name,
                    "count": kind.count,
                    "shape": list(kind.shape),
                    "axes": list(kind.axes),
                    "partition_spec": list(kind.spec),
                    "bytes_per_device": kind.num_bytes,
                }
                for kind in self.parameters
            ],
            "bytes_per_device": {
                **{part.key: part.num_bytes for part in self.parts},
                **{key: size for key, (_, _, size) in self.totals().items()},
                "peak": self.peak,
            },
            "device_memory_bytes": self.device_memory,
            "why": {part.key: part.why for part in self.parts},
            "warnings": list(self.warnings),
        }


def parse_bytes(text: str) -> int:
    """Bytes from text such as `80GB` (powers of 1000), `24GiB` (powers of 1024) or `16e9`.

    Raises ValueError for other text, and for less than a byte.
    """
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)\s*([kmgt]i?)?b?", text.strip(), re.IGNORECASE)
    number = float(found[1]) * UNITS[(found[2] or "").capitalize()] if found else 0
    if not 1 <= number < math.inf:
        raise ValueError(f"a size of memory is a number with a unit, as 80GB, 24GiB or 16e9; got {text!r}")
    return int(number)


def render(result: Placement) -> str:
    """Two tables, of the parameters and of a device's bytes, and the warnings."""
    return "\n".join((*_parameter_table(result), "", *_part_table(result), *_warning_lines(result)))


def _parameter_table(result: Placement) -> Iterator[str]:
    yield f"parameters on mesh {written(result.roles.train.mesh)}"
    head = ("name", "shape", "logical axes", "PartitionSpec", "on a device")
    rows = [
        (
            kind.name if kind.count == 1 else f"{kind.name} x {kind.count}",
            ",".join(map(str, kind.shape)),
            ",".join(kind.axes),
            ",".join(axis or "-" for axis in kind.spec),
            in_units(kind.num_bytes),
        )
        for kind in result.parameters
    ]
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    for *cells, size in (head, *rows):
        yield GAP.join((*map(str.ljust, cells, widths), size.rjust(widths[-1])))


def _part_table(result: Placement) -> Iterator[str]:
    totals = [
        Part(key, size, " + ".join(part.key for part in result.there(phase, roles) if part.num_bytes))
        for key, (phase, roles, size) in result.totals().items()
    ]
    known = result.device_memory
    share = "" if known is None else f"{result.peak / known:.0%} of {in_units(known)}"
    rows = [*result.parts, *totals, Part("peak", result.peak, share)]
    name, size = (max(map(len, column)) for column in zip(*((r.key, in_units(r.num_bytes)) for r in rows)))
    yield "bytes on each device"
    for row in rows:
        first, *more = textwrap.wrap(row.why, WIDTH - name - size - 2 * len(GAP)) or [""]
        yield GAP.join((row.key.ljust(name), in_units(row.num_bytes).rjust(size), first)).rstrip()
        yield from (" " * (name + size + 2 * len(GAP)) + line for line in more)


def _warning_lines(result: Placement) -> Iterator[str]:
    for warning in result.warnings:
        yield from textwrap.wrap(f"warning: {warning}", WIDTH, subsequent_indent=GAP, break_on_hyphens=False)


def written(mesh: MeshShape) -> str:
    """`mesh` as a configuration has it."""
    return ",".join(map(str, mesh))


def in_units(num_bytes: int) -> str:
    """`num_bytes` in the largest unit of 1024 that it has one of."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
