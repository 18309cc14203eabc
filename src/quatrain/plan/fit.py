"""Searches for the mesh and the switches with which a run fits into the memory of its devices.

Data flow: a configuration and changes to it -> `placement` of each -> `fit`, for `quatrain plan --fit`. Only
shapes are used, as in `plan/placement.py`.
"""

from __future__ import annotations

import itertools
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quatrain.config.derive import longest_sequence
from quatrain.config.roles import resolve_roles
from quatrain.config.schema import Config
from quatrain.plan.batches import GAP, WIDTH
from quatrain.plan.device_memory import format_mesh, in_units
from quatrain.plan.placement import architecture, placement

ROOM = 0.9
"""Part of a device's memory that the plan may fill; the rest is for what it does not count."""
MOST_ROWS = 5
MOST_HALVINGS = 6
REMATS = ("none", "dots", "layer")
Resolve = Callable[[Sequence[str]], Config]
"""The configuration with further overrides, each as `key=value`."""


class _Cost(NamedTuple):
    """What a combination costs, in units of about the same slowdown; 0 is the fastest."""

    mesh: float
    remat: float
    halvings: float
    reference: float
    optimizer: float
    dtype: float

    def exceeds(self, other: _Cost) -> bool:
        """Whether it costs at least as much in everything."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


@dataclass(frozen=True)
class Combination:
    """A mesh and switches: overrides of the configuration, and the bytes that each device needs."""

    overrides: tuple[str, ...]
    mesh: str
    remat: str
    budget: str
    offloaded: str
    param_dtype: str
    peak: int

    @property
    def command(self) -> str:
        """The overrides as options of a command."""
        return " ".join(f"--set {shlex.quote(override)}" for override in self.overrides)


@dataclass(frozen=True)
class Fits:
    """The combinations that fit, the cheapest first; `smallest` needs the least memory of all."""

    device_memory: int
    devices: int
    found: tuple[Combination, ...]
    smallest: Combination

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "device_memory_bytes": self.device_memory,
            "devices": self.devices,
            "usable_bytes": int(ROOM * self.device_memory),
            "fitting": [{"set": list(c.overrides), "bytes_per_device": c.peak} for c in self.found],
            "smallest": {"set": list(self.smallest.overrides), "bytes_per_device": self.smallest.peak},
        }


def fit(resolve: Resolve, *, devices: int, processes: int, device_memory: int) -> Fits:
    """The cheapest combinations of `mesh`, `model.remat`, token budget, `offload` and `model.param_dtype`.

    A combination fits if its peak is at most ROOM of `device_memory` bytes. They are tried in the order of
    their costs, a rough measure of the time that they add; those that cost at least as much as one found in
    every respect are left out. `resolve` makes the configuration of a combination from its overrides. Raises
    ValueError if no mesh of the devices can shard the model.
    """
    search = _Search(resolve, devices, processes, int(ROOM * device_memory))
    meshes = search.meshes()
    smallest = {}
    for mesh in meshes:
        made = search.made(mesh, *search.frugal())
        if made is not None:
            smallest[mesh] = made[1]
    if not smallest:
        raise ValueError(
            f"no mesh of {devices} devices can shard the model; the meshes tried are {', '.join(meshes)}; "
            "use another number of devices"
        )
    found: list[tuple[_Cost, Combination]] = []
    fitting = [mesh for mesh, each in smallest.items() if each.peak <= search.usable]
    for cost, mesh, switches in search.in_order(fitting):
        if len(found) == MOST_ROWS:
            break
        if any(cost.exceeds(other) for other, _ in found):
            continue
        made = search.made(mesh, *switches)
        if made is not None and made[0] and made[1].peak <= search.usable:
            found.append((cost, made[1]))
    least = min(smallest.values(), key=lambda each: each.peak)
    return Fits(device_memory, devices, tuple(each for _, each in found), least)


_Switches = tuple[str, int, bool, bool, str]
"""remat, halvings of the budget, whether reference and optimizer are offloaded, dtype of parameters."""


class _Search:
    def __init__(self, resolve: Resolve, devices: int, processes: int, usable: int):
        self._resolve, self._devices, self._processes, self.usable = resolve, devices, processes, usable
        self._config = resolve(["mesh=auto"])
        self._arch = architecture(self._config)
        self._mesh_devices = resolve_roles(self._config, devices, processes).train.mesh.num_devices
        update = self._config.update
        self._key = "micro_batch_size" if update.micro_batch_size else "max_tokens_per_device"
        self._budget: int = getattr(update, self._key)
        self._least = 1 if update.micro_batch_size else longest_sequence(self._config)

    def meshes(self) -> list[str]:
        """All meshes of the training devices, as `dp,fsdp,tp`."""
        n = self._mesh_devices
        sizes = [size for size in range(1, n + 1) if n % size == 0]
        return [f"{n // (f * t)},{f},{t}" for t in sizes for f in sizes if n % (f * t) == 0]

    def frugal(self) -> _Switches:
        """The switches that need the least memory."""
        return "layer", self._halvings()[-1], self._config.copies_reference, True, "bfloat16"

    def in_order(self, meshes: Sequence[str]) -> Iterator[tuple[_Cost, str, _Switches]]:
        """All combinations on `meshes`, the cheapest first."""
        references = (False, True) if self._config.copies_reference else (False,)
        dtypes = dict.fromkeys((self._config.model.param_dtype, "bfloat16"))
        choices = itertools.product(REMATS, self._halvings(), references, (False, True), dtypes)
        frozen = self._config.lora.rank > 0
        every = [
            (_cost(mesh, *switches, frozen=frozen), mesh, switches) for switches in choices for mesh in meshes
        ]
        yield from sorted(every, key=lambda each: (sum(each[0]), each[1:]))

    def made(
        self, mesh: str, remat: str, halvings: int, reference: bool, optimizer: bool, dtype: str
    ) -> tuple[bool, Combination] | None:
        """(whether nothing warns, the combination); None if the model cannot be sharded so."""
        now, budget = self._config, max(self._budget >> halvings, self._least)
        overrides = [f"mesh={mesh}"]
        for key, value, current in (
            ("model.remat", remat, now.model.remat),
            (f"update.{self._key}", budget, self._budget),
            ("offload.reference", str(reference).lower(), str(now.offload.reference).lower()),
            ("offload.optimizer", str(optimizer).lower(), str(now.offload.optimizer).lower()),
            ("model.param_dtype", dtype, now.model.param_dtype),
        ):
            if value != current:
                overrides.append(f"{key}={value}")
        try:
            config = self._resolve(overrides)
            placed = placement(
                config,
                devices=self._devices,
                processes=self._processes,
                device_memory=self.usable,
                arch=self._arch,
            )
        except ValueError:
            return None
        offloaded = " ".join(name for name, on in (("reference", reference), ("optimizer", optimizer)) if on)
        mesh = format_mesh(placed.roles.train.mesh)
        return not placed.warnings, Combination(
            tuple(overrides), mesh, remat, str(budget), offloaded or "-", dtype, placed.peak
        )

    def _halvings(self) -> list[int]:
        return [n for n in range(MOST_HALVINGS + 1) if not n or self._budget >> (n - 1) > self._least]


def _cost(
    mesh: str, remat: str, halvings: int, reference: bool, optimizer: bool, dtype: str, *, frozen: bool
) -> _Cost:
    """Tensor parallelism communicates in every layer, offloading copies over a slow bus.

    bfloat16 parameters cost the most, because small updates are lost in them, unless they are `frozen`.
    """
    _, fsdp, tp = map(int, mesh.split(","))
    return _Cost(
        mesh=(fsdp > 1) + 4.0 * (tp > 1) * (tp.bit_length() - 1),
        remat=2.0 * REMATS.index(remat),
        halvings=0.5 * halvings,
        reference=3.0 * reference,
        optimizer=6.0 * optimizer,
        dtype=(1.0 if frozen else 30.0) * (dtype == "bfloat16"),
    )


def render(result: Fits) -> str:
    """A table of the combinations that fit, and the options for the first."""
    memory = f"{result.devices} devices of {in_units(result.device_memory)}"
    if not result.found:
        text = (
            f"nothing fits {memory}: the smallest combination needs {in_units(result.smallest.peak)} on each "
            f"device, of which {ROOM:.0%} may be filled, with {result.smallest.command}; use more devices, "
            "or lower rollout.max_new_tokens, data.max_prompt_length or rollout.max_concurrency"
        )
        return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))
    head = ("mesh", "remat", "budget", "offloaded", "param_dtype", "peak", "of a device")
    rows = [
        (c.mesh, c.remat, c.budget, c.offloaded, c.param_dtype, in_units(c.peak), _share(c, result))
        for c in result.found
    ]
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    table = [GAP.join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    return "\n".join((f"fits {memory}, the cheapest first", *table, "", result.found[0].command))


def _share(combination: Combination, result: Fits) -> str:
    return f"{combination.peak / result.device_memory:.0%}"
