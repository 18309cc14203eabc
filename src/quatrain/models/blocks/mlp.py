"""The gated MLP: down(activation(gate(x)) * up(x)) (Shazeer 2020).

Shapes: B rows, T tokens, D hidden, F columns of the MLP on this `tp` device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.config.mesh import MeshShape
from quatrain.models.blocks.layer_run import Costs, Enter, LayerRun
from quatrain.models.layers import Layer
from quatrain.models.spec import ParamSpec, TensorName, linear_tensors, part_tensors, require
from quatrain.parallel.axes import TP
from quatrain.parallel.collectives import psum_backward

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def activated(x: jax.Array, activation: str) -> jax.Array:
    """The activation, one of `ACTIVATIONS`, of `x`."""
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=True)


@dataclass(frozen=True)
class Dense:
    """A gated MLP of `width` columns, the same for every token."""

    width: int
    activation: str = "silu"
    bias: bool = False
    fused: bool = False
    """Whether a checkpoint has the gate and the up projection as one tensor."""
    module: str = "mlp"
    """The name of the block in a checkpoint."""

    frozen: ClassVar[frozenset[str]] = frozenset()
    """Matrices that cannot have adapters."""

    def __post_init__(self) -> None:
        known = self.activation in ACTIVATIONS
        require(known, "activation", f"one of {', '.join(ACTIVATIONS)}", self.activation)

    def params(self, d: int, residual: float) -> dict[str, ParamSpec]:
        """`gate_up` [2, F, D] and `down` [D, F], whose standard deviation is scaled by `residual`."""
        specs = {
            "gate_up": ParamSpec.matrix((2, self.width, d), ("group", "mlp", "embed")),
            "down": ParamSpec.matrix((d, self.width), ("embed", "mlp"), residual),
        }
        return specs | {f"{name}_bias": specs[name].bias() for name in specs if self.bias}

    def tensors(self) -> list[TensorName]:
        """Its tensors in a layer of a checkpoint."""
        parts = {"gate_up_proj": ...} if self.fused else {"gate_proj": np.s_[0], "up_proj": np.s_[1]}
        gate_up = part_tensors(self.module, "gate_up", parts, bias=self.bias)
        return [*gate_up, *linear_tensors(f"{self.module}.down_proj", "down", bias=self.bias)]

    def run(self, x_BTD: jax.Array, enter: Enter, run: LayerRun) -> jax.Array:
        """The MLP of `enter(x)`: [B, T, D], summed over the columns of all `tp` devices."""

        def up(x_BTD: jax.Array, layer: Layer) -> jax.Array:
            return run.linear(psum_backward(enter(x_BTD, layer), TP), layer, "gate_up")

        def down(gate_up_BT2F: jax.Array, layer: Layer) -> jax.Array:
            gate, up = jnp.split(gate_up_BT2F.reshape(*gate_up_BT2F.shape[:-2], -1), 2, axis=-1)
            return run.linear(activated(gate, self.activation) * up, layer, "down", sum_axis=TP)

        y_BTD: jax.Array = run.part(down, run.part(up, x_BTD))
        return y_BTD

    def splits(self, tp: int) -> bool:
        """Whether `tp` devices can share its columns."""
        return self.width % tp == 0

    @property
    def split_rule(self) -> str:
        """What a valid `tp` does, for an error."""
        return f"divides the {self.width} columns of the MLP"

    def costs(self, d: int, mesh: MeshShape) -> Costs:
        """Of a block for hidden states of `d` elements."""
        f = self.width // mesh.tp
        return Costs(3 * d * f, 0, {"gate_up": 2 * f, "down": d}, 2 * f, 0, 6 * f, 0)
