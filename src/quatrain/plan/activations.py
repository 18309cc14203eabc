"""Estimates the memory of activations in one forward and backward pass.

Parameters, optimizer state and accumulated gradients are not included. Data flow: architecture, tokens and
mesh -> `activations` -> `quatrain plan --params`. The formula follows the decoder and the tiles of the output
head. It is used instead of XLA's memory analysis, which takes much longer and needs the compiler of the
target devices; `tests/plan/test_placement.py` compares the two.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from quatrain.backend import ACCELERATOR
from quatrain.config.mesh import MeshShape
from quatrain.models.architecture import Architecture, LayerKind
from quatrain.models.lora import trained_part
from quatrain.models.params import LM_HEAD, ParamSpec, is_spec, param_specs, partition
from quatrain.ops.logprobs import even_parts
from quatrain.parallel.axes import EP, TP, axes_of

OFF_BY = "-4 % to +12 %, with tp up to +54 %"
"""Difference of the estimate from the memory analysis of XLA's compiler for TPUs (docs/scaling.md)."""
OFF_BY_WITH_EXPERTS = "-10 % to +10 % on a CPU, with a shared expert up to +23 %"
"""That of models with experts, from the analysis of its compiler for CPUs."""
FLOAT32 = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Activations:
    """Bytes on one device, by purpose.

    `kept`: activations of one layer that are stored until the backward pass. `layer` and `head`: the maximum
    of temporary memory while one layer, or the output head, is computed. `gradients`: gradients of parameters
    before they are added to the accumulated gradients.
    """

    num_layers: int
    kept: int
    layer: int
    head: int
    gradients: int

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.num_layers * self.kept + max(self.layer, self.head) + self.gradients


@functools.lru_cache(maxsize=1024)  # `fit.py` asks for the same many times
def activations(
    arch: Architecture, *, tokens: int, remat: str, dtype: str, param_dtype: str, mesh: MeshShape
) -> Activations:
    """The estimate for a micro-batch with `tokens` tokens on each device, for GPUs and TPUs.

    Let b be the bytes of `dtype`, D the hidden size, and on one `tp` device Q the columns of queries, K the
    columns of keys and values together, F the columns of the MLP and V the vocabulary. Bytes per token:

    - `kept`, remat `layer` (only a layer's input is stored): D b
    - `kept`, remat `dots` (also the outputs of products): (2 D + 2 Q + K + 2 F) b, and 4 bytes per head
    - `kept`, remat `none`: (6 D + 2 Q + K + 2 F) b, 4 bytes per head, and 8 for norms
    - `layer`: (6 D + 3 Q + K + 6 F) b, less what `dots` or `none` stores
    - norms of queries and keys add (Q + K) b, norms after attention and MLP add 2 D b: once to `kept` of
      `dots` and to `layer`, twice to `kept` of `none`
    - `head`: 5 D b, and 12 bytes for each logit of a tile (`Backend.tile`), 16 with a soft cap; a `score`
      head has none

    `layer` and `head` also contain the weights of one layer or of the head, if they are gathered over `fsdp`,
    `cp` or `ep`, or cast to `dtype`, and their gradients; the gradient of the whole embedding table is in
    float32.

    The states at the beginnings of the chunks of DeltaNet layers add 4 bytes for each of their numbers: to
    `kept` of `dots` and `none`, to `layer` of remat `layer`.

    Keys and values that layers lend are added to `layer` twice, the inputs of all layers three times.

    With adapters of rank r, their gradients are the only ones. The r columns of A x of each adapted matrix
    are added to `layer` and to `kept` of `dots` and `none`, and the most columns of a B (A x) to `layer`. Of
    the output head they add 2 r b bytes per token and r (b + 4) for each of V words to `head`.
    """
    b, own_b, n = jnp.dtype(dtype).itemsize, jnp.dtype(param_dtype).itemsize, _Widths.of(arch, mesh)
    sharded, cast = mesh.fsdp * mesh.cp * mesh.ep > 1, dtype != param_dtype
    tile = ACCELERATOR.tile(arch.vocab_size)
    products = n.hidden + n.kept + n.normed + n.low
    every = products + 4 * n.hidden + n.normed + n.inputs
    columns = n.hidden + {"layer": 0, "dots": products, "none": every}[remat]
    statistics = FLOAT32 * {"layer": 0, "dots": n.statistics, "none": n.statistics + 2}[remat]
    statistics += FLOAT32 * n.states * (remat != "layer")
    works = 6 * n.hidden + n.working + n.normed + 2 * n.low + n.added
    works -= {"layer": 0, "dots": products, "none": products + n.inputs}[remat]
    works += n.between

    specs, places = param_specs(arch), partition(arch, mesh)
    whole = jax.tree.map(_as_read, specs, places, is_leaf=is_spec)
    first_of_kind = [arch.layers.index(kind) for kind in arch.kinds]

    def largest(specs: Any, places: Any) -> int:
        """Elements of the largest layer."""
        layers = ((specs["layers"][i], places["layers"][i]) for i in first_of_kind)
        return max(sum_on_device(*layer, mesh) for layer in layers)

    weights = largest(specs, whole)
    specs, places, whole = (trained_part(tree, arch) for tree in (specs, places, whole))
    layer_gradient = largest(specs, whole)
    gradients = sum_on_device(specs, places, mesh)
    in_dtype = weights * b if sharded or cast else 0
    table = n.vocabulary * n.hidden
    trained_table = 0 if arch.lora else table
    head = tokens * 5 * n.hidden * b
    if arch.head == "lm_head":
        logits = even_parts(tokens, tile.tokens)[1] * min(tile.words, n.vocabulary)
        whole_head = table * (b * cast + own_b * sharded) + trained_table * FLOAT32
        head += (3 + bool(arch.final_softcap)) * FLOAT32 * logits + whole_head
        if arch.lora and LM_HEAD in arch.lora.targets:
            head += arch.lora.rank * (2 * tokens * b + n.vocabulary * (b + FLOAT32))
    return Activations(
        num_layers=arch.num_layers,
        kept=tokens * (columns * b + statistics) + in_dtype * (remat == "none"),
        layer=tokens * (works * b + FLOAT32 * n.most_states * (remat == "layer"))
        + FLOAT32 * n.chunk
        + in_dtype
        + (layer_gradient * sharded + trained_table) * FLOAT32,
        head=head,
        gradients=gradients * (FLOAT32 if arch.lora else own_b),
    )


