"""What devices tell each other, read from compiled programs, beside a formula; nothing is run or allocated.

    python benchmarks/scaling.py --case 8:1,8,1 --case 8:1,4,2 --json scaling.json
    python benchmarks/scaling.py --topology v5e:4x4 --case 16:1,16,1     # libtpu installed, no TPU needed

A case is DEVICES:MESH or DEVICES:MESH:ROLLOUT_MESH. Each compiles, in a process with so many simulated
devices and from abstract arrays of the shape of Qwen2.5-7B, the gradient of one micro-batch, the optimizer
step, a decode call, and the move of the weights to the rollout; once for each of `--layers`, of which the
bytes of 28 layers follow, as they are linear in layers. Bytes are those that one device sends in rings.

XLA widens bfloat16 on a CPU, collectives included, so that there float16 stands for it; compilers for TPUs
are given bfloat16. A collective in a loop counts once: the loop is a decode call, and a round of it a step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quatrain.config.mesh import MeshShape, resolve_mesh

if TYPE_CHECKING:
    import jax

    from quatrain.backend import Backend
    from quatrain.models.architecture import Architecture

NUM_LAYERS = 28
QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 151645,
}
CASES = (
    "8:1,8,1",
    "8:1,8,1:1,8,1",
    "8:1,8,1:2,1,4",
    "8:1,4,2",
    "64:1,64,1",
    "64:1,16,4",
    "64:8,8,1",
    "256:4,64,1",
    "256:1,64,4",
)
PARTS = ("gradient", "apply", "decode", "sync")
SHOWN_BYTES = 1e6
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
ELEMENT_BYTES = {"pred": 1, "s64": 8, "u64": 8, "f64": 8, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "f16": 2}
ELEMENT_BYTES |= {"s16": 2, "u16": 2, "s8": 1, "u8": 1}


@dataclass(frozen=True)
class Collective:
    """One in a compiled program: `payload` bytes gathered, reduced or exchanged on each device.

    The devices of a group are `stride` apart; `loops` that it is in run it once for each of their rounds.
    """

    kind: str
    dtype: str
    payload: int
    size: int
    stride: int
    loops: int

    @property
    def sent(self) -> float:
        """Bytes that one device sends in a ring of `size` devices."""
        if self.kind == "collective-permute":
            return self.payload
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.payload * (self.size - 1) / self.size

    def axis(self, mesh: MeshShape) -> str:
        """The axis of `mesh` that the group is: one of its own, `data` for dp, fsdp and ep, `params` for all
        that split parameters, or `all`."""
        axes, stride = {}, 1
        for name, size in reversed(mesh._asdict().items()):
            axes[size, stride] = name  # of two axes with one device, the outer
            stride *= size
        wider = {group: name for name, group in joint_groups(mesh).items()}
        return (wider | {(mesh.num_devices, 1): "all"} | axes).get((self.size, self.stride), "other")


def joint_groups(mesh: MeshShape) -> dict[str, tuple[int, int]]:
    """(devices, stride) of the groups of several axes; of two equal ones, the last has the name."""
    return {
        "params": (mesh.fsdp * mesh.ep * mesh.cp, 1 if mesh.cp > 1 else mesh.tp),
        "data": (mesh.num_data_shards, mesh.tp * mesh.cp),
    }


def collectives(hlo: str) -> list[Collective]:
    """Those of the module `hlo`, the text of a compiled program; -start and -done are one."""
    computations, entry = _computations(hlo)
    everyone = math.prod(int(n) for n in re.findall(r"(?:replica_count|num_partitions)=(\d+)", hlo[:100_000]))

    chains: set[str] = set()

    def walk(name: str, loops: int) -> Iterator[Collective]:
        for line in computations[name]:
            if not _continued(line, chains):
                yield from _collective(line, name, loops, everyone)
            for role, called in _called(line):
                if called in computations:
                    yield from walk(called, loops + (role == "body"))

    return list(walk(entry, 0))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of each computation by its name, and which one is run."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if begun := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$", line):
            name = begun[2]
            computations[name] = []
            entry = name if begun[1] else entry
        elif " = " in line and name:
            computations[name].append(line)
    return computations, entry


def _called(line: str) -> Iterator[tuple[str, str]]:
    """(how, name) of the computations that an instruction calls."""
    yield from re.findall(r"(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line)
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
        yield from (("branch", name.strip().lstrip("%")) for name in branches.split(","))


def _continued(line: str, chains: set[str]) -> bool:
    """Whether it is a further part of a collective in `chains`: on TPUs, work goes on between its parts."""
    found = re.search(r'chain_id="(\d+)"', line)
    if found is None or found[1] in chains:
        return found is not None
    chains.add(found[1])
    return False


def _collective(line: str, computation: str, loops: int, everyone: int) -> Iterator[Collective]:
    found = re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
    if found is None:
        return
    shape, kind, start = found[1], found[2], found[3]
    parts = _elements(shape)
    if start and kind != "all-reduce":
        parts = _elements(parts[1])  # (operands, results, ...)
    arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", ",".join(parts))
    payload = sum(_bytes(dtype, sizes) for dtype, sizes in arrays)
    size, stride = _group(line, kind, everyone)
    if kind == "reduce-scatter":
        payload *= size
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # how the compiler for TPUs writes it: fused with the slicing
    yield Collective(kind, "+".join(sorted({dtype for dtype, _ in arrays})), payload, size, stride, loops)


def _elements(shape: str) -> list[str]:
    """The shapes in a tuple, or the one."""
    if not shape.startswith("("):
        return [shape]
    elements, depth = [""], 0
    for letter in shape[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            elements.append("")
        else:
            elements[-1] += letter
    return [re.sub(r"/\*.*?\*/", "", element).strip() for element in elements]


def _bytes(dtype: str, sizes: str) -> int:
    return ELEMENT_BYTES[dtype] * math.prod(int(n) for n in sizes.split(",") if n)


def _group(line: str, kind: str, everyone: int) -> tuple[int, int]:
    """Devices of a group, and how far apart the first two are."""
    if kind == "collective-permute":
        return 2, 0
    devices = _first_group(line, everyone)
    return len(devices), int(devices[1] - devices[0]) if len(devices) > 1 else 1


def _first_group(line: str, everyone: int) -> np.ndarray:
    """Devices of the first of `replica_groups`, in any form that HLO has; none stands for one of all."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[^ ]*\](?:T\([\d,]+\))?)", line):
        return _iota(iota[3]).reshape(int(iota[1]), int(iota[2]))[0]
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\))\))? ?\{([^}]*)\}", line):
        return _group_of_axes(mesh[1], mesh[2], mesh[3])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return np.array(_numbers(listed[1]))
    assert "replica_groups={}" in line or "replica_groups=" not in line, line[:500]
    return np.arange(everyone)


