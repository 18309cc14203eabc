"""The forward pass of every supported family: token ids to hidden states, hidden states to logits.

Data flow: sampling (with a cache) and log-probabilities, loss and gradient (without) all run through here.
Without a cache, attention is the implementation that was chosen for the device (`attention.py`).

Shapes: B rows, T queries, S keys, D hidden, N query heads, K key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quatrain.models.attention import Seen, seen_by, self_attention
from quatrain.models.families import LAYER_TYPES, Architecture
from quatrain.models.kv_cache import KVCache, write
from quatrain.models.layers import (
    Layer,
    attention,
    attention_mask,
    linear,
    mlp,
    rms_norm,
    rope_angles,
    rope_frequencies,
    rotate,
    softcap,
)
from quatrain.models.params import Params

Angles = tuple[jax.Array, jax.Array]
KeysValues = tuple[jax.Array, jax.Array]
Cached = tuple[jax.Array, jax.Array, jax.Array | int]
"""Keys and values of a layer, and the first column to write."""


def forward(
    params: Params,
    arch: Architecture,
    input_ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    cache: KVCache | None = None,
    cache_start: jax.Array | int | None = None,
    branch_ids: jax.Array | None = None,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    attention: str = "xla",
) -> tuple[jax.Array, KVCache | None]:
    """Hidden states [B, T, D] after the final norm, and the cache with the new tokens in it.

    A query attends to keys of its own segment (0 is padding) at its position or before, within the sliding
    window where the layer has one; a row may hold several segments, each with positions from 0. Without a
    cache a segment may have branches, `branch_ids` [B, T]: those from 1 on see themselves and branch 0, and
    have positions that follow it. With a `cache`, a row is one sequence: the T tokens are written at columns
    cache_start..cache_start+T, padding as position -1, and queries attend to all the cache holds. Activations
    are in `dtype`; norms, rotary embeddings and softmax in float32. `remat` recomputes each layer in the
    backward pass, keeping its input. `attention` names the implementation of attention without a cache
    (`kernels.choose_attention`).
    Raises ValueError where a cache comes without `cache_start` or with fewer than T columns.
    """
    if cache is not None:
        cache = _write_positions(cache, positions, segment_ids, cache_start)
    x_BTD = params["embed"][input_ids].astype(dtype)
    if arch.scale_embeddings:
        x_BTD = x_BTD * jnp.asarray(arch.hidden_size**0.5, dtype)
    seen = _seen(arch, positions, segment_ids, branch_ids, cache, attention)
    angles = _angles(arch, positions)

    written = []
    for i, layer in enumerate(params["layers"]):
        kind = arch.layer_type(i)
        cached = None
        if cache is not None and cache_start is not None:
            cached = cache.keys[i], cache.values[i], cache_start
        run = partial(_layer, arch=arch, window=_windows(arch)[kind], implementation=attention)
        x_BTD, keys_values = (jax.checkpoint(run) if remat else run)(
            x_BTD, layer, angles[kind], seen[kind], cached
        )
        written.append(keys_values)
    hidden_BTD = rms_norm(x_BTD, params["final_norm"], arch.norm_eps, arch.norm_offset)
    if cache is None:
        return hidden_BTD, None
    keys, values = zip(*written, strict=True)
    return hidden_BTD, KVCache(keys, values, cache.positions)


def logits(params: Params, arch: Architecture, hidden: jax.Array) -> jax.Array:
    """Next-token logits [..., V] float32 of hidden states [..., D] that `forward` returned."""
    if arch.tie_embeddings:
        weight, product = params["embed"], "...D,VD->...V"
    else:
        weight, product = params["lm_head"], "...D,DV->...V"
    scores = jnp.einsum(product, hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return softcap(scores, arch.final_softcap)


def _layer(
    x_BTD: jax.Array,
    layer: Layer,
    angles: Angles,
    seen: Seen,
    cached: Cached | None,
    arch: Architecture,
    window: int | None,
    implementation: str,
) -> tuple[jax.Array, KeysValues | None]:
    """x + attention(norm(x)), then x + mlp(norm(x)), with norms after both too where the family has them."""
    norm = partial(rms_norm, eps=arch.norm_eps, offset=arch.norm_offset)
    q_BTNH, k_BTKH, v_BTKH = _queries_keys_values(norm(x_BTD, layer["attention_norm"]), layer, angles, arch)
    if cached is None:
        written = None
        y_BTNH = self_attention(
            implementation, q_BTNH, k_BTKH, v_BTKH, seen, window=window, cap=arch.attention_softcap
        )
    else:
        assert isinstance(seen, jax.Array), "with a cache, what is seen is a mask"
        keys, values, start = cached
        written = write(keys, k_BTKH.swapaxes(1, 2), start, 2), write(values, v_BTKH.swapaxes(1, 2), start, 2)
        y_BTNH = attention(q_BTNH, *written, seen, arch.attention_softcap)
    y_BTD = linear(y_BTNH.reshape(*x_BTD.shape[:2], -1), layer, "o")
    x_BTD = x_BTD + (norm(y_BTD, layer["post_attention_norm"]) if arch.post_norms else y_BTD)
    y_BTD = mlp(norm(x_BTD, layer["mlp_norm"]), layer, arch)
    return x_BTD + (norm(y_BTD, layer["post_mlp_norm"]) if arch.post_norms else y_BTD), written


def _queries_keys_values(
    x_BTD: jax.Array, layer: Layer, angles: Angles, arch: Architecture
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries, scaled for the dot product, rotated keys, and values."""
    B, T, _ = x_BTD.shape
    norm = partial(rms_norm, eps=arch.norm_eps, offset=arch.norm_offset)
    q_BTNH = linear(x_BTD, layer, "q").reshape(B, T, arch.num_heads, arch.head_dim)
    k_BTKH = linear(x_BTD, layer, "k").reshape(B, T, arch.num_kv_heads, arch.head_dim)
    v_BTKH = linear(x_BTD, layer, "v").reshape(B, T, arch.num_kv_heads, arch.head_dim)
    if arch.qk_norm:
        q_BTNH, k_BTKH = norm(q_BTNH, layer["q_norm"]), norm(k_BTKH, layer["k_norm"])
    return rotate(q_BTNH, angles) * arch.query_scale, rotate(k_BTKH, angles), v_BTKH


