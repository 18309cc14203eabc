"""The compiled half of the rollout: prompts into the cache, then several tokens of every slot in one call.

Called by `session.py` alone. Shapes: B slots, R rows of the prompt cache, each of S columns, O columns of a
slot's own, M slots that share a prompt at most; a prefill has N prompts of n samples in T packed tokens.

These are the sizes of one replica of the sampler. On a mesh each data shard is one, and arrays hold those of
all replicas one behind the other; places of slots and rows are counted within a replica. What comes out for
the host is of all replicas, and on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from quatrain.backend import Backend, this_backend
from quatrain.models import decode_step
from quatrain.models.architecture import Architecture
from quatrain.models.decode_step import Sharing
from quatrain.models.decoder import logits
from quatrain.models.kv_cache import CACHE_SPEC, CachePart
from quatrain.models.params import partition
from quatrain.ops.sampling import sample, token_uniforms
from quatrain.parallel.collectives import all_gather_shards, any_shard, from_first_device, shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.mesh import DATA_AXES, mesh_shape
from quatrain.rollout.interface import Sampling

EACH_REPLICA, EVERYWHERE = PartitionSpec(DATA_AXES), PartitionSpec()
TOKENS_PER_CALL = 8
"""Tokens each slot decodes before the host looks; a slot that ends waits half as many on average."""


class Packed(NamedTuple):
    """N prompts in one row of T tokens, and the samples that start from them.

    A common prefix of all prompts may stand in the row once, first; the rest of prompt i then begins at
    `starts[i]`.
    """

    input_ids: jax.Array  # [T] int32
    positions: jax.Array  # [T] int32
    segment_ids: jax.Array  # [T] int32, 0 is padding
    branch_ids: jax.Array  # [T] int32
    num_common: jax.Array  # [1] int32, tokens of the common prefix; 0 where there is none
    starts: jax.Array  # [N] int32
    lengths: jax.Array  # [N] int32, of prompts with the common prefix, at least 1
    rows: jax.Array  # [N] int32, of the prompt cache; out of range for padding
    sequence_ids: jax.Array  # [N, n] uint32
    steps: jax.Array  # [N] uint32


@dataclass(frozen=True)
class Program:
    """What the compiled functions are made for; static.

    `sampling` is that of one token (`Sampling.of_one_token`); a completion ends with the first of `stop_ids`.
    """

    arch: Architecture
    sampling: Sampling
    stop_ids: tuple[int, ...]
    dtype: jnp.dtype
    attention: str
    mesh: Mesh
    backend: Backend = field(default_factory=this_backend)

    @property
    def params(self) -> Any:
        """The partition specs of the parameters."""
        return partition(self.arch, mesh_shape(self.mesh))

    def draw(
        self,
        token_logits: jax.Array,
        seed: jax.Array,
        steps: jax.Array,
        sequence_ids: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens and log-probabilities [B] from logits [B, V], as completion tokens number `positions`."""
        each = jax.vmap(token_uniforms, (None, 0, 0, 0))
        uniforms = each(seed, steps, sequence_ids[:, None], positions[:, None])[:, 0]
        sampling = self.sampling
        tokens, logprobs = sample(
            token_logits,
            uniforms,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        return from_first_device(tokens, "tp"), from_first_device(logprobs, "tp")

    def ends(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Whether completions of `lengths` tokens, the last of them `tokens`, are complete."""
        stopped = jnp.isin(tokens, jnp.asarray(self.stop_ids, jnp.int32))
        return stopped | (lengths >= self.sampling.max_new_tokens)


def _prefill(
    params: dict, prompts: CachePart, packed: Packed, seed: jax.Array, *, program: Program
) -> tuple[CachePart, jax.Array, jax.Array]:
    """`prompts` with the new ones in their rows, and the first token of each sample, with log-probability.

    A prompt is computed once; its n samples fan out from its last logits. Both are [N, n].
    """
    in_specs = (program.params, CACHE_SPEC, EACH_REPLICA, EVERYWHERE)
    out_specs = (CACHE_SPEC, EVERYWHERE, EVERYWHERE)
    own = partial(_own_prefill, program=program)
    return shard_mapped(own, program.mesh, in_specs, out_specs)(params, prompts, packed, seed)


prefill_program = jit_for_backend(_prefill, static_argnames=("program",), donate_argnames=("prompts",))
"""`prefill_program(backend)` is the jitted `_prefill`."""


def _own_prefill(
    params: dict, prompts: CachePart, packed: Packed, seed: jax.Array, program: Program
) -> tuple[CachePart, jax.Array, jax.Array]:
    hidden_TD, new = decode_step.prefill(
        params,
        program.arch,
        packed.input_ids,
        packed.positions,
        packed.segment_ids,
        packed.branch_ids,
        dtype=program.dtype,
        attention=program.attention,
        backend=program.backend,
    )
    columns_S, after_N = jnp.arange(prompts.columns), packed.starts - packed.num_common
    columns_NS = jnp.where(columns_S < packed.num_common, columns_S, after_N[:, None] + columns_S)

    def insert(buffer: jax.Array, new_TKH: jax.Array, order: tuple[int, ...]) -> jax.Array:
        new_NSKH = jnp.take(new_TKH, columns_NS, axis=0, mode="clip")
        return buffer.at[packed.rows].set(new_NSKH.transpose(order).astype(buffer.dtype), mode="drop")

    prompts = CachePart(
        jax.tree.map(partial(insert, order=(0, 2, 3, 1)), prompts.keys, new.keys),
        jax.tree.map(partial(insert, order=(0, 2, 1, 3)), prompts.values, new.values),
    )
    n = packed.sequence_ids.shape[1]
    last_ND = hidden_TD[after_N + packed.lengths - 1]
    last_logits = logits(params, program.arch, last_ND, backend=program.backend)
    tokens, logprobs = program.draw(
        jnp.repeat(last_logits, n, axis=0),
        seed,
        jnp.repeat(packed.steps, n),
        packed.sequence_ids.reshape(-1),
        jnp.zeros(packed.sequence_ids.size, jnp.uint32),
    )
    return prompts, *all_gather_shards((tokens.reshape(-1, n), logprobs.reshape(-1, n)))


class Slots(NamedTuple):
    """The sequences in the slots, [B] each; anything in range where `live` is False."""

    tokens: jax.Array  # int32, the last one sampled
    lengths: jax.Array  # int32, completion tokens so far, at least 1
    prompt_lengths: jax.Array  # int32
    sequence_ids: jax.Array  # uint32
    steps: jax.Array  # uint32
    live: jax.Array  # bool


class Decoded(NamedTuple):
    """Tokens and log-probabilities [B, TOKENS_PER_CALL], the first `counts` [B] of each; steps done."""

    tokens: jax.Array
    logprobs: jax.Array
    counts: jax.Array
    num_steps: jax.Array


_Carry = tuple[CachePart, jax.Array, jax.Array, jax.Array, Decoded]
"""Own cache, last tokens, which slots go on, whether one of any replica does, and what is decoded."""


def _decode(
    params: dict,
    own: CachePart,
    prompts: CachePart,
    slots: Slots,
    sharing: Sharing,
    column: jax.Array | np.int32,
    seed: jax.Array,
    *,
    program: Program,
) -> tuple[CachePart, Decoded]:
    """Up to TOKENS_PER_CALL tokens of every live slot; ends early when all are done, on every replica.

    The first of them is written at `column` of the ring `own`, which must hold what a slot has and gets.
    """
    in_specs = (program.params, CACHE_SPEC, CACHE_SPEC, EACH_REPLICA, EACH_REPLICA, EVERYWHERE, EVERYWHERE)
    run = shard_mapped(
        partial(_own_decode, program=program), program.mesh, in_specs, (CACHE_SPEC, EVERYWHERE)
    )
    return run(params, own, prompts, slots, sharing, column, seed)


decode_program = jit_for_backend(_decode, static_argnames=("program",), donate_argnames=("own",))
"""`decode_program(backend)` is the jitted `_decode`."""


def _own_decode(
    params: dict,
    own: CachePart,
    prompts: CachePart,
    slots: Slots,
    sharing: Sharing,
    column: jax.Array,
    seed: jax.Array,
    program: Program,
) -> tuple[CachePart, Decoded]:
    arch = program.arch
    shape = (len(slots.tokens), TOKENS_PER_CALL)
    zeros = jnp.zeros(shape, jnp.int32)
    empty = Decoded(zeros, zeros.astype(jnp.float32), zeros[:, 0], jnp.int32(0))

    def unfinished(carry: _Carry) -> jax.Array:
        *_, any_live, decoded = carry
        return (decoded.num_steps < TOKENS_PER_CALL) & any_live

    def advance(carry: _Carry) -> _Carry:
        own, tokens, live, _, decoded = carry
        now = decoded.num_steps
        lengths = slots.lengths + now
        hidden, own = decode_step.decode(
            params,
            arch,
            tokens,
            slots.prompt_lengths + lengths - 1,
            prompts,
            own,
            lengths,
            (column + now) % own.columns,
            sharing,
            dtype=program.dtype,
            backend=program.backend,
        )
        tokens, logprobs = program.draw(
            logits(params, arch, hidden, backend=program.backend),
            seed,
            slots.steps,
            slots.sequence_ids,
            lengths.astype(jnp.uint32),
        )
        decoded = Decoded(
            jax.lax.dynamic_update_slice(decoded.tokens, tokens[:, None], (0, now)),
            jax.lax.dynamic_update_slice(decoded.logprobs, logprobs[:, None], (0, now)),
            decoded.counts + live,
            now + 1,
        )
        live = live & ~program.ends(tokens, lengths + 1)
        return own, tokens, live, any_shard(live.any()), decoded

    begin = (own, slots.tokens, slots.live, any_shard(slots.live.any()), empty)
    own, _, _, _, decoded = jax.lax.while_loop(unfinished, advance, begin)
    tokens, logprobs, counts = all_gather_shards((decoded.tokens, decoded.logprobs, decoded.counts))
    return own, Decoded(tokens, logprobs, counts, decoded.num_steps)


def rearrange(part: CachePart, rows: np.ndarray, columns: np.ndarray, mesh: Mesh) -> CachePart:
    """A cache of other rows and columns; arrays one by one, which share one small program."""
    keys, values = (
        tuple(_pick(x, rows, columns, axis, mesh) for x in xs)
        for xs, axis in ((part.keys, 3), (part.values, 2))
    )
    return CachePart(keys, values)


@partial(jax.jit, static_argnames=("axis", "mesh"))
def _pick(x: jax.Array, rows: np.ndarray, columns: np.ndarray, axis: int, mesh: Mesh) -> jax.Array:
    def own(x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return jnp.take(jnp.take(x, rows, axis=0, mode="clip"), columns, axis=axis, mode="clip")

    return shard_mapped(own, mesh, (CACHE_SPEC, EACH_REPLICA, EVERYWHERE), CACHE_SPEC)(x, rows, columns)