def _iota(text: str) -> np.ndarray:
    """0, 1, ... as an array of dimensions [2,4], transposed where T(1,0) follows."""
    dims, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()  # type: ignore[union-attr]
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order)) if order else ids


def _group_of_axes(mesh: str, ids: str | None, axes: str) -> np.ndarray:
    """The first group along `axes`, such as 'a','b', of `mesh`, such as 'a'=4,'b'=2, of devices `ids`."""
    assert ":" not in axes, f"whole axes are expected, got {axes}"
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    names = re.findall(r"'(\w+)'", axes)
    devices = _iota(ids or f"[{math.prod(sizes.values())}]").reshape(list(sizes.values()))
    first = devices[tuple(slice(None) if name in names else 0 for name in sizes)]
    kept = [name for name in sizes if name in names]
    return first.transpose([kept.index(name) for name in names]).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


@dataclass(frozen=True)
class Case:
    """What is compiled: meshes, layers, and the sizes of a micro-batch buffer and of a decode call.

    `tokens` on each data shard; `slots` and their `prompts` on each replica of the sampler.
    """

    mesh: MeshShape
    rollout: MeshShape
    layers: int
    model: dict[str, Any]
    dtype: str = "float16"
    param_dtype: str = "float16"
    topology: str | None = None
    tokens: int = 4096
    slots: int = 64
    prompts: int = 8
    prompt_positions: int = 512
    own_columns: int = 512
    parts: tuple[str, ...] = PARTS

    @property
    def arch(self) -> Architecture:
        """The model with so many layers."""
        from quatrain.models.families import architecture_from_hf

        return architecture_from_hf(self.model | {"num_hidden_layers": self.layers})


