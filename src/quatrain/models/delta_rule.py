"""The gated delta rule in chunks (Yang et al. 2024, arXiv:2412.06464), after a causal convolution.

Data flow: the block (`blocks/delta.py`) -> `delta_rule` on packed rows, `continued` after states of the
sampler, `step` for one token. Of each key head a sequence has a memory S [E, G F], in float32:

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  y = S^T q

Within a chunk this is a triangular system, solved with the inverse of its matrix, which is found by forward
substitution in blocks: powers of the matrix overflow, and two solvers of LAPACK at once wait for each other
for ever in JAX 0.10.2 where XLA's pool has two threads.
A row of packed tokens is a forest of nodes (a shared prefix, what follows it); chunks begin and end with
nodes, so that a state at the end of a prefix is that of every sequence that continues it.

Shapes: B rows, T tokens, L tokens of a chunk, K key heads, G value heads of each, E size of keys, F of
values, C = 2 E + G F channels of the convolution over W tokens, X >= C columns of the projection.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CHUNK = 64
"""Most tokens of a chunk."""
BLOCK = 8
"""Rows of the triangular system that are substituted one after another; products join blocks of them."""
PREFIXES = 2
"""How deep prefixes are nested: that of all sequences, and that of a group."""
FROM_ZERO, FROM_CHUNK_BEFORE, FROM_SAVED = range(3)
"""Where a chunk begins: with nothing before it, where the one before ended, or with saved state 0, 1, ..."""
NOWHERE = np.iinfo(np.int32).max
"""The index of a saved state that there is not."""
_matmul = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


class DeltaState(NamedTuple):
    """What a sequence has of its tokens so far."""

    conv: jax.Array
    """[B, K, W - 1, C]: the inputs of the convolution of the last tokens; 0 where there is none. Float32 in
    the scan, where gradients of several sequences add up."""
    memory: jax.Array
    """[B, K, E, G F] float32."""


class DeltaWeights(NamedTuple):
    """The weights of the rule, by key head."""

    conv: jax.Array
    """[K, C, W]."""
    a_log: jax.Array
    """[K G]: g = -exp(a_log) softplus(a + dt_bias)."""
    dt_bias: jax.Array
    """[K G]."""


class Chunks(NamedTuple):
    """The chunks of each row in their order, [B, N] int32 each; those without tokens come last."""

    starts: jax.Array
    counts: jax.Array
    sources: jax.Array
    """`FROM_ZERO`, `FROM_CHUNK_BEFORE`, or `FROM_SAVED` + number."""
    saves: jax.Array
    """The number under which the state at its end is saved; `NOWHERE`: it is not."""


def one_sequence(segment_ids: jax.Array) -> Chunks:
    """The chunks of rows [B, T] of one sequence each, with padding (segment 0) at their ends."""
    real = segment_ids != 0
    begins, lengths = jnp.argmax(real, axis=1), real.sum(axis=1)
    before = jnp.arange(-(-real.shape[1] // CHUNK), dtype=jnp.int32) * CHUNK
    counts = jnp.clip(lengths[:, None] - before, 0, CHUNK).astype(jnp.int32)
    # The first chunk begins with nothing also where the row begins with padding: `starts` skips it.
    sources = jnp.where(before == 0, FROM_ZERO, FROM_CHUNK_BEFORE)
    starts = begins[:, None].astype(jnp.int32) + before
    return Chunks(starts, counts, jnp.broadcast_to(sources, counts.shape), jnp.full_like(counts, NOWHERE))


def delta_rule(
    x_BTKX: jax.Array, ba_BTKG: jax.Array, chunks: Chunks, weights: DeltaWeights, key_size: int
) -> jax.Array:
    """[B, T, K, G F] of rows of whole sequences; 0 on padding.

    `x` has in its first C columns queries, keys and values of each key head before the convolution, `ba`
    [B, T, K, 2 G] what beta and g are made of. The backward pass keeps the state at the beginning of each
    chunk, and computes the rest of it again.
    """
    exact = jax.tree.map(lambda each: each.astype(jnp.float32), weights)  # their gradients are sums of chunks
    return _delta_rule(x_BTKX, ba_BTKG, chunks, exact, key_size)


def states_at_ends(
    x_BTKX: jax.Array, ba_BTKG: jax.Array, chunks: Chunks, weights: DeltaWeights, key_size: int, count: int
) -> tuple[jax.Array, DeltaState]:
    """(`delta_rule`, the first `count` saved states: arrays [count, B, ...])."""
    begin = _zeros(len(x_BTKX), weights, key_size)
    y, saved, _, _ = _scan(x_BTKX, ba_BTKG, chunks, weights, begin, count, keep=False)
    return y, saved


def continued(
    x_BTKX: jax.Array, ba_BTKG: jax.Array, counts: jax.Array, weights: DeltaWeights, begin: DeltaState
) -> tuple[jax.Array, DeltaState]:
    """([B, T, K, G F], the state after the tokens) of the first `counts` [B] tokens after `begin`."""
    before = jnp.arange(-(-x_BTKX.shape[1] // CHUNK), dtype=jnp.int32) * CHUNK
    left = jnp.clip(counts[:, None] - before, 0, CHUNK).astype(jnp.int32)
    starts = jnp.broadcast_to(before, left.shape)
    chunks = Chunks(starts, left, jnp.full_like(left, FROM_CHUNK_BEFORE), jnp.full_like(left, NOWHERE))
    # The scan carries one dtype; the cache has the convolution's inputs in that of activations.
    begin = begin._replace(conv=begin.conv.astype(jnp.float32))
    y, _, end, _ = _scan(x_BTKX, ba_BTKG, chunks, weights, begin, 0, keep=False)
    return y, end


def step(
    x_BKX: jax.Array, ba_BKG: jax.Array, weights: DeltaWeights, state: DeltaState
) -> tuple[jax.Array, DeltaState]:
    """([B, K, G F], the state after it) of one token of each sequence."""
    B, K, E, _ = state.memory.shape
    new_inputs = x_BKX[:, :, None, : state.conv.shape[3]].astype(state.conv.dtype)
    # The convolution reads the last W inputs: those before this token are the state, so nothing is computed
    # again.
    recent = jnp.concatenate([state.conv, new_inputs], axis=2)
    mixed = jax.nn.silu(_matmul("bkwc,kcw->bkc", *(x.astype(jnp.float32) for x in (recent, weights.conv))))
    q_BKE, k_BKE, v_BKGF, beta_BKG, g_BKG = _prepared(mixed, ba_BKG, weights, E)
    decay = jnp.exp(g_BKG)[..., None]
    both = _matmul("bkxe,bkef->bkxf", jnp.stack([k_BKE, q_BKE], axis=2), state.memory)
    of_key, of_query = (both[:, :, i].reshape(v_BKGF.shape) * decay for i in (0, 1))
    new = beta_BKG[..., None] * (v_BKGF - of_key)
    y_BKGF = of_query + jnp.sum(q_BKE * k_BKE, axis=-1)[..., None, None] * new
    memory = state.memory.reshape(B, K, E, *new.shape[2:]) * decay[:, :, None]
    memory = memory + k_BKE[..., None, None] * new[:, :, None]
    y = y_BKGF.reshape(B, K, -1).astype(x_BKX.dtype)
    return y, DeltaState(recent[:, :, 1:], memory.reshape(state.memory.shape))


def _prepared(
    mixed: jax.Array, ba: jax.Array, weights: DeltaWeights, key_size: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries and keys [..., K, E] of length 1 and E**-0.5, values [..., K, G, F], beta and g [..., K, G]."""
    q, k, v = jnp.split(mixed, (key_size, 2 * key_size), axis=-1)

    def normed(x: jax.Array) -> jax.Array:
        # The epsilon is within the root, as in the published code: outside, small keys would have another
        # length.
        return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    b, a = jnp.split(ba.astype(jnp.float32), 2, axis=-1)
    a_log, dt_bias = (x.astype(jnp.float32).reshape(a.shape[-2:]) for x in (weights.a_log, weights.dt_bias))
    g = -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)
    values = v.reshape(*a.shape, -1)
    return normed(q) * key_size**-0.5, normed(k), values, jax.nn.sigmoid(b), g


