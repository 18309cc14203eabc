"""The compiled programs of the rollout: the prefill of prompts, and several decode steps of all slots.

The extension computes the tokens that follow a prefix slot: of long prompts, in parts, and of contexts whose
beginning is kept beside the cache. `load_blocks` copies what is kept to prefix slots, `keep_blocks` and
`keep_turn_blocks` copy what prefix slots and slots have to blocks.

Called by `session.py`. Shapes: B slots, R prefix slots of S positions in the prompt cache, C positions per
slot in the cache of generated tokens, at most M slots per prompt. A prefill has N prompts in T packed tokens,
and n samples per prompt.

These are the sizes on one replica of the sampler; each data shard of the mesh is one replica. Arrays hold the
entries of all replicas, concatenated along the first dimension; indices of slots and prefix slots count from
0 on each replica. Results for the host hold the entries of all replicas and are replicated on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from quatrain.backend import Backend, this_backend
from quatrain.models import decode_step
from quatrain.models.architecture import Architecture
from quatrain.models.attention import unpacks_above
from quatrain.models.attention.unpacking import Unpacking
from quatrain.models.decode_step import Continued, Restored, Sharing
from quatrain.models.decoder import logits
from quatrain.models.delta_rule import Chunks, DeltaState
from quatrain.models.kv_cache import CACHE_SPEC, CachePart, LayerCache, position_axes
from quatrain.models.params import partition
from quatrain.models.prefix_tree import RowForms
from quatrain.models.vision import Inserts
from quatrain.ops.sampling import KeptWords, SamplingNumbers, allowed, sample_kept, token_uniforms
from quatrain.ops.shape_buckets import power_of_four
from quatrain.parallel.axes import DATA_AXES, TP
from quatrain.parallel.collectives import all_gather_shards, any_shard, from_first_device, shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.mesh import mesh_shape

EACH_REPLICA, EVERYWHERE = PartitionSpec(DATA_AXES), PartitionSpec()
TOKENS_PER_CALL = 8
"""Decode steps per call; a slot whose sequence ends waits for the rest of the call, half of it on average."""


class Packed(NamedTuple):
    """N prompts packed into one row of T tokens, and the samples that start from them.

    A common prefix of all prompts may stand in the row once, first; the rest of prompt i begins at
    `starts[i]`.
    """

    input_ids: jax.Array  # [T] int32
    positions: jax.Array  # [T] int32
    segment_ids: jax.Array  # [T] int32, 0 is padding
    branch_ids: jax.Array  # [T] int32
    num_common: jax.Array  # [1] int32, tokens of the common prefix; 0 where there is none
    starts: jax.Array  # [N] int32
    lengths: jax.Array  # [N] int32, prompt tokens including the common prefix, at least 1
    prefix_slots: jax.Array  # [N] int32, prefix slot; out of range for padding
    sequence_ids: jax.Array  # [N, n] uint32
    steps: jax.Array  # [N] uint32
    offsets: jax.Array  # [N] uint32, index of the next token in the completion
    sampling: SamplingNumbers  # [N]
    layout: Unpacking | None = None  # of [1, T] tokens
    chunks: Chunks | None = None  # of [1, T] tokens, with the ends of prompts; for DeltaNet layers
    routes: jax.Array | None = None  # [T, L, k], of prompts that are computed again
    turns: jax.Array | None = None  # [1, 3, T] int32, rotary positions, if there are pictures
    inserts: Inserts | None = (
        None  # features of pictures [1, 1 + L, F, D], and which [1, T] of them tokens have
    )
    masks: jax.Array | None = None  # [N, ceil(V / 32)] uint32, `allowed`; None: no sequence has a grammar


@dataclass(frozen=True)
class Program:
    """The static argument of the compiled functions: model, dtype, attention and mesh.

    How tokens are sampled is no part of it: `SamplingNumbers` are data. A completion ends with the first
    token that is in `stop_ids`. `records_routes`: results have the routes of tokens, [.., L, k].
    `most_kept`: results have the words that tokens were drawn from, so many; 0: they have not.
    """

    arch: Architecture
    stop_ids: tuple[int, ...]
    dtype: jnp.dtype
    attention: str
    mesh: Mesh
    backend: Backend = field(default_factory=this_backend)
    records_routes: bool = field(default=False, kw_only=True)
    most_kept: int = field(default=0, kw_only=True)

    @property
    def forms(self) -> RowForms:
        """Which further arrays rows of prompts need."""
        return RowForms(unpacks_above(self.attention), bool(self.arch.deltas))

    @property
    def params(self) -> Any:
        """The partition specs of the parameters."""
        return partition(self.arch, mesh_shape(self.mesh))

    def recorded(self, routes: jax.Array | None) -> jax.Array | None:
        """The routes of all replicas, on every device; None if they are not recorded."""
        return all_gather_shards(routes) if self.records_routes else None

    def hidden(
        self, params: dict, packed: Any, num_prompts: int = 0, routes: jax.Array | None = None
    ) -> tuple[jax.Array, CachePart, jax.Array | None]:
        """Hidden states [T, D] of tokens packed as in `Packed`, what `prefill` has of them for the cache, and
        their routes; of one replica."""
        return decode_step.prefill(
            params,
            self.arch,
            packed.input_ids,
            packed.positions,
            packed.segment_ids,
            packed.branch_ids,
            dtype=self.dtype,
            attention=self.attention,
            layout=packed.layout,
            chunks=packed.chunks,
            num_prompts=num_prompts,
            routes=routes,
            turns=packed.turns,
            inserts=packed.inserts,
            backend=self.backend,
        )

    def draw(
        self,
        token_logits: jax.Array,
        sampling: SamplingNumbers,
        steps: jax.Array,
        sequence_ids: jax.Array,
        positions: jax.Array,
        masks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, KeptWords | None]:
        """Samples tokens from logits [B, V]: (tokens, log-probabilities, kept words if recorded), each [B].

        `positions` [B] are the indices of the tokens in their completions, from which their randomness
        derives. `masks` [B, ceil(V / 32)] are the words that may be drawn (`allowed`); None: all.
        """
        token_logits = token_logits if masks is None else allowed(token_logits, masks)
        by_row = jax.vmap(token_uniforms)
        uniforms = by_row(sampling.seeds, steps, sequence_ids[:, None], positions[:, None])[:, 0]
        by_word = self.backend.vocabulary_first
        how: dict[str, Any] = {"most": self.most_kept, "vocabulary_first": by_word}
        drawn = sample_kept(token_logits, uniforms, sampling, **how)
        # Devices that share matrices may round sums differently: one draws for all, else tokens differ.
        return jax.tree.map(lambda x: from_first_device(x, TP), drawn)

    def stops(self, tokens: jax.Array) -> jax.Array:
        """[B] bool: which `tokens` end a completion."""
        return jnp.isin(tokens, jnp.asarray(self.stop_ids, jnp.int32))


def sharded_program(
    per_shard: Callable[..., Any],
    in_specs: tuple[PartitionSpec, ...],
    out_specs: Any,
    *,
    statics: tuple[str, ...] = (),
    donated: tuple[int, ...] = (),
) -> Callable[[Backend], Any]:
    """A function of a backend; what it returns, jitted, runs `per_shard` on every replica.

    Its arguments are those of `per_shard`: parameters, arrays with `in_specs`, and by name `program` and
    `statics`, which are static. `donated` counts from the parameters.
    """

    def run(params: dict, *arrays: Any, program: Program, **static: Any) -> Any:
        function = partial(per_shard, program=program, **static)
        mapped = shard_mapped(function, program.mesh, (program.params, *in_specs), out_specs)
        return mapped(params, *arrays)

    run.__name__ = run.__qualname__ = per_shard.__name__
    return jit_for_backend(run, static_argnames=("program", *statics), donate_argnums=donated)


def _prefill(
    params: dict, prompts: CachePart, packed: Packed, program: Program
) -> tuple[CachePart, jax.Array, jax.Array, KeptWords | None, jax.Array | None]:
    """(prompt cache with the new prompts in their prefix slots, first tokens [N, n], their log-probabilities
    [N, n], the words that they were drawn from and the routes of all tokens [T, L, k] if these are recorded).

    Each prompt is computed once; the first tokens of its n samples are drawn from its last logits.
    """
    hidden_TD, new, routes = program.hidden(params, packed, len(packed.starts), packed.routes)
    prompt_positions_S, after_N = jnp.arange(prompts.positions), packed.starts - packed.num_common
    from_NS = jnp.where(
        prompt_positions_S < packed.num_common, prompt_positions_S, after_N[:, None] + prompt_positions_S
    )

    def insert(buffer: jax.Array, new_TKH: jax.Array, order: tuple[int, ...]) -> jax.Array:
        new_NSKH = jnp.take(new_TKH, from_NS, axis=0, mode="clip")
        return buffer.at[packed.prefix_slots].set(new_NSKH.transpose(order).astype(buffer.dtype), mode="drop")

    def inserted(layer: LayerCache, new: LayerCache) -> LayerCache:
        if isinstance(layer, DeltaState):
            return DeltaState(
                *(
                    old.at[packed.prefix_slots].set(ends[1:].astype(old.dtype), mode="drop")
                    for old, ends in zip(layer, new, strict=True)
                )
            )
        (keys, values), (new_keys, new_values) = layer, new
        return insert(keys, new_keys, (0, 2, 3, 1)), insert(values, new_values, (0, 2, 1, 3))

    prompts = CachePart(tuple(map(inserted, prompts.layers, new.layers)))
    drawn = _draw_samples(params, hidden_TD[after_N + packed.lengths - 1], packed, program)
    return prompts, *drawn, program.recorded(routes)


_SPECS = (CACHE_SPEC, EACH_REPLICA), (CACHE_SPEC, EVERYWHERE, EVERYWHERE, EVERYWHERE, EVERYWHERE)
prefill_program = sharded_program(_prefill, *_SPECS, donated=(1,))


class Extended(NamedTuple):
    """N sequences that go on after prefix slots: tokens, and what n samples of the next are drawn from."""

    continued: Continued
    sequence_ids: jax.Array  # [N, n] uint32
    steps: jax.Array  # [N] uint32
    offsets: jax.Array  # [N] uint32, index of the next token in the completion
    sampling: SamplingNumbers  # [N]
    masks: jax.Array | None = None  # as in `Packed`


def _extend(
    params: dict, prompts: CachePart, extended: Extended, program: Program
) -> tuple[CachePart, jax.Array, jax.Array, KeptWords | None, jax.Array | None]:
    """(prompt cache with the tokens in their prefix slots, next tokens [N, n], log-probabilities [N, n], the
    words that they were drawn from and the routes of the tokens [N, T, L, k] if these are recorded)."""
    hidden_ND, prompts, routes = decode_step.extend(
        params, program.arch, extended.continued, prompts, dtype=program.dtype, backend=program.backend
    )
    return prompts, *_draw_samples(params, hidden_ND, extended, program), program.recorded(routes)


def _draw_samples(
    params: dict, last_ND: jax.Array, drawn: Packed | Extended, program: Program
) -> tuple[jax.Array, jax.Array, KeptWords | None]:
    """(tokens [N, n] of the n samples after each of N contexts, their log-probabilities, the words that they
    were drawn from if these are recorded) of all replicas."""
    n = drawn.sequence_ids.shape[1]
    sampled = program.draw(
        jnp.repeat(logits(params, program.arch, last_ND, backend=program.backend), n, axis=0),
        jax.tree.map(lambda x: jnp.repeat(x, n), drawn.sampling),
        jnp.repeat(drawn.steps, n),
        drawn.sequence_ids.reshape(-1),
        jnp.repeat(drawn.offsets, n),
        None if drawn.masks is None else jnp.repeat(drawn.masks, n, axis=0),
    )
    return all_gather_shards(jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]), sampled))


extend_program = sharded_program(_extend, *_SPECS, donated=(1,))


def _restore(
    params: dict, generated: CachePart, prompts: CachePart, restored: Restored, program: Program
) -> CachePart:
    """`generated` with tokens of turns that lost their slots."""
    return decode_step.restore(
        params, program.arch, restored, prompts, generated, dtype=program.dtype, backend=program.backend
    )


restore_program = sharded_program(_restore, (CACHE_SPEC, CACHE_SPEC, EACH_REPLICA), CACHE_SPEC, donated=(1,))


class Filled(NamedTuple):
    """Slots that begin after prefix slots; [N] int32 each."""

    slots: np.ndarray  # out of range for padding
    prefix_slots: np.ndarray


def copy_states(generated: CachePart, prompts: CachePart, filled: Filled, mesh: Mesh) -> CachePart:
    """`generated` with the states of prefix slots in the slots that begin after them."""
    pairs = zip(generated.layers, prompts.layers, strict=True)
    layers = [
        DeltaState(*(_copied(to, by, filled, mesh) for to, by in zip(own, before, strict=True)))
        if isinstance(own, DeltaState)
        else own
        for own, before in pairs
    ]
    return CachePart(tuple(layers))


@partial(jax.jit, static_argnames=("mesh",), donate_argnames=("x",))
def _copied(x: jax.Array, source: jax.Array, filled: Filled, mesh: Mesh) -> jax.Array:
    def on_shard(x: jax.Array, source: jax.Array, filled: Filled) -> jax.Array:
        return x.at[filled.slots].set(source[filled.prefix_slots], mode="drop")

    specs = CACHE_SPEC, CACHE_SPEC, EACH_REPLICA
    return shard_mapped(on_shard, mesh, specs, CACHE_SPEC)(x, source, filled)


class Slots(NamedTuple):
    """The sequences in the slots, [B] each; values are valid but arbitrary where `live` is False."""

    tokens: jax.Array  # int32, the last one sampled
    lengths: jax.Array  # int32, tokens sampled so far, at least 1
    limits: jax.Array  # int32, the most tokens that may be sampled
    prompt_lengths: jax.Array  # int32
    offsets: jax.Array  # uint32, the index from which those are counted that their randomness derives from
    sequence_ids: jax.Array  # uint32
    steps: jax.Array  # uint32
    live: jax.Array  # bool
    sampling: SamplingNumbers
    shifts: jax.Array | None = None  # int32, rotary positions less positions, behind pictures
    masks: jax.Array | None = None
    """[B, ceil(V / 32)] uint32, as in `Packed`; those of one step, which is then all that a call runs."""


class Decoded(NamedTuple):
    """The result of a decode call: tokens and log-probabilities [B, TOKENS_PER_CALL], or [B, 1] with masks.

    Of each slot, the first `counts` [B] are valid. `num_steps` is the number of decode steps. `routes`
    [B, TOKENS_PER_CALL, L, k] are those of the inputs of the steps: of the token before each of `tokens`.
    `kept` are the words [B, TOKENS_PER_CALL, K] that the tokens were drawn from.
    """

    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    num_steps: jax.Array
    routes: jax.Array | None = None
    kept: KeptWords | None = None
    drafted: jax.Array | None = None  # [B] int32: drafts that were checked; without drafts None
    ends: jax.Array | None = None  # [B, steps] int32: the counts after each step; without drafts None

    @classmethod
    def empty(cls, program: Program, shape: tuple[int, int]) -> Self:
        """Room for `shape` [B, tokens] of what `program` records, without drafts."""
        zeros = jnp.zeros(shape, jnp.int32)
        routes = program.arch.routes if program.records_routes else None
        form = routes and jnp.zeros((*shape, routes.layers, routes.experts_per_token), routes.dtype)
        width = min(program.most_kept, program.arch.vocab_size)
        kept = KeptWords(jnp.zeros((*shape, width), jnp.int32), zeros) if width else None
        return cls(zeros, zeros.astype(jnp.float32), zeros[:, 0], jnp.int32(0), form, kept)


_Carry = tuple[CachePart, jax.Array, jax.Array, Decoded]
"""Cache of generated tokens, last tokens, live slots, sampled tokens."""
_AnyCarry = TypeVar("_AnyCarry", bound=tuple[Any, ...])
"""The cache, two that may be others, and what follows, sampled tokens last."""


def _decode(
    params: dict,
    generated: CachePart,
    prompts: CachePart,
    slots: Slots,
    sharing: Sharing,
    ring_position: jax.Array,
    program: Program,
) -> tuple[CachePart, Decoded]:
    """(updated `generated`, up to TOKENS_PER_CALL tokens per live slot, with masks one).

    With `Backend.decode_ends_early`, ends once no slot of any replica is live; otherwise slots whose sequence
    has ended compute on, and what they sample does not count. The first decode step writes `ring_position` of
    the ring buffer `generated`, which must have enough positions for the tokens that a slot has and will get.
    """
    arch = program.arch
    # The mask of a further token depends on this one.
    shape = (len(slots.tokens), TOKENS_PER_CALL if slots.masks is None else 1)
    empty = Decoded.empty(program, shape)

    def advance(carry: _Carry) -> _Carry:
        generated, tokens, live, decoded = carry
        now = decoded.num_steps
        lengths = slots.lengths + now
        hidden, generated, routes = decode_step.decode(
            params,
            arch,
            tokens,
            slots.prompt_lengths + lengths - 1,
            prompts,
            generated,
            lengths,
            (ring_position + now) % generated.positions,
            sharing,
            live,
            shifts=slots.shifts,
            dtype=program.dtype,
            backend=program.backend,
        )
        tokens, logprobs, kept = program.draw(
            logits(params, arch, hidden, backend=program.backend),
            slots.sampling,
            slots.steps,
            slots.sequence_ids,
            slots.offsets + lengths.astype(jnp.uint32),
            slots.masks,
        )
        own = decoded.routes
        if own is not None and routes is not None:
            own = jax.lax.dynamic_update_slice(own, routes[:, None], (0, now, 0, 0))
        decoded = Decoded(
            jax.lax.dynamic_update_slice(decoded.tokens, tokens[:, None], (0, now)),
            jax.lax.dynamic_update_slice(decoded.logprobs, logprobs[:, None], (0, now)),
            decoded.counts + live,
            now + 1,
            own,
            jax.tree.map(
                lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new[:, None], now, 1),
                decoded.kept,
                kept,
            ),
        )
        live = live & ~program.stops(tokens) & (lengths + 1 < slots.limits)
        return generated, tokens, live, decoded

    begin = (generated, slots.tokens, slots.live, empty)
    generated, _, _, decoded = repeated(advance, begin, program) if shape[1] > 1 else advance(begin)
    tokens, logprobs, counts = all_gather_shards((decoded.tokens, decoded.logprobs, decoded.counts))
    recorded = program.recorded(decoded.routes), all_gather_shards(decoded.kept)
    return generated, Decoded(tokens, logprobs, counts, decoded.num_steps, *recorded)


_SPECS_OF_DECODE = CACHE_SPEC, CACHE_SPEC, EACH_REPLICA, EACH_REPLICA, EVERYWHERE
decode_program = sharded_program(_decode, _SPECS_OF_DECODE, (CACHE_SPEC, EVERYWHERE), donated=(1,))


def repeated(advance: Callable[[_AnyCarry], _AnyCarry], begin: _AnyCarry, program: Program) -> _AnyCarry:
    """The decode steps of a call, of whose carry the live slots are number 2 and `Decoded` is the last."""
    if not program.backend.decode_ends_early:
        return jax.lax.fori_loop(0, TOKENS_PER_CALL, lambda _, carry: advance(carry), begin)

    def any_live(carry: _AnyCarry) -> jax.Array:
        return any_shard(carry[2].any())

    def unfinished(state: tuple[_AnyCarry, jax.Array]) -> jax.Array:
        carry, more = state
        return (carry[-1].num_steps < TOKENS_PER_CALL) & more

    def advance_all(state: tuple[_AnyCarry, jax.Array]) -> tuple[_AnyCarry, jax.Array]:
        carry = advance(state[0])
        return carry, any_live(carry)

    return jax.lax.while_loop(unfinished, advance_all, (begin, any_live(begin)))[0]


class Blocks(NamedTuple):
    """Blocks of positions that are copied from prefix slots, or to them; [N] int32 each on a replica."""

    counts: np.ndarray  # [1]: how many of the N are real
    blocks: np.ndarray
    prefix_slots: np.ndarray
    firsts: np.ndarray  # the sequence's token with which the block begins


class TurnBlocks(NamedTuple):
    """Blocks of positions that are copied from slots; [N] int32 each on a replica."""

    counts: np.ndarray  # [1]: how many of the N are real
    blocks: np.ndarray
    slots: np.ndarray
    firsts: (
        np.ndarray
    )  # the turn's token with which the block begins; negative where it begins before the turn
    ring_positions: np.ndarray  # that of the turn's first token in its slot, modulo their number


def load_blocks(prompts: CachePart, kept: CachePart, blocks: Blocks, mesh: Mesh) -> CachePart:
    """`prompts` with these blocks of `kept`, in its layers of attention.

    A block is copied whole: what is there after the tokens that are wanted is masked, and overwritten.
    """

    def loaded(pair: tuple[LayerCache, LayerCache]) -> LayerCache:
        (keys, values), (kept_keys, kept_values) = pair
        return _load(keys, kept_keys, blocks, 3, mesh), _load(values, kept_values, blocks, 2, mesh)

    return _with_attentions(prompts, map(loaded, zip(_attentions(prompts), kept.layers, strict=True)))


def keep_blocks(kept: CachePart, prompts: CachePart, blocks: Blocks, mesh: Mesh) -> CachePart:
    """`kept` with these blocks, of what is in prefix slots."""

    def filled(pair: tuple[LayerCache, LayerCache]) -> LayerCache:
        (keys, values), (new_keys, new_values) = pair
        return _keep_block(keys, new_keys, blocks, 3, mesh), _keep_block(values, new_values, blocks, 2, mesh)

    return CachePart(tuple(map(filled, zip(kept.layers, _attentions(prompts), strict=True))))


def keep_turn_blocks(kept: CachePart, generated: CachePart, blocks: TurnBlocks, mesh: Mesh) -> CachePart:
    """`kept` with what these blocks have of turns; positions before a turn stay as they are."""

    def filled(pair: tuple[LayerCache, LayerCache]) -> LayerCache:
        (keys, values), (new_keys, new_values) = pair
        return (
            _keep_turn_block(keys, new_keys, blocks, 3, mesh),
            _keep_turn_block(values, new_values, blocks, 2, mesh),
        )

    return CachePart(tuple(map(filled, zip(kept.layers, _attentions(generated), strict=True))))


def keep_states(kept: CachePart, cache: CachePart, filled: Filled, mesh: Mesh) -> CachePart:
    """`kept` with states of rows of `cache`: those of `filled.prefix_slots` in `filled.slots`."""
    return CachePart(
        tuple(
            DeltaState(*(_copied(to, by, filled, mesh) for to, by in zip(own, state, strict=True)))
            for own, state in zip(kept.layers, _states(cache), strict=True)
        )
    )


def load_states(prompts: CachePart, kept: CachePart, filled: Filled, mesh: Mesh) -> CachePart:
    """`prompts` with kept states: those of `filled.prefix_slots` in `filled.slots`."""
    states = iter(kept.layers)
    return CachePart(
        tuple(
            DeltaState(*(_copied(to, by, filled, mesh) for to, by in zip(own, next(states), strict=True)))
            if isinstance(own, DeltaState)
            else own
            for own in prompts.layers
        )
    )


def _attentions(part: CachePart) -> list[LayerCache]:
    return [layer for layer in part.layers if not isinstance(layer, DeltaState)]


def _states(part: CachePart) -> list[DeltaState]:
    return [layer for layer in part.layers if isinstance(layer, DeltaState)]


def _with_attentions(part: CachePart, new: Iterator[LayerCache]) -> CachePart:
    layers = (layer if isinstance(layer, DeltaState) else next(new) for layer in part.layers)
    return CachePart(tuple(layers))


@partial(jax.jit, static_argnames=("axis", "mesh"), donate_argnames=("prompts",))
def _load(prompts: jax.Array, kept: jax.Array, blocks: Blocks, axis: int, mesh: Mesh) -> jax.Array:
    def load_shard(prompts: jax.Array, kept: jax.Array, blocks: Blocks) -> jax.Array:
        def step(i: jax.Array, prompts: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_slice_in_dim(kept, blocks.blocks[i], 1, 0)
            # Slices, not a scatter of whole rows: that took five times as long.
            return jax.lax.dynamic_update_slice(prompts, block, _place(blocks, i, axis))

        return jax.lax.fori_loop(0, blocks.counts[0], step, prompts)

    specs = CACHE_SPEC, CACHE_SPEC, EACH_REPLICA
    return shard_mapped(load_shard, mesh, specs, CACHE_SPEC)(prompts, kept, blocks)


@partial(jax.jit, static_argnames=("axis", "mesh"), donate_argnames=("kept",))
def _keep_block(kept: jax.Array, prompts: jax.Array, blocks: Blocks, axis: int, mesh: Mesh) -> jax.Array:
    def keep_shard(kept: jax.Array, prompts: jax.Array, blocks: Blocks) -> jax.Array:
        def step(i: jax.Array, kept: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_slice(prompts, _place(blocks, i, axis), (1, *kept.shape[1:]))
            return jax.lax.dynamic_update_slice_in_dim(kept, block, blocks.blocks[i], 0)

        return jax.lax.fori_loop(0, blocks.counts[0], step, kept)

    specs = CACHE_SPEC, CACHE_SPEC, EACH_REPLICA
    return shard_mapped(keep_shard, mesh, specs, CACHE_SPEC)(kept, prompts, blocks)


@partial(jax.jit, static_argnames=("axis", "mesh"), donate_argnames=("kept",))
def _keep_turn_block(
    kept: jax.Array, generated: jax.Array, blocks: TurnBlocks, axis: int, mesh: Mesh
) -> jax.Array:
    size = kept.shape[axis]

    def keep_shard(kept: jax.Array, generated: jax.Array, blocks: TurnBlocks) -> jax.Array:
        def step(i: jax.Array, kept: jax.Array) -> jax.Array:
            after = blocks.firsts[i] + jnp.arange(size)
            places = (blocks.ring_positions[i] + after) % generated.shape[axis]
            # One gather: to slice the slot first would copy all of its positions for each block.
            turn = generated[(blocks.slots[i], *[slice(None)] * (axis - 1), places)]
            before = (after < 0).reshape([size if dim == axis else 1 for dim in range(4)])
            block = jax.lax.dynamic_slice_in_dim(kept, blocks.blocks[i], 1, 0)
            block = jnp.where(before, block, jnp.moveaxis(turn, 0, axis - 1)[None])
            return jax.lax.dynamic_update_slice_in_dim(kept, block, blocks.blocks[i], 0)

        return jax.lax.fori_loop(0, blocks.counts[0], step, kept)

    specs = CACHE_SPEC, CACHE_SPEC, EACH_REPLICA
    return shard_mapped(keep_shard, mesh, specs, CACHE_SPEC)(kept, generated, blocks)


def _place(blocks: Blocks, i: jax.Array, axis: int) -> list[Any]:
    """Where in the prompt cache a block stands."""
    return [{0: blocks.prefix_slots[i], axis: blocks.firsts[i]}.get(dim, 0) for dim in range(4)]


def rearrange(part: CachePart, slots: np.ndarray, positions: np.ndarray, mesh: Mesh) -> CachePart:
    """`part` with these `slots` (indices per replica) and `positions`; one small program serves all arrays.

    Each array of `part` is freed once it is copied, so that only one of them is in memory twice.
    """
    [new] = rearrange_rings((part,), (), [(Picked(slots, None, positions), {})], mesh)
    return new


class Picked(NamedTuple):
    """What a ring takes of another: slots, and which of their positions; indices per replica."""

    slots: np.ndarray | None
    """None: all of them, where they are."""
    to: np.ndarray | None
    """The slots that these become, out of range for padding; None: all, in order."""
    positions: np.ndarray

    def is_whole(self, slots: int, replicas: int) -> bool:
        """Whether these are all `slots` of a ring on all replicas, in order."""
        return self.slots is None or np.array_equal(self.slots, np.arange(slots) % (slots // replicas))

    @classmethod
    def moved(cls, pairs: list[list[tuple[int, int]]], size: int, positions: np.ndarray) -> Picked:
        """The (to, from) slots of each replica, into a ring of `size` slots."""
        count = power_of_four(max(map(len, pairs)))
        table = np.array([own + [(size, 0)] * (count - len(own)) for own in pairs], np.int32)
        to, slots = table.reshape(-1, 2).T.copy()
        return cls(slots, to, positions)


def rearrange_rings(
    old: Sequence[CachePart],
    empty: Sequence[Callable[[int], LayerCache]],
    sources: Sequence[tuple[Picked | None, Mapping[int, Picked]]],
    mesh: Mesh,
) -> tuple[CachePart, ...]:
    """New rings, each of the old one in its place, or of `empty` layers, and of slots that come from others.

    Arrays of `old` are freed layer by layer. Slots may come from rings before, and from rings that are not
    among the new ones.
    """
    layers: list[list[LayerCache]] = [[] for _ in sources]
    replicas = mesh_shape(mesh).num_data_shards
    for layer, form in enumerate(old[0].layers):
        fresh = {ring: empty[ring](layer) for ring, (own, _) in enumerate(sources) if own is None}
        pairs: list[dict[int, jax.Array]] = [{}, {}]
        for kind, axis in enumerate(position_axes(form)):
            before = [part.layers[layer][kind] for part in old]
            for ring in reversed(range(len(sources))):  # before what it takes of shorter rings is freed
                own, more = sources[ring]
                if own is None:
                    new = fresh[ring][kind]
                elif own.slots is None or (axis is None and own.is_whole(len(before[ring]), replicas)):
                    new = before[ring]
                else:
                    new = _pick(before[ring], own.slots, own.positions, axis, mesh)
                for of, picked in more.items():
                    new = _put(new, before[of], picked.slots, picked.to, picked.positions, axis, mesh)
                pairs[kind][ring] = new
            for x in before:
                if all(x is not new for new in pairs[kind].values()) and not x.is_deleted():
                    x.delete()
        for ring, new_layers in enumerate(layers):
            both = pairs[0][ring], pairs[1][ring]
            new_layers.append(DeltaState(*both) if isinstance(form, DeltaState) else both)
    return tuple(CachePart(tuple(each)) for each in layers)


def _taken(x: jax.Array, slots: jax.Array, positions: jax.Array, axis: int | None) -> jax.Array:
    """These slots of `x`, and of them these positions, if it has positions."""
    rows = jnp.take(x, slots, axis=0, mode="clip")
    return rows if axis is None else jnp.take(rows, positions, axis=axis, mode="clip")


@partial(jax.jit, static_argnames=("axis", "mesh"))
def _pick(x: jax.Array, slots: np.ndarray, positions: np.ndarray, axis: int | None, mesh: Mesh) -> jax.Array:
    def pick_shard(x: jax.Array, slots: jax.Array, positions: jax.Array) -> jax.Array:
        return _taken(x, slots, positions, axis)

    return shard_mapped(pick_shard, mesh, (CACHE_SPEC, EACH_REPLICA, EVERYWHERE), CACHE_SPEC)(
        x, slots, positions
    )


@partial(jax.jit, static_argnames=("axis", "mesh"), donate_argnames=("x",))
def _put(
    x: jax.Array,
    source: jax.Array,
    slots: np.ndarray,
    to: np.ndarray,
    positions: np.ndarray,
    axis: int | None,
    mesh: Mesh,
) -> jax.Array:
    def put_shard(
        x: jax.Array, source: jax.Array, slots: jax.Array, to: jax.Array, positions: jax.Array
    ) -> jax.Array:
        return x.at[to].set(_taken(source, slots, positions, axis), mode="drop")

    specs = CACHE_SPEC, CACHE_SPEC, EACH_REPLICA, EACH_REPLICA, EVERYWHERE
    return shard_mapped(put_shard, mesh, specs, CACHE_SPEC)(x, source, slots, to, positions)
