"""The forward passes of the sampler: prefill of prompts, decode steps, and tokens after cached ones.

Data flow: `engine/decode.py` compiles both. They call the layers of `decoder.run_layers` with an attention
that writes and reads the KV cache. The cache has two parts: the prompt cache, with one prefix slot per
prompt, shared by all its completions, and the completion cache `generated`, with one slot per sequence. The
positions of `generated` are a ring buffer: in a decode step, all sequences write the same position.

Shapes: T tokens, R prefix slots (prompts) of S positions in the prompt cache, at most M sequences per prompt,
B sequences, C positions in `generated`, D hidden, N query heads, K key/value heads, G = N / K, H head size, X
= M x G."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quatrain.backend import ACCELERATOR, Backend
from quatrain.models.architecture import Architecture
from quatrain.models.attention import attention_pattern, self_attention
from quatrain.models.attention.unpacking import Unpacking
from quatrain.models.blocks.attention import Attend, Attention
from quatrain.models.decoder import run_layers
from quatrain.models.kv_cache import CachePart, LayerCache, write
from quatrain.models.layers import MASKED, softcap
from quatrain.models.params import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Continued:
    """Tokens that continue sequences in prefix slots: at most T of each of N sequences."""

    input_ids: jax.Array  # [N, T] int32
    starts: jax.Array  # [N] int32: tokens of the sequence that are in its prefix slot before these
    counts: jax.Array  # [N] int32: how many of the T tokens are real
    prefix_slots: jax.Array  # [N] int32; out of range for padding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Restored:
    """Tokens of turns of N sequences in slots, after their prefix slots: at most T of each."""

    continued: Continued  # `starts` counts the tokens of the turn before these
    prompt_lengths: jax.Array  # [N] int32: tokens before the turn, all of them in the prefix slot
    slots: jax.Array  # [N] int32; out of range for padding
    begins: jax.Array  # [N] int32: the ring position of the turn's first token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sharing:
    """Which sequences continue which prompt. Entries for slots without a sequence may be any valid index."""

    members: jax.Array  # [R, M] int32: the sequences of each prompt; any index in unused entries
    place: jax.Array  # [B] int32: the index of each sequence in the flattened `members`
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
    layout: Unpacking | None = None,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart]:
    """Hidden states [T, D] of prompts packed into a row of T tokens, and per layer keys and values [T, K, H].

    `layout` has the prompts in rows of their own, for an implementation that `unpacks`.
    """

    def attend_of(mixer: Attention) -> Attend:
        window, cap, sizes = mixer.window, mixer.softcap, backend.attention_blocks
        pattern = attention_pattern(
            attention, positions[None], segment_ids[None], branch_ids[None], window, sizes, layout=layout
        )

        def attend(
            q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: None
        ) -> tuple[jax.Array, LayerCache]:
            y_BTNH = self_attention(attention, q_BTNH, k_BTKH, v_BTKH, pattern, window=window, cap=cap)
            return y_BTNH, (k_BTKH[0], v_BTKH[0])

        return attend

    inputs, caches = (input_ids[None], positions[None]), [None] * arch.num_layers
    hidden, new = run_layers(params, arch, *inputs, attend_of, caches, dtype=dtype, backend=backend)
    return hidden[0], CachePart.of_layers(new)


def extend(
    params: Params,
    arch: Architecture,
    continued: Continued,
    prompts: CachePart,
    *,
    dtype: DTypeLike,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart]:
    """(hidden states [N, D] of the last real tokens of `continued`, `prompts` with their keys and values)."""
    N, T = continued.input_ids.shape
    prompt_positions_S, ahead_T = jnp.arange(prompts.positions), jnp.arange(T)
    positions_NT = continued.starts[:, None] + ahead_T
    real_NT = ahead_T < continued.counts[:, None]
    written_NT = jnp.where(real_NT, positions_NT, prompts.positions)  # out of range: not written
    back_NTS = positions_NT[:, :, None] - prompt_positions_S

    def attend_of(mixer: Attention) -> Attend:
        mask_NTS = _within(back_NTS >= 0, back_NTS, mixer.window)

        def attend(
            q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: LayerCache
        ) -> tuple[jax.Array, LayerCache]:
            rows = continued.prefix_slots
            cache = _written(cache, rows, written_NT, k_BTKH, v_BTKH)
            attended = _attend(_by_key_head(q_BTNH, k_BTKH), *_rows_of(cache, rows), mask_NTS, mixer.softcap)
            return (attended.sums / attended.total).reshape(q_BTNH.shape).astype(q_BTNH.dtype), cache

        return attend

    inputs = continued.input_ids, positions_NT
    hidden, new = run_layers(params, arch, *inputs, attend_of, prompts.layers, dtype=dtype, backend=backend)
    last_N = jnp.maximum(continued.counts - 1, 0)
    return hidden[jnp.arange(N), last_N], CachePart.of_layers(new)


def restore(
    params: Params,
    arch: Architecture,
    restored: Restored,
    prompts: CachePart,
    generated: CachePart,
    *,
    dtype: DTypeLike,
    backend: Backend = ACCELERATOR,
) -> CachePart:
    """`generated` with the keys and values of tokens that were sampled before, as `decode` has written
    them."""
    S, C, continued = prompts.positions, generated.positions, restored.continued
    ahead_T, begins_N1 = jnp.arange(continued.input_ids.shape[1]), restored.begins[:, None]
    index_NT = continued.starts[:, None] + ahead_T
    positions_NT = restored.prompt_lengths[:, None] + index_NT
    real_NT = ahead_T < continued.counts[:, None]
    written_NT = jnp.where(real_NT, (begins_N1 + index_NT) % C, C)  # out of range: not written
    prompt_back_NTS = positions_NT[:, :, None] - jnp.arange(S)
    in_prompt_NTS = (jnp.arange(S) < restored.prompt_lengths[:, None])[:, None]
    back_NTC = index_NT[:, :, None] - ((jnp.arange(C) - begins_N1) % C)[:, None]

    def attend_of(mixer: Attention) -> Attend:
        prompt_mask_NTS = _within(in_prompt_NTS, prompt_back_NTS, mixer.window)
        own_mask_NTC = _within(back_NTC >= 0, back_NTC, mixer.window)

        def attend(
            q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: tuple[LayerCache, LayerCache]
        ) -> tuple[jax.Array, LayerCache]:
            before, own = cache
            own = _written(own, restored.slots, written_NT, k_BTKH, v_BTKH)
            q_BTKGH = _by_key_head(q_BTNH, k_BTKH)
            prompt = _rows_of(before, continued.prefix_slots)
            y_BTKGH = _over_both(
                _attend(q_BTKGH, *prompt, prompt_mask_NTS, mixer.softcap),
                _attend(q_BTKGH, *_rows_of(own, restored.slots), own_mask_NTC, mixer.softcap),
            )
            return y_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype), own

        return attend

    inputs = continued.input_ids, positions_NT
    caches = list(zip(prompts.layers, generated.layers, strict=True))
    _, new = run_layers(params, arch, *inputs, attend_of, caches, dtype=dtype, backend=backend)
    return CachePart.of_layers(new)


def _within(allowed: jax.Array, back: jax.Array, window: int | None) -> jax.Array:
    """Which keys a query sees, of those `allowed`, `back` tokens before it."""
    shape = jnp.broadcast_shapes(allowed.shape, back.shape)
    return jnp.broadcast_to(allowed if window is None else allowed & (back < window), shape)


def _written(
    cache: LayerCache, rows_N: jax.Array, places_NT: jax.Array, k_NTKH: jax.Array, v_NTKH: jax.Array
) -> LayerCache:
    """The cache with these keys and values in these rows and positions; those out of range are dropped."""
    keys, values = cache
    at_N1 = rows_N[:, None]
    return (
        keys.at[at_N1, :, :, places_NT].set(k_NTKH.astype(keys.dtype), mode="drop"),
        values.at[at_N1, :, places_NT].set(v_NTKH.astype(values.dtype), mode="drop"),
    )


def _rows_of(cache: LayerCache, rows_N: jax.Array) -> LayerCache:
    """Keys [N, K, H, S] and values [N, K, S, H] of these rows; of any row where it is out of range."""
    keys, values = (jnp.take(x, rows_N, axis=0, mode="clip") for x in cache)
    return keys, values


def _by_key_head(q_BTNH: jax.Array, k_BTKH: jax.Array) -> jax.Array:
    """Queries [B, T, K, G, H]."""
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    return q_BTNH.reshape(B, T, K, N // K, H)


def decode(
    params: Params,
    arch: Architecture,
    tokens: jax.Array,
    positions: jax.Array,
    prompts: CachePart,
    generated: CachePart,
    generated_lengths: jax.Array,
    ring_position: jax.Array,
    sharing: Sharing,
    *,
    dtype: DTypeLike,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart]:
    """(hidden states [B, D] of one token per sequence, `generated` with its keys and values at
    `ring_position`).

    `positions` [B] are the positions of the tokens in their sequences. `generated_lengths` [B] counts the
    positions of `generated` that hold tokens of the sequence, including this token. These positions end at
    `ring_position`; the ring wraps around, so that position C - 1 is before position 0.
    """
    S, C = prompts.positions, generated.positions
    back_C = (ring_position - jnp.arange(C, dtype=jnp.int32)) % C
    prompt_positions_S = jnp.arange(S, dtype=jnp.int32)
    back_RMS = positions[sharing.members][:, :, None] - prompt_positions_S
    real_RMS = jnp.broadcast_to(
        (prompt_positions_S < sharing.prompt_lengths[:, None])[:, None], back_RMS.shape
    )
    valid_BC = back_C < generated_lengths[:, None]

    def attend_of(mixer: Attention) -> Attend:
        window, cap = mixer.window, mixer.softcap
        near = (True, True) if window is None else (back_RMS < window, back_C < window)
        prompt_mask, generated_mask = real_RMS & near[0], (valid_BC & near[1])[:, None]

        def attend(
            q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: tuple[LayerCache, LayerCache]
        ) -> tuple[jax.Array, LayerCache]:
            _, B, N, H = q_BTNH.shape
            K = k_BTKH.shape[2]
            (prompt_keys, prompt_values), (keys, values) = cache
            keys = write(keys, k_BTKH[0, :, :, :, None], ring_position, 3)
            values = write(values, v_BTKH[0, :, :, None], ring_position, 2)
            q_BKGH = q_BTNH[0].reshape(B, K, N // K, H)
            shared = _attend(q_BKGH[sharing.members], prompt_keys, prompt_values, prompt_mask, cap)
            own = _attend(q_BKGH[:, None], keys, values, generated_mask, cap)
            prompt = _Attended(*(x.reshape(-1, *x.shape[2:])[sharing.place] for x in shared))
            y_BKGH = _over_both(prompt, _Attended(*(x[:, 0] for x in own)))
            return y_BKGH.reshape(1, B, N, H).astype(q_BTNH.dtype), (keys, values)

        return attend

    inputs, caches = (tokens[None], positions[None]), list(zip(prompts.layers, generated.layers, strict=True))
    hidden, new = run_layers(params, arch, *inputs, attend_of, caches, dtype=dtype, backend=backend)
    return hidden[0], CachePart.of_layers(new)


class _Attended(NamedTuple):
    """Attention over a set of keys before the division of the softmax, so that sets can be combined."""

    sums: jax.Array
    """[..., H] float32: values weighted by the exponentials of their scores less the peak."""
    peak: jax.Array
    """[..., 1] float32: the greatest score."""
    total: jax.Array
    """[..., 1] float32: the sum of the exponentials."""


def _over_both(a: _Attended, b: _Attended) -> jax.Array:
    """Attention [..., H] over two sets of keys."""
    peak = jnp.maximum(a.peak, b.peak)
    of_a, of_b = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    return (a.sums * of_a + b.sums * of_b) / (a.total * of_a + b.total * of_b)


def _attend(
    q_RMKGH: jax.Array, k_RKHS: jax.Array, v_RKSH: jax.Array, mask_RMS: jax.Array, cap: float | None
) -> _Attended:
    """Attention [R, M, K, G, H] over one of the two caches.

    The queries of all M sequences that share a prefix slot, and of the G query heads that share a key/value
    head, are rows of one matrix product with these keys.
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
    sums = y_RKXH.reshape(R, K, M, G, H)
    return _Attended(*(x.swapaxes(1, 2) for x in (sums, peak, total)))
