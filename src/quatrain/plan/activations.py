"""Memory of one forward and backward pass beside parameters, optimizer and sums of gradients: an estimate.

Data flow: architecture, tokens and mesh -> `activations` -> `quatrain plan --params`. The formula follows
the decoder and the tiles of the head. It stands in for the compiler's memory analysis, which takes far longer
and the compiler of the devices planned for; `tests/plan/test_placement.py` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from quatrain.backend import ACCELERATOR
from quatrain.config.mesh import MeshShape
from quatrain.models.architecture import Architecture
from quatrain.models.params import is_spec, param_specs, partition
from quatrain.ops.logprobs import even_parts

OFF_BY = "-4 % to +12 %, with tp up to +54 %"
"""By how much the estimate differed from the count of XLA's compiler for TPUs (docs/scaling.md)."""
FLOAT32 = 4
"""Bytes."""


@dataclass(frozen=True)
class Activations:
    """Bytes on one device, by what they are for.

    `kept` is what one layer keeps until the backward pass, `layer` and `head` are the most that one layer and
    the output head need while they work, and `gradients` those of parameters on their way to the sums.
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


def activations(
    arch: Architecture,
    *,
    tokens: int,
    remat: str,
    dtype: str,
    param_dtype: str,
    mesh: MeshShape,
) -> Activations:
    """The estimate for a micro-batch with `tokens` tokens on each device, which is an accelerator.

    With b bytes of `dtype`, hidden size D, and of one `tp` device Q columns of queries, K of keys and values,
    F of the MLP and a vocabulary of V, a token takes:

    - kept of a layer whose input alone is (`remat` of `layer`): D b
    - whose products are too (`dots`): (2 D + 2 Q + K + 2 F) b, and 4 bytes a head
    - of which nothing is computed again (`none`): (6 D + 2 Q + K + 2 F) b, 4 bytes a head, 8 for norms
    - while a layer works: (6 D + 3 Q + K + 6 F) b, without what `dots` has kept
    - once more for `dots`, twice for `none` and while it works: (Q + K) b where queries and keys have norms
      (K is of keys and values), 2 D b where attention and MLP end in norms
    - while the head works: 5 D b, and 12 for each logit of a tile (`Backend.tile`)

    Beside the tokens stand the weights of the layer or head that works, where they are gathered or cast, and
    their gradients: of a whole vocabulary in float32 wherever it waits for other devices.
    """
    b, own_b, n = jnp.dtype(dtype).itemsize, jnp.dtype(param_dtype).itemsize, _Widths.of(arch, mesh)
    sharded, cast = mesh.fsdp > 1, dtype != param_dtype
    tile = ACCELERATOR.tile(arch.vocab_size)
    norms = arch.qk_norm * (n.queries + n.keys_values) + arch.post_norms * 2 * n.hidden
    products = n.hidden + 2 * n.queries + n.keys_values + 2 * n.mlp + norms
    every = products + 4 * n.hidden + norms
    columns = n.hidden + {"layer": 0, "dots": products, "none": every}[remat]
    statistics = FLOAT32 * {"layer": 0, "dots": n.heads, "none": n.heads + 2}[remat]
    works = 6 * n.hidden + 3 * n.queries + n.keys_values + 6 * n.mlp + 2 * norms
    works -= 0 if remat == "layer" else products

    weights = _layer_weights(arch, mesh)
    in_dtype = weights * b if sharded or cast else 0
    table = n.vocabulary * n.hidden
    whole_head = table * (b * cast + own_b * sharded + FLOAT32)
    together = even_parts(tokens, tile.tokens)[1] * min(tile.words, n.vocabulary)
    layer = tokens * works * b + in_dtype + weights * FLOAT32 * sharded + table * FLOAT32
    head = tokens * 5 * n.hidden * b + 3 * FLOAT32 * together + whole_head
    return Activations(
        num_layers=arch.num_layers,
        kept=tokens * (columns * b + statistics) + in_dtype * (remat == "none"),
        layer=layer,
        head=head,
        gradients=_elements(param_specs(arch), partition(arch, mesh), mesh) * own_b,
    )


@dataclass(frozen=True)
class _Widths:
    """Columns of a token's activations on one of the `tp` devices; `keys_values` of both together."""

    hidden: int
    queries: int
    keys_values: int
    mlp: int
    heads: int
    vocabulary: int

    @classmethod
    def of(cls, arch: Architecture, mesh: MeshShape) -> _Widths:
        shared = "tp" in partition(arch, mesh)["embed"]
        return cls(
            hidden=arch.hidden_size,
            queries=arch.num_heads * arch.head_dim // mesh.tp,
            keys_values=2 * max(arch.num_kv_heads // mesh.tp, 1) * arch.head_dim,
            mlp=arch.intermediate_size // mesh.tp,
            heads=arch.num_heads // mesh.tp,
            vocabulary=arch.vocab_size // mesh.tp if shared else arch.vocab_size,
        )


def elements_on_device(shape: Sequence[int], spec: PartitionSpec, mesh: MeshShape) -> int:
    """Elements that one device of `mesh` has of an array of `shape` that lies there as `spec`."""
    axes = [axis for axis in spec if axis is not None]
    return math.prod(shape) // math.prod(getattr(mesh, axis) for axis in axes)


def _layer_weights(arch: Architecture, mesh: MeshShape) -> int:
    """Weights of a layer on one of the `tp` devices, gathered over `fsdp`."""
    gathered = mesh._replace(fsdp=1)
    return _elements(param_specs(arch)["layers"][0], partition(arch, gathered)["layers"][0], gathered)


def _elements(params: Any, specs: Any, mesh: MeshShape) -> int:
    """Of a tree of parameters, on one device."""
    own = jax.tree.map(
        lambda p, spec: elements_on_device(p.shape, spec, mesh), params, specs, is_leaf=is_spec
    )
    return sum(jax.tree.leaves(own))
