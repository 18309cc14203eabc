"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it.

y = W_o (norm(rule(conv(q, k, v), beta, g)) * silu(z)), with the rule of `models/delta_rule.py`.

Shapes: B rows, T tokens, D hidden, K key heads, G value heads of each, E size of keys, F of values,
C = 2 E + G F channels of the convolution over W tokens, X = C + G F.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from itertools import pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.config.mesh import MeshShape
from quatrain.models.blocks.layer_run import Costs, Enter, GatheredLayer, LayerRun
from quatrain.models.delta_rule import BLOCK, CHUNK, DeltaWeights
from quatrain.models.layers import Layer, Norm, rms_norm
from quatrain.models.rope import Angles
from quatrain.models.spec import ParamSpec, TensorName, linear_tensors, require
from quatrain.parallel.axes import TP
from quatrain.parallel.collectives import psum_backward

Recur = Callable[[jax.Array, jax.Array, DeltaWeights, int, Any], tuple[jax.Array, Any]]
"""(x [B, T, K, X], what beta and g are made of [B, T, K, 2 G], weights, E, the layer's cache) ->
([B, T, K, G F], the layer's new cache)."""


@dataclass(frozen=True)
class GatedDeltaNet:
    """A memory of each value head, of which `num_heads` / `num_key_heads` share a key head."""

    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int
    conv_width: int = 4
    grouped: bool = False
    """Whether a checkpoint has all of a key head's inputs together, in one tensor (Qwen3-Next)."""

    rope: ClassVar[None] = None
    sharing: ClassVar[None] = None
    window: ClassVar[None] = None

    def __post_init__(self) -> None:
        multiple = f"a multiple of linear_num_key_heads = {self.num_key_heads}"
        require(self.num_heads % self.num_key_heads == 0, "linear_num_value_heads", multiple, self.num_heads)
        require(self.conv_width > 1, "linear_conv_kernel_dim", "2 or more", self.conv_width)

    @property
    def _group(self) -> int:
        return self.num_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """C: queries, keys and values of a key head."""
        return 2 * self.key_size + self._group * self.value_size

    @property
    def _inputs(self) -> int:
        """X."""
        return self.channels + self._group * self.value_size

    def params(self, d: int, norm: Norm, residual: float) -> dict[str, ParamSpec]:
        """`qkv` [K, X, D], of each key head what queries, keys, values and their gates z are made of; `ba`
        [K, 2 G, D]; the convolution, the decay, a norm; and `o` [D, K G F], scaled by `residual`.
        """
        K, V = self.num_key_heads, self.num_heads
        by_head = ("kv_heads", "group", "embed")
        # By key head like everything else here, so that `tp` and `cp` devices own whole key heads with their
        # values.
        conv = (K, self.channels, self.conv_width)
        return {
            "qkv": ParamSpec.matrix((K, self._inputs, d), by_head),
            "ba": ParamSpec.matrix((K, 2 * self._group, d), by_head),
            "conv": ParamSpec.matrix(conv, ("kv_heads", "group", "rank")),
            "a_log": ParamSpec((V,), ("heads",), "uniform", 2.0),
            "dt_bias": ParamSpec((V,), ("heads",), "constant", -3.0),
            "delta_norm": ParamSpec((self.value_size,), ("norm",), "constant", 1.0),
            "o": ParamSpec.matrix((d, V * self.value_size), ("embed", "heads"), residual),
        }

    def tensors(self) -> list[TensorName]:
        """Its tensors in a layer of a checkpoint."""
        G, C = self._group, self.channels
        by_part = _by_part(self.num_key_heads, self.key_size, G * self.value_size)
        parts: dict[str, tuple[str, Any]] = {
            "in_proj_qkv": ("qkv", by_part),
            "in_proj_z": ("qkv", np.s_[:, C:]),
            "in_proj_b": ("ba", np.s_[:, :G]),
            "in_proj_a": ("ba", np.s_[:, G:]),
        }
        if self.grouped:
            parts = {"in_proj_qkvz": ("qkv", ...), "in_proj_ba": ("ba", ...)}
        matrices = {**parts, "out_proj": ("o", ...)}
        linear = [
            linear_tensors(f"linear_attn.{module}", name, part, bias=False)[0]
            for module, (name, part) in matrices.items()
        ]
        return [
            *linear,
            TensorName("linear_attn.conv1d.weight", ("conv",), by_part, vector=False, kernel=True),
            TensorName("linear_attn.A_log", ("a_log",)),
            TensorName("linear_attn.dt_bias", ("dt_bias",)),
            TensorName("linear_attn.norm.weight", ("delta_norm",)),
        ]

    def stacked(self, name: str) -> tuple[int, ...]:
        """How many rows of a key head in matrix `name` each of its tensors has; () if it is one tensor."""
        values = self._group * self.value_size
        apart = {"qkv": (self.channels, values), "ba": (self._group,) * 2}
        return () if self.grouped else apart.get(name, ())

    def run(
        self, x_BTD: jax.Array, enter: Enter, run: LayerRun, angles: Angles | None, recur: Recur, cache: Any
    ) -> tuple[jax.Array, Any]:
        """The block of `enter(x)`: ([B, T, D], summed over the heads of all `tp` devices, the new cache)."""

        def inputs(x_BTD: jax.Array, layer: Layer) -> tuple[jax.Array, ...]:
            x_BTD = psum_backward(enter(x_BTD, layer), TP)
            both = (run.linear(x_BTD, layer, name, stacked=self.stacked(name)) for name in ("qkv", "ba"))
            return tuple(both)

        def output(rule: tuple[jax.Array, jax.Array], layer: Layer) -> jax.Array:
            y_BTV, x_BTKX = rule
            y, z = (
                each.reshape(*each.shape[:2], -1, self.value_size)
                for each in (y_BTV, x_BTKX[..., self.channels :])
            )
            y = rms_norm(y, psum_backward(layer["delta_norm"], TP), run.norm.eps)
            # In float32 and after the norm, as the published models were trained.
            y = (y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(y.dtype)
            return run.linear(y.reshape(*y.shape[:2], -1), layer, "o", sum_axis=TP)

        x_BTKX, ba_BTKG = run.part(inputs, x_BTD)
        layer = GatheredLayer(run.layer, run.specs, run.dtype)
        # Gathered outside of a part: the rule has a backward pass of its own, which reads them again.
        weights = DeltaWeights(layer["conv"], layer["a_log"], layer["dt_bias"])
        y_BTKV, cache = recur(x_BTKX, ba_BTKG, weights, self.key_size, cache)
        return run.part(output, (y_BTKV, x_BTKX)), cache

    def splits(self, tp: int) -> bool:
        """Whether `tp` devices can share its key heads."""
        return self.num_key_heads % tp == 0

    @property
    def split_rule(self) -> str:
        """What a valid `tp` does, for an error."""
        return f"divides the {self.num_key_heads} key heads of DeltaNet layers"

    def exchanges(self, tp: int, cp: int) -> bool:
        """Whether `cp` devices can exchange these key heads for tokens."""
        return self.num_key_heads // tp % cp == 0

    def state(self, slots: int, positions: int, tp: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of a `DeltaState`, which has the same size for any number of tokens."""
        K, values = self.num_key_heads, self._group * self.value_size
        return (slots, K, self.conv_width - 1, self.channels), (slots, K, self.key_size, values)

    def costs(self, d: int, mesh: MeshShape) -> Costs:
        """Of a block for hidden states of `d` elements; the rule's products count as weights."""
        K, V = self.num_key_heads // mesh.tp, self.num_heads // mesh.tp
        E, F = self.key_size, self.value_size
        rule = V * (3 * E * F + 2 * CHUNK * F + (CHUNK**2 - BLOCK**2) // 3) + K * 2 * CHUNK * E
        inputs, ba = K * self._inputs, 2 * V
        padded = K * self.channels  # the inputs of the convolution, of which the compiler keeps a padded copy
        return Costs(
            weights=d * (inputs + ba + V * F) + rule,
            per_key=0,
            outputs={"qkv": inputs, "ba": ba, "o": d},
            kept=inputs + padded + ba + V * F,
            normed=2 * V * F,  # and its product with the gate
            working=4 * inputs + padded + 2 * V * F,
            statistics=0,
            states=K * (E * self._group * F + (self.conv_width - 1) * self.channels) // CHUNK,
            chunk=V * (8 * CHUNK**2 + 6 * E * F) + 6 * K * CHUNK * self.channels,
        )


@cached
def _by_part(key_heads: int, key_size: int, values: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The index of [K, X, ...] that gives the queries of all key heads, then all keys, then all values."""
    ends = (0, key_size, 2 * key_size, 2 * key_size + values)
    order = [
        (head, row) for first, end in pairwise(ends) for head in range(key_heads) for row in range(first, end)
    ]
    heads, rows = zip(*order, strict=True)
    return heads, rows
