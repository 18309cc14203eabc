"""Decode steps with drafts: each runs the last token of a slot and drafts of the next ones, and keeps those
drafts that are the tokens which the sampler draws there.

A draft is what followed, in the prompt, in the slot's own tokens or in those of other samples of the prompt,
on the tokens that the slot ends with (`ops/ngrams.py`). The token of each place is drawn from the logits of
that place with the random number of that place, as without drafts; the first one that differs from its draft
ends the step. So drafts decide how many tokens a step gives, and never which.

Data flow: groups -> `drafts_of`, tables for a decode call -> `speculate_program` -> `session.py`. Shapes as
in `decode.py`; T = 1 + `num_drafts` tokens of a slot in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.engine.decode import (
    EACH_REPLICA,
    EVERYWHERE,
    TOKENS_PER_CALL,
    Decoded,
    Program,
    Slots,
    repeated,
    sharded_program,
)
from quatrain.engine.groups import Group, as_jit_arguments
from quatrain.models import decode_step
from quatrain.models.decode_step import Sharing
from quatrain.models.decoder import logits
from quatrain.models.kv_cache import CACHE_SPEC, CachePart
from quatrain.ops.ngrams import NOTHING, followers
from quatrain.parallel.collectives import all_gather_shards

MOST_OTHERS = 4096
"""Tokens of the samples of a prompt that drafts are taken from, beside prompt and turn of the slot itself."""


class Drafts(NamedTuple):
    """Where drafts are looked up; NOTHING where there is no token."""

    others: jax.Array  # [R, W] int32: tokens of the samples of each prompt, NOTHING between them and last
    own: jax.Array  # [B, S + C + 1] int32: context and turn of each slot


_Carry = tuple[CachePart, jax.Array, jax.Array, jax.Array, jax.Array, Decoded]
"""Cache of generated tokens, last tokens, live slots, lengths, contexts and turns, sampled tokens."""


def _speculate(
    params: dict,
    generated: CachePart,
    prompts: CachePart,
    slots: Slots,
    sharing: Sharing,
    drafts: Drafts,
    program: Program,
    num_drafts: int,
) -> tuple[CachePart, Decoded]:
    """(updated `generated`, what up to TOKENS_PER_CALL decode steps have sampled; with masks one step).

    Of each live slot a step gives from one to T tokens. A turn's token number i is at position i of its slot.
    """
    arch, width = program.arch, 1 + num_drafts
    B, steps = len(slots.tokens), TOKENS_PER_CALL if slots.masks is None else 1
    rows, ahead = jnp.arange(B), jnp.arange(width, dtype=jnp.int32)
    ends = jnp.zeros((B, steps), jnp.int32)
    empty = Decoded.empty(program, (B, steps * width))._replace(drafted=ends[:, 0], ends=ends)
    others = drafts.others[sharing.place // sharing.members.shape[1]]

    def of_each_place(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, width, axis=0)

    def advance(carry: _Carry) -> _Carry:
        generated, tokens, live, lengths, own, decoded = carry
        drafted = jnp.zeros((B, 0), jnp.int32)
        if num_drafts:
            history, after = jnp.concatenate([others, own], axis=1), slots.prompt_lengths + lengths
            drafted = followers(history, others.shape[1] + after, num_drafts, others.shape[1])
            # The last token that a sequence may have needs no draft: nothing is drawn after it.
            drafted = jnp.where(lengths[:, None] + 1 + ahead[:-1] < slots.limits[:, None], drafted, NOTHING)
        hidden, generated, routes = decode_step.verify(
            params,
            arch,
            jnp.concatenate([tokens[:, None], jnp.maximum(drafted, 0)], axis=1),
            slots.prompt_lengths + lengths - 1,
            prompts,
            generated,
            lengths,
            sharing,
            shifts=slots.shifts,
            dtype=program.dtype,
            backend=program.backend,
        )
        new_lengths = lengths[:, None] + ahead
        sampled = program.draw(
            logits(params, arch, hidden.reshape(B * width, -1), backend=program.backend),
            jax.tree.map(of_each_place, slots.sampling),
            of_each_place(slots.steps),
            of_each_place(slots.sequence_ids),
            of_each_place(slots.offsets) + new_lengths.reshape(-1).astype(jnp.uint32),
            slots.masks,
        )
        drawn, logprobs, kept = jax.tree.map(lambda x: x.reshape(B, width, *x.shape[1:]), sampled)
        stops = program.stops(drawn) | (new_lengths + 1 >= slots.limits[:, None])
        # A token is of the sequence if the input before it is, and no token before it has ended the sequence.
        follows = (drawn[:, :-1] == drafted) & ~stops[:, :-1]
        count = 1 + jnp.cumprod(follows, axis=1, dtype=jnp.int32).sum(axis=1)
        last, count = (count - 1)[:, None], jnp.where(live, count, 0)
        taken = ahead < count[:, None]

        def appended(table: jax.Array, ends: jax.Array, new: jax.Array) -> jax.Array:
            places = jnp.where(taken, ends[:, None] + ahead, table.shape[1])  # out of range: not written
            return table.at[rows[:, None], places].set(new.astype(table.dtype), mode="drop")

        assert decoded.drafted is not None
        assert decoded.ends is not None
        table, of_inputs = decoded.routes, routes
        if table is not None and of_inputs is not None:
            table = appended(table, decoded.counts, of_inputs)
        checked = jnp.cumprod(drafted != NOTHING, axis=1, dtype=jnp.int32).sum(axis=1)
        counts = decoded.counts + count
        decoded = Decoded(
            appended(decoded.tokens, decoded.counts, drawn),
            appended(decoded.logprobs, decoded.counts, logprobs),
            counts,
            decoded.num_steps + 1,
            table,
            jax.tree.map(lambda old, new: appended(old, decoded.counts, new), decoded.kept, kept),
            decoded.drafted + jnp.where(live, checked, 0),
            jax.lax.dynamic_update_slice(decoded.ends, counts[:, None], (0, decoded.num_steps)),
        )
        own = appended(own, slots.prompt_lengths + lengths, drawn)
        tokens = jnp.where(live, jnp.take_along_axis(drawn, last, axis=1)[:, 0], tokens)
        live &= ~jnp.take_along_axis(stops, last, axis=1)[:, 0]
        return generated, tokens, live, lengths + count, own, decoded

    begin = generated, slots.tokens, slots.live, slots.lengths, drafts.own, empty
    generated, *_, decoded = repeated(advance, begin, program) if steps > 1 else advance(begin)
    names = "tokens", "logprobs", "counts", "kept", "drafted", "ends"
    gathered = all_gather_shards(tuple(getattr(decoded, name) for name in names))
    decoded = decoded._replace(**dict(zip(names, gathered, strict=True)))
    return generated, decoded._replace(routes=program.recorded(decoded.routes))


speculate_program = sharded_program(
    _speculate,
    (CACHE_SPEC, CACHE_SPEC, EACH_REPLICA, EACH_REPLICA, EACH_REPLICA),
    (CACHE_SPEC, EVERYWHERE),
    statics=("num_drafts",),
    donated=(1,),
)


def drafts_of(
    prompts: Sequence[Group | None],
    slots: Sequence[tuple[Group, int] | None],
    n: int,
    prompt_positions: int,
    positions: int,
) -> Drafts:
    """What drafts are looked up in, of the prompts in prefix slots and of the samples in slots.

    The tokens of up to `n` samples of a prompt have at most MOST_OTHERS places: samples that have ended come
    first, as they are whole. The sizes follow from those of the cache, so that they compile nothing more.
    """
    width = min(n * (positions + 1), MOST_OTHERS) if n > 1 else 0
    others = np.full((len(prompts), width + 1), NOTHING, np.int32)
    for row, group in zip(others, prompts, strict=True):
        if group is not None and width:
            first = 0
            for completion in sorted(group.completions, key=lambda each: each.finish_reason != "stop"):
                tokens = completion.tokens[: width - first]
                row[first : first + len(tokens)] = tokens
                first = min(first + len(tokens) + 1, width)
    own = np.full((len(slots), prompt_positions + positions + 1), NOTHING, np.int32)
    for row, sample in zip(own, slots, strict=True):
        if sample is not None:
            group, index = sample
            context, tokens = group.context, group.completions[index].tokens
            row[: len(context)] = context
            row[len(context) : len(context) + len(tokens)] = tokens
    return Drafts(*as_jit_arguments(others, own))


def steps_of(decoded: Decoded, slot: int, kept: int) -> int:
    """How many steps of a decode call gave one or more of the first `kept` tokens of a slot."""
    if decoded.ends is None:
        return kept
    ends = np.asarray(decoded.ends)[slot, : int(decoded.num_steps)]
    begins = np.concatenate([[0], ends[:-1]])
    return int(((begins < kept) & (begins < ends)).sum())