def _chunk(
    x_BLKC: jax.Array, ba_BLKG: jax.Array, weights: DeltaWeights, begin: DeltaState, counts: jax.Array
) -> tuple[jax.Array, DeltaState]:
    """([B, L, K, G F] float32, the state at the end) of chunks whose first `counts` tokens are real."""
    L, (E, GF), W = x_BLKC.shape[1], begin.memory.shape[2:], weights.conv.shape[2]
    recent = jnp.concatenate([begin.conv.swapaxes(1, 2), x_BLKC.astype(jnp.float32)], axis=1)
    kernel = weights.conv.astype(jnp.float32)
    mixed = jax.nn.silu(sum(recent[:, w : w + L] * kernel[:, :, w] for w in range(W)))
    q, k, v, beta, g = _prepared(mixed, ba_BLKG, weights, E)
    real = (jnp.arange(L) < counts[:, None])[..., None, None]
    # Padding then neither writes (beta 0) nor decays (g 0), so the state at the end is that of the last real
    # token.
    beta_BKGL, g_BKGL = (jnp.where(real, x, 0.0).transpose(0, 2, 3, 1) for x in (beta, g))
    q_BKLE, k_BKLE, v_BKGLF = q.swapaxes(1, 2), k.swapaxes(1, 2), v.transpose(0, 2, 3, 1, 4)

    since = jnp.cumsum(g_BKGL, axis=-1)
    ahead = since[..., :, None] - since[..., None, :]
    # Masked before the exponential: above the diagonal `ahead` is positive and would overflow.
    decay = jnp.exp(jnp.where(jnp.tri(L, dtype=bool), ahead, -jnp.inf))
    both = jnp.concatenate([k_BKLE, q_BKLE], axis=2)
    of_keys = _matmul("bkie,bkje->bkij", both, k_BKLE)[:, :, None]
    # Keys and queries in one product: the memory, the largest array of a chunk, is read once.
    of_memory = _matmul("bkie,bkef->bkif", both, begin.memory).reshape(*both.shape[:3], *v.shape[3:])
    of_memory = of_memory.swapaxes(2, 3)  # [B, K, 2 L, G, F] -> [B, K, G, 2 L, F]
    grown = jnp.exp(since)[..., None]
    system = beta_BKGL[..., None] * of_keys[..., :L, :] * decay
    new_BKGLF = _matmul(
        "bkgij,bkgjf->bkgif",
        inverse_of_unit_lower(system),
        beta_BKGL[..., None] * (v_BKGLF - grown * of_memory[..., :L, :]),
    )
    y = grown * of_memory[..., L:, :] + _matmul("bkgij,bkgjf->bkgif", of_keys[..., L:, :] * decay, new_BKGLF)
    # Decays are differences of one running sum, never quotients of exponentials, which underflow.
    left = jnp.exp(since[..., -1:] - since)[..., None] * new_BKGLF
    left = left.swapaxes(2, 3).reshape(*k_BKLE.shape[:3], GF)
    whole = jnp.repeat(jnp.exp(since[..., -1]), GF // since.shape[2], axis=-1)[:, :, None]
    memory = whole * begin.memory + _matmul("bkie,bkif->bkef", k_BKLE, left)
    conv = jax.vmap(lambda x, n: lax.dynamic_slice_in_dim(x, n, W - 1))(recent, counts).swapaxes(1, 2)
    return y.transpose(0, 3, 1, 2, 4).reshape(*x_BLKC.shape[:3], GF), DeltaState(conv, memory)


@jax.custom_jvp
def inverse_of_unit_lower(x: jax.Array) -> jax.Array:
    """[..., L, L]: the inverse of the lower triangular matrices that have 1 on their diagonals and `x` below.

    `L` is `BLOCK` times a power of 2. What `x` has on the diagonal and above is not read.
    """
    L, eye = x.shape[-1], jnp.eye(BLOCK, dtype=x.dtype)
    blocks = jnp.stack([x[..., i : i + BLOCK, i : i + BLOCK] for i in range(0, L, BLOCK)], axis=-3)
    rows = [jnp.broadcast_to(eye[0], blocks.shape[:-1])]
    for i in range(1, BLOCK):
        rows.append(eye[i] - (blocks[..., i, :i, None] * jnp.stack(rows, axis=-2)).sum(axis=-2))
    inverse, size = jnp.stack(rows, axis=-2), BLOCK
    while size < L:
        corners = range(0, L, 2 * size)
        below = jnp.stack([x[..., i + size : i + 2 * size, i : i + size] for i in corners], axis=-3)
        first, last = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_matmul("...ij,...jk,...kl->...il", last, below, first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, last], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


@inverse_of_unit_lower.defjvp
def _inverse_jvp(x: tuple[jax.Array], dx: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    inverse = inverse_of_unit_lower(*x)
    return inverse, -_matmul("...ij,...jk,...kl->...il", inverse, jnp.tril(dx[0], -1), inverse)


def _zeros(rows: int, weights: DeltaWeights, key_size: int) -> DeltaState:
    """The states of rows before their first token."""
    K, C, W = weights.conv.shape
    shapes = (rows, K, W - 1, C), (rows, K, key_size, C - 2 * key_size)
    return DeltaState(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


def _scan(
    x: jax.Array,
    ba: jax.Array,
    chunks: Chunks,
    weights: DeltaWeights,
    state: DeltaState,
    num_saved: int,
    *,
    keep: bool,
) -> tuple[jax.Array, DeltaState, DeltaState, DeltaState | None]:
    """(y, saved states, the state after the last chunk, with `keep` those at the beginning of each chunk)."""
    (B, T, K, _), GF, C = x.shape, state.memory.shape[3], state.conv.shape[3]
    # A chunk is sliced whole, also the last of a row: without room behind it `dynamic_slice` would move it
    # back.
    x, ba = (_padded(each, T + CHUNK - 1) for each in (x, ba))

    def stack(count: int) -> DeltaState:
        return jax.tree.map(lambda each: jnp.zeros((count, *each.shape), each.dtype), state)

    def advance(i: jax.Array, carry: Any) -> Any:
        y, saved, state, begins = carry
        start, count, source, save = (each[:, i] for each in chunks)
        begin = _begin(source, state, saved)
        if begins is not None:
            begins = jax.tree.map(lambda all_, one: all_.at[i].set(one), begins, begin)
        inputs = _rows(x, start)[..., :C], _rows(ba, start)
        of_chunk, end = _chunk(*inputs, weights, begin, count)
        saved = jax.tree.map(lambda all_, one: all_.at[save, jnp.arange(B)].set(one, mode="drop"), saved, end)
        return _with_rows(y, of_chunk, start, count), saved, end, begins

    y = jnp.zeros((B, T + CHUNK - 1, K, GF), x.dtype)
    begins = stack(chunks.counts.shape[1]) if keep else None
    carry = (y, stack(num_saved), state, begins)
    # As many steps as the row with most chunks has: the number of chunks is rounded up for the compiler
    # alone.
    y, saved, end, begins = lax.fori_loop(0, _num_used(chunks), advance, carry)
    return y[:, :T], saved, end, begins


def _num_used(chunks: Chunks) -> jax.Array:
    """Chunks of the row that has the most."""
    return (chunks.counts > 0).sum(axis=1).max()


def _begin(source: jax.Array, before: DeltaState, saved: DeltaState) -> DeltaState:
    """The states with which chunks of these sources begin."""

    def one(before: jax.Array, saved: jax.Array) -> jax.Array:
        begin = where_rows(source == FROM_CHUNK_BEFORE, before, jnp.zeros_like(before))
        if not len(saved):
            return begin
        taken = saved[jnp.maximum(source - FROM_SAVED, 0), jnp.arange(len(source))]
        return where_rows(source >= FROM_SAVED, taken, begin)

    return jax.tree.map(one, before, saved)


def where_rows(rows: jax.Array, x: jax.Array, y: jax.Array | int) -> jax.Array:
    """`x` in these rows, else `y`."""
    return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def _padded(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _rows(x: jax.Array, start: jax.Array) -> jax.Array:
    """[B, L, ...]: the tokens from `start` [B] on."""
    return jax.vmap(lambda row, first: lax.dynamic_slice_in_dim(row, first, CHUNK))(x, start)


def _with_rows(x: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """`x` with the first `count` of `new` [B, L, ...] from `start` on."""
    real = (jnp.arange(CHUNK) < count[:, None]).reshape(*new.shape[:2], *[1] * (x.ndim - 2))
    # Chunks overlap in what lies behind their real tokens, which belongs to the next chunk.
    new = jnp.where(real, new.astype(x.dtype), _rows(x, start))
    return jax.vmap(lambda row, part, first: lax.dynamic_update_slice_in_dim(row, part, first, 0))(
        x, new, start
    )


_Residuals = tuple[jax.Array, jax.Array, Chunks, DeltaWeights, DeltaState | None]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _delta_rule(
    x: jax.Array, ba: jax.Array, chunks: Chunks, weights: DeltaWeights, key_size: int
) -> jax.Array:
    begin = _zeros(len(x), weights, key_size)
    return _scan(x, ba, chunks, weights, begin, PREFIXES, keep=False)[0]


def _forward(
    x: jax.Array, ba: jax.Array, chunks: Chunks, weights: DeltaWeights, key_size: int
) -> tuple[jax.Array, _Residuals]:
    begin = _zeros(len(x), weights, key_size)
    y, _, _, begins = _scan(x, ba, chunks, weights, begin, PREFIXES, keep=True)
    return y, (x, ba, chunks, weights, begins)


def _backward(
    key_size: int, residuals: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None, DeltaWeights]:
    """The gradient of a saved state is the sum of those of the chunks that began with it."""
    x, ba, chunks, weights, begins = residuals
    (_, T, _, X), C, rows = x.shape, weights.conv.shape[1], jnp.arange(x.shape[0])
    x_padded, ba_padded, dy = (_padded(each, T + CHUNK - 1) for each in (x[..., :C], ba, dy))
    used = _num_used(chunks)

    def retreat(j: jax.Array, carry: Any) -> Any:
        dx, dba, dweights, dstate, dsaved = carry
        i = used - 1 - j
        start, count, source, save = (each[:, i] for each in chunks)
        inputs = _rows(x_padded, start), _rows(ba_padded, start)
        begin = jax.tree.map(lambda each: each[i], begins)
        # One chunk is computed again at a time: the triangular systems of all are never in memory together.
        (of_chunk, _), pullback = jax.vjp(partial(_chunk, counts=count), *inputs, weights, begin)
        real = (jnp.arange(CHUNK) < count[:, None])[..., None, None]
        above = jnp.where(real, _rows(dy, start), 0).astype(of_chunk.dtype)
        dend = jax.tree.map(
            lambda own, all_: own + all_.at[save, rows].get(mode="fill", fill_value=0), dstate, dsaved
        )
        # Going backward, the chunk that saved a state is the last to need its gradient; the number is used
        # anew before it.
        dsaved = jax.tree.map(lambda all_: all_.at[save, rows].set(0, mode="drop"), dsaved)
        of_x, of_ba, of_weights, dbegin = pullback((above, dend))
        dstate = jax.tree.map(partial(where_rows, source == FROM_CHUNK_BEFORE), dbegin, nothing)
        to = jnp.where(source >= FROM_SAVED, source - FROM_SAVED, NOWHERE)
        dsaved = jax.tree.map(lambda all_, one: all_.at[to, rows].add(one, mode="drop"), dsaved, dbegin)
        dx, dba = _with_rows(dx, of_x, start, count), _with_rows(dba, of_ba, start, count)
        return dx, dba, jax.tree.map(jnp.add, dweights, of_weights), dstate, dsaved

    nothing = jax.tree.map(lambda each: jnp.zeros(each.shape[1:], each.dtype), begins)
    dsaved = jax.tree.map(lambda each: jnp.zeros((PREFIXES, *each.shape), each.dtype), nothing)
    zeros = jax.tree.map(jnp.zeros_like, (x_padded, ba_padded, weights))
    dx, dba, dweights, _, _ = lax.fori_loop(0, used, retreat, (*zeros, nothing, dsaved))
    dx = jnp.pad(dx[:, :T], [*[(0, 0)] * 3, (0, X - C)])
    return dx, dba[:, :T], None, dweights


_delta_rule.defvjp(_forward, _backward)
