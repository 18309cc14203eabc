"""The forward pass of every supported family: token ids to hidden states, hidden states to logits.

Data flow: log-probabilities, loss and gradient call `forward` on whole rows, with the attention
implementation chosen for the device (`attention/`). The sampler calls the same layers (`run_layers`) for one
token per sequence, with attention over the KV cache (`decode_step.py`).

Shapes: B rows, T tokens, D hidden, N query heads, K key/value heads, H head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache as cached
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from quatrain.backend import ACCELERATOR, Backend
from quatrain.models.architecture import Architecture, LayerKind, Mixer
from quatrain.models.attention import attention_pattern, self_attention
from quatrain.models.attention.unpacking import Unpacking
from quatrain.models.blocks.attention import Attend, Attention
from quatrain.models.blocks.delta import Recur
from quatrain.models.blocks.experts import Experts, Routed, RouterSums
from quatrain.models.blocks.layer_run import Enter, LayerRun, gather_params, recomputed
from quatrain.models.delta_rule import Chunks, DeltaWeights, delta_rule, one_sequence
from quatrain.models.layers import Layer, matmul_transposed, product_in, softcap
from quatrain.models.params import LM_HEAD, Params, output_head_name, partition
from quatrain.models.rope import Angles, rope_angles
from quatrain.models.spec import LORA_A, LORA_B
from quatrain.models.vision import Inserts
from quatrain.ops.logprobs import Rows, States
from quatrain.parallel.axes import CP, TP
from quatrain.parallel.collectives import (
    all_gather,
    axis_index,
    axis_size,
    columns_to_heads,
    current_mesh,
    heads_to_columns,
    local_columns,
    psum_backward,
    psum_forward,
)

REMAT = ("none", "dots", "layer")
"""What the backward pass recomputes of a layer: nothing, everything except matrix products, or everything."""


class Forwarded(NamedTuple):
    """What the layers return; `routes` and `sums` are None in a model without experts."""

    hidden: jax.Array
    """[B, T, D], after the final norm."""
    caches: tuple[Any, ...]
    """The new cache of each layer that has one."""
    routes: jax.Array | None
    """[B, T, L, k] of `Routes.dtype`: the experts that each token took in each layer of experts."""
    sums: RouterSums | None
    """[L, ...]: sums over this device's tokens, if tokens are `counted`."""


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
    chunks: Chunks | None = None,
    routes: jax.Array | None = None,
    counted: jax.Array | None = None,
    turns: jax.Array | None = None,
    inserts: Inserts | None = None,
    backend: Backend = ACCELERATOR,
) -> Forwarded:
    """Hidden states [B, T, D] of whole rows, after the final norm; on a mesh with `cp`, [B, T / cp, D].

    A device of `cp` has those of its part of the columns (`local_columns`). It computes attention for all
    tokens and its part of the heads: queries, keys and values are exchanged before it, and its output after
    it (all-to-all, as DeepSpeed-Ulysses, arXiv:2309.14509).

    A query attends to keys of its own segment (segment 0 is padding) at its position or before, within the
    layer's sliding window if it has one. A row may hold several segments; positions count from 0 in each. A
    segment may have branches with shared prefixes, given by `branch_ids` [B, T]: a branch attends to itself
    and to the prefixes that it continues, and its positions follow theirs (`layers.attention_mask`).

    Activations are in `dtype`; norms, rotary embeddings and softmax are computed in float32. `remat` is one
    of `REMAT`, `attention` is the name of an implementation (`kernels.choose_attention`), and `backend` holds
    the block sizes of attention and the order of factors in matrix products. Rows that are not `packed` are
    one sequence each, with padding behind it; packed rows may need their `layout`
    (`attention.unpacks_above`). In DeltaNet layers rows are one sequence each, with padding at their ends,
    unless their `chunks` are given. For `routes` [B, T, L, k], `counted` [B, T], `turns` [3, B, T] and
    `inserts` see `run_layers`: routes and sums that are returned are of the tokens of this device of `cp`.
    """

    def attend_of(mixer: Attention) -> Attend:
        window, cap, sizes = mixer.window, mixer.softcap, backend.attention_blocks
        pattern = attention_pattern(
            attention, positions, segment_ids, branch_ids, window, sizes, packed=packed, layout=layout
        )

        def attend(q: jax.Array, k: Any, v: Any, sinks: Any, cache: Any) -> tuple[jax.Array, Any]:
            q = columns_to_heads(q, CP)
            # What is lent has been exchanged over `cp` already, and must not be exchanged again.
            k, v = cache[1] if mixer.sharing == "reuses" else (_all_tokens(k), _all_tokens(v))
            lent = (k, v) if mixer.sharing == "lends" else None
            sinks = None if sinks is None else _heads_of_cp_device(sinks)
            y = self_attention(attention, q, k, v, pattern, window=window, cap=cap, sinks=sinks)
            return heads_to_columns(y, CP), lent

        # Without this checkpoint, the padded or repeated heads that a kernel reads would be kept for the
        # backward pass; with it, only queries, keys and values are kept.
        return jax.checkpoint(attend) if remat == "dots" and attention != "xla" else attend

    if arch.deltas and chunks is None:
        chunks = one_sequence(segment_ids)

    def recur(
        x: jax.Array, ba: jax.Array, weights: DeltaWeights, key_size: int, cache: Any
    ) -> tuple[jax.Array, Any]:
        assert chunks is not None
        if axis_size(CP) > 1:
            x, ba = (columns_to_heads(each, CP) for each in (x[..., : weights.conv.shape[1]], ba))
            weights = jax.tree.map(_heads_of_cp_device, weights)
        y = delta_rule(x, ba, chunks, weights, key_size)
        return heads_to_columns(y, CP), None

    tokens = local_columns(input_ids, CP), local_columns(positions, CP)
    # Experts are chosen for the device's own columns; positions and segments stay whole, attention reads all.
    routes, counted = (each if each is None else local_columns(each, CP) for each in (routes, counted))
    if turns is not None:
        turns = jnp.stack([local_columns(axis, CP) for axis in turns])
    if inserts is not None:
        inserts = inserts._replace(rows=local_columns(inserts.rows, CP))
    return run_layers(
        params,
        arch,
        *tokens,
        attend_of,
        recur,
        [None] * arch.num_caches,
        routes=routes,
        counted=counted,
        turns=turns,
        inserts=inserts,
        dtype=dtype,
        remat=remat,
        backend=backend,
    )


