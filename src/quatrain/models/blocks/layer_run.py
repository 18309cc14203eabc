"""What a block needs to run: a layer's weights, gathered part by part, and the settings of products.

Data flow: the decoder makes a `LayerRun` for each layer; its blocks compute in parts.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from quatrain.models.layers import Layer, Norm, linear
from quatrain.parallel.axes import CP, EP, FSDP, axes_of
from quatrain.parallel.collectives import all_gather, psum_backward

ROUTER = "router"
"""The name of the matrix of a router, which stays float32."""
OF_EXPERTS = "experts_"
"""How the names of the experts' parameters begin, which each device of `ep` has for itself."""
ROUTES = "routes"
"""The name of chosen experts in a compiled program."""

Enter = Callable[[jax.Array, Layer], jax.Array]
"""What a block's first part does before its product: the norm before the block."""


def keeps_dtype(name: str, num_dims: int) -> bool:
    """Whether a parameter has its own dtype in products, not `model.dtype`: vectors and routers have."""
    return num_dims < 2 or name == ROUTER


def recomputed(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which the backward pass computes again from its inputs; but experts are not chosen again.

    Computed again, a router may choose others: its compiled form, and so its rounding, may differ.
    """
    return jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(ROUTES))


class Costs(NamedTuple):
    """What a block costs on one of `tp` devices."""

    weights: int
    """Weights that a token is multiplied by."""
    per_key: int
    """Multiplications, scores and weighted values each, of a pair of query and key."""
    outputs: Mapping[str, int]
    """Columns of a token's results of each matrix, by its name."""
    kept: int
    """Columns that the backward pass needs if matrix products are kept, the results of norms left out."""
    normed: int
    """Columns of the results of norms within the block."""
    working: int
    """Columns of temporary arrays in the backward pass, the results of norms left out."""
    statistics: int
    """Further float32 numbers that are kept."""
    inputs: int = 0
    """Columns of the rows that kernels multiply, which are kept if nothing is recomputed."""
    states: int = 0
    """Float32 numbers of the states at the beginnings of chunks, kept if a layer is not recomputed whole."""
    chunk: int = 0
    """Float32 numbers of temporary arrays of one chunk of tokens, whatever the tokens of the micro-batch."""


def gather_params(
    params: Any, specs: Any, dtype: DTypeLike | None = None, over: tuple[str, ...] = (FSDP, CP, EP)
) -> Any:
    """`params` all-gathered over the axes `over`; for use inside `shard_map`, where they are read.

    `specs` are the partition specs of `params`. Matrices are cast to `dtype` before the all-gather. The
    backward pass sums the gradients over these axes (reduce-scatter), whose devices have other tokens.
    """

    def one(parameter: jax.Array, spec: PartitionSpec) -> jax.Array:
        axes = list(map(axes_of, spec))
        for axis in over:
            # A parameter that an axis does not shard is whole on its devices, whose gradients are of other
            # tokens.
            if not any(axis in names for names in axes):
                parameter = psum_backward(parameter, axis)
        places = [(names, dim) for dim, names in enumerate(axes) if set(over) & set(names)]
        return all_gather(parameter, places, dtype if parameter.ndim > 1 else None)

    return jax.tree.map(one, params, specs)


class GatheredLayer(UserDict[str, jax.Array]):
    """The parameters of one layer as a mapping; reading one all-gathers it, as `gather_params` does."""

    def __init__(self, layer: Layer, specs: Mapping[str, PartitionSpec], dtype: DTypeLike):
        super().__init__(layer)
        self._specs, self._dtype = specs, dtype

    def __getitem__(self, name: str) -> jax.Array:
        dtype = None if keeps_dtype(name, self.data[name].ndim) else self._dtype
        # Each device of `ep` has experts of its own: gathered over it, every device would hold all of them.
        over = (FSDP, CP) if name.startswith(OF_EXPERTS) else (FSDP, CP, EP)
        whole: jax.Array = gather_params(self.data[name], self._specs[name], dtype, over)
        return whole


@dataclass(frozen=True)
class LayerRun:
    """One layer's weights, its norms and how its products are computed."""

    layer: Layer
    specs: Mapping[str, PartitionSpec]
    dtype: DTypeLike
    norm: Norm
    by_parts: bool
    few_rows: int
    lora_scale: float
    experts: str = "blocks"
    """How the products of experts are computed (`expert_products.PRODUCTS`)."""

    def part(self, run: Callable[[Any, Layer], Any], inputs: Any) -> Any:
        """`run(inputs, layer)`, which all-gathers the weights that it reads.

        If the layer runs `by_parts`, the backward pass recomputes the part from its inputs, so gathered
        weights are not kept between the passes. A part ends with its product with weights: no gradient
        within the part needs the result of that product, so the product is not recomputed.
        """

        def gathering(inputs: Any, layer: Layer) -> Any:
            return run(inputs, GatheredLayer(layer, self.specs, self.dtype))

        return (recomputed(gathering) if self.by_parts else gathering)(inputs, self.layer)

    def linear(
        self,
        x: jax.Array,
        layer: Layer,
        name: str,
        sum_axis: str | None = None,
        stacked: tuple[int, ...] = (),
    ) -> jax.Array:
        """`layers.linear` with the settings of this run."""
        return linear(x, layer, name, sum_axis, self.few_rows, self.lora_scale, stacked)