Sent = dict[tuple[str, str], float]
"""(kind, axis) -> bytes that one device sends."""


@dataclass(frozen=True)
class Sizes:
    """Elements of the parameters on a device of a `tp` axis, whole along `fsdp` and `ep`."""

    layer: int
    """Of a layer, what `fsdp` and `ep` split; but of the next two."""
    router: int
    """Of its router, in float32."""
    experts: int
    """Of this device's experts of a layer, which only `fsdp` splits further."""
    layer_copied: int
    table: int
    """Of the embedding, and of the output head."""
    own: int
    """Of all of them, what one device keeps."""

    @classmethod
    def of(cls, arch: Architecture, mesh: MeshShape) -> Sizes:
        """From where they lie."""
        import jax

        from quatrain.models.params import is_spec, param_specs, partition
        from quatrain.parallel.axes import axes_of

        specs, places = param_specs(arch), partition(arch, mesh)

        def size(spec: Any, place: Any) -> tuple[int, int]:
            split = {axis for entry in place for axis in axes_of(entry)}
            own = {"tp", "ep"} if "experts" in spec.axes else {"tp"}
            whole, parts = (
                math.prod(getattr(mesh, axis) for axis in axes) for axes in (split & own, split - own)
            )
            return math.prod(spec.shape) // whole, parts

        sizes = jax.tree.map(size, specs, places, is_leaf=is_spec)
        everything = jax.tree.leaves(sizes, is_leaf=lambda leaf: isinstance(leaf, tuple))
        layer = dict(sizes["layers"][0])
        router = layer.pop("router", (0, 1))[0]
        experts = [layer.pop(name)[0] for name in list(layer) if name.startswith("experts_")]
        return cls(
            sum(size for size, shards in layer.values() if shards > 1),
            router,
            sum(experts),
            sum(size for size, shards in layer.values() if shards == 1),
            sizes["embed"][0],
            sum(size // shards for size, shards in everything),
        )


TOKEN_AND_LOGPROB = 8
"""Bytes of what the first device of a replica tells the others of each slot."""


def expected(case: Case, part: str, num_metrics: int) -> Sent:
    """The formula, for up to as many `tp` devices as key/value heads."""
    formulas = {"gradient": _expected_gradient, "apply": _expected_apply, "decode": _expected_decode}
    if part == "sync":
        return {}
    rings = formulas[part](case)
    if part == "gradient":
        rings["all-reduce", "data"] = 4.0 * num_metrics
    mesh = case.rollout if part == "decode" else case.mesh
    joint, total = joint_groups(mesh), Counter[tuple[str, str]]()
    for (kind, axis), payload in rings.items():
        size, stride = joint.get(axis) or (getattr(mesh, axis), 0)
        ring = Collective(kind, "", 1, size, stride, 0)  # of one byte
        if sent := ring.sent * payload:
            total[kind, ring.axis(mesh) if axis in joint else axis] += sent  # type: ignore[assignment]
    return dict(total)


def _expected_gradient(case: Case) -> Sent:
    """Layers are gathered twice, embedding and head once; gradients come back in float32.

    Over tp the [T, D] of a layer is added up twice forward, once when it is computed again (what ends
    the layer is not) and twice backward; so are those after the embedding and before the head.

    Over ep a layer of experts gathers hidden states, routes and weights forward and once more when it is
    computed again, and the gradient of its result; it reduce-scatters its result and the gradients of hidden
    states and weights, these in float32. Other parameters are split over fsdp, ep and cp together.

    Over cp a layer exchanges queries, keys, values and its result forward, once more when it is computed
    again, and backward; of the T tokens of a data shard a device has T / cp.
    """
    arch, compute, stored = case.arch, item_bytes(case.dtype), item_bytes(case.param_dtype)
    sizes, layers, mesh = Sizes.of(arch, case.mesh), arch.num_layers, case.mesh
    exchanged = sum(
        2 * (mixer.num_heads // mesh.tp + max(mixer.num_kv_heads // mesh.tp, mesh.cp)) * mixer.head_dim
        for mixer in (layer.mixer for layer in arch.layers)
    )
    gathered = 2 * (compute * (layers * sizes.layer + sizes.table) + 4 * layers * sizes.router)
    sent = {
        ("all-gather", "params"): gathered,
        ("reduce-scatter", "params"): 4 * (layers * (sizes.layer + sizes.router) + 2 * sizes.table),
        **{
            ("all-reduce", axis): stored * (layers * sizes.layer_copied + arch.hidden_size)
            for axis in ("fsdp", "ep")
        },
        ("all-reduce", "tp"): compute * case.tokens // mesh.cp * arch.hidden_size * (5 * layers + 2)
        + 4 * 4 * scored_places(case),
        ("all-to-all", "cp"): 3 * compute * exchanged * case.tokens // mesh.cp,
    }
    total = Counter(sent) + Counter(_exchanged_by_experts(case, sizes))
    return {key: float(value) for key, value in total.items()}


def _exchanged_by_experts(case: Case, sizes: Sizes) -> dict[tuple[str, str], int]:
    """By the layers of experts, over ep; and their weights over fsdp."""
    arch, compute, routes = case.arch, item_bytes(case.dtype), case.arch.routes
    if routes is None:
        return {}
    hidden, chosen = compute * arch.hidden_size, 4 * routes.experts_per_token
    rows = routes.layers * case.tokens * case.mesh.ep
    return {
        ("all-gather", "ep"): rows * (3 * hidden + 4 * chosen),
        ("reduce-scatter", "ep"): rows * (hidden + 4 * arch.hidden_size + chosen),
        ("all-gather", "fsdp"): 2 * compute * routes.layers * sizes.experts,
        ("reduce-scatter", "fsdp"): 4 * routes.layers * sizes.experts,
    }


def _expected_apply(case: Case) -> Sent:
    return {("all-reduce", "dp"): 4.0 * Sizes.of(case.arch, case.mesh).own}


def _expected_decode(case: Case) -> Sent:
    """A step. Over tp [B, D] twice in a layer and once after the embedding, and the logits [B, V]."""
    arch, compute = case.arch, item_bytes(case.dtype)
    sizes = Sizes.of(arch, case.rollout)
    return {
        ("all-gather", "fsdp"): float(compute * (arch.num_layers * sizes.layer + 2 * sizes.table)),
        ("all-reduce", "tp"): float(
            case.slots * (compute * arch.hidden_size * (2 * arch.num_layers + 1) + TOKEN_AND_LOGPROB)
        ),
        ("all-gather", "tp"): 4.0 * case.slots * arch.vocab_size,
    }


def item_bytes(dtype: str) -> int:
    """Of an element."""
    return {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]


def scored_places(case: Case) -> int:
    """Tokens the head has places for: those of the buffer, in tiles of equal size."""
    from quatrain.ops.logprobs import even_parts

    tile = _backend(case).tile(case.arch.vocab_size)
    chunks, size = even_parts(case.tokens, tile.tokens)
    return chunks * size


def measure(case: Case) -> dict[str, Any]:
    """Every part compiled: seconds, bytes sent by kind and axis, and memory on a device."""
    import jax

    devices = _devices(case)
    programs = Programs(case, devices)
    report: dict[str, Any] = {"jax": jax.__version__, "num_metrics": programs.num_metrics}
    report["missing"] = programs.missing()
    for part in case.parts:
        try:
            report[part] = _compiled(getattr(programs, part), case, part)
        except jax.errors.JaxRuntimeError as error:  # a compiler for TPUs refuses what does not fit
            report[part] = {"error": str(error)[:1500]}
    return report


def _backend(case: Case) -> Backend:
    """The settings of the devices that a case is compiled for, which need not be here."""
    from quatrain.backend import backend_of

    return backend_of("tpu" if case.topology else "cpu")


def _devices(case: Case) -> list[jax.Device]:
    import jax

    if case.topology is None:
        return jax.devices()
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices)


def _compiled(lower: Callable[[], Any], case: Case, part: str) -> dict[str, Any]:
    began = time.perf_counter()
    lowered = lower()
    if lowered is None:
        return {}
    traced = time.perf_counter()
    program = lowered.compile()
    ended = time.perf_counter()
    text = program.as_text()
    if keep := os.environ.get("QUATRAIN_KEEP_HLO"):
        Path(keep, f"{part}-{case.layers}.hlo").write_text(text, "utf-8")
    memory = program.memory_analysis()
    mesh = case.rollout if part == "decode" else case.mesh
    sent: dict[str, Counter[str]] = {"once": Counter(), "in a loop": Counter()}
    calls: Counter[str] = Counter()
    for one in collectives(text):
        where = f"{one.kind} {'all' if part == 'sync' else one.axis(mesh)} {one.dtype}"
        calls[where] += 1
        sent["in a loop" if one.loops else "once"][where] += one.sent  # type: ignore[assignment]
    return {
        "trace_s": round(traced - began, 1),
        "compile_s": round(ended - traced, 1),
        "sent": sent,
        "calls": calls,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


class Programs:
    """The programs of a case, each lowered from abstract arrays."""

    def __init__(self, case: Case, devices: list[jax.Device]):
        import jax
        import jax.numpy as jnp
        from jax.experimental import mesh_utils

        from quatrain.config.schema import UpdateConfig
        from quatrain.forward.specs import PolicySpec
        from quatrain.parallel.mesh import make_mesh
        from quatrain.update.gradient import weighted_loss
        from quatrain.update.objective import PolicyObjective

        self.case, self.arch = case, case.arch
        near = mesh_utils.create_device_mesh(case.mesh, devices, allow_split_physical_axes=True)
        self.mesh, self.rollout_mesh = (
            make_mesh(shape, list(near.flat)) for shape in (case.mesh, case.rollout)
        )
        self.policy = PolicySpec(
            self.arch, dtype=case.dtype, remat="layer", mesh=self.mesh, backend=_backend(case)
        )
        self.objective = PolicyObjective.of(UpdateConfig(mini_batch_size=1), on_policy=True)
        self.params = self._params(self.mesh, jnp.dtype(case.param_dtype))

        def loss(params: Any, batch: Any) -> Any:
            return weighted_loss(self.policy.predict(params, batch), batch, self.policy, self.objective)

        self.stats = jax.eval_shape(loss, self.params, self._batch())[1]
        self.num_metrics = len(jax.tree.leaves(self.stats))

    def _params(self, mesh: Any, dtype: Any, *, matrices: Any = None) -> Any:
        import jax

        from quatrain.models.params import is_spec, param_specs, partition
        from quatrain.parallel.mesh import mesh_shape, shardings

        places = shardings(mesh, partition(self.arch, mesh_shape(mesh)))

        def abstract(spec: Any, place: Any) -> Any:
            of_kind = matrices if matrices and len(spec.shape) > 1 else dtype
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype or of_kind, sharding=place)

        return jax.tree.map(abstract, param_specs(self.arch), places, is_leaf=is_spec)

    def _batch(self) -> Any:
        import jax
        import jax.numpy as jnp

        from quatrain.forward.micro_batch import MicroBatch
        from quatrain.ops.packing import buffers_per_shard
        from quatrain.parallel.mesh import data_sharding

        integers = ("input_ids", "positions", "segment_ids", "branch_ids", "predictors", "targets")
        dtypes = dict.fromkeys((*integers, "sequence_ids"), jnp.int32) | {"mask": jnp.bool_}
        floats = ("weights", "advantages", "rollout_logprobs")
        lines = buffers_per_shard([], self.case.tokens, self.policy.backend.line_tokens)
        shape = (self.case.mesh.num_data_shards * lines, self.case.tokens // lines)
        place = data_sharding(self.mesh)
        arrays, columns = (
            {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in each.items()}
            for each in (dtypes, dict.fromkeys(floats, jnp.float32))
        )
        return MicroBatch(**arrays, columns=columns, packed=True)  # type: ignore[arg-type]

    def _total(self) -> Any:
        import jax
        import jax.numpy as jnp

        from quatrain.parallel.mesh import shardings
        from quatrain.update.gradient import _copies

        places = shardings(self.mesh, _copies(self.policy))
        grads = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct((self.case.mesh.dp, *x.shape), jnp.float32, sharding=place),
            self.params,
            places,
        )
        return grads, jax.tree.map(lambda _: self._scalar(jnp.float32), self.stats)

    def _scalar(self, dtype: Any, mesh: Any = None) -> Any:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        return jax.ShapeDtypeStruct((), dtype, sharding=NamedSharding(mesh or self.mesh, PartitionSpec()))

    def gradient(self) -> Any:
        """Of one micro-batch."""
        from quatrain.update.gradient import gradient_program

        return cast(Any, gradient_program(self.policy.backend)).lower(
            self.params, self._total(), self._batch(), model=self.policy, objective=self.objective
        )

    def apply(self) -> Any:
        """The optimizer step, with AdamW."""
        import jax
        import jax.numpy as jnp
        import optax

        from quatrain.config.schema import OptimizerConfig
        from quatrain.update.gradient import _apply
        from quatrain.update.optimizer import Optimizer

        optimizer = Optimizer(OptimizerConfig(learning_rate=1e-6), 1000)
        form, numbers = optimizer.form, optimizer.numbers(0)
        masters = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), self.params
        )
        state = optax.tree_map_params(
            form,
            lambda _, master: master,
            jax.eval_shape(form.init, masters),
            masters,
            transform_non_params=lambda x: self._scalar(x.dtype),
        )
        loss = self._scalar(jnp.float32)
        return _apply.lower(self.params, state, self._total()[0], loss, numbers, form=form)

    def decode(self) -> Any:
        """A call of the sampler."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding

        from quatrain.engine.decode import EACH_REPLICA, Program, Sharing, Slots, decode_program
        from quatrain.models.kv_cache import CACHE_SPEC, CachePart
        from quatrain.ops.sampling import SamplingNumbers

        case, dtype = self.case, jnp.dtype(self.case.dtype)
        replicas = case.rollout.num_data_shards
        program = Program(self.arch, (0,), dtype, "xla", self.rollout_mesh, _backend(case))

        def array(spec: Any, dtype: Any, *sizes: int) -> Any:
            place = NamedSharding(self.rollout_mesh, spec)
            return jax.ShapeDtypeStruct((sizes[0] * replicas, *sizes[1:]), dtype, sharding=place)

        def cache(slots: int, positions: int) -> CachePart:
            states = [kind.mixer.state(slots, positions, case.rollout.tp) for kind in self.arch.layers]
            return CachePart(
                tuple((array(CACHE_SPEC, dtype, *k), array(CACHE_SPEC, dtype, *v)) for k, v in states)
            )

        each = partial(array, EACH_REPLICA)
        integers = (each(jnp.int32, case.slots),) * 4
        unsigned, real = each(jnp.uint32, case.slots), each(jnp.float32, case.slots)
        sampling = SamplingNumbers(unsigned, real, None)
        slots = Slots(*integers, *(unsigned,) * 3, each(jnp.bool_, case.slots), sampling)
        sharing = Sharing(
            each(jnp.int32, case.prompts, case.slots // case.prompts),
            each(jnp.int32, case.slots),
            each(jnp.int32, case.prompts),
        )
        return decode_program(program.backend).lower(
            self._params(self.rollout_mesh, jnp.dtype(case.param_dtype), matrices=dtype),
            cache(case.slots, case.own_columns),
            cache(case.prompts, case.prompt_positions),
            slots,
            sharing,
            self._scalar(jnp.int32, self.rollout_mesh),
            program=program,
        )

    def _exchanged(self) -> list[tuple[Any, Any]]:
        """The parameters that move, where they are and where they go."""
        import jax
        import jax.numpy as jnp

        stored, dtype = jnp.dtype(self.case.param_dtype), jnp.dtype(self.case.dtype)
        old = jax.tree.leaves(self._params(self.mesh, stored, matrices=dtype))
        new = jax.tree.leaves(self._params(self.rollout_mesh, stored, matrices=dtype))
        return [
            (x, y.sharding)
            for x, y in zip(old, new, strict=True)
            if not x.sharding.is_equivalent_to(y.sharding, x.ndim)
        ]

    def sync(self) -> Any:
        """The weights from the mesh of training to that of the rollout; None where they lie there already.

        One program of all, which the engine runs for one parameter after the other.
        """
        import jax

        pairs = self._exchanged()
        program = jax.jit(lambda arrays: arrays, out_shardings=[place for _, place in pairs])
        return program.lower([x for x, _ in pairs]) if pairs else None

    def missing(self) -> float:
        """Bytes of the rollout's weights that a device does not have from training, on average."""
        return sum(_missing(x, place) * x.dtype.itemsize for x, place in self._exchanged())