def _heads_of_cp_device(weight: jax.Array) -> jax.Array:
    """The part of a weight by heads that is of the heads that this `cp` device exchanges tokens for."""
    size = len(weight) // axis_size(CP)
    return lax.dynamic_slice_in_dim(weight, axis_index(CP) * size, size)


def _all_tokens(x_BTKH: jax.Array) -> jax.Array:
    """Keys or values of all tokens, of the heads that this `cp` device's queries read.

    With fewer heads than devices, several have the same one.
    """
    copies = max(axis_size(CP) // x_BTKH.shape[2], 1)
    return columns_to_heads(jnp.repeat(x_BTKH, copies, axis=2) if copies > 1 else x_BTKH, CP)


def run_layers(
    params: Params,
    arch: Architecture,
    input_ids: jax.Array,
    positions: jax.Array,
    attend_of: Callable[[Attention], Attend],
    recur: Recur,
    caches: Sequence[Any],
    *,
    routes: jax.Array | None = None,
    counted: jax.Array | None = None,
    turns: jax.Array | None = None,
    inserts: Inserts | None = None,
    dtype: DTypeLike = jnp.float32,
    remat: str = "none",
    backend: Backend = ACCELERATOR,
) -> Forwarded:
    """Hidden states of tokens at `positions` [B, T], and the new cache of each layer that has one.

    `attend_of(mixer)` is the attention of the layers with this mixer, which takes and returns the cache of
    each, and `recur` the same of DeltaNet layers; `caches` are those of `Architecture.cached`. They must be
    pure functions: layers of one kind are traced and lowered once. For the other arguments see
    `forward`.

    `routes` [B, T, L, k] of `Routes.dtype` are the experts to take in each of the L layers that have experts,
    and `Routes.live` in all k entries where the layer chooses them. Their weights are computed from the
    router's logits either way. A token counts `counted` [B, T] times in `Forwarded.sums`.

    Rotary embeddings turn by `turns` [3, B, T] int32 in the place of `positions`, where they are given:
    among pictures a token has a time, a row and a column. `inserts` are features of pictures.
    """
    specs = partition(arch, current_mesh())
    x_BTD = _embed(gather_params(params["embed"], specs["embed"], dtype), arch, input_ids).astype(dtype)
    if arch.embedding_scale != 1.0:
        x_BTD = x_BTD * jnp.asarray(arch.embedding_scale, dtype)
    if inserts is not None:  # after the scale, which is that of token embeddings alone
        x_BTD = _inserted(inserts, 0, x_BTD)
    ropes = dict.fromkeys((mixer.rope, mixer.head_dim) for mixer in arch.attentions)
    places = positions if turns is None else turns
    by_rope = {(rope, size): rope and rope_angles(places, rope, size) for rope, size in ropes}
    angles = {mixer: by_rope[mixer.rope, mixer.head_dim] for mixer in arch.attentions}
    attends: dict[Mixer, Any] = dict.fromkeys(arch.deltas, recur)
    attends |= {mixer: attend_of(mixer) for mixer in arch.attentions}

    @cached
    # One jitted function for layers of one kind: traced and lowered once, where a model has dozens of them.
    def compiled(kind: LayerKind, layer_specs: tuple[tuple[str, PartitionSpec], ...]) -> Callable[..., Any]:
        settings = dict(layer_specs), remat == "dots", backend
        run = partial(_layer, kind, arch, attends[kind.mixer], *settings)
        return jax.jit(recomputed(run) if remat == "layer" else run)

    new_caches, routed, given = list(caches), list[Routed](), _given(arch, routes)
    inputs = _layer_inputs(params, specs, arch, input_ids, x_BTD)
    layers = zip(arch.layers, params["layers"], specs["layers"], inputs, arch.cached, strict=True)
    for i, (kind, layer, layer_specs, input_BTP, number) in enumerate(layers, 1):
        run = compiled(kind, tuple(sorted(layer_specs.items())))
        turned = angles.get(kind.mixer) if isinstance(kind.mixer, Attention) else None
        reuses = kind.mixer.sharing == "reuses"
        # The lender ran before in this pass: before it, the cache lacks the tokens that are computed now.
        cache = (caches[number], new_caches[number]) if reuses else caches[number]
        has_experts = isinstance(kind.mlp, Experts)
        choices = (given[len(routed)], counted) if has_experts else (None, None)
        x_BTD, cache, chosen = run(x_BTD, layer, turned, cache, input_BTP, *choices)
        if inserts is not None and i < inserts.features.shape[1]:
            x_BTD = x_BTD + _inserted(inserts, i, jnp.zeros_like(x_BTD))
        routed += [chosen] if has_experts else []
        if not reuses:
            new_caches[number] = cache
    final_norm = gather_params(params["final_norm"], specs["final_norm"])
    if arch.head == "lm_head" and arch.logits_scale != 1.0:
        final_norm = arch.logits_scale * final_norm  # in float32: the logits of every caller are scaled alike
    return Forwarded(arch.norm(x_BTD, final_norm), tuple(new_caches), *_of_all_layers(arch, routed))


def _given(arch: Architecture, routes: jax.Array | None) -> Sequence[jax.Array | None]:
    """[B, T, k] int32 of each layer of experts: those to take, and -1 where the layer chooses."""
    if arch.routes is None:
        assert routes is None, "routes need a model with experts"
        return ()
    if routes is None:
        return [None] * arch.routes.layers
    # All k entries: one of them alone may be the largest expert number of a full byte.
    live = (routes == arch.routes.live).all(axis=-1, keepdims=True)
    experts = jnp.where(live, -1, routes.astype(jnp.int32))
    return [experts[:, :, layer] for layer in range(arch.routes.layers)]


def _of_all_layers(
    arch: Architecture, routed: Sequence[Routed]
) -> tuple[jax.Array | None, RouterSums | None]:
    """(routes [B, T, L, k], the sums of each layer if there are any)."""
    if arch.routes is None:
        return None, None
    routes = jnp.stack([each.experts for each in routed], axis=2).astype(arch.routes.dtype)
    sums = [each.sums for each in routed if each.sums is not None]
    return routes, jax.tree.map(lambda *each: jnp.stack(each), *sums) if sums else None


def _layer_inputs(
    params: Params, specs: Any, arch: Architecture, input_ids: jax.Array, x_BTD: jax.Array
) -> Sequence[jax.Array | None]:
    """[B, T, P] of each layer: an embedding of the token, and a projection of the first hidden state."""
    block = arch.layers[0].layer_input
    if block is None:
        return [None] * arch.num_layers
    names = ("layer_embed", "layer_projection", "layer_norm")
    table, matrix, norm = (gather_params(params[name], specs[name], x_BTD.dtype) for name in names)
    projected = matmul_transposed(x_BTD, matrix) * arch.hidden_size**-0.5
    shape = (*input_ids.shape, arch.num_layers, block.width)
    embedded = table[input_ids].reshape(shape) * jnp.asarray(block.width**0.5, x_BTD.dtype)
    inputs = (arch.norm(projected.reshape(shape), norm) + embedded) * 2**-0.5
    return [inputs[:, :, i] for i in range(arch.num_layers)]


def _embed(table_VD: jax.Array, arch: Architecture, input_ids: jax.Array) -> jax.Array:
    """Embeddings of `input_ids`; `table_VD` is this device's shard if the vocabulary is sharded over `tp`."""
    axis = vocabulary_axis(arch)
    if axis is None:
        return table_VD[input_ids]
    rows = input_ids - axis_index(axis) * len(table_VD)
    # Every device looks up all ids, and adds 0 for those of others: one sum in place of an all-gathered
    # table.
    here = (rows >= 0) & (rows < len(table_VD))
    return psum_forward(jnp.where(here[..., None], table_VD[jnp.where(here, rows, 0)], 0), axis)


def _inserted(inserts: Inserts, level: int, otherwise_BTD: jax.Array) -> jax.Array:
    """The features of this level of tokens that have some, and of others what they have `otherwise`."""
    table_RFD, rows_BT = inserts.features[:, level], inserts.rows
    at_BT = jnp.maximum(rows_BT, 0)
    # A table that all rows share is read where it is: broadcast to them, it would be copied for each.
    features = table_RFD[0][at_BT] if len(table_RFD) == 1 else jax.vmap(lambda x, i: x[i])(table_RFD, at_BT)
    return jnp.where(rows_BT[..., None] >= 0, features.astype(otherwise_BTD.dtype), otherwise_BTD)


def output_head(
    params: Params, arch: Architecture, hidden: jax.Array, *, backend: Backend = ACCELERATOR
) -> tuple[Rows, States]:
    """What `project` takes: the output head, and what it multiplies of the `hidden` states [..., D].

    The head is a matrix [V, D] in the dtype of `hidden`; this device's shard if the vocabulary is sharded.
    With adapters it is (W [V, D], B [V, r]), and the states are (h, scale · A h [..., r]).
    """
    specs, name = partition(arch, current_mesh()), output_head_name(arch)
    head_VD = gather_params(params[name], specs[name], hidden.dtype)
    if LM_HEAD + LORA_A not in params:
        return head_VD, hidden
    assert arch.lora is not None
    names = LM_HEAD + LORA_A, LM_HEAD + LORA_B
    a_rD, b_Vr = (gather_params(params[name], specs[name], hidden.dtype) for name in names)
    if (axis := vocabulary_axis(arch)) is not None:  # each device uses A for its part of the vocabulary
        a_rD = psum_backward(a_rD, axis)
    low = arch.lora.scale * matmul_transposed(hidden, a_rD, few_rows=backend.few_rows)
    return (head_VD, b_Vr), (hidden, low)


def project(
    head: Rows,
    arch: Architecture,
    states: States,
    *,
    dtype: DTypeLike | None = None,
    backend: Backend = ACCELERATOR,
) -> jax.Array:
    """Next-token logits [..., V] float32 of what `output_head` returned.

    The products and those of their gradients are in `dtype`, by default that of `states`. If the vocabulary
    is sharded over `tp` (`vocabulary_axis`), the logits are those of this device's shard.
    """

    def product(rows: jax.Array, states: jax.Array) -> jax.Array:
        if dtype is None or dtype == jnp.float32:
            return matmul_transposed(states, rows, jnp.float32, few_rows=backend.few_rows)
        return product_in(states, rows, dtype)

    scores = reduce(add, map(product, jax.tree.leaves(head), jax.tree.leaves(states)))
    return softcap(scores, arch.final_softcap)


def scores(params: Params, arch: Architecture, hidden: jax.Array) -> jax.Array:
    """One number [...] float32 for each of the hidden states [..., D] that `forward` returned.

    For models whose `Architecture.head` is `value_head`.
    """
    head_D = gather_params(params["score"], partition(arch, current_mesh())["score"])[0]
    return jnp.einsum("...D,D->...", hidden, head_D, preferred_element_type=jnp.float32)


def logits(
    params: Params, arch: Architecture, hidden: jax.Array, *, backend: Backend = ACCELERATOR
) -> jax.Array:
    """Next-token logits [..., V] float32 of the whole vocabulary, on every device."""
    head, states = output_head(params, arch, hidden, backend=backend)
    scores = project(head, arch, states, backend=backend)
    axis = vocabulary_axis(arch)
    return scores if axis is None else all_gather(scores, [((axis,), scores.ndim - 1)])


def vocabulary_axis(arch: Architecture) -> str | None:
    """The axis of the current mesh that the vocabulary is sharded over; None if it is not sharded."""
    return TP if TP in partition(arch, current_mesh())["embed"] else None


def _layer(
    kind: LayerKind,
    arch: Architecture,
    attend: Any,
    specs: Mapping[str, PartitionSpec],
    by_parts: bool,
    backend: Backend,
    x_BTD: jax.Array,
    layer: Layer,
    angles: Angles | None,
    cache: Any,
    input_BTP: jax.Array | None,
    routes_BTk: jax.Array | None,
    counted_BT: jax.Array | None,
) -> tuple[jax.Array, Any, Routed | None]:
    """x + mixer(norm(x)), then x + mlp(norm(x)), the new cache, and the choices of a layer of experts.

    Each `tp` device computes its own heads and its own columns of the MLP.
    """
    lora_scale = arch.lora.scale if arch.lora else 1.0
    settings = by_parts, backend.few_rows, lora_scale, backend.experts
    run = LayerRun(layer, specs, x_BTD.dtype, arch.norm, *settings)

    norms = dict(kind.norms)

    def norm(name: str) -> Enter:
        return lambda x, layer: arch.norm(x, layer[name]) if name in norms else x

    def added(x_BTD: jax.Array, y_BTD: jax.Array, name: str) -> jax.Array:
        """The residual sum, of `y` after its norm `name` if the layer has it."""
        y_BTD = run.part(norm(name), y_BTD) if name in norms else y_BTD
        return x_BTD + (y_BTD if kind.residual_scale == 1.0 else kind.residual_scale * y_BTD)

    y_BTD, cache = kind.mixer.run(x_BTD, norm("attention_norm"), run, angles, attend, cache)
    x_BTD = added(x_BTD, y_BTD, "post_attention_norm")
    routed = None
    if isinstance(kind.mlp, Experts):
        y_BTD, routed = kind.mlp.run(x_BTD, norm("mlp_norm"), run, routes_BTk, counted_BT)
    else:
        y_BTD = kind.dense.run(x_BTD, norm("mlp_norm"), run)
    x_BTD = added(x_BTD, y_BTD, "post_mlp_norm")
    if kind.layer_input and input_BTP is not None:
        y_BTD = kind.layer_input.run(x_BTD, run, input_BTP)
        x_BTD = x_BTD + run.part(lambda y, layer: arch.norm(y, layer["input_norm"]), y_BTD)
    if kind.scaled:
        x_BTD = x_BTD * lax.stop_gradient(run.layer["layer_scalar"]).astype(x_BTD.dtype)
    return x_BTD, cache, routed