def _write_positions(
    cache: KVCache, positions: jax.Array, segment_ids: jax.Array, cache_start: jax.Array | int | None
) -> KVCache:
    columns, tokens = cache.positions.shape[1], positions.shape[1]
    if cache_start is None or tokens > columns:
        raise ValueError(
            f"a forward pass with a cache needs cache_start and at least as many columns as tokens; got "
            f"cache_start {cache_start}, {columns} columns, {tokens} tokens: make the cache longer"
        )
    new = jnp.where(segment_ids != 0, positions, -1)
    return KVCache(cache.keys, cache.values, write(cache.positions, new, cache_start, axis=1))


def _seen(
    arch: Architecture,
    positions: jax.Array,
    segment_ids: jax.Array,
    branch_ids: jax.Array | None,
    cache: KVCache | None,
    implementation: str,
) -> dict[str, Seen]:
    """Who sees whom in each layer type in use, made once for all layers: masks where there is a cache."""
    kinds = sorted(set(arch.layer_types or LAYER_TYPES[:1]))
    windows = _windows(arch)
    if cache is None:
        return {
            kind: seen_by(implementation, positions, segment_ids, branch_ids, windows[kind]) for kind in kinds
        }
    filled = (cache.positions >= 0).astype(jnp.int32)
    real = (segment_ids != 0).astype(jnp.int32)
    return {kind: attention_mask(positions, cache.positions, real, filled, windows[kind]) for kind in kinds}


def _windows(arch: Architecture) -> dict[str, int | None]:
    return dict(zip(LAYER_TYPES, (None, arch.sliding_window), strict=True))


def _angles(arch: Architecture, positions: jax.Array) -> dict[str, Angles]:
    """The rotary angles of each layer type."""
    full = rope_angles(positions, rope_frequencies(arch.head_dim, arch.rope_theta, arch.rope_scaling))
    if arch.local_rope_theta is None:
        return dict.fromkeys(LAYER_TYPES, full)
    local = rope_angles(positions, rope_frequencies(arch.head_dim, arch.local_rope_theta))
    return {"full_attention": full, "sliding_attention": local}
