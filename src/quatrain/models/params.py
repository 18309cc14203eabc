"""One tree of parameter specs, from which abstract values, initial values and (later) shardings follow.

Data flow: `Architecture` -> specs -> the parameter tree that loading fills and the decoder reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quatrain.models.families import Architecture

Params = dict[str, Any]
"""{"embed": [V, D], "layers": [one dict per layer], "final_norm": [D], "lm_head": [D, V] if untied}."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape, the logical axis of each dimension, and how it is drawn.

    Logical axes: `vocab`, `embed` (hidden), `heads` (query heads x head size), `kv_heads` (key or value
    heads x head size), `mlp`, `norm` (never worth splitting). `scale` is the standard deviation of
    `normal` and the value of `constant`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "constant"]
    scale: float


def param_specs(arch: Architecture) -> Params:
    """The tree of `ParamSpec`s of `arch`. Matrices are stored [in, out], so that `x @ w` applies them.

    Normal weights have standard deviation in**-0.5, divided by sqrt(2 * layers) where they write to the
    residual stream (Radford et al. 2019), so that its variance does not grow with depth.
    """
    d = arch.hidden_size
    specs: Params = {
        "embed": ParamSpec((arch.vocab_size, d), ("vocab", "embed"), "normal", d**-0.5),
        "layers": [_layer_specs(arch) for _ in range(arch.num_layers)],
        "final_norm": _norm(arch, d),
    }
    if not arch.tie_embeddings:
        specs["lm_head"] = ParamSpec((d, arch.vocab_size), ("embed", "vocab"), "normal", d**-0.5)
    return specs


def _layer_specs(arch: Architecture) -> dict[str, ParamSpec]:
    d, f = arch.hidden_size, arch.intermediate_size
    heads, kv_heads = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    residual = (2 * arch.num_layers) ** -0.5
    specs = {
        "attention_norm": _norm(arch, d),
        "q": _matrix(d, heads, ("embed", "heads")),
        "k": _matrix(d, kv_heads, ("embed", "kv_heads")),
        "v": _matrix(d, kv_heads, ("embed", "kv_heads")),
        "o": _matrix(heads, d, ("heads", "embed"), residual),
        "mlp_norm": _norm(arch, d),
        "gate": _matrix(d, f, ("embed", "mlp")),
        "up": _matrix(d, f, ("embed", "mlp")),
        "down": _matrix(f, d, ("mlp", "embed"), residual),
    }
    biased = "qkv" * arch.qkv_bias + "o" * arch.output_bias
    for name in [*biased, *(("gate", "up", "down") if arch.mlp_bias else ())]:
        out, axis = specs[name].shape[1], specs[name].axes[1]
        specs[f"{name}_bias"] = ParamSpec((out,), (axis,), "constant", 0.0)
    if arch.qk_norm:
        specs |= {"q_norm": _norm(arch, arch.head_dim), "k_norm": _norm(arch, arch.head_dim)}
    if arch.post_norms:
        specs |= {"post_attention_norm": _norm(arch, d), "post_mlp_norm": _norm(arch, d)}
    return specs


def _matrix(rows: int, columns: int, axes: tuple[str, str], factor: float = 1.0) -> ParamSpec:
    return ParamSpec((rows, columns), axes, "normal", factor * rows**-0.5)


def _norm(arch: Architecture, size: int) -> ParamSpec:
    return ParamSpec((size,), ("norm",), "constant", 1.0 - arch.norm_offset)


def is_spec(leaf: object) -> bool:
    """Whether `leaf` is a ParamSpec; for `jax.tree.map(..., is_leaf=is_spec)`."""
    return isinstance(leaf, ParamSpec)


def init_params(arch: Architecture, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters for `arch`; the key of each is folded from its place in the tree."""
    specs, structure = jax.tree.flatten(param_specs(arch), is_leaf=is_spec)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(specs)))
    drawn = [_draw(keys[i], spec, jnp.dtype(dtype)) for i, spec in enumerate(specs)]
    return jax.tree.unflatten(structure, drawn)


@partial(jax.jit, static_argnames=("spec", "dtype"))
def _draw(key: jax.Array, spec: ParamSpec, dtype: jnp.dtype) -> jax.Array:
    if spec.init == "constant":
        return jnp.full(spec.shape, spec.scale, dtype)
    return (spec.scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)


def abstract_params(arch: Architecture, dtype: DTypeLike = jnp.float32) -> Params:
    """The tree as shapes and dtypes, without any memory."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), param_specs(arch), is_leaf=is_spec)


def num_params(arch: Architecture) -> int:
    """Number of parameters; tied embeddings count once."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(arch), is_leaf=is_spec))
