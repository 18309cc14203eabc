"""Block-sparse self-attention: only blocks of the score matrix that are not fully masked are computed.

The implementation `xla` of attention without a KV cache. A row may hold many packed sequences; the work is
proportional to the number of blocks that are not fully masked, not to the square of the row length.

Shapes: the B x T tokens form M blocks of S tokens. A query blocks are computed at a time, and each reads W
key blocks at a time. N query heads, K key/value heads, G = N / K, H head size, X = G x S queries of one
key/value head in a block, Y = W x S keys read at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quatrain.backend import BlockSizes
from quatrain.models.layers import BRANCHES_PER_GROUP, MASKED, attention_mask, softcap

FAR = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPattern:
    """The key blocks that each query block has to read; computed once for all layers with the same window.

    The query blocks are sorted by their number of key blocks and processed in groups of A. `rank` maps the
    results back to the order of the row.
    """

    queries: jax.Array  # [groups, A] int32, block numbers
    keys: jax.Array  # [groups, A, ceil(M / W), W] int32; the first `counts` block numbers are read
    counts: jax.Array  # [groups, A] int32
    rank: jax.Array  # [M] int32, index of block m in the sorted order
    positions: jax.Array  # [M, S] int32
    segment_ids: jax.Array  # [M, S] int32, distinct across rows; 0 is padding
    branch_ids: jax.Array  # [M, S] int32

    @property
    def block(self) -> int:
        """Tokens in a block: S."""
        return self.positions.shape[1]


def block_pattern(
    positions: jax.Array,
    segment_ids: jax.Array,
    branch_ids: jax.Array,
    window: int | None,
    sizes: BlockSizes,
    *,
    causal: bool = True,
) -> BlockPattern:
    """The pattern of rows with `positions`, `segment_ids` and `branch_ids` [B, T], in blocks of `sizes`.

    S is `sizes.block`, A is `sizes.queries` and W is `sizes.keys`. A segment must lie within one row, and its
    branches must stand in it one after another, in ascending order of their ids. If it is not `causal`,
    `positions` must be 0: then each token attends to all of its segment (patches of a picture).
    """
    rows, length = positions.shape
    # Rows are concatenated into one: their segments need numbers of their own, else rows would see each
    # other.
    row_offsets = jnp.arange(rows, dtype=jnp.int32)[:, None] * (length + 1)
    own = jnp.where(segment_ids != 0, segment_ids + row_offsets, 0)
    block = min(sizes.block, positions.size)
    positions, own, branches = (_blocks(x, block) for x in (positions, own, branch_ids))
    allowed = _visible_blocks(positions, own, branches, window, causal)
    counts = allowed.sum(axis=1, dtype=jnp.int32)
    keys = _in_groups(jnp.argsort(~allowed, axis=1, stable=True).astype(jnp.int32), sizes.keys, axis=1)
    # Query blocks of one group read as often as the one that reads most: sorted, they waste the least.
    order = jnp.argsort(-counts, stable=True).astype(jnp.int32)
    at_once = min(sizes.queries or len(counts), len(counts))
    grouped, live = (_in_groups(x, at_once, axis=0) for x in (order, jnp.ones_like(order)))
    rank = jnp.argsort(order).astype(jnp.int32)
    return BlockPattern(grouped, keys[grouped], counts[grouped] * live, rank, positions, own, branches)


def _in_groups(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Reshapes `axis` of n elements to [ceil(n / size), size], padded with 0."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, padding).reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _visible_blocks(
    positions: jax.Array, segments: jax.Array, branches: jax.Array, window: int | None, causal: bool
) -> jax.Array:
    """[M, M] bool: which key blocks each query block has to read. Some of those may still be fully masked."""
    real = segments != 0
    # Tokens of one branch, group or segment are neighbours, so a block holds a contiguous range of their
    # numbers.
    own = _numbered(segments, branches)
    same_branch = _overlap(_range(own, real), _range(own, real))
    groups = _numbered(segments, branches // BRANCHES_PER_GROUP)
    group_prefix = _overlap(_range(groups, real), _range(groups, real & (branches % BRANCHES_PER_GROUP == 0)))
    common_prefix = _overlap(_range(segments, real), _range(segments, real & (branches == 0)))
    blocks = jnp.arange(len(segments))
    allowed = same_branch | group_prefix | common_prefix
    if causal:
        allowed = allowed & (blocks[:, None] >= blocks[None])
    if window is None:
        return allowed
    first, _ = _range(positions, real)
    _, last = _range(positions, real)
    return allowed & (first[:, None] - last[None] < window)


def _numbered(segments: jax.Array, branches: jax.Array) -> jax.Array:
    """[M, S]: the (segment, branch) pairs, numbered from 1 in the order in which they stand in the row."""
    pairs = segments.reshape(-1), branches.reshape(-1)
    first, second = (jnp.diff(x, prepend=0) != 0 for x in pairs)
    return jnp.cumsum(first | second, dtype=jnp.int32).reshape(segments.shape)


def _range(values: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and greatest of the `counted` values of each block; an empty range if none is counted."""
    return jnp.where(counted, values, FAR).min(axis=1), jnp.where(counted, values, -1).max(axis=1)