def _missing(array: Any, place: Any) -> float:
    """Elements of `array` that a device needs where it lies as `place`, and has not, on average."""
    old, new = (s.devices_indices_map(array.shape) for s in (array.sharding, place))

    def common(device: Any, *maps: Any) -> int:
        bounds = zip(array.shape, *(m[device] for m in maps), strict=True)
        sizes = [
            max(0, min(s.indices(n)[1] for s in slices) - max(s.indices(n)[0] for s in slices))
            for n, *slices in bounds
        ]
        return math.prod(sizes)

    return sum(common(device, new) - common(device, old, new) for device in new) / len(new)


def child(case: dict[str, Any]) -> None:
    """Measure `case` and print the report."""
    meshes = {name: MeshShape(*case[name]) for name in ("mesh", "rollout")}
    case_ = Case(**{**case, **meshes, "parts": tuple(case["parts"])})
    report = measure(case_)
    report["expected"] = {
        part: {" ".join(key): value for key, value in expected(case_, part, report["num_metrics"]).items()}
        for part in PARTS
    }
    report["expected"]["sync"] = {"all": report.pop("missing")}
    print(json.dumps(report))


def in_child(case: Case, timeout_s: float) -> dict[str, Any]:
    """`measure`, in a process with as many simulated devices as `case` has."""
    devices = f"--xla_force_host_platform_device_count={case.mesh.num_devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(asdict(case))],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        return {"error": done.stderr[-1500:]}
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def sent_by_kind(report: dict[str, Any], part: str) -> dict[str, float]:
    """Bytes of each "kind axis": of a micro-batch, an optimizer step, a decode step, a move."""
    sent: Counter[str] = Counter()
    loops = report[part].get("sent", {}).get("in a loop")
    assert part == "decode" or not loops, f"as often as its loop goes round: {part} sends {loops} there"
    for of in report[part].get("sent", {}).values():
        for name, value in of.items():
            sent[" ".join(name.split()[:2])] += value
    return {name: value for name, value in sent.items() if value}