def _as_read(spec: ParamSpec, place: PartitionSpec) -> PartitionSpec:
    """A parameter as a layer reads it: whole, but over `tp`, and experts over `ep`."""
    own = (TP, EP) if "experts" in spec.axes else (TP,)
    return PartitionSpec(*(tuple(axis for axis in axes_of(entry) if axis in own) for entry in place))


class _Widths(NamedTuple):
    """Columns of a token's activations in a layer on one `tp` device (`blocks.layer_run.Costs`).

    Of what is kept the mean of all layers, of what is temporary the most.
    """

    hidden: int
    vocabulary: int
    kept: int
    normed: int
    working: int
    statistics: int
    inputs: int
    states: int
    most_states: int
    """Of the layer that has the most of them."""
    chunk: int
    """Float32 numbers of temporary arrays that do not grow with the tokens."""
    low: int
    """Columns of A x of all adapted matrices of a layer."""
    added: int
    """Columns of B (A x) of the largest of them."""
    between: int
    """Columns that all layers share: lent keys and values, the inputs of layers, and their gradients."""

    @classmethod
    def of(cls, arch: Architecture, mesh: MeshShape) -> _Widths:
        d, targets = arch.hidden_size, arch.lora.targets if arch.lora else ()
        counts = Counter(arch.layers)
        costs = {kind: [block.costs(d, mesh) for block in kind.blocks] for kind in counts}

        def mean(of: Callable[[LayerKind], int]) -> int:
            """Of all layers."""
            return sum(count * of(kind) for kind, count in counts.items()) // arch.num_layers

        def adapted(kind: LayerKind) -> int:
            parts = sum(kind.low_parts(name, mesh) for name in targets)
            return parts * (arch.lora.rank if arch.lora else 0)

        lending = (kind.mixer for kind in arch.layers if kind.mixer.sharing == "lends")
        lent = [shape for mixer in lending for shape in mixer.state(1, 1, mesh.tp)]
        inputs = arch.layers[0].layer_input.width if arch.layers[0].layer_input else 0
        outputs = [cost.outputs for kind in costs for cost in costs[kind]]
        return cls(
            hidden=d,
            vocabulary=arch.vocab_size // (mesh.tp if TP in partition(arch, mesh)["embed"] else 1),
            kept=mean(lambda kind: sum(cost.kept for cost in costs[kind])),
            normed=mean(lambda kind: sum(cost.normed for cost in costs[kind]) + d * (len(kind.norms) - 2)),
            working=max(sum(cost.working for cost in each) for each in costs.values()),
            statistics=mean(lambda kind: sum(cost.statistics for cost in costs[kind])),
            inputs=mean(lambda kind: sum(cost.inputs for cost in costs[kind])),
            states=mean(lambda kind: sum(cost.states for cost in costs[kind])),
            most_states=max(sum(cost.states for cost in each) for each in costs.values()),
            chunk=max(cost.chunk for each in costs.values() for cost in each),
            low=mean(adapted),
            between=2 * sum(map(math.prod, lent)) // mesh.tp + 3 * arch.num_layers * inputs,
            added=max((each[name] for each in outputs for name in targets if name in each), default=0),
        )


def elements_on_device(shape: Sequence[int], spec: PartitionSpec, mesh: MeshShape) -> int:
    """Elements that one device of `mesh` holds of an array of `shape` that is sharded by `spec`."""
    axes = [axis for entry in spec for axis in axes_of(entry)]
    return math.prod(shape) // math.prod(getattr(mesh, axis) for axis in axes)


def sum_on_device(
    params: Any, partition: Any, mesh: MeshShape, size: Callable[[Any], int] = lambda spec: 1
) -> int:
    """Elements, each of `size`, that one device holds of a tree of arrays with the specs `partition`."""
    sizes = jax.tree.map(
        lambda p, spec: elements_on_device(p.shape, spec, mesh) * size(p), params, partition, is_leaf=is_spec
    )
    return sum(jax.tree.leaves(sizes))
