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
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from quatrain.backend import ACCELERATOR, Backend
from quatrain.models import delta_rule
from quatrain.models.architecture import Architecture
from quatrain.models.attention import attention_pattern, self_attention
from quatrain.models.attention.unpacking import Unpacking
from quatrain.models.blocks.attention import Attend, Attention
from quatrain.models.decoder import run_layers
from quatrain.models.delta_rule import Chunks, DeltaState, DeltaWeights, states_at_ends, where_rows
from quatrain.models.kv_cache import CachePart, LayerCache, write
from quatrain.models.layers import MASKED, softcap
from quatrain.models.params import Params
from quatrain.models.vision import Inserts

MOST_AT_ONCE = 1024
"""Sequences of a cache with at most so many positions are attended to as a whole."""
KEYS_AT_ONCE = 128
"""Positions of longer ones that are attended to at one time; sizes of such caches are multiples of it."""
NOWHERE = np.iinfo(np.int32).max
"""A position after all others."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Continued:
    """Tokens that continue sequences in prefix slots: at most T of each of N sequences."""

    input_ids: jax.Array  # [N, T] int32
    starts: jax.Array  # [N] int32: tokens of the sequence that are in its prefix slot before these
    counts: jax.Array  # [N] int32: how many of the T tokens are real
    prefix_slots: jax.Array  # [N] int32; out of range for padding
    routes: jax.Array | None = None  # [N, T, L, k], of tokens that are computed again
    turns: jax.Array | None = None  # [N, 3, T] int32: rotary positions, if pictures are among or before them
    inserts: Inserts | None = None  # features of pictures, the same [1, 1 + L, F, D] for all N sequences


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Restored:
    """Tokens of turns of N sequences in slots, after their prefix slots: at most T of each."""

    continued: Continued  # `starts` counts the tokens of the turn before these
    prompt_lengths: jax.Array  # [N] int32: tokens before the turn, all of them in the prefix slot
    slots: jax.Array  # [N] int32; out of range for padding
    begins: jax.Array  # [N] int32: the ring position of the turn's first token
    shifts: jax.Array | None = None  # [N] int32: rotary positions less positions, behind pictures


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
    chunks: Chunks | None = None,
    num_prompts: int = 0,
    routes: jax.Array | None = None,
    turns: jax.Array | None = None,
    inserts: Inserts | None = None,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart, jax.Array | None]:
    """Hidden states [T, D] of prompts packed into a row of T tokens, per layer keys and values [T, K, H], and
    the experts [T, L, k] of each token of a model that has them: those of `routes`, or the router's choice.

    `layout` has the prompts in rows of their own, where attention needs it, and `chunks` those of
    DeltaNet layers, of which the result has the states at the end of a common prefix and of `num_prompts`.
    `turns` [1, 3, T] are rotary positions, and `inserts` features of pictures, as in `Continued`.
    """

    def attend_of(mixer: Attention) -> Attend:
        # Made once for each kind of attention, and not again in each of its layers.
        window, cap, sizes = mixer.window, mixer.softcap, backend.attention_blocks
        pattern = attention_pattern(
            attention, positions[None], segment_ids[None], branch_ids[None], window, sizes, layout=layout
        )

        def attend(
            q_BTNH: jax.Array, k_BTKH: Any, v_BTKH: Any, sinks_N: Any, cache: Any
        ) -> tuple[jax.Array, LayerCache]:
            if mixer.sharing == "reuses":
                # The lender's keys of this pass: the layer itself has none, and its cache entry is the
                # lender's.
                k_BTKH, v_BTKH = (x[None] for x in cache[1])
            y_BTNH = self_attention(
                attention, q_BTNH, k_BTKH, v_BTKH, pattern, window=window, cap=cap, sinks=sinks_N
            )
            # Returned, not written: the engine places prompts in slots afterwards, several of them from one
            # row.
            return y_BTNH, (k_BTKH[0], v_BTKH[0])

        return attend

    def recur(
        x: jax.Array, ba: jax.Array, weights: DeltaWeights, key_size: int, cache: Any
    ) -> tuple[jax.Array, DeltaState]:
        # Without chunks a state would run on from one prompt of the row into the next.
        assert chunks is not None, "DeltaNet layers need the chunks of packed rows"
        y, states = states_at_ends(x, ba, chunks, weights, key_size, 1 + num_prompts)
        return y, jax.tree.map(lambda each: each[:, 0], states)

    inputs, caches = (input_ids[None], positions[None]), [None] * arch.num_caches
    given = None if routes is None else routes[None]
    settings: Any = {"dtype": dtype, "backend": backend, "turns": _by_axis(turns), "inserts": inserts}
    run = run_layers(params, arch, *inputs, attend_of, recur, caches, routes=given, **settings)
    return run.hidden[0], CachePart(run.caches), None if run.routes is None else run.routes[0]


def extend(
    params: Params,
    arch: Architecture,
    continued: Continued,
    prompts: CachePart,
    *,
    dtype: DTypeLike,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart, jax.Array | None]:
    """(hidden states [N, D] of the last real tokens of `continued`, `prompts` with their keys and values, the
    experts [N, T, L, k] of the tokens of a model that has them)."""
    N, T = continued.input_ids.shape
    ahead_T, places_S = jnp.arange(T), jnp.arange(prompts.positions)
    positions_NT = continued.starts[:, None] + ahead_T
    real_NT = ahead_T < continued.counts[:, None]
    written_NT = jnp.where(real_NT, positions_NT, prompts.positions)  # out of range: not written
    places_NS = jnp.broadcast_to(places_S, (N, prompts.positions))

    def attend_of(mixer: Attention) -> Attend:
        def attend(
            q_BTNH: jax.Array, k_BTKH: Any, v_BTKH: Any, sinks_N: Any, cache: Any
        ) -> tuple[jax.Array, LayerCache]:
            if mixer.sharing == "reuses":
                _, cache = cache
            else:
                # Written before they are read, so that new tokens attend to each other by the same path as to
                # old ones.
                cache = _written(cache, continued.prefix_slots, written_NT, k_BTKH, v_BTKH)
            sequences = _Sequences(cache, continued.prefix_slots, places_NS)
            attended = _attend_to(_by_key_head(q_BTNH, cache), positions_NT, sequences, mixer)
            attended = _with_sinks(attended, sinks_N)
            return (attended.sums / attended.total).reshape(q_BTNH.shape).astype(q_BTNH.dtype), cache

        return attend

    def recur(
        x: jax.Array, ba: jax.Array, weights: DeltaWeights, key_size: int, cache: DeltaState
    ) -> tuple[jax.Array, DeltaState]:
        # A slot is used again without being cleared: what its last sequence left must not be the beginning of
        # this one.
        begin = jax.tree.map(
            lambda rows: where_rows(continued.starts > 0, rows, 0), _rows(cache, continued.prefix_slots)
        )
        y, end = delta_rule.continued(x, ba, continued.counts, weights, begin)
        return y, _with_rows(cache, continued.prefix_slots, end)

    inputs, caches = (continued.input_ids, positions_NT), prompts.layers
    settings: Any = {"routes": continued.routes, "dtype": dtype, "backend": backend}
    settings |= {"turns": _by_axis(continued.turns), "inserts": continued.inserts}
    run = run_layers(params, arch, *inputs, attend_of, recur, caches, **settings)
    # Padding rows have a count of 0: their hidden states are of any token and are not used.
    last_N = jnp.maximum(continued.counts - 1, 0)
    return run.hidden[jnp.arange(N), last_N], CachePart(run.caches), run.routes


def _by_axis(turns: jax.Array | None) -> jax.Array | None:
    """Rotary positions [B, 3, T] as [3, B, T]."""
    return None if turns is None else jnp.moveaxis(turns, 1, 0)


def _turned(positions: jax.Array, shifts: jax.Array | None) -> jax.Array:
    """The rotary positions [B, T] of text behind pictures; equal in all axes, so that one number will do."""
    return positions if shifts is None else positions + shifts[:, None]


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
    them. Slots have their states before it."""
    S, C, continued = prompts.positions, generated.positions, restored.continued
    ahead_T = jnp.arange(continued.input_ids.shape[1])
    lengths_N1, begins_N1 = restored.prompt_lengths[:, None], restored.begins[:, None]
    index_NT = continued.starts[:, None] + ahead_T
    positions_NT = lengths_N1 + index_NT
    real_NT = ahead_T < continued.counts[:, None]
    written_NT = jnp.where(real_NT, (begins_N1 + index_NT) % C, C)  # out of range: not written
    # Behind the prompt the slot may hold tokens of an earlier, longer one: no query may see them.
    prompt_NS = jnp.where(jnp.arange(S) < lengths_N1, jnp.arange(S), NOWHERE)
    # The ring position of a turn's first token differs by sequence: positions are derived, nothing is moved.
    turn_NC = lengths_N1 + (jnp.arange(C) - begins_N1) % C

    def attend_of(mixer: Attention) -> Attend:
        def attend(
            q_BTNH: jax.Array, k_BTKH: Any, v_BTKH: Any, sinks_N: Any, cache: Any
        ) -> tuple[jax.Array, LayerCache]:
            if mixer.sharing == "reuses":
                (before, _), own = cache
            else:
                before, own = cache
                own = _written(own, restored.slots, written_NT, k_BTKH, v_BTKH)
            queries = _by_key_head(q_BTNH, own), positions_NT
            prompt = _attend_to(*queries, _Sequences(before, continued.prefix_slots, prompt_NS), mixer)
            turn = _attend_to(*queries, _Sequences(own, restored.slots, turn_NC), mixer)
            y_BTKGH = _over_both(_with_sinks(prompt, sinks_N), turn)
            return y_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype), own

        return attend

    def recur(
        x: jax.Array, ba: jax.Array, weights: DeltaWeights, key_size: int, cache: Any
    ) -> tuple[jax.Array, DeltaState]:
        _, own = cache
        y, end = delta_rule.continued(x, ba, continued.counts, weights, _rows(own, restored.slots))
        return y, _with_rows(own, restored.slots, end)

    inputs = continued.input_ids, _turned(positions_NT, restored.shifts)
    caches = list(zip(prompts.layers, generated.layers, strict=True))
    settings: Any = {"routes": continued.routes, "dtype": dtype, "backend": backend}
    return CachePart(run_layers(params, arch, *inputs, attend_of, recur, caches, **settings).caches)


