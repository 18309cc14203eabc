"""The forward pass of the sampler: packed prompts into a cache, then one token of every sequence at a time.

Data flow: `rollout/decode.py` compiles it. Layers are `decoder.run_layers`; what is here is where keys
and values come from. The cache has two parts: prompts, each once however many sequences continue it, and each
sequence's own tokens, in a ring of columns that all sequences write in step.

Shapes: T tokens, R prompts of S columns, M sequences of a prompt at most, B sequences, O own columns,
D hidden, N query heads, K key/value heads, G = N / K, H head size, X = M x G.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quatrain.backend import ACCELERATOR, Backend
from quatrain.models.attention import attention_pattern, self_attention, supports_shared_prefixes
from quatrain.models.decoder import layer_windows, run_layers
from quatrain.models.families import Architecture
from quatrain.models.kv_cache import CachePart, write
from quatrain.models.layers import MASKED, softcap
from quatrain.models.params import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sharing:
    """Who continues which prompt. Slots without a sequence may hold anything that is in range."""

    members: jax.Array  # [R, M] int32: the sequences of each prompt, any where there are fewer
    place: jax.Array  # [B] int32: where in the flattened `members` each sequence is
    prompt_lengths: jax.Array  # [R] int32


def prefill(
    params: Params,
    arch: Architecture,
    input_ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    branch_ids: jax.Array,
    *,
    dtype: DTypeLike,
    attention: str,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart]:
    """Hidden states [T, D] of prompts packed into a row of T tokens, and their keys and values [T, K, H].

    An `attention` that does not know branches takes `branch_ids` for zeros, which they have to be.
    """
    windows = layer_windows(arch)
    branches = branch_ids[None] if supports_shared_prefixes(attention) else None
    patterns = {
        window: attention_pattern(
            attention, positions[None], segment_ids[None], branches, window, backend.attention_blocks
        )
        for window in dict.fromkeys(windows)
    }
    keys, values = [], []

    def attend(i: int, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        window, cap = windows[i], arch.attention_softcap
        keys.append(k_BTKH[0])
        values.append(v_BTKH[0])
        return self_attention(attention, q_BTNH, k_BTKH, v_BTKH, patterns[window], window=window, cap=cap)

    hidden = run_layers(params, arch, input_ids[None], positions[None], attend, dtype=dtype, backend=backend)
    return hidden[0], CachePart(tuple(keys), tuple(values))


def decode(
    params: Params,
    arch: Architecture,
    tokens: jax.Array,
    positions: jax.Array,
    prompts: CachePart,
    own: CachePart,
    own_lengths: jax.Array,
    column: jax.Array,
    sharing: Sharing,
    *,
    dtype: DTypeLike,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart]:
    """Hidden states [B, D] of one token per sequence, and `own` with that token's keys at `column`.

    `positions` [B] are the tokens' own, `own_lengths` [B] the columns of `own` that belong to the sequence,
    this one included; they are the last ones before `column`, around the ring.
    """
    S, O = prompts.columns, own.columns
    back_O = (column - jnp.arange(O, dtype=jnp.int32)) % O
    columns_S = jnp.arange(S, dtype=jnp.int32)
    back_RMS = positions[sharing.members][:, :, None] - columns_S
    real_RMS = jnp.broadcast_to((columns_S < sharing.prompt_lengths[:, None])[:, None], back_RMS.shape)
    mine_BO = back_O < own_lengths[:, None]
    windows, masks = layer_windows(arch), {}
    for window in dict.fromkeys(windows):
        near = (True, True) if window is None else (back_RMS < window, back_O < window)
        masks[window] = real_RMS & near[0], (mine_BO & near[1])[:, None]
    keys, values = [], []

    def attend(i: int, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
        _, B, N, H = q_BTNH.shape
        K = k_BTKH.shape[2]
        keys.append(write(own.keys[i], k_BTKH[0, :, :, :, None], column, 3))
        values.append(write(own.values[i], v_BTKH[0, :, :, None], column, 2))
        q_BKGH = q_BTNH[0].reshape(B, K, N // K, H)
        prompt_mask, own_mask = masks[windows[i]]
        cap = arch.attention_softcap
        shared = _attend(q_BKGH[sharing.members], prompts.keys[i], prompts.values[i], prompt_mask, cap)
        y_prompt, total_prompt = (x.reshape(-1, *x.shape[2:])[sharing.place] for x in shared)
        y_own, total_own = (x[:, 0] for x in _attend(q_BKGH[:, None], keys[i], values[i], own_mask, cap))
        share = jax.nn.sigmoid(total_prompt - total_own)[..., None]
        return (y_prompt * share + y_own * (1 - share)).reshape(1, B, N, H).astype(q_BTNH.dtype)

    hidden = run_layers(params, arch, tokens[None], positions[None], attend, dtype=dtype, backend=backend)
    return hidden[0], CachePart(tuple(keys), tuple(values))


def _attend(
    q_RMKGH: jax.Array, k_RKHS: jax.Array, v_RKSH: jax.Array, mask_RMS: jax.Array, cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Attention over one part of the keys [R, M, K, G, H], and the log of its softmax's denominator.

    Two parts y1, y2 with logs t1, t2 make the whole as y1 * sigmoid(t1 - t2) + y2 * sigmoid(t2 - t1). All M
    sequences of a prompt, and the G queries of a key/value head, are rows of one product with its keys.
    """
    R, M, K, G, H = q_RMKGH.shape
    S = k_RKHS.shape[3]
    q_RKXH = q_RMKGH.swapaxes(1, 2).reshape(R, K, M * G, H)
    scores = jnp.einsum("RKXH,RKHS->RKXS", q_RKXH, k_RKHS, preferred_element_type=jnp.float32)
    scores = softcap(scores, cap).reshape(R, K, M, G, S)
    scores = jnp.where(mask_RMS[:, None, :, None], scores, MASKED)
    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    y_RKXH = jnp.einsum(
        "RKXS,RKSH->RKXH",
        weights.reshape(R, K, M * G, S).astype(v_RKSH.dtype),
        v_RKSH,
        preferred_element_type=jnp.float32,
    )
    y = y_RKXH.reshape(R, K, M, G, H) / total
    return y.swapaxes(1, 2), (peak + jnp.log(total))[..., 0].swapaxes(1, 2)
