"""The forward pass of every supported family: token ids to hidden states, hidden states to logits.

Data flow: log-probabilities, loss and gradient call `forward` on whole rows, with the attention
implementation chosen for the device (`attention/`). The sampler calls the same layers (`run_layers`) for one
token per sequence, with attention over the KV cache (`decode_step.py`).

Shapes: B rows, T tokens, D hidden, N query heads, K key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from quatrain.backend import ACCELERATOR, Backend
from quatrain.models.attention import attention_pattern, self_attention
from quatrain.models.attention.unpacking import Unpacking
from quatrain.models.families import LAYER_TYPES, Architecture
from quatrain.models.layers import (
    Layer,
    linear,
    matmul_transposed,
    mlp_down,
    mlp_up,
    product_in,
    rms_norm,
    rope_angles,
    rope_frequencies,
    rotate,
    softcap,
)
from quatrain.models.params import GatheredLayer, Params, gather_params, output_head_name, partition
from quatrain.parallel.axes import TP
from quatrain.parallel.collectives import (
    all_gather,
    axis_index,
    axis_size,
    current_mesh,
    psum_backward,
    psum_forward,
)

Angles = tuple[jax.Array, jax.Array]
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(q [B, T, N, H], k and v [B, T, K, H], the layer's cache) -> ([B, T, N, H], the layer's new cache).

A cache is any tree of arrays, or None."""
REMAT = ("none", "dots", "layer")
"""What the backward pass recomputes of a layer: nothing, everything except matrix products, or everything."""


def forward(
    params: Params,
    arch: Architecture,
    input_ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    branch_ids: jax.Array | None = None,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    attention: str = "xla",
    packed: bool = True,
    layout: Unpacking | None = None,
    backend: Backend = ACCELERATOR,
) -> jax.Array:
    """Hidden states [B, T, D] of whole rows, after the final norm.

    A query attends to keys of its own segment (segment 0 is padding) at its position or before, within the
    layer's sliding window if it has one. A row may hold several segments; positions count from 0 in each. A
    segment may have branches with shared prefixes, given by `branch_ids` [B, T]: a branch attends to itself
    and to the prefixes that it continues, and its positions follow theirs (`layers.attention_mask`).

    Activations are in `dtype`; norms, rotary embeddings and softmax are computed in float32. `remat` is one
    of `REMAT`, `attention` is the name of an implementation (`kernels.choose_attention`), and `backend` holds
    the block sizes of attention and the order of factors in matrix products. Rows that are not `packed` are
    one sequence each, with padding behind it; packed rows need their `layout` if the implementation
    `unpacks`.
    """

    def attend_within(window: int | None) -> Attend:
        pattern = attention_pattern(
            attention,
            positions,
            segment_ids,
            branch_ids,
            window,
            backend.attention_blocks,
            packed=packed,
            layout=layout,
        )

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: None) -> tuple[jax.Array, None]:
            cap = arch.attention_softcap
            return self_attention(attention, q, k, v, pattern, window=window, cap=cap), cache

        # Without this checkpoint, the padded or repeated heads that a kernel reads would be kept for the
        # backward pass; with it, only queries, keys and values are kept.
        return jax.checkpoint(attend) if remat == "dots" and attention != "xla" else attend

    caches = [None] * arch.num_layers
    return run_layers(
        params,
        arch,
        input_ids,
        positions,
        attend_within,
        caches,
        dtype=dtype,
        remat=remat,
        backend=backend,
    )[0]


