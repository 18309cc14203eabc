"""The memory plan of a device, and its output as tables and JSON.

Data flow: `placement.placement` creates a `Placement` -> `render` or `Placement.to_dict`, for `quatrain plan
--params`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

from quatrain.config.mesh_axes import axes_of
from quatrain.config.roles import Roles
from quatrain.plan.tables import table, warning_lines, wrapped

UNITS = {"": 1} | {f"{p}{i}": (1024 if i else 1000) ** k for k, p in enumerate("KMGT", 1) for i in ("", "i")}
LEAST_BYTES = 10**6
RoleName = Literal["train", "rollout", "reference", "critic", "reward", "teacher"]
Phase = Literal[
    "reference_pass", "rollout", "gradient", "optimizer_step", "critic_gradient", "critic_optimizer_step"
]
REFERENCE_PASS: Phase = "reference_pass"
"""What comes before the first step on preferences; the stages of a training step are `PHASES`."""
PHASES: tuple[Phase, ...] = get_args(Phase)[1:]
CRITIC_PHASES: tuple[Phase, Phase] = ("critic_gradient", "critic_optimizer_step")

PROCESS_BYTES = 350 * 2**20
"""Resident memory of a process on a CPU without its arrays: Python, JAX and the programs of a small model."""


@dataclass(frozen=True)
class ParameterKind:
    """A parameter of the same name and shape in `count` layers; `num_bytes` of all of them on one device."""

    name: str
    count: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    spec: tuple[str | tuple[str, ...] | None, ...]
    num_bytes: int

    def to_dict(self) -> dict[str, Any]:
        keys = ("name", "count", "shape", "axes", "partition_spec", "bytes_per_device")
        return dict(zip(keys, astuple(self), strict=True))


@dataclass(frozen=True)
class MemoryPart:
    """An item that needs memory on each device of `role`, in the stages `phases` of a training step."""

    key: str
    num_bytes: int
    why: str
    phases: tuple[Phase, ...] = PHASES
    role: RoleName = "train"


@dataclass(frozen=True)
class Placement:
    """Parameters, parts and their totals, in bytes on one device; the same on all devices of a role."""

    roles: Roles
    parameters: tuple[ParameterKind, ...]
    parts: tuple[MemoryPart, ...]
    device_memory: int | None = None
    warnings: tuple[str, ...] = ()
    remedy: str = ""
    """What to change if the plan does not fit (`plan.fit.remedy`)."""
    worker: Placement | None = None
    """The plan of a rollout worker, whose devices are none of these; None without `rollout.workers`."""
    elsewhere: str = ""
    """Who samples, in words, if these devices do not."""
    host: tuple[MemoryPart, ...] = ()
    """Items in the memory of each process's host."""
    samples: bool = True
    """Whether the run has a rollout; one on given data has none, unless evaluations sample."""

    @property
    def role_groups(self) -> tuple[tuple[RoleName, ...], ...]:
        """The roles, grouped by their devices: roles with the same devices are in one tuple.

        Critic, reward models and teacher are roles of runs that have them.
        """
        used = {"train", "rollout", "reference", *(part.role for part in self.parts)}
        together: dict[tuple[int, ...], tuple[RoleName, ...]] = {}
        for name in get_args(RoleName):
            if name in used:
                devices = getattr(self.roles, name).devices
                together[devices] = (*together.get(devices, ()), name)
        return tuple(together.values())

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The stages of a training step of this run, after that before the first step if it needs memory."""
        has = {
            REFERENCE_PASS: any(part.phases == (REFERENCE_PASS,) for part in self.parts),
            "rollout": self.samples,
            **dict.fromkeys(CRITIC_PHASES, any(part.role == "critic" for part in self.parts)),
        }
        return tuple(phase for phase in get_args(Phase) if has.get(phase, True))

    def parts_of(self, phase: Phase, roles: tuple[RoleName, ...]) -> list[MemoryPart]:
        """The parts on the devices of `roles` in `phase`."""
        return [part for part in self.parts if phase in part.phases and part.role in roles]

    def totals(self) -> dict[str, tuple[Phase, tuple[RoleName, ...], int]]:
        """(phase, roles, total bytes on one of their devices) by key; totals of 0 bytes are left out."""
        one = len(self.role_groups) == 1
        found = {}
        for phase in self.phases:
            for roles in self.role_groups:
                size = sum(part.num_bytes for part in self.parts_of(phase, roles))
                if size and (phase not in CRITIC_PHASES or "critic" in roles):
                    where = "" if one else f"_on_{'_'.join(roles)}"
                    found[f"total_in_{phase}{where}"] = (phase, roles, size)
        return found

    @property
    def peak(self) -> int:
        """The largest total: bytes on a device, over all phases and roles."""
        return max(size for _, _, size in self.totals().values())

    @property
    def least_on_a_cpu(self) -> int | None:
        """Bytes that the process of a run on one CPU needs at least; None on several devices or accelerators.

        The parts are those of an accelerator, on which a process needs nothing of the device for itself.
        """
        alone = self.roles.train.mesh.num_devices == 1 and len(self.role_groups) == 1 and not self.elsewhere
        return self.peak + PROCESS_BYTES if alone and self.device_memory is None else None

    @property
    def largest(self) -> int:
        """The largest total on any device of the run, those of a rollout worker among them."""
        return max(self.peak, self.worker.peak if self.worker else 0)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON: parameters, bytes by part, totals by phase, formulas and warnings."""
        return {
            "mesh": self.roles.train.mesh._asdict(),
            "rollout_mesh": None if self.elsewhere else self.roles.rollout.mesh._asdict(),
            "parameters": [kind.to_dict() for kind in self.parameters],
            **self._sizes(),
            "device_memory_bytes": self.device_memory,
            "warnings": list(self.warnings),
            "remedy": self.remedy,
            "worker": self.worker
            and {"rollout_mesh": self.worker.roles.rollout.mesh._asdict(), **self.worker._sizes()},
            "elsewhere": self.elsewhere,
            "bytes_on_host": {part.key: part.num_bytes for part in self.host},
            "why_on_host": {part.key: part.why for part in self.host},
        }

    def _sizes(self) -> dict[str, Any]:
        """Bytes by part and totals by phase, with what they are."""
        totals = {key: size for key, (_, _, size) in self.totals().items()}
        sizes = {**{part.key: part.num_bytes for part in self.parts}, **totals, "peak": self.peak}
        if self.least_on_a_cpu is not None:
            sizes["at_least_on_a_cpu"] = self.least_on_a_cpu
        return {"bytes_per_device": sizes, "why": {part.key: part.why for part in self.parts}}


