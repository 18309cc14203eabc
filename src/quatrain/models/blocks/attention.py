"""Grouped-query attention with rotary embeddings.

Shapes: B rows, T tokens, D hidden, N query heads, K key/value heads, G = N / K, X = G + 2, H head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quatrain.config.mesh import MeshShape
from quatrain.models.blocks.layer_run import Costs, Enter, GatheredLayer, LayerRun
from quatrain.models.layers import Layer, Norm, rms_norm
from quatrain.models.rope import Angles, Rope, rotate
from quatrain.models.spec import LORA_A, LORA_B, ParamSpec, TensorName, linear_tensors, part_tensors, require
from quatrain.parallel.axes import TP
from quatrain.parallel.collectives import axis_index, axis_size, psum_backward, psum_forward

Attend = Callable[[jax.Array, Any, Any, Any, Any], tuple[jax.Array, Any]]
"""(q [B, T, N, H], k and v [B, T, K, H], sinks [N] float32 or None, the layer's cache) -> ([B, T, N, H], the
layer's new cache).

A cache is any tree of arrays, or None. A layer that `reuses` keys and values has neither k nor v (None), and
the cache is a pair: that of the layer that lends them, before it and after it."""


@dataclass(frozen=True)
class Attention:
    """Attention of `num_heads` query heads, several of which may share a key/value head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: queries and keys are not rotated."""
    window: int | None = None
    """The sliding window in tokens; None: full attention."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norm_over_heads: bool = False
    """Whether these norms are of all heads together, not of each (OLMo 2)."""
    scale: float | None = None
    """The factor of scores; None: head_dim ** -0.5."""
    softcap: float | None = None
    """The soft cap of scores (`layers.softcap`)."""
    fused: bool = False
    """Whether a checkpoint has queries, keys and values as one tensor (Phi-3)."""
    keys_are_values: bool = False
    """Whether values are the keys before their norm (Gemma 4)."""
    clip: float | None = None
    """Queries, keys and values are clipped to +-clip before they are rotated (OLMoE)."""
    value_norm: bool = False
    """Whether values are normalised, without weights."""
    gate: bool = False
    """Whether what a head adds is multiplied by the sigmoid of a gate (Qwen3-Next)."""
    sinks: bool = False
    """Whether a number of each head is one more score of the softmax, without a value (gpt-oss)."""
    sharing: Literal["lends", "reuses"] | None = None
    """Whether a layer reuses keys and values of an earlier one, the last that lends with the same window."""

    def __post_init__(self) -> None:
        multiple = f"a multiple of num_kv_heads = {self.num_kv_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "num_heads", multiple, self.num_heads)
        even = self.head_dim > 0 and self.head_dim % 2 == 0
        require(even, "head_dim", "a positive even number", self.head_dim)
        require(self.window is None or self.window > 0, "sliding_window", "a positive number", self.window)

    @property
    def query_scale(self) -> float:
        """The factor that queries are multiplied by before the dot product with keys."""
        return float(self.head_dim) ** -0.5 if self.scale is None else self.scale

    def params(self, d: int, norm: Norm, residual: float) -> dict[str, ParamSpec]:
        """`qkv` [K, G + 2, H, D], `o` [D, N H], whose standard deviation is scaled by `residual`, and others.

        `qkv` holds for each key/value head its G query heads, its key head and its value head. Values that
        are keys have no head of their own there, and reused keys and values none at all. Gates stand after
        the query heads that they belong to.
        """
        # By key/value head, so that a `tp` device's rows are neighbours and one product makes all three.
        shape = (self.num_kv_heads, self._queries + self._others, self.head_dim, d)
        specs = {
            "qkv": ParamSpec.matrix(shape, ("kv_heads", "group", "head", "embed")),
            "o": ParamSpec.matrix((d, self.num_heads * self.head_dim), ("embed", "heads"), residual),
        }
        biased = ["qkv"] * self.qkv_bias + ["o"] * self.output_bias
        return (
            specs
            | {f"{name}_bias": specs[name].bias() for name in biased}
            | {name: norm.spec(self.head_dim * heads) for name, heads in self._norms.items()}
            | self._sinks
        )

    @property
    def _sinks(self) -> dict[str, ParamSpec]:
        spec = ParamSpec((self.num_heads,), ("heads",), "constant", 0.0)
        return {"sinks": spec} if self.sinks else {}

    @property
    def _norms(self) -> dict[str, int]:
        """The norms of queries and keys, and how many heads one has weights for."""
        if not self.qk_norm:
            return {}
        queries, keys = (self.num_heads, self.num_kv_heads) if self.norm_over_heads else (1, 1)
        return {"q_norm": queries} | ({"k_norm": keys} if self._others else {})

    @property
    def _others(self) -> int:
        """Heads beside the queries of each key/value head: a key and a value, a key alone, or none."""
        return 0 if self.sharing == "reuses" else 2 - self.keys_are_values

    @property
    def _queries(self) -> int:
        """Query heads of each key/value head, and their gates."""
        return self.num_heads // self.num_kv_heads * (1 + self.gate)

    def tensors(self) -> list[TensorName]:
        """Its tensors in a layer of a checkpoint."""
        elements, queries = self._elements, self._queries
        apart = {
            "q_proj": np.s_[:, :queries, *elements],
            "k_proj": np.s_[:, queries, *elements],
            "v_proj": np.s_[:, -1],
        }
        parts = {name: apart[name] for name in [*apart][: 1 + self._others]}
        if self.fused:
            parts = {"qkv_proj": self._one_after_another}
        return [
            *part_tensors("self_attn", "qkv", parts, bias=self.qkv_bias),
            *linear_tensors("self_attn.o_proj", "o", bias=self.output_bias),
            *(TensorName(f"self_attn.{name}.weight", (name,)) for name in self._norms),
            *(TensorName(f"self_attn.{name}", (name,)) for name in self._sinks),
        ]

    @property
    def _one_after_another(self) -> Any:
        """The index of `qkv` [K, G + 2, H, D] that gives all queries, then all keys, then all values."""
        heads, group = range(self.num_kv_heads), range(self.num_heads // self.num_kv_heads)
        order = [(head, x) for head in heads for x in group]
        order += [(head, x) for x in (-2, -1) for head in heads]
        return tuple(zip(*order, strict=True))

    @property
    def _elements(self) -> tuple[tuple[int, ...], ...]:
        """The index of a head's elements in the order of a checkpoint; () if it is the order here."""
        if self.rope is None or not self.rope.interleaved:
            return ()
        half = self.rope.rotated(self.head_dim) // 2
        pairs = [i + offset for i in range(half) for offset in (0, half)]
        return ((*pairs, *range(2 * half, self.head_dim)),)

    def run(
        self, x_BTD: jax.Array, enter: Enter, run: LayerRun, angles: Angles | None, attend: Attend, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Attention of `enter(x)`: ([B, T, D], summed over the heads of all `tp` devices, the new cache)."""

        def heads(x_BTD: jax.Array, layer: Layer) -> jax.Array:
            """[B, T, K, X, H]: for each key/value head its query heads, then its key and value, if any."""
            # Each `tp` device has the gradient of its heads alone: the sum belongs where their inputs part.
            x_BTD = psum_backward(enter(x_BTD, layer), TP)
            return run.linear(x_BTD, self._rows_of_device(layer), "qkv")

        def clipped(x: jax.Array) -> jax.Array:
            return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)

        def turned(x: jax.Array, layer: Layer, norm_name: str) -> jax.Array:
            if self.qk_norm:
                # OLMo 2 takes one root mean square over all heads, of which a `tp` device has a part.
                norm = partial(self._norm_of_all_heads, run.norm) if self.norm_over_heads else run.norm
                x = norm(x, psum_backward(layer[norm_name], TP))
            x = clipped(x)
            return x if angles is None else rotate(x, angles)

        def queries_keys_values(heads_BTKXH: jax.Array, layer: Layer) -> tuple[Any, ...]:
            """(queries, rotated and scaled for the dot product; keys, rotated; values)."""
            B, T, queries = *heads_BTKXH.shape[:2], heads_BTKXH.shape[3] - self._others
            q_BTKGH = heads_BTKXH[:, :, :, : queries : 1 + self.gate]
            q_BTNH = turned(q_BTKGH.reshape(B, T, -1, self.head_dim), layer, "q_norm")
            if angles is not None and angles.query_scale is not None:
                q_BTNH = q_BTNH * angles.query_scale.astype(q_BTNH.dtype)
            # Queries, not scores: there are H numbers of a token in place of one for each key.
            q_BTNH = q_BTNH * self.query_scale
            if self.sharing == "reuses":
                return q_BTNH, None, None
            k_BTKH, v_BTKH = heads_BTKXH[:, :, :, queries], heads_BTKXH[:, :, :, -1]
            if self.value_norm:
                # Values that are keys are taken before the keys' norm and rotation, so they are normed by
                # themselves.
                v_BTKH = rms_norm(v_BTKH, jnp.ones(self.head_dim), run.norm.eps)
            return q_BTNH, turned(k_BTKH, layer, "k_norm"), clipped(v_BTKH)

        def output(y_BTNH: jax.Array, layer: Layer) -> jax.Array:
            return run.linear(y_BTNH.reshape(*y_BTNH.shape[:2], -1), layer, "o", sum_axis=TP)

        def gated(y_and_heads: tuple[jax.Array, jax.Array], layer: Layer) -> jax.Array:
            y_BTNH, heads_BTKXH = y_and_heads
            # A gate stands after its query head, so that a `tp` device that has the one has the other.
            gates = heads_BTKXH[:, :, :, 1 : heads_BTKXH.shape[3] - self._others : 2]
            return output(y_BTNH * jax.nn.sigmoid(gates).reshape(y_BTNH.shape), layer)

        heads_BTKXH = run.part(heads, x_BTD)
        q_BTNH, k_BTKH, v_BTKH = run.part(queries_keys_values, heads_BTKXH)
        sinks_N = None
        if self.sinks:
            sinks_N = GatheredLayer(run.layer, run.specs, run.dtype)["sinks"].astype(jnp.float32)
        y_BTNH, cache = attend(q_BTNH, k_BTKH, v_BTKH, sinks_N, cache)
        if self.gate:
            return run.part(gated, (y_BTNH, heads_BTKXH)), cache
        return run.part(output, y_BTNH), cache

    def _rows_of_device(self, layer: Layer) -> Layer:
        """`qkv`, its bias and its adapters, with the rows that this `tp` device computes.

        If `tp` divides the number of key/value heads, the parameters are sharded and a device holds only its
        rows. Otherwise there are more devices than key/value heads, and every device holds all of them:
        several devices then compute the same key/value head, each with its part of that head's query heads.
        """
        if self.num_kv_heads % axis_size(TP) == 0:
            return layer
        sharing = axis_size(TP) // self.num_kv_heads
        number = axis_index(TP)

        def sliced(rows: jax.Array) -> jax.Array:
            head = lax.dynamic_index_in_dim(psum_backward(rows, TP), number // sharing, 0)
            all_queries = head.shape[1] - self._others
            queries = all_queries // sharing
            own = lax.dynamic_slice_in_dim(head, number % sharing * queries, queries, 1)
            return jnp.concatenate([own, head[:, all_queries:]], axis=1)

        rows = {name: sliced(layer[name]) for name in ("qkv", "qkv_bias", "qkv" + LORA_B) if name in layer}
        # A reads whole inputs and is not by head: every device uses all of it.
        return {**rows, **{name: layer[name] for name in ("qkv" + LORA_A,) if name in layer}}

    @staticmethod
    def _norm_of_all_heads(norm: Norm, x_BTNH: jax.Array, weight: jax.Array) -> jax.Array:
        """The RMS norm over all heads, of which this `tp` device has N, with the `weight` [heads x H] of all.

        Of keys a device may have a head that others have too: there are more devices than such heads.
        """
        H, devices = x_BTNH.shape[-1], axis_size(TP)
        # Copies of a key head are summed too: divided by their number, the sum counts each head once.
        heads, copies = len(weight) // H, x_BTNH.shape[2] * devices * H // len(weight)
        first = axis_index(TP) * heads // devices * H
        weight = lax.dynamic_slice_in_dim(weight, first, x_BTNH.shape[2] * H)
        x32 = x_BTNH.astype(jnp.float32)
        squares = jnp.square(x32).sum(axis=(2, 3), keepdims=True)
        squares = psum_backward(psum_forward(squares, TP), TP) / (heads * copies * H)
        factors = norm.offset + weight.astype(jnp.float32).reshape(-1, H)
        return (x32 * lax.rsqrt(squares + norm.eps) * factors).astype(x_BTNH.dtype)

    def splits(self, tp: int) -> bool:
        """Whether `tp` devices can share its heads."""
        return not (self.num_heads % tp or (self.num_kv_heads % tp and tp % self.num_kv_heads))

    def heads_of_device(self, tp: int) -> tuple[int, int]:
        """Query heads and key/value heads that one of `tp` devices computes."""
        return self.num_heads // tp, max(self.num_kv_heads // tp, 1)

    def exchanges(self, tp: int, cp: int) -> bool:
        """Whether `cp` devices can exchange these heads for tokens."""
        queries, keys = self.heads_of_device(tp)
        # Heads are exchanged whole; where `cp` exceeds the key heads, several devices take the same one.
        return not (queries % cp or (keys % cp and cp % keys))

    @property
    def split_rule(self) -> str:
        """What a valid `tp` does, for an error."""
        return (
            f"divides the {self.num_heads} query heads, divides or is a multiple of the {self.num_kv_heads} "
            "key/value heads"
        )

    def state(self, slots: int, positions: int, tp: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of cached keys and values, if it has its own.

        With fewer heads than `tp` devices, each device has one.
        """
        heads = max(self.num_kv_heads, tp)
        if self.sharing == "reuses":
            return ()
        return (slots, heads, self.head_dim, positions), (slots, heads, positions, self.head_dim)

    def costs(self, d: int, mesh: MeshShape) -> Costs:
        """Of a block for hidden states of `d` elements."""
        queries = self.num_heads * self.head_dim // mesh.tp
        heads, keys = self.heads_of_device(mesh.tp)
        keys_values, gates = self._others * keys * self.head_dim, queries * self.gate
        return Costs(
            weights=d * (2 * queries + gates + keys_values),
            per_key=queries,
            outputs={"qkv": queries + gates + keys_values, "o": d},
            kept=2 * queries + gates + keys_values,
            normed=self.qk_norm * (queries + keys_values),
            working=3 * queries + 2 * gates + keys_values,
            statistics=heads,
        )
