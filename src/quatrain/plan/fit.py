"""Searches for the mesh and the switches with which a run fits into the memory of its devices.

Data flow: a configuration and changes to it -> `placement` of each -> `fit`, for `quatrain plan --fit`. Only
shapes are used, as in `placement.py`.
"""

import itertools
import operator
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quatrain.config.derive import longest_sequence
from quatrain.config.mesh import MeshShape
from quatrain.config.roles import resolve_roles
from quatrain.config.schema import Config
from quatrain.plan.device_memory import Placement, in_units
from quatrain.plan.placement import architecture, placement
from quatrain.plan.tables import GAP, WIDTH, table, wrapped

ROOM = 0.9
"""Part of a device's memory that the plan may fill; the rest is for what it does not count."""
MOST_ROWS = 5
MOST_HALVINGS = 6
REMATS = ("none", "dots", "layer")
Resolve = Callable[[Sequence[str]], Config]
"""The configuration with further overrides, each as `key=value`."""
Progress = Callable[[int], None]
_Cost = tuple[float, ...]
"""What each switch of a combination costs, in units of about the same slowdown; 0 is the fastest."""


class _Switches(NamedTuple):
    """The switches beside the mesh: those of micro-batches, then those of what is kept on the devices."""

    remat: str
    halvings: int
    """Of the budget of a micro-batch."""
    reference: bool
    """Whether it is offloaded, as `policy` and `optimizer`."""
    policy: bool
    optimizer: bool
    state_dtype: str
    param_dtype: str

    @property
    def kept(self) -> tuple[bool | str, ...]:
        return self[2:]


@dataclass(frozen=True)
class Combination:
    """A mesh and switches: overrides of the configuration, and the bytes that each device needs."""

    overrides: tuple[str, ...]
    mesh: str
    remat: str
    budget: str
    offloaded: str
    state_dtype: str
    param_dtype: str
    peak: int
    warns: bool
    """Whether the plan has warnings."""

    @property
    def command(self) -> str:
        """The overrides as options of a command."""
        return " ".join(f"--set {shlex.quote(override)}" for override in self.overrides)

    def to_dict(self) -> dict[str, Any]:
        return {"set": list(self.overrides), "bytes_per_device": self.peak}


@dataclass(frozen=True)
class Fits:
    """The combinations that fit, the cheapest first; if none does, the `smallest` of all."""

    device_memory: int
    devices: int
    found: tuple[Combination, ...]
    smallest: Combination | None
    lengths: str
    """The keys by which sequences become shorter."""

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "device_memory_bytes": self.device_memory,
            "devices": self.devices,
            "usable_bytes": int(ROOM * self.device_memory),
            "fitting": [combination.to_dict() for combination in self.found],
            "smallest": self.smallest and self.smallest.to_dict(),
        }


def fit(
    resolve: Resolve,
    *,
    devices: int,
    processes: int,
    device_memory: int,
    most_rows: int = MOST_ROWS,
    progress: Progress = lambda tried: None,
) -> Fits:
    """The `most_rows` cheapest combinations of mesh, `model.remat`, token budget, `offload` and dtypes.

    A combination fits if its peak is at most ROOM of `device_memory` bytes. They are tried in the order of
    their costs, a rough measure of the time that they add; those that cost at least as much as one found in
    every respect are left out. `resolve` makes the configuration of a combination from its overrides;
    `progress` is told the number of combinations computed so far. Raises ValueError if no mesh of the devices
    can shard the model.
    """
    usable = int(ROOM * device_memory)
    search = _Search(resolve, devices, processes, usable, progress)
    found: dict[_Cost, Combination] = {}
    for cost, mesh, switches in search.in_order():
        if len(found) == most_rows:
            break
        dearer = any(all(map(operator.ge, cost, other)) for other in found)
        # From what is quickly known to what is not: most combinations of a large model fail at once.
        if dearer or not search.may_fit(mesh) or not search.fits(mesh, search.least_of(switches)):
            continue
        combination = search.combination(mesh, switches)
        if combination and not combination.warns and combination.peak <= usable:
            found[cost] = combination
    smallest = None if found else search.smallest()
    return Fits(device_memory, devices, tuple(found.values()), smallest, search.lengths)


