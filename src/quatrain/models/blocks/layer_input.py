"""What a layer adds of an embedding that each layer has of every token (Gemma 4).

Shapes: B rows, T tokens, D hidden, P elements of such an embedding, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from quatrain.config.mesh import MeshShape
from quatrain.models.blocks.layer_run import Costs, LayerRun
from quatrain.models.blocks.mlp import activated
from quatrain.models.layers import Layer, Norm
from quatrain.models.spec import ParamSpec, TensorName, linear_tensors


@dataclass(frozen=True)
class LayerInput:
    """norm(projection(activation(gate(x)) * input)), with an input of `width` elements for each token."""

    width: int
    activation: str

    def params(self, d: int, norm: Norm, residual: float) -> dict[str, ParamSpec]:
        """`input_gate` [P, D], `input_projection` [D, P] and a norm; every `tp` device has all of them."""
        return {
            "input_gate": ParamSpec.matrix((self.width, d), ("group", "embed")),
            "input_projection": ParamSpec.matrix((d, self.width), ("embed", "group"), residual),
            "input_norm": norm.spec(d),
        }

    def tensors(self) -> list[TensorName]:
        """Its tensors in a layer of a checkpoint."""
        return [
            *linear_tensors("per_layer_input_gate", "input_gate", bias=False),
            *linear_tensors("per_layer_projection", "input_projection", bias=False),
            TensorName("post_per_layer_input_norm.weight", ("input_norm",)),
        ]

    def run(self, x_BTD: jax.Array, run: LayerRun, input_BTP: jax.Array) -> jax.Array:
        """What is added to `x` after its norm: [B, T, D]."""

        def gate(x_BTD: jax.Array, layer: Layer) -> jax.Array:
            return run.linear(x_BTD, layer, "input_gate")

        def project(gate_BTP: jax.Array, layer: Layer) -> jax.Array:
            return run.linear(activated(gate_BTP, self.activation) * input_BTP, layer, "input_projection")

        # Two parts, because a part ends with its product: `by_parts` then recomputes neither product.
        y_BTD: jax.Array = run.part(project, run.part(gate, x_BTD))
        return y_BTD

    def splits(self, tp: int) -> bool:
        """It is not split."""
        return True

    @property
    def split_rule(self) -> str:
        """What a valid `tp` does, for an error."""
        return "is any number"

    def costs(self, d: int, mesh: MeshShape) -> Costs:
        """Of a block for hidden states of `d` elements."""
        outputs = {"input_gate": self.width, "input_projection": d}
        return Costs(
            2 * d * self.width,
            0,
            outputs,
            kept=self.width + d,
            normed=d,
            working=4 * self.width,
            statistics=0,
        )