def parse_bytes(text: str) -> int:
    """Bytes from text such as `80GB` (powers of 1000), `24GiB` (powers of 1024) or `16e9`.

    Raises ValueError for other text, and for less than a megabyte.
    """
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)\s*([kmgt]i?)?b?", text.strip(), re.IGNORECASE)
    number = float(found[1]) * UNITS[(found[2] or "").capitalize()] if found else 0
    if not LEAST_BYTES <= number < math.inf:
        raise ValueError(
            "a memory size must be at least 1MB, a number with a unit, e.g. 80GB, 24GiB or 16e9; got "
            f"{text!r}"
        )
    return int(number)


def render(result: Placement) -> str:
    """The plan as text: tables of the parameters and of the bytes on a device, warnings, and the remedy."""
    lines = (
        *_parameter_table(result),
        "",
        *_table([*result.parts, *_totals(result)]),
        *_elsewhere(result, whole=True),
        *(_table(result.host, "bytes on the host of each process") if result.host else ()),
        *warning_lines(result.warnings),
    )
    return "\n".join((*lines, result.remedy) if result.remedy else lines)


def _parameter_table(result: Placement) -> Iterator[str]:
    head = ("name", "on a device", "shape: logical axis=size/mesh axis")
    rows = [
        (
            kind.name if kind.count == 1 else f"{kind.name} x {kind.count}",
            in_units(kind.num_bytes),
            ", ".join(map(_dim, kind.axes, kind.shape, (*kind.spec, *(None,) * len(kind.shape)))),
        )
        for kind in result.parameters
    ]
    yield f"parameters on mesh {result.roles.train.mesh}"
    yield from table([head, *rows], right=(1,))


def _dim(axis: str, size: int, mesh_axes: str | tuple[str, ...] | None) -> str:
    return "/".join((f"{axis}={size}", *axes_of(mesh_axes)))


def totals_table(result: Placement) -> Iterator[str]:
    """The lines of a table of the bytes on a device in each stage of a training step."""
    yield from _table(_totals(result))
    yield from _elsewhere(result, whole=False)


def _elsewhere(result: Placement, *, whole: bool) -> Iterator[str]:
    """Who samples if the devices of the run do not, with the table of a worker; its parts if `whole`."""
    if result.elsewhere:
        yield from ("", *wrapped(result.elsewhere))
    if result.worker is not None:
        parts = result.worker.parts if whole else ()
        yield from _table([*parts, *_totals(result.worker)], "bytes on each device of a rollout worker")


def _totals(result: Placement) -> list[MemoryPart]:
    totals = [
        MemoryPart(
            key, size, " + ".join(part.key for part in result.parts_of(phase, roles) if part.num_bytes)
        )
        for key, (phase, roles, size) in result.totals().items()
    ]
    known = result.device_memory
    share = "" if known is None else f"{result.peak / known:.0%} of {in_units(known)}"
    rows = [*totals, MemoryPart("peak", result.peak, share)]
    if result.least_on_a_cpu is not None:
        why = (
            f"peak + {in_units(PROCESS_BYTES)} for Python, JAX and compiled programs; what is merged, copied "
            "and compiled comes on top: memory/peak_gib is logged at each step"
        )
        rows.append(MemoryPart("at_least_on_a_cpu", result.least_on_a_cpu, why))
    return rows


def _table(parts: Sequence[MemoryPart], title: str = "bytes on each device") -> Iterator[str]:
    yield title
    yield from table([(p.key, in_units(p.num_bytes), p.why) for p in parts], right=(1,))


def in_units(num_bytes: int) -> str:
    """`num_bytes` in the largest binary unit (KiB, MiB, ...) that is not larger than it."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes / 1024**power:.2f} {' KMGT'[power]}iB" if power else f"{num_bytes} B"