class _Search:
    def __init__(
        self, resolve: Resolve, devices: int, processes: int, usable: int, progress: Progress
    ) -> None:
        self._usable, self._progress = usable, progress
        self._tried: dict[tuple[MeshShape, _Switches], Combination | None] = {}
        self._resolve, self._config = resolve, resolve(["mesh=auto"])
        self._arch = architecture(self._config)
        self._layout = {"devices": devices, "processes": processes, "device_memory": usable}
        n = resolve_roles(self._config, devices, processes).train.mesh.num_devices
        sizes = [size for size in range(1, n + 1) if n % size == 0]
        self.meshes = [MeshShape(n // (f * t), f, t) for t in sizes for f in sizes if n % (f * t) == 0]
        """All meshes of the training devices that differ in dp, fsdp and tp."""
        config, update, rollout = self._config, self._config.update, self._config.rollout
        of_rollouts = "rollout.max_new_tokens or data.max_prompt_length"
        self.lengths = config.key_of("max_length") if config.run.on_given_data else of_rollouts
        self._key = "micro_batch_size" if update.micro_batch_size else "max_tokens_per_device"
        self._budget: int = getattr(update, self._key)
        self._least = 1 if update.micro_batch_size else longest_sequence(config)
        halvings = [n for n in range(MOST_HALVINGS + 1) if not n or self._budget >> (n - 1) > self._least]
        optimizers = config.optimizer, config.critic_optimizer
        halved = ["bfloat16"] * all(optimizer.has_first_moment for optimizer in optimizers)
        kept = (
            (False, True) if config.copies_reference else (False,),
            (False, True)
            if config.generates and not (rollout.max_staleness or rollout.has_fleet)
            else (False,),
            (False, True),
            dict.fromkeys((config.optimizer.state_dtype, *halved)),
            dict.fromkeys((config.model.param_dtype, "bfloat16")),
        )
        every = itertools.product(REMATS, halvings, *kept)
        self.switches = list(itertools.starmap(_Switches, every))
        """All values of the switches that this configuration may have."""
        self._frugal = REMATS[-1], halvings[-1]
        references, _, optimizers, states, _ = ([*values][-1] for values in kept)
        self._least_kept = [
            switches
            for switches in self.switches
            if switches[:3] == (*self._frugal, references) and switches[4:6] == (optimizers, states)
        ]
        """Those of which one needs the least memory: micro-batches are the smallest, and all is offloaded and
        narrow that can be, but the policy and its parameters, whose offloading some dtypes exclude."""

    def least_of(self, switches: _Switches) -> _Switches:
        """`switches` with the smallest micro-batches."""
        return switches._replace(remat=self._frugal[0], halvings=self._frugal[1])

    def fits(self, mesh: MeshShape, switches: _Switches) -> bool:
        """Whether the memory suffices for a combination."""
        combination = self.combination(mesh, switches)
        return combination is not None and combination.peak <= self._usable

    def may_fit(self, mesh: MeshShape) -> bool:
        """Whether any combination of `mesh` fits."""
        return any(self.fits(mesh, switches) for switches in self._least_kept)

    def smallest(self) -> Combination:
        """The combination that needs the least memory; raises ValueError if no mesh can shard the model."""
        every = (self.combination(*each) for each in itertools.product(self.meshes, self._least_kept))
        if possible := [combination for combination in every if combination]:
            return min(possible, key=lambda combination: combination.peak)
        raise ValueError(
            f"no mesh of {self._layout['devices']} devices can shard the model, of "
            f"{'; '.join(map(str, self.meshes))}; use another number of devices"
        )

    def in_order(self) -> list[tuple[_Cost, MeshShape, _Switches]]:
        """The combinations of all meshes and switches, the cheapest first."""
        frozen = self._config.lora.rank > 0
        every = itertools.product(self.switches, self.meshes)
        costs = ((_cost(mesh, switches, frozen=frozen), mesh, switches) for switches, mesh in every)
        return sorted(costs, key=lambda row: (sum(row[0]), row[1:]))

    def combination(self, mesh: MeshShape, switches: _Switches) -> Combination | None:
        """The combination with its memory; None if it is not possible, as where `mesh` cannot shard."""
        if (mesh, switches) not in self._tried:
            self._tried[mesh, switches] = self._computed(mesh, switches)
            self._progress(len(self._tried))
        return self._tried[mesh, switches]

    def _computed(self, mesh: MeshShape, switches: _Switches) -> Combination | None:
        now = self._config
        budget = max(self._budget >> switches.halvings, self._least)
        critic = now.critic.enabled and switches.state_dtype == "bfloat16"
        optimizers = ("optimizer", "critic_optimizer") if critic else ("optimizer",)
        offloads = {name: getattr(switches, name) for name in ("reference", "policy", "optimizer")}
        values = (
            ("model.remat", switches.remat, now.model.remat),
            (f"update.{self._key}", budget, self._budget),
            *((f"offload.{what}", on, getattr(now.offload, what)) for what, on in offloads.items()),
            *((f"{o}.state_dtype", switches.state_dtype, getattr(now, o).state_dtype) for o in optimizers),
            ("model.param_dtype", switches.param_dtype, now.model.param_dtype),
        )
        changed = (f"{key}={str(value).lower()}" for key, value, current in values if value != current)
        overrides = (f"mesh={mesh}", *changed)
        try:
            placed = placement(self._resolve(overrides), arch=self._arch, **self._layout)
        except ValueError:
            return None
        offloaded = " ".join(what for what, on in offloads.items() if on) or "-"
        return Combination(
            *(overrides, str(placed.roles.train.mesh), switches.remat, str(budget), offloaded),
            *(switches.state_dtype, switches.param_dtype),
            peak=placed.largest,
            warns=bool(placed.warnings),
        )


def _cost(mesh: MeshShape, switches: _Switches, *, frozen: bool) -> _Cost:
    """Tensor parallelism communicates in every layer, offloading copies over a slow bus.

    bfloat16 costs no time but accuracy: little in the first moment; in the parameters the noise of rounding
    in every step, which costs the most, unless they are `frozen`.
    """
    return (
        (mesh.fsdp > 1) + 4.0 * (mesh.tp > 1) * (mesh.tp.bit_length() - 1),
        2.0 * REMATS.index(switches.remat),
        0.5 * switches.halvings,
        3.0 * switches.reference,
        4.0 * switches.policy,
        5.0 * (switches.state_dtype == "bfloat16"),
        6.0 * switches.optimizer,
        (1.0 if frozen else 20.0) * (switches.param_dtype == "bfloat16"),
    )


def remedy(
    resolve: Resolve,
    placed: Placement,
    *,
    devices: int,
    processes: int,
    progress: Progress = lambda tried: None,
) -> str:
    """A sentence for a plan that does not fit: the overrides of the cheapest that does, or that none does."""
    memory = placed.device_memory
    assert memory is not None
    result = fit(
        resolve, devices=devices, processes=processes, device_memory=memory, most_rows=1, progress=progress
    )
    if not result.found:
        return render(result)
    same = f"mesh={placed.roles.train.mesh}"
    changes = tuple(override for override in result.found[0].overrides if override != same)
    return "\n".join(("it fits with:", *_options(replace(result.found[0], overrides=changes))))


def render(result: Fits) -> str:
    """A table of the combinations that fit, and the options for the first."""
    memory = f"{result.devices} device{'s' * (result.devices != 1)} of {in_units(result.device_memory)}"
    if result.smallest is not None:
        text = (
            f"nothing fits {memory}: the smallest combination needs {in_units(result.smallest.peak)} on each "
            f"device, of which {ROOM:.0%} may be filled, with {result.smallest.command}; use more devices, "
            f"or lower {result.lengths}"
        )
        return "\n".join(wrapped(text))
    head = ("mesh", "remat", "budget", "state", "params", "peak", "share", "offloaded")
    rows = [
        (
            *(c.mesh, c.remat, c.budget, c.state_dtype, c.param_dtype),
            *(in_units(c.peak), f"{c.peak / result.device_memory:.0%}", c.offloaded),
        )
        for c in result.found
    ]
    title = f"fits {memory}, the cheapest first"
    return "\n".join((title, *table([head, *rows]), "", *_options(result.found[0])))


def _options(combination: Combination) -> list[str]:
    """The options in lines that a shell reads as one."""
    *lines, last = wrapped(combination.command, WIDTH - 2, indent=GAP)
    return [*(f"{line} \\" for line in lines), last]