def _rows(state: Any, rows_N: jax.Array) -> DeltaState:
    """The states of these rows; any row where it is out of range."""
    # Clipped, for padding alone, whose result is dropped when it is written.
    return DeltaState(*(jnp.take(each, rows_N, axis=0, mode="clip") for each in state))


def _with_rows(state: DeltaState, rows_N: jax.Array, new: DeltaState) -> DeltaState:
    """`state` with the `new` ones in these rows; those out of range are dropped."""
    return jax.tree.map(lambda x, y: x.at[rows_N].set(y.astype(x.dtype), mode="drop"), state, new)


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


def _by_key_head(q_BTNH: jax.Array, cache: LayerCache) -> jax.Array:
    """Queries [B, T, K, G, H]."""
    B, T, N, H = q_BTNH.shape
    K = cache[0].shape[1]
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
    live: jax.Array,
    *,
    shifts: jax.Array | None = None,
    dtype: DTypeLike,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart, jax.Array | None]:
    """(hidden states [B, D] of one token per sequence, `generated` with its keys and values at
    `ring_position`, the experts [B, L, k] of the tokens of a model that has them).

    `positions` [B] are the positions of the tokens in their sequences. `generated_lengths` [B] counts the
    positions of `generated` that hold tokens of the sequence, including this token. These positions end at
    `ring_position`; the ring wraps around, so that position C - 1 is before position 0. The states of slots
    that are not `live` [B] stay as they are: what other slots write at their positions is not read. `shifts`
    [B] are added to `positions` for rotary embeddings, behind pictures.
    """
    S, C = prompts.positions, generated.positions
    # All sequences write one position, so that a step is a slice update and not a scatter.
    back_C = (ring_position - jnp.arange(C, dtype=jnp.int32)) % C
    prompt_positions_S = jnp.arange(S, dtype=jnp.int32)
    # By prompt and member: the keys of a prompt are read once for all sequences that continue it.
    back_RMS = positions[sharing.members][:, :, None] - prompt_positions_S
    real_RMS = jnp.broadcast_to(
        (prompt_positions_S < sharing.prompt_lengths[:, None])[:, None], back_RMS.shape
    )
    # A slot that was given to a new sequence still holds the old one's keys, further back than its own
    # tokens.
    valid_BC = back_C < generated_lengths[:, None]

    def attend_of(mixer: Attention) -> Attend:
        window, cap = mixer.window, mixer.softcap
        near = (True, True) if window is None else (back_RMS < window, back_C < window)
        prompt_mask, generated_mask = real_RMS & near[0], (valid_BC & near[1])[:, None]

        def attend(
            q_BTNH: jax.Array, k_BTKH: Any, v_BTKH: Any, sinks_N: Any, cache: Any
        ) -> tuple[jax.Array, LayerCache]:
            if mixer.sharing == "reuses":
                ((prompt_keys, prompt_values), _), (keys, values) = cache
            else:
                (prompt_keys, prompt_values), (keys, values) = cache
                keys = write(keys, k_BTKH[0, :, :, :, None], ring_position, 3)
                values = write(values, v_BTKH[0, :, :, None], ring_position, 2)
            _, B, N, H = q_BTNH.shape
            K = keys.shape[1]
            q_BKGH = q_BTNH[0].reshape(B, K, N // K, H)
            shared = _attend(q_BKGH[sharing.members], prompt_keys, prompt_values, prompt_mask, cap)
            own = _attend(q_BKGH[:, None], keys, values, generated_mask, cap)
            # Back from members of prompts to slots: unused entries of `members` are computed and never read.
            prompt = _Attended(*(x.reshape(-1, *x.shape[2:])[sharing.place] for x in shared))
            prompt = _with_sinks(prompt, sinks_N)
            y_BKGH = _over_both(prompt, _Attended(*(x[:, 0] for x in own)))
            return y_BKGH.reshape(1, B, N, H).astype(q_BTNH.dtype), (keys, values)

        return attend

    def recur(
        x: jax.Array, ba: jax.Array, weights: DeltaWeights, key_size: int, cache: Any
    ) -> tuple[jax.Array, DeltaState]:
        _, own = cache
        y, new = delta_rule.step(x[0], ba[0], weights, own)
        # A state has no positions that could be ignored: a step of an idle slot would be part of it for good.
        return y[None], jax.tree.map(partial(where_rows, live), new, own)

    inputs = tokens[None], (positions if shifts is None else positions + shifts)[None]
    caches = list(zip(prompts.layers, generated.layers, strict=True))
    run = run_layers(params, arch, *inputs, attend_of, recur, caches, dtype=dtype, backend=backend)
    return run.hidden[0], CachePart(run.caches), None if run.routes is None else run.routes[0]


def verify(
    params: Params,
    arch: Architecture,
    tokens: jax.Array,
    positions: jax.Array,
    prompts: CachePart,
    generated: CachePart,
    generated_lengths: jax.Array,
    sharing: Sharing,
    *,
    shifts: jax.Array | None = None,
    dtype: DTypeLike,
    backend: Backend = ACCELERATOR,
) -> tuple[jax.Array, CachePart, jax.Array | None]:
    """As `decode`, of T tokens [B, T] that follow one another in each sequence: hidden states [B, T, D],
    `generated` with their keys and values, experts [B, T, L, k].

    `positions` and `generated_lengths` [B] are those of the first of them. A turn's token number i is at
    position i of its slot of `generated`, which is no ring here: sequences go on by different numbers of
    tokens. What does not fit into a slot is not written. For models without DeltaNet layers, whose states
    cannot be taken back.
    """
    (B, T), S, C = tokens.shape, prompts.positions, generated.positions
    (R, M), ahead_T = sharing.members.shape, jnp.arange(T, dtype=jnp.int32)
    positions_BT, index_BT = positions[:, None] + ahead_T, generated_lengths[:, None] - 1 + ahead_T
    prompt_positions_S = jnp.arange(S, dtype=jnp.int32)
    back_RMTS = positions_BT[sharing.members][..., None] - prompt_positions_S
    back_RXS = back_RMTS.reshape(R, M * T, S)
    real_RXS = jnp.broadcast_to(
        (prompt_positions_S < sharing.prompt_lengths[:, None])[:, None], back_RXS.shape
    )
    # Behind its own place a slot holds drafts that were rejected, which the next tokens overwrite.
    back_BTC = index_BT[:, :, None] - jnp.arange(C, dtype=jnp.int32)

    def attend_of(mixer: Attention) -> Attend:
        window, cap = mixer.window, mixer.softcap
        near = (True, True) if window is None else (back_RXS < window, back_BTC < window)
        prompt_mask, generated_mask = real_RXS & near[0], (back_BTC >= 0) & near[1]

        def attend(
            q_BTNH: jax.Array, k_BTKH: Any, v_BTKH: Any, sinks_N: Any, cache: Any
        ) -> tuple[jax.Array, LayerCache]:
            if mixer.sharing == "reuses":
                (before, _), own = cache
            else:
                before, own = cache
                # Out of range at the end of a slot: of a sequence that may have no more tokens.
                own = _written(own, jnp.arange(B), index_BT, k_BTKH, v_BTKH)
            (prompt_keys, prompt_values), (keys, values) = before, own
            q_BTKGH = _by_key_head(q_BTNH, own)
            q_RXKGH = q_BTKGH[sharing.members].reshape(R, M * T, *q_BTKGH.shape[2:])
            shared = _attend(q_RXKGH, prompt_keys, prompt_values, prompt_mask, cap)
            turn = _attend(q_BTKGH, keys, values, generated_mask, cap)
            by_member = (x.reshape(R * M, T, *x.shape[2:]) for x in shared)
            prompt = _with_sinks(_Attended(*(x[sharing.place] for x in by_member)), sinks_N)
            return _over_both(prompt, turn).reshape(q_BTNH.shape).astype(q_BTNH.dtype), own

        return attend

    def recur(*_: Any) -> Any:
        raise AssertionError("states of DeltaNet layers cannot be taken back")

    caches = list(zip(prompts.layers, generated.layers, strict=True))
    inputs = tokens, _turned(positions_BT, shifts)
    run = run_layers(params, arch, *inputs, attend_of, recur, caches, dtype=dtype, backend=backend)
    return run.hidden, CachePart(run.caches), run.routes


class _Attended(NamedTuple):
    """Attention over a set of keys before the division of the softmax, so that sets can be combined."""

    sums: jax.Array
    """[..., H] float32: values weighted by the exponentials of their scores less the peak."""
    peak: jax.Array
    """[..., 1] float32: the greatest score."""
    total: jax.Array
    """[..., 1] float32: the sum of the exponentials."""


def _merged(a: _Attended, b: _Attended) -> _Attended:
    """Attention over two sets of keys."""
    peak = jnp.maximum(a.peak, b.peak)
    # Of the greater peak, so that no exponential is above 1; MASKED is finite, so that the difference is
    # never NaN.
    of_a, of_b = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    return _Attended(a.sums * of_a + b.sums * of_b, peak, a.total * of_a + b.total * of_b)


def _with_sinks(attended: _Attended, sinks_N: jax.Array | None) -> _Attended:
    """With one more score of each head [..., K, G], which has no value."""
    if sinks_N is None:
        return attended
    # Once, on the prompt's part: merged into both parts the sink would count twice.
    score = jnp.broadcast_to(sinks_N.reshape(*attended.peak.shape[-3:]), attended.peak.shape)
    return _merged(attended, _Attended(jnp.zeros_like(attended.sums), score, jnp.ones_like(score)))


def _over_both(a: _Attended, b: _Attended) -> jax.Array:
    """Attention [..., H] over two sets of keys."""
    both = _merged(a, b)
    return both.sums / both.total


class _Sequences(NamedTuple):
    """The keys and values of N sequences in rows of a cache."""

    cache: LayerCache
    rows: jax.Array  # [N] int32; any row where it is out of range
    places: jax.Array  # [N, S] int32: the position in its sequence of each key; NOWHERE if it is none of it


def _attend_to(
    q_NTKGH: jax.Array, positions_NT: jax.Array, sequences: _Sequences, mixer: Attention
) -> _Attended:
    """Attention [N, T, K, G, H] of tokens at these positions to what is before them in their sequences.

    Long sequences are read in blocks with a running softmax, so that no more than KEYS_AT_ONCE scores of a
    query exist at one time; blocks that no query sees are skipped.
    """
    cache, rows_N, places_NS = sequences

    def rows(x: jax.Array, axis: int, first: jax.Array | int, size: int) -> jax.Array:
        """Those positions of the sequences' rows."""
        sizes = tuple(size if i == axis else length for i, length in enumerate(x.shape))[1:]
        begin = tuple(first if i == axis else 0 for i in range(x.ndim))[1:]
        # Slices, not a gather of whole rows: only the block that is read leaves the cache.
        return jax.vmap(lambda row: lax.dynamic_slice(x, (row, *begin), (1, *sizes))[0])(rows_N)

    def read(first: jax.Array | int, size: int) -> _Attended:
        keys, values = rows(cache[0], 3, first, size), rows(cache[1], 2, first, size)
        return _attend(q_NTKGH, keys, values, visible(first, size), mixer.softcap)

    def visible(first: jax.Array | int, size: int) -> jax.Array:
        places = lax.dynamic_slice_in_dim(places_NS, first, size, 1)
        back_NTS = positions_NT[:, :, None] - places[:, None]
        return (back_NTS >= 0) if mixer.window is None else (back_NTS >= 0) & (back_NTS < mixer.window)

    S = places_NS.shape[1]
    # The sizes are static: short caches have one product and no loop.
    if S <= MOST_AT_ONCE:
        return read(0, S)
    assert S % KEYS_AT_ONCE == 0, S

    def step(i: jax.Array, before: _Attended) -> _Attended:
        first, size = i * KEYS_AT_ONCE, KEYS_AT_ONCE
        return lax.cond(
            visible(first, size).any(), lambda: _merged(before, read(first, size)), lambda: before
        )

    sums = jnp.zeros(q_NTKGH.shape, jnp.float32)
    return lax.fori_loop(0, S // KEYS_AT_ONCE, step, _Attended(sums, sums[..., :1] + MASKED, sums[..., :1]))


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
    # Float32 scores also of bfloat16 caches: the trainer's softmax has them, and log-probabilities must
    # agree.
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