def bytes_on_device(part: dict[str, Any]) -> dict[str, float]:
    """Arguments; all at the peak: results that reuse none of them too, and what is between."""
    arguments = part["argument_bytes"]
    rest = part["output_bytes"] - part["alias_bytes"] + part["temp_bytes"]
    return {"arguments": arguments, "peak": arguments + rest}


def at_layers(layers: int, reports: dict[int, dict[str, float]]) -> dict[str, float]:
    """Figures of two numbers of layers, for another number of them: bytes are linear in layers."""
    (low, first), (high, second) = sorted(reports.items())[-2:]
    slopes = {name: (second.get(name, 0) - first.get(name, 0)) / (high - low) for name in first | second}
    return {name: first.get(name, 0) + (layers - low) * slope for name, slope in slopes.items()}


def summary(reports: dict[int, Any], layers: int) -> dict[str, Any]:
    """Of each part, for `layers`: bytes sent and expected, memory, and seconds to compile those there are."""
    largest = reports[max(reports)]
    parts: dict[str, Any] = {}
    for part in PARTS:
        if part not in largest:
            continue
        failed = [report[part]["error"] for report in reports.values() if "error" in report.get(part, {})]
        if failed or not largest.get(part):
            parts[part] = {"error": failed[0]} if failed else {}
            continue
        measured = {n: sent_by_kind(report, part) for n, report in reports.items()}
        memory = {n: bytes_on_device(report[part]) for n, report in reports.items()}
        formula = {n: report["expected"][part] for n, report in reports.items()}
        seconds = {n: report[part]["trace_s"] + report[part]["compile_s"] for n, report in reports.items()}
        parts[part] = {
            "sent": _of_layers(layers, measured),
            "expected": _of_layers(layers, formula),
            "memory": _of_layers(layers, memory),
            "compile_s": seconds,
            "calls": largest[part]["calls"],
        }
    return parts


