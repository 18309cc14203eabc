"""One block of a tower: x + attention(norm(x)), then x + mlp(norm(x)), with biases in every product.

Data flow: `models/vision.py` runs the blocks one after another over rows of patches.

Shapes: R rows, P patches, W width of the tower, N heads of H elements, F columns of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.models.blocks.mlp import ACTIVATIONS
from quatrain.models.blocks.mlp import activated as activated_text
from quatrain.models.layers import Layer, linear, rms_norm
from quatrain.models.rope import Angles, rotate
from quatrain.models.spec import LoRA, ParamSpec, TensorName, linear_tensors, require

NormKind = Literal["rms", "layer"]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
GELU = "gelu"
"""The exact one, of all projectors with an MLP."""


def activated(x: jax.Array, activation: str) -> jax.Array:
    """The activation of `x`: GELU, or one of those of text models."""
    return jax.nn.gelu(x, approximate=False) if activation == GELU else activated_text(x, activation)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / deviation * weight + bias over the last dimension, in float32 (Ba et al. 2016)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)
    return (centred * scale * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@dataclass(frozen=True)
class VisionNorm:
    """The norms of a tower and of its projector."""

    kind: NormKind
    eps: float = 1e-6

    def __call__(self, x: jax.Array, layer: Layer, name: str) -> jax.Array:
        """The norm `name` of `x`, over the last dimension."""
        if self.kind == "rms":
            return rms_norm(x, layer[name], self.eps)
        return layer_norm(x, layer[name], layer[f"{name}_bias"], self.eps)

    def params(self, name: str, size: int) -> dict[str, ParamSpec]:
        """Its weight, and its bias if it has one."""
        specs = {name: ParamSpec((size,), ("norm",), "constant", 1.0)}
        if self.kind == "layer":
            specs[f"{name}_bias"] = ParamSpec((size,), ("norm",), "constant", 0.0)
        return specs

    def tensors(self, module: str, name: str) -> list[TensorName]:
        """Those of the module of a checkpoint."""
        weight, bias = linear_tensors(module, name, bias=True)
        return [weight._replace(vector=True), bias][: 1 + (self.kind == "layer")]


@dataclass(frozen=True)
class VisionBlock:
    """The blocks of one tower, which are all alike but for what their patches attend to."""

    size: int
    """W."""
    num_heads: int
    width: int
    """F."""
    activation: str
    norm: VisionNorm
    modules: tuple[tuple[str, str], ...]
    """The names in a checkpoint of norm1, norm2, o, down; of qkv, or q, k and v; of up, or gate and up."""
    rope_theta: float | None = None
    """Base of the rotary embeddings of rows and columns; None: it has none."""

    def __post_init__(self) -> None:
        known = (*ACTIVATIONS, GELU)
        require(self.activation in known, "hidden_act", f"one of {', '.join(known)}", self.activation)
        whole, heads = self.size % self.num_heads == 0, self.num_heads
        require(whole, "hidden_size of the tower", f"a multiple of {heads} heads", self.size)
        quarter = self.rope_theta is None or self.head_dim % 4 == 0
        require(quarter, "head size of the tower", "a multiple of 4", self.head_dim)

    @property
    def head_dim(self) -> int:
        """H."""
        return self.size // self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP is activation(gate) * up."""
        return "gate" in dict(self.modules)

    def params(self, residual: float, lora: LoRA | None = None) -> dict[str, ParamSpec]:
        """`qkv` [3, W, W], `o` [W, W], `gate_up` [F, W] or [2, F, W], `down` [W, F]; with biases, norms and
        adapters."""
        w, f = self.size, self.width
        columns, axes = ((2, f), ("group", "group")) if self.gated else ((f,), ("group",))
        specs = {
            "qkv": ParamSpec.matrix((3, w, w), ("group", "group", "embed")),
            "o": ParamSpec.matrix((w, w), ("group", "embed"), residual),
            "gate_up": ParamSpec.matrix((*columns, w), (*axes, "embed")),
            "down": ParamSpec.matrix((w, f), ("embed", "group"), residual),
        }
        biases = {f"{name}_bias": spec.bias() for name, spec in specs.items()}
        added = {} if lora is None else self._adapters(specs, lora)
        specs |= biases | added
        return specs | self.norm.params("norm1", w) | self.norm.params("norm2", w)

    def _adapters(self, specs: Mapping[str, ParamSpec], lora: LoRA) -> dict[str, ParamSpec]:
        parts = self.matrices()
        each = (specs[name].adapters(name, lora.rank, len(parts[name])) for name in lora.targets)
        return {name: spec for adapters in each for name, spec in adapters.items()}

    def matrices(self) -> dict[str, list[TensorName]]:
        """The matrices, which may have adapters, each with the tensors that are stored as one."""
        found: dict[str, list[TensorName]] = {}
        for tensor in self.tensors():
            if not tensor.vector:
                found.setdefault(str(tensor.path[0]), []).append(tensor)
        return found

    def tensors(self) -> list[TensorName]:
        """The tensors of a block of a checkpoint."""
        names = dict(self.modules)
        stacked = ({"q": np.s_[0], "k": np.s_[1], "v": np.s_[2]}, {"gate": np.s_[0], "up": np.s_[1]})
        apart = [{names[key]: part for key, part in parts.items() if key in names} for parts in stacked]
        qkv = apart[0] if "q" in names else {names["qkv"]: ...}
        gate_up = apart[1] if self.gated else {names["up"]: ...}
        return [
            *(tensor for name in ("norm1", "norm2") for tensor in self.norm.tensors(names[name], name)),
            *_parts("qkv", qkv),
            *_parts("gate_up", gate_up),
            *(tensor for name in ("o", "down") for tensor in linear_tensors(names[name], name, bias=True)),
        ]

    def angles(self, places_RP2: jax.Array) -> Angles | None:
        """Cosines and sines of patches at these rows and columns; None without rotary embeddings.

        The first half of the frequencies turns by the row, the second by the column, and each of them are
        theta**(-2 i / (H / 2)).
        """
        if self.rope_theta is None:
            return None
        half = self.head_dim // 2
        frequencies = self.rope_theta ** (-jnp.arange(0, half, 2, dtype=jnp.float32) / half)
        turns = places_RP2.astype(jnp.float32)[..., None] * frequencies
        turns = turns.reshape(*places_RP2.shape[:2], 1, half)
        return jax.lax.optimization_barrier(Angles(jnp.cos(turns), jnp.sin(turns), None))

    def run(
        self, x_RPW: jax.Array, layer: Layer, angles: Angles | None, attend: Attend, lora_scale: float = 1.0
    ) -> jax.Array:
        """The block with the weights of `layer`; `attend` is attention of scaled queries."""
        qkv = linear(self.norm(x_RPW, layer, "norm1"), layer, "qkv", lora_scale=lora_scale)
        heads = (*x_RPW.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (qkv[:, :, part].reshape(heads) for part in range(3))
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        y = attend(q * self.head_dim**-0.5, k, v)
        x_RPW = x_RPW + linear(y.reshape(x_RPW.shape), layer, "o", lora_scale=lora_scale)
        h = linear(self.norm(x_RPW, layer, "norm2"), layer, "gate_up", lora_scale=lora_scale)
        if self.gated:
            h = activated(h[:, :, 0], self.activation) * h[:, :, 1]
        else:
            h = activated(h, self.activation)
        return x_RPW + linear(h, layer, "down", lora_scale=lora_scale)


def _parts(param: str, modules: Mapping[str, object]) -> list[TensorName]:
    """The linear modules, with biases, that are parts of the matrix `param`."""
    pairs = (linear_tensors(module, param, part, bias=True) for module, part in modules.items())
    return [tensor for pair in pairs for tensor in pair]