def _overlap(queries: tuple[jax.Array, jax.Array], keys: tuple[jax.Array, jax.Array]) -> jax.Array:
    return (queries[0][:, None] <= keys[1][None]) & (keys[0][None] <= queries[1][:, None])


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def block_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    pattern: BlockPattern,
    window: int | None,
    cap: float | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention [B, T, N, H]. Queries must be scaled already; the softmax is in float32.

    The mask is `layers.attention_mask`; padding attends to nothing and its results are 0. Scores are computed
    block by block with a running softmax and recomputed in the backward pass, so no scores are kept
    (FlashAttention, arXiv 2205.14135). `sinks` [N] float32 are one more score of each head, without a value.
    """
    return _forward(q_BTNH, k_BTKH, v_BTKH, pattern, window, cap, sinks)[0]


def _blocks(values: jax.Array, block: int) -> jax.Array:
    """[B, T, ...] as [M, S, ...]: rows concatenated, padded with 0, and split into blocks of S = `block`."""
    return _in_groups(values.reshape(-1, *values.shape[2:]), block, axis=0)


def _heads(x_BTNH: jax.Array, K: int, block: int) -> jax.Array:
    """[B, T, N, H] as [M, K, X, H]."""
    x_MSNH = _blocks(x_BTNH, block)
    M, S, N, H = x_MSNH.shape
    return x_MSNH.reshape(M, S, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(M, K, N // K * S, H)


def _rows(x_MKXH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[M, K, X, H] as [B, T, N, H] = `shape`; the inverse of `_heads`."""
    B, T, N, H = shape
    M, K, X, _ = x_MKXH.shape
    S = X * K // N
    x_MSNH = x_MKXH.reshape(M, K, N // K, S, H).transpose(0, 3, 1, 2, 4)
    return x_MSNH.reshape(M * S, N, H)[: B * T].reshape(B, T, N, H)


def _forward(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    pattern: BlockPattern,
    window: int | None,
    cap: float | None,
    sinks_N: jax.Array | None,
) -> tuple[jax.Array, Any]:
    K = k_BTKH.shape[2]
    # The barrier makes XLA materialise each array once; otherwise it makes another for the backward pass.
    heads = partial(_heads, K=K, block=pattern.block)
    q, k, v = lax.optimization_barrier((heads(q_BTNH), heads(k_BTKH), heads(v_BTKH)))

    def group(i: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        blocks, keys, counts = pattern.queries[i], pattern.keys[i], pattern.counts[i]
        queries = q[blocks]

        def read(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
            peak, total, y = carry
            at = keys[:, j]
            scores, mask = _scores(queries, _joined(k, at), pattern, blocks, at, j, counts, window, cap)
            new_peak = jnp.maximum(peak, jnp.where(mask, scores, MASKED).max(axis=-1))
            weights = jnp.where(mask, jnp.exp(scores - new_peak[..., None]), 0.0)
            shrink = jnp.exp(peak - new_peak)
            product = jnp.einsum(
                "AKXY,AKYH->AKXH", weights.astype(v.dtype), _joined(v, at), preferred_element_type=jnp.float32
            )
            return new_peak, total * shrink + weights.sum(axis=-1), y * shrink[..., None] + product

        empty = jnp.zeros(queries.shape[:-1], jnp.float32)
        begin = jnp.full_like(empty, MASKED), empty, jnp.zeros(queries.shape, jnp.float32)
        if sinks_N is not None:  # the softmax begins with their scores
            peaks = jnp.repeat(sinks_N.reshape(K, -1), pattern.block, axis=1)
            begin = jnp.broadcast_to(peaks, empty.shape), jnp.ones_like(empty), begin[2]
        peak, total, y = lax.fori_loop(0, _num_reads(keys, counts), read, _constants_after(queries, begin))
        # A block of padding sees no key: its result is 0, and its log of the total finite for the backward
        # pass.
        safe = jnp.where(total > 0, total, 1.0)
        ys, log_totals = results
        return _put(ys, (y / safe[..., None]).astype(q.dtype), i), _put(log_totals, peak + jnp.log(safe), i)

    groups = pattern.queries.shape
    begin = jnp.zeros(groups + q.shape[1:], q.dtype), jnp.zeros(groups + q.shape[1:-1], jnp.float32)
    y, log_total = lax.fori_loop(0, groups[0], group, _constants_after(q, begin))
    # The barrier makes XLA remove the padding once; otherwise it makes one copy per use.
    y_BTNH = lax.optimization_barrier(_rows(_in_order(y, pattern), q_BTNH.shape))
    return y_BTNH, (q, k, v, pattern, y_BTNH, _in_order(log_total, pattern), sinks_N)


def _backward(window: int | None, cap: float | None, residuals: Any, dy_BTNH: jax.Array) -> Any:
    q, k, v, pattern, y_BTNH, log_total, sinks_N = residuals
    B, T, _, H = dy_BTNH.shape
    K = k.shape[1]
    float32s = (x.astype(jnp.float32) for x in (dy_BTNH, y_BTNH))
    # Of results as they were returned, in the dtype of activations: dy is the gradient of those.
    along_BTN1 = jnp.vecdot(*float32s, precision="highest")[..., None]
    dy, along = (_heads(x, K, pattern.block) for x in (dy_BTNH, along_BTN1))
    along = along[..., 0]

    def group(i: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        blocks, keys, counts = pattern.queries[i], pattern.keys[i], pattern.counts[i]
        queries, dys, norms, alongs = q[blocks], dy[blocks], log_total[blocks], along[blocks]

        def read(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
            dq, dk, dv = carry
            at = keys[:, j]
            keys_AKYH = _joined(k, at)
            scores, mask = _scores(queries, keys_AKYH, pattern, blocks, at, j, counts, window, cap)
            weights = jnp.where(mask, jnp.exp(scores - norms[..., None]), 0.0)
            product = partial(jnp.einsum, preferred_element_type=jnp.float32)
            dweights = product("AKXH,AKYH->AKXY", dys, _joined(v, at))
            dscores = weights * (dweights - alongs[..., None])
            if cap is not None:
                # `scores` are capped already: 1 - tanh^2 needs no score before the cap.
                dscores = dscores * (1 - jnp.square(scores / cap))
            dscores = dscores.astype(q.dtype)
            return (
                dq + product("AKXY,AKYH->AKXH", dscores, keys_AKYH),
                _add(dk, at, product("AKHX,AKXY->AKHY", queries_AKHX, dscores)),
                _add(dv, at, product("AKHX,AKXY->AKHY", dys_AKHX, weights.astype(v.dtype))),
            )

        # Queries and dy are transposed once for all products that contract over X; otherwise each of these
        # products transposes its scores.
        queries_AKHX, dys_AKHX = lax.optimization_barrier((queries.swapaxes(2, 3), dys.swapaxes(2, 3)))
        (zeros,) = _constants_after(queries, (jnp.zeros(queries.shape, jnp.float32),))
        dqs, dks, dvs = results
        dq, dks, dvs = lax.fori_loop(0, _num_reads(keys, counts), read, (zeros, dks, dvs))
        return _put(dqs, dq.astype(q.dtype), i), dks, dvs

    groups = pattern.queries.shape
    by_head = jnp.zeros(k.swapaxes(2, 3).shape, jnp.float32)
    begin = jnp.zeros(groups + q.shape[1:], q.dtype), by_head, by_head
    dq, dk, dv = lax.fori_loop(0, groups[0], group, _constants_after(dy, begin))
    dk_BTKH, dv_BTKH = (_rows(each.swapaxes(2, 3).astype(k.dtype), (B, T, K, H)) for each in (dk, dv))
    dsinks_N = None
    if sinks_N is not None:
        at_sink = jnp.repeat(sinks_N.reshape(K, -1), pattern.block, axis=1) - log_total
        of_queries = (jnp.exp(at_sink) * along).sum(axis=0)
        dsinks_N = -of_queries.reshape(-1, pattern.block).sum(axis=1)
    return _rows(_in_order(dq, pattern), dy_BTNH.shape), dk_BTKH, dv_BTKH, None, dsinks_N


block_attention.defvjp(_forward, _backward)


def _put(whole: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    """`whole` with `part` at index i of its first dimension."""
    return lax.dynamic_update_index_in_dim(whole, part, i, 0)


def _num_reads(keys: jax.Array, counts: jax.Array) -> jax.Array:
    """The number of reads of W key blocks after which all query blocks have read their first `counts` [A]."""
    return -(-counts.max() // keys.shape[-1])


def _joined(x_MKSH: jax.Array, blocks_AW: jax.Array) -> jax.Array:
    """The blocks `blocks_AW` of x, concatenated for each query block: [A, K, Y, H]."""
    x_AWKSH = x_MKSH[blocks_AW]
    A, W, K, S, H = x_AWKSH.shape
    return x_AWKSH.swapaxes(1, 2).reshape(A, K, W * S, H)


def _add(x_MKHS: jax.Array, blocks_AW: jax.Array, change_AKHY: jax.Array) -> jax.Array:
    """x with `change_AKHY` added to the blocks `blocks_AW`."""
    parts_AKHWS = change_AKHY.reshape(*change_AKHY.shape[:-1], blocks_AW.shape[1], -1)
    return x_MKHS.at[blocks_AW].add(jnp.moveaxis(parts_AKHWS, 3, 1))


def _constants_after(loop_input: jax.Array, constants: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """`constants`, the initial values of a loop, created only after `loop_input` is computed.

    Without this barrier XLA creates the initial values of all layers before the first layer, and copies them
    for each layer.
    """
    return lax.optimization_barrier((loop_input, constants))[1]


def _scores(
    queries_AKXH: jax.Array,
    keys_AKYH: jax.Array,
    pattern: BlockPattern,
    query_blocks_A: jax.Array,
    key_blocks_AW: jax.Array,
    read: jax.Array,
    counts_A: jax.Array,
    window: int | None,
    cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Scores [A, K, X, Y] of A query blocks with W key blocks each, and their mask [A, 1, X, Y].

    `read` is the index of the read, of `_num_reads`.
    """
    scores = jnp.einsum("AKXH,AKYH->AKXY", queries_AKXH, keys_AKYH, preferred_element_type=jnp.float32)
    A, W = key_blocks_AW.shape
    live = read * W + jnp.arange(W) < counts_A[:, None]
    # Entries past `counts` are masked: they may name a block that was read already or that is fully masked.
    segments = jnp.where(live[..., None], pattern.segment_ids[key_blocks_AW], 0)
    keys = (x[key_blocks_AW] for x in (pattern.positions, pattern.branch_ids))
    positions, branches, segments = (x.reshape(A, -1) for x in (*keys, segments))
    mask = attention_mask(
        pattern.positions[query_blocks_A],
        positions,
        pattern.segment_ids[query_blocks_A],
        segments,
        window,
        (pattern.branch_ids[query_blocks_A], branches),
    )
    return softcap(scores, cap), jnp.tile(mask, (1, queries_AKXH.shape[2] // mask.shape[1], 1))[:, None]


def _in_order(grouped: jax.Array, pattern: BlockPattern) -> jax.Array:
    """[groups, A, ...] as [M, ...]: blocks in the order of the row instead of the sorted order."""
    return grouped.reshape(-1, *grouped.shape[2:])[pattern.rank]