def _of_layers(layers: int, values: dict[int, dict[str, float]]) -> dict[str, float]:
    return values[layers] if layers in values else at_layers(layers, values)


def table(case: str, parts: dict[str, Any], layers: int) -> str:
    """Lines of Markdown."""
    lines = [f"### {case}, {layers} layers", "", "| | sent | formula | ratio |", "|---|---|---|---|"]
    for part, of in parts.items():
        if "sent" not in of:
            lines.append(f"| {part} | {of.get('error', 'nothing to do')[:200]} | | |")
            continue
        if part == "sync":
            kinds = ", ".join(sorted({call.split()[0] for call in of["calls"]}))
            of = of | {"sent": {kinds: sum(of["sent"].values())}, "expected": {kinds: of["expected"]["all"]}}
        for name in sorted(of["sent"] | of["expected"]):
            got, want = of["sent"].get(name, 0.0), of["expected"].get(name, 0.0)
            if max(got, want) > SHOWN_BYTES:
                ratio = f"{got / want:.4f}" if want else ""
                lines.append(f"| {part}: {name} | {got / 1e9:.4f} GB | {want / 1e9:.4f} GB | {ratio} |")
    for part, of in parts.items():
        if "sent" in of:
            memory = {name: f"{value / 1e9:.2f} GB" for name, value in of["memory"].items()}
            seconds = ", ".join(f"{s:.0f} s for {n} layers" for n, s in of["compile_s"].items())
            lines.append(
                f"{part}: arguments {memory['arguments']}, peak {memory['peak']}; compiled in {seconds}"
            )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", action="append", metavar="DEVICES:MESH[:ROLLOUT_MESH]")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch, on each data shard")
    parser.add_argument("--param-dtype", choices=("float32", "half"), default="half")
    parser.add_argument("--topology", help="of TPUs, such as v5e:4x4; needs libtpu, but no TPU")
    parser.add_argument("--timeout-s", type=float, default=3600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(json.loads(args.child))
        return
    results = {}
    for text in args.case or CASES:
        half = "bfloat16" if args.topology else "float16"
        base = Case(
            *_meshes(text),
            layers=0,
            model=QWEN2_5_7B,
            dtype=half,
            param_dtype=half if args.param_dtype == "half" else args.param_dtype,
            topology=args.topology,
            tokens=args.tokens,
            parts=tuple(args.part or PARTS),
        )
        reports = {n: in_child(replace(base, layers=n), args.timeout_s) for n in args.layers}
        results[text] = {"layers": reports}
        failed = [report["error"] for report in reports.values() if "error" in report]
        if failed:
            print(f"### {text}\n\n{failed[0]}\n", flush=True)
        else:
            layers = NUM_LAYERS if len(reports) > 1 else args.layers[0]
            results[text]["summary"] = summary(reports, layers)
            print(table(text, results[text]["summary"], layers), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def _meshes(case: str) -> tuple[MeshShape, MeshShape]:
    devices, *meshes = case.split(":")
    training = resolve_mesh(meshes[0], int(devices))
    copies = MeshShape(training.num_data_shards, 1, training.tp)
    return training, resolve_mesh(meshes[1], int(devices)) if len(meshes) > 1 else copies


if __name__ == "__main__":
    main()