def run_layers(
    params: Params,
    arch: Architecture,
    input_ids: jax.Array,
    positions: jax.Array,
    attend_within: Callable[[int | None], Attend],
    caches: Sequence[Any],
    *,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Hidden states [B, T, D] of tokens at `positions` [B, T], and the new cache of each layer.

    `attend_within(window)` is the attention of the layers with this sliding window (None: full attention),
    which takes and returns the cache of each. It must be a pure function: layers that differ in nothing but
    their arrays are traced and lowered once. For the other arguments see `forward`.
    """
    specs = partition(arch, current_mesh())
    x_BTD = _embed(gather_params(params["embed"], specs["embed"], dtype), arch, input_ids).astype(dtype)
    if arch.scale_embeddings:
        x_BTD = x_BTD * jnp.asarray(arch.hidden_size**0.5, dtype)
    angles = _angles(arch, positions)
    windows, kinds, new_caches = layer_windows(arch), dict[Hashable, Any](), []
    attends = {window: attend_within(window) for window in dict.fromkeys(windows)}
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        layer_specs = specs["layers"][i]
        kind = windows[i], tuple(sorted(layer_specs.items()))
        if kind not in kinds:
            run = partial(
                _layer,
                arch=arch,
                attend=attends[windows[i]],
                specs=layer_specs,
                by_parts=remat == "dots",
                few_rows=backend.few_rows,
            )
            kinds[kind] = jax.jit(jax.checkpoint(run) if remat == "layer" else run)
        x_BTD, new_cache = kinds[kind](x_BTD, layer, angles[arch.layer_type(i)], cache)
        new_caches.append(new_cache)
    final_norm = gather_params(params["final_norm"], specs["final_norm"])
    return rms_norm(x_BTD, final_norm, arch.norm_eps, arch.norm_offset), tuple(new_caches)


def _embed(table_VD: jax.Array, arch: Architecture, input_ids: jax.Array) -> jax.Array:
    """Embeddings of `input_ids`; `table_VD` is this device's shard if the vocabulary is sharded over `tp`."""
    axis = vocabulary_axis(arch)
    if axis is None:
        return table_VD[input_ids]
    own = input_ids - axis_index(axis) * len(table_VD)
    there = (own >= 0) & (own < len(table_VD))
    return psum_forward(jnp.where(there[..., None], table_VD[jnp.where(there, own, 0)], 0), axis)


def layer_windows(arch: Architecture) -> list[int | None]:
    """The sliding window of each layer, in tokens; None for a layer with full attention."""
    windows = dict(zip(LAYER_TYPES, (None, arch.sliding_window), strict=True))
    return [windows[arch.layer_type(i)] for i in range(arch.num_layers)]


def output_head(params: Params, arch: Architecture, dtype: DTypeLike) -> jax.Array:
    """The matrix [V, D] in `dtype` that `project` takes; this device's shard if the vocabulary is sharded."""
    name = output_head_name(arch)
    return gather_params(params[name], partition(arch, current_mesh())[name], dtype)


def project(
    head_VD: jax.Array,
    arch: Architecture,
    hidden: jax.Array,
    *,
    dtype: DTypeLike | None = None,
    backend: Backend = ACCELERATOR,
) -> jax.Array:
    """Next-token logits [..., V] float32 of hidden states [..., D] that `forward` returned.

    The product and those of its gradients are in `dtype`, by default that of `hidden`. If the vocabulary is
    sharded over `tp` (`vocabulary_axis`), the logits are those of this device's shard.
    """
    if dtype is None or dtype == jnp.float32:
        scores = matmul_transposed(hidden, head_VD, jnp.float32, few_rows=backend.few_rows)
    else:
        scores = product_in(hidden, head_VD, dtype)
    return softcap(scores, arch.final_softcap)


def scores(params: Params, arch: Architecture, hidden: jax.Array) -> jax.Array:
    """One number [...] float32 for each of the hidden states [..., D] that `forward` returned.

    For models whose `Architecture.head` is `score`.
    """
    head_D = gather_params(params["score"], partition(arch, current_mesh())["score"])[0]
    return jnp.einsum("...D,D->...", hidden, head_D, preferred_element_type=jnp.float32)


def logits(
    params: Params, arch: Architecture, hidden: jax.Array, *, backend: Backend = ACCELERATOR
) -> jax.Array:
    """Next-token logits [..., V] float32 of the whole vocabulary, on every device."""
    scores = project(output_head(params, arch, hidden.dtype), arch, hidden, backend=backend)
    axis = vocabulary_axis(arch)
    return scores if axis is None else all_gather(scores, axis, scores.ndim - 1)


def vocabulary_axis(arch: Architecture) -> str | None:
    """The axis of the current mesh that the vocabulary is sharded over; None if it is not sharded."""
    return TP if TP in partition(arch, current_mesh())["embed"] else None


def _layer(
    x_BTD: jax.Array,
    layer: Layer,
    angles: Angles,
    cache: Any,
    arch: Architecture,
    attend: Attend,
    specs: Mapping[str, PartitionSpec],
    by_parts: bool,
    few_rows: int,
) -> tuple[jax.Array, Any]:
    """x + attention(norm(x)), then x + mlp(norm(x)), and the new cache.

    With `post_norms` both outputs are normalised too.

    The layer is computed in parts, each of which all-gathers its own weights. With `by_parts`, the backward
    pass recomputes every part from its inputs, so gathered weights are not kept between the passes (nor are
    they if the caller recomputes the whole layer). Each part ends with its product with weights: no gradient
    within the part needs the result of that product, so the product is not recomputed. Each `tp` device
    computes its own heads and its own columns of the MLP.
    """

    def part(run: Callable[[Any, Layer], Any], inputs: Any) -> Any:
        def gathering(inputs: Any, layer: Layer) -> Any:
            return run(inputs, GatheredLayer(layer, specs, x_BTD.dtype))

        return (jax.checkpoint(gathering) if by_parts else gathering)(inputs, layer)

    norm = partial(_norm, arch=arch)
    heads_BTKXH = part(partial(_heads, arch=arch, few_rows=few_rows), x_BTD)
    q_BTNH, k_BTKH, v_BTKH = part(partial(_queries_keys_values, angles=angles, arch=arch), heads_BTKXH)
    y_BTNH, cache = attend(q_BTNH, k_BTKH, v_BTKH, cache)
    y_BTD = part(partial(_output, arch=arch, few_rows=few_rows), y_BTNH)
    if arch.post_norms:
        y_BTD = part(partial(norm, name="post_attention_norm"), y_BTD)
    x_BTD = x_BTD + y_BTD
    up = partial(mlp_up, few_rows=few_rows, lora_scale=arch.lora_scale)
    gate_up = part(lambda x, layer: up(norm(x, layer, "mlp_norm"), layer), x_BTD)
    y_BTD = part(partial(mlp_down, arch=arch, few_rows=few_rows), gate_up)
    if arch.post_norms:
        y_BTD = part(partial(norm, name="post_mlp_norm"), y_BTD)
    return x_BTD + y_BTD, cache


def _norm(x: jax.Array, layer: Layer, name: str, arch: Architecture) -> jax.Array:
    return rms_norm(x, layer[name], arch.norm_eps, arch.norm_offset)


def _heads(x_BTD: jax.Array, layer: Layer, arch: Architecture, few_rows: int) -> jax.Array:
    """[B, T, K, G + 2, H]: for each key/value head its G = N / K query heads, its key and its value."""
    x_BTD = psum_backward(_norm(x_BTD, layer, "attention_norm", arch), TP)
    return linear(x_BTD, _own_rows(layer, arch), "qkv", few_rows=few_rows, lora_scale=arch.lora_scale)


def _queries_keys_values(
    heads_BTKXH: jax.Array, layer: Layer, angles: Angles, arch: Architecture
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(queries with rotary embedding, scaled for the dot product; keys with rotary embedding; values)."""
    B, T = heads_BTKXH.shape[:2]
    q_BTNH = heads_BTKXH[:, :, :, :-2].reshape(B, T, -1, arch.head_dim)
    k_BTKH, v_BTKH = heads_BTKXH[:, :, :, -2], heads_BTKXH[:, :, :, -1]
    if arch.qk_norm:
        q_norm, k_norm = (psum_backward(layer[name], TP) for name in ("q_norm", "k_norm"))
        q_BTNH = rms_norm(q_BTNH, q_norm, arch.norm_eps, arch.norm_offset)
        k_BTKH = rms_norm(k_BTKH, k_norm, arch.norm_eps, arch.norm_offset)
    return rotate(q_BTNH, angles) * arch.query_scale, rotate(k_BTKH, angles), v_BTKH


def _output(y_BTNH: jax.Array, layer: Layer, arch: Architecture, few_rows: int) -> jax.Array:
    """The output projection of attention: [B, T, D], summed over all heads of all `tp` devices."""
    y = y_BTNH.reshape(*y_BTNH.shape[:2], -1)
    return linear(y, layer, "o", sum_axis=TP, few_rows=few_rows, lora_scale=arch.lora_scale)


def _own_rows(layer: Layer, arch: Architecture) -> Layer:
    """`qkv`, its bias and its adapters, with the rows that this `tp` device computes.

    If `tp` divides the number of key/value heads, the parameters are sharded and a device holds only its own
    rows. Otherwise there are more devices than key/value heads, and every device holds all of them: several
    devices then compute the same key/value head, each with its own part of that head's query heads.
    """
    if arch.num_kv_heads % axis_size(TP) == 0:
        return layer
    sharing = axis_size(TP) // arch.num_kv_heads
    number = axis_index(TP)

    def own(rows: jax.Array) -> jax.Array:
        head = lax.dynamic_index_in_dim(psum_backward(rows, TP), number // sharing, 0)
        queries = (head.shape[1] - 2) // sharing
        first = number % sharing * queries
        return jnp.concatenate([lax.dynamic_slice_in_dim(head, first, queries, 1), head[:, -2:]], axis=1)

    rows = {name: own(layer[name]) for name in ("qkv", "qkv_bias", "qkv_lora_b") if name in layer}
    return {**rows, **({"qkv_lora_a": layer["qkv_lora_a"]} if "qkv_lora_a" in layer else {})}


def _angles(arch: Architecture, positions: jax.Array) -> dict[str, Angles]:
    """Cosines and sines of the rotary embedding, keyed by layer type (`LAYER_TYPES`)."""
    full = rope_angles(positions, rope_frequencies(arch.head_dim, arch.rope_theta, arch.rope_scaling))
    if arch.local_rope_theta is None:
        return dict.fromkeys(LAYER_TYPES, full)
    local = rope_angles(positions, rope_frequencies(arch.head_dim, arch.local_rope_theta))
    return {"full_attention": full, "sliding_attention": local}
