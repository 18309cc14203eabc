"""What lies on each device of a run, in bytes: parameters and how they are split, and all that stands beside.

Data flow: `Config` and the number of devices -> `placement` -> `render` (tables) or `Placement.to_dict`
(JSON), for `quatrain plan --params`. Everything is abstract: no weights are read and no array is made.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from quatrain.config.derive import longest_sequence
from quatrain.config.mesh import MeshShape
from quatrain.config.plan import GAP, WIDTH
from quatrain.config.roles import resolve_roles
from quatrain.config.schema import Config
from quatrain.data.tokenizer import load_tokenizer
from quatrain.models.activations import Activations, activations, elements_on_device
from quatrain.models.families import Architecture
from quatrain.models.kv_cache import bytes_per_column
from quatrain.models.load import BUILTIN, load_architecture
from quatrain.models.params import ParamSpec, abstract_params, is_spec, param_specs, partition
from quatrain.ops.ladder import round_up
from quatrain.ops.logprobs import default_chunk
from quatrain.rollout.engine import CACHE_SHARE
from quatrain.update.optimizer import build_optimizer

UNITS = {"": 1} | {f"{p}{i}": (1024 if i else 1000) ** k for k, p in enumerate("KMGT", 1) for i in ("", "i")}
PLATFORM = "accelerator"
"""Devices are planned for that have memory of their own, wherever the plan is made."""
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
    """Something that takes memory on each device; `phases` are the stages that it is there in."""

    key: str
    num_bytes: int
    why: str
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class Placement:
    """Parameters, parts and what they come to; bytes are those of one device, where all hold as much."""

    mesh: MeshShape
    rollout_mesh: MeshShape
    parameters: tuple[ParameterKind, ...]
    parts: tuple[Part, ...]
    device_memory: int | None = None
    warnings: tuple[str, ...] = ()

    def total(self, phase: str) -> int:
        """Bytes on a device in `phase`."""
        return sum(part.num_bytes for part in self.parts if phase in part.phases)

    @property
    def peak(self) -> int:
        """Bytes on a device in the phase that needs most."""
        return max(map(self.total, PHASES))

    def to_dict(self) -> dict[str, Any]:
        """Bytes by part, totals by phase, a list of the parameters, formulas and warnings."""
        return {
            "mesh": self.mesh._asdict(),
            "rollout_mesh": self.rollout_mesh._asdict(),
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
                **{f"total_in_{phase}": self.total(phase) for phase in PHASES},
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


def placement(
    config: Config, *, devices: int = 1, processes: int = 1, device_memory: int | None = None
) -> Placement:
    """What lies on each of `devices` devices, all of them alike, that run a final configuration.

    Raises ValueError where the model's shape cannot be had, and where it cannot be split as `mesh` and
    `rollout.mesh` ask (`params.partition`).
    """
    roles = resolve_roles(config, devices, processes)
    meshes = roles.train.mesh, roles.rollout.mesh
    plan = _Plan(config, _architecture(config), *meshes)
    held = tuple(plan.held())
    fitting = None
    if device_memory is not None:
        fitting = plan.fitting(device_memory - sum(part.num_bytes for part in held))
    parts = (*held, *plan.working(), plan.cache(plan.concurrency(fitting)))
    result = Placement(*meshes, tuple(plan.kinds()), parts, device_memory)
    warnings = () if fitting is None else tuple(plan.warnings(result, fitting))
    return replace(result, warnings=warnings)


def _architecture(config: Config) -> Architecture:
    path = config.model.path
    if not path.startswith(BUILTIN):
        return load_architecture(path)
    return load_architecture(path, vocab_size=len(load_tokenizer(config.model.tokenizer or path)))


@dataclass(frozen=True)
class _Plan:
    config: Config
    arch: Architecture
    mesh: MeshShape
    rollout_mesh: MeshShape

    def kinds(self) -> Iterator[ParameterKind]:
        """The parameters on the mesh of training, those of one name in all layers as one kind."""
        specs, places = param_specs(self.arch), partition(self.arch, self.mesh)
        first = [("embed", 1, specs["embed"], places["embed"])]
        layer = [
            (f"layers.{name}", self.arch.num_layers, spec, places["layers"][0][name])
            for name, spec in specs["layers"][0].items()
        ]
        last = [(name, 1, specs[name], places[name]) for name in ("final_norm", "lm_head") if name in specs]
        itemsize = jnp.dtype(self.config.model.param_dtype).itemsize
        for name, count, spec, place in (*first, *layer, *last):
            size = count * itemsize * elements_on_device(spec.shape, place, self.mesh)
            yield ParameterKind(name, count, spec.shape, spec.axes, tuple(place), size)

    def held(self) -> Iterator[Part]:
        """What is there from the first step to the last."""
        model, update = self.config.model, self.config.update
        weights = self._weights(self.mesh, model.param_dtype)
        yield Part("weights", weights, f"model.param_dtype {model.param_dtype} on mesh {_written(self.mesh)}")
        yield self._rollout_weights()
        yield Part("optimizer_state", self._optimizer_state(), f"{self.config.optimizer.name}, in float32")
        if update.kl_coef > 0:
            yield Part("reference", weights, f"as the weights; update.kl_coef is {update.kl_coef:g}")

    def working(self) -> Iterator[Part]:
        """What the update adds."""
        sums = self._weights(self.mesh, "float32")
        each = "sums over micro-batches, in float32, of each dp copy"
        yield Part("gradients", sums, each, (GRADIENT, STEP))
        size, tokens = self._activations()
        layers = f"{size.num_layers} x {_text(size.kept)} kept (model.remat {self.config.model.remat})"
        working = f"the larger of a layer {_text(size.layer)} and the head {_text(size.head)}"
        rest = f"gradients on their way {_text(size.gradients)}"
        why = f"estimate for {tokens}: {layers} + {working} + {rest}"
        yield Part("activations", size.total, why, (GRADIENT,))
        copies = f"the gradients of {self.mesh.dp} dp copies added up"
        yield Part("gradient_sum", sums if self.mesh.dp > 1 else 0, copies, (STEP,))

    def cache(self, sequences: int) -> Part:
        """The cache of a replica that decodes up to `sequences` at once, in the shapes that it comes in."""
        slots = min(round_up(self._share(), minimum=1), sequences)
        rows = min(1 << (-(-slots // self.config.rollout.n) - 1).bit_length(), slots)
        prompt, own = self._columns()
        why = (
            f"{slots} sequences at once x {own} tokens + {rows} prompts x {prompt}, each token "
            f"{_text(self._column_bytes())} ({self.config.model.dtype}, tp {self.rollout_mesh.tp})"
        )
        size = (slots * own + rows * prompt) * self._column_bytes()
        return Part("kv_cache", size, why, (ROLLOUT,))

    def concurrency(self, fitting: int | None) -> int:
        """Sequences that a replica decodes at once at most, where the cache of `fitting` has room."""
        limit, replicas = self.config.rollout.max_concurrency, self.rollout_mesh.num_data_shards
        if limit is not None:
            return max(limit // replicas, 1)
        return round_up(self._share(), minimum=1) if fitting is None else max(fitting, 1)

    def fitting(self, free: int) -> int:
        """Sequences of a replica whose cache has room in `free` bytes, each with a prompt of its own."""
        return int(CACHE_SHARE * max(free, 0)) // (sum(self._columns()) * self._column_bytes())

    def _share(self) -> int:
        """Sequences of a training step on each replica."""
        return -(-self.config.data.batch_size * self.config.rollout.n // self.rollout_mesh.num_data_shards)

    def _columns(self) -> tuple[int, int]:
        """Columns of the cache for a prompt and for a completion."""
        longest = self.config.data.max_prompt_length, self.config.rollout.max_new_tokens
        return _prompt_columns(longest[0]), round_up(longest[1])

    def _column_bytes(self) -> int:
        return bytes_per_column(self.arch, self.config.model.dtype, self.rollout_mesh.tp)

    def _weights(self, mesh: MeshShape, dtype: str) -> int:
        elements = jax.tree.map(
            lambda p, spec: elements_on_device(p.shape, spec, mesh),
            param_specs(self.arch),
            partition(self.arch, mesh),
            is_leaf=is_spec,
        )
        return sum(jax.tree.leaves(elements)) * jnp.dtype(dtype).itemsize

    def _rollout_weights(self) -> Part:
        """A copy in the dtype of activations, norms excepted; none of what is there already."""
        model, key = self.config.model, "rollout_weights"
        same_mesh = self.mesh == self.rollout_mesh
        if same_mesh and model.dtype == model.param_dtype:
            return Part(key, 0, "those of training, which lie alike")

        def own(spec: ParamSpec, place: PartitionSpec) -> int:
            dtype = model.dtype if len(spec.shape) > 1 else model.param_dtype
            there = same_mesh and dtype == model.param_dtype
            elements = elements_on_device(spec.shape, place, self.rollout_mesh)
            return 0 if there else elements * jnp.dtype(dtype).itemsize

        places = partition(self.arch, self.rollout_mesh)
        copied = jax.tree.map(own, param_specs(self.arch), places, is_leaf=is_spec)
        why = f"model.dtype {model.dtype} on rollout.mesh {_written(self.rollout_mesh)}"
        return Part(key, sum(jax.tree.leaves(copied)), why)

    def _optimizer_state(self) -> int:
        """Moments lie as their parameters, all else on every device."""
        optimizer = build_optimizer(self.config.optimizer, total_steps=1)
        state = jax.eval_shape(optimizer.init, abstract_params(self.arch, jnp.float32))
        own = optax.tree_map_params(
            optimizer,
            lambda x, place: elements_on_device(x.shape, place, self.mesh) * x.dtype.itemsize,
            state,
            partition(self.arch, self.mesh),
            transform_non_params=lambda x: x.size * x.dtype.itemsize,
        )
        return sum(jax.tree.leaves(own))

    def _activations(self) -> tuple[Activations, str]:
        """Of the largest micro-batch, and its tokens in words."""
        model, update, n = self.config.model, self.config.update, self.config.rollout.n
        longest = longest_sequence(self.config)
        prompts = update.mini_batch_size or self.config.data.batch_size
        if update.micro_batch_size is None:
            assert update.max_tokens_per_device is not None, "batch sizes are derived before they come here"
            tokens = min(update.max_tokens_per_device, round_up(prompts * n * longest))
            words = f"{tokens} tokens"
        else:
            rows = min(update.micro_batch_size, -(-prompts * n // self.mesh.num_data_shards))
            tokens = rows * round_up(longest)
            words = f"{rows} x {round_up(longest)} tokens"
        size = activations(
            self.arch,
            tokens=tokens,
            chunk=default_chunk(self.arch.vocab_size, PLATFORM),
            remat=model.remat,
            dtype=model.dtype,
            param_dtype=model.param_dtype,
            mesh=self.mesh,
            platform=PLATFORM,
        )
        return size, words

    def warnings(self, result: Placement, fitting: int) -> Iterator[str]:
        """A sentence for each phase that has no room on a device, and for a cache that is refused."""
        memory = result.device_memory
        assert memory is not None
        for phase in PHASES:
            total = result.total(phase)
            if total > memory:
                parts = [part for part in result.parts if phase in part.phases]
                yield (
                    f"the {phase.replace('_', ' ')} needs {_text(total)} on each device, which has "
                    f"{_text(memory)}: no room for {', '.join(_left_out(parts, memory))}; "
                    f"{self._remedy(phase)}"
                )
        together = min(self.concurrency(fitting), self._share())
        if together > fitting and result.total(ROLLOUT) <= memory:
            most = fitting * self.rollout_mesh.num_data_shards
            remedy = f"set rollout.max_concurrency to {most} or fewer" if most else self._remedy(ROLLOUT)
            yield (
                f"the cache may take {CACHE_SHARE:g} of the memory that is free, which is enough for "
                f"{fitting} sequences on each replica of the rollout, and {together} are to decode at once; "
                f"{remedy}"
            )

    def _remedy(self, phase: str) -> str:
        if phase == ROLLOUT:
            sizes = "rollout.max_concurrency, rollout.max_new_tokens or data.max_prompt_length"
            return f"raise fsdp or tp of mesh and rollout.mesh, or lower {sizes}"
        if phase == STEP:
            return "raise fsdp or tp of mesh, in place of dp where there is more than one"
        size = "micro_batch_size" if self.config.update.micro_batch_size else "max_tokens_per_device"
        remat = "" if self.config.model.remat == "layer" else ", or set model.remat to layer"
        return f"raise fsdp or tp of mesh, or lower update.{size}{remat}"


def _left_out(parts: list[Part], memory: int) -> Iterator[str]:
    """The keys of `parts` that have no room where each takes its own in order."""
    for part in parts:
        memory -= part.num_bytes
        if memory < 0 and part.num_bytes:
            yield part.key


def _prompt_columns(tokens: int) -> int:
    """Columns of the cache for the longest prompt: 2 or 3 times a power of two, from 32."""
    power = max(32, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if tokens <= power * 3 // 4 and power > 32 else power


def render(result: Placement) -> str:
    """Two tables, of the parameters and of a device's bytes, and the warnings."""
    return "\n".join((*_parameter_table(result), "", *_part_table(result), *_warning_lines(result)))


def _parameter_table(result: Placement) -> Iterator[str]:
    yield f"parameters on mesh {_written(result.mesh)}"
    head = ("name", "shape", "logical axes", "PartitionSpec", "on a device")
    rows = [
        (
            kind.name if kind.count == 1 else f"{kind.name} x {kind.count}",
            ",".join(map(str, kind.shape)),
            ",".join(kind.axes),
            ",".join(axis or "-" for axis in kind.spec),
            _text(kind.num_bytes),
        )
        for kind in result.parameters
    ]
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    for *cells, size in (head, *rows):
        yield GAP.join((*map(str.ljust, cells, widths), size.rjust(widths[-1])))


def _part_table(result: Placement) -> Iterator[str]:
    totals = [Part(f"total_in_{phase}", result.total(phase), _names(result, phase)) for phase in PHASES]
    known = result.device_memory
    share = "" if known is None else f"{result.peak / known:.0%} of {_text(known)}"
    rows = [*result.parts, *totals, Part("peak", result.peak, share)]
    name, size = (max(map(len, column)) for column in zip(*((r.key, _text(r.num_bytes)) for r in rows)))
    yield "bytes on each device"
    for row in rows:
        first, *more = textwrap.wrap(row.why, WIDTH - name - size - 2 * len(GAP)) or [""]
        yield GAP.join((row.key.ljust(name), _text(row.num_bytes).rjust(size), first)).rstrip()
        yield from (" " * (name + size + 2 * len(GAP)) + line for line in more)


def _names(result: Placement, phase: str) -> str:
    return " + ".join(part.key for part in result.parts if phase in part.phases and part.num_bytes)


def _warning_lines(result: Placement) -> Iterator[str]:
    for warning in result.warnings:
        yield from textwrap.wrap(f"warning: {warning}", WIDTH, subsequent_indent=GAP, break_on_hyphens=False)


def _written(mesh: MeshShape) -> str:
    return ",".join(map(str, mesh))


def _text(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
