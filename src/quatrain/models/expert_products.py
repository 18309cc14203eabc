"""Products of rows with the matrix of their expert, for rows that are sorted by expert.

Called by the block `Experts`. No row is dropped, and no sum depends on an order that may change: rows move by
permutations, whose backward passes are permutations too.

Shapes: N tokens, k experts of each, P = N k pairs of a token and an expert, E experts, I columns in, O out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

MOST_ROWS, FEWEST_ROWS = 64, 8
"""Rows that `blocks` multiplies by one matrix at a time: with many tokens, and in decode steps."""


class Groups(NamedTuple):
    """Pairs in the order of their experts; those of other devices' experts come last."""

    order: jax.Array
    """[P] int32: the pair at each place; pair i is of token i // k."""
    place: jax.Array
    """[P] int32: the place of each pair."""
    sizes: jax.Array
    """[E] int32: pairs of each of this device's experts."""


def group_pairs(experts_P: jax.Array, num_experts: int) -> Groups:
    """The pairs sorted by expert; a number outside of 0 .. `num_experts` - 1 is another device's expert."""
    foreign = (experts_P < 0) | (experts_P >= num_experts)
    keys = jnp.where(foreign, num_experts, experts_P)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    # The inverse by a scatter of unique indices: a second sort would cost as much as the first.
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    sizes = jnp.diff(jnp.searchsorted(keys[order], jnp.arange(num_experts + 1))).astype(jnp.int32)
    return Groups(order, place, sizes)


@jax.custom_vjp
def to_experts(x_ND: jax.Array, groups: Groups) -> jax.Array:
    """[P, D]: the token of each pair, sorted by expert; of [P, D], each pair's own row."""
    return x_ND[groups.order // (len(groups.order) // len(x_ND))]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def from_experts(y_PD: jax.Array, groups: Groups, tokens: int) -> jax.Array:
    """[N, D]: the sum of each token's k rows, which are sorted by expert, in float32 in the order of its
    experts: no scatter-add, whose order is not fixed on a GPU.
    """
    pairs = y_PD[groups.place].reshape(tokens, -1, y_PD.shape[1])
    return pairs.astype(jnp.float32).sum(axis=1).astype(y_PD.dtype)


# Each is the other's transpose.
to_experts.defvjp(
    lambda x, groups: (to_experts(x, groups), (groups, len(x))),
    lambda residuals, dy: (from_experts(dy, *residuals), None),
)
from_experts.defvjp(
    lambda y, groups, tokens: (from_experts(y, groups, tokens), groups),
    lambda tokens, groups, dy: (to_experts(dy, groups), None),
)


def expert_product(x_PI: jax.Array, w_EOI: jax.Array, groups: Groups, how: str) -> jax.Array:
    """[P, O]: each row times the transpose of its expert's matrix; 0 in rows of other devices' experts.

    Matrices are cast to the dtype of the rows. `how` is one of `PRODUCTS`.
    """
    w_EOI = w_EOI.astype(x_PI.dtype)
    if how == "blocks":
        return _blocks(x_PI, w_EOI, groups.sizes, rows_of_block(len(x_PI), len(w_EOI)))
    # Rows of other devices' experts come last and belong to no group: a kernel may leave whatever memory held
    # there.
    own = (jnp.arange(len(x_PI)) < groups.sizes.sum())[:, None]
    return jnp.where(own, _RAGGED[how](jnp.where(own, x_PI, 0), w_EOI.swapaxes(1, 2), groups.sizes), 0)


def add_expert_bias(
    y_PO: jax.Array, bias_EO: jax.Array, groups: Groups, weights_P1: jax.Array | float = 1.0
) -> jax.Array:
    """`y` plus the bias of each row's expert, times the row's weight; rows of other devices' experts stay.

    By a product with ones or weights, so that the gradient of a bias is one too, whose order of sums is
    fixed.
    """
    ends = jnp.cumsum(groups.sizes)
    places = jnp.arange(len(y_PO))[:, None]
    own = ((places < ends) & (places >= ends - groups.sizes)) * weights_P1
    return y_PO + jnp.matmul(own.astype(y_PO.dtype), bias_EO.astype(y_PO.dtype), precision="highest")


def rows_of_block(pairs: int, experts: int) -> int:
    """Rows of a block: a power of two near those that an expert has on average."""
    return min(max(2 ** (pairs // experts).bit_length() // 2, FEWEST_ROWS), MOST_ROWS, pairs)


def _tokamax(x_PI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    import tokamax

    product: jax.Array = tokamax.ragged_dot(x_PI, w_EIO, sizes_E)
    return product


_RAGGED: dict[str, Callable[..., jax.Array]] = {"ragged": lax.ragged_dot, "tokamax": _tokamax}
PRODUCTS = ("blocks", *_RAGGED)
"""Blocks of rows of one expert; XLA's `ragged_dot`, which is a kernel on TPUs alone; tokamax's kernel."""


class _Block(NamedTuple):
    expert: jax.Array
    at: jax.Array
    """Its first row."""
    own: jax.Array
    """[rows, 1] bool: the rows that are this expert's and in no other block."""


def _table(sizes_E: jax.Array, pairs: int, rows: int) -> tuple[jax.Array, Any]:
    """(the number of blocks, number -> `_Block`), in the order of experts."""
    ends, blocks = jnp.cumsum(sizes_E), -(-sizes_E // rows)
    ends_of_blocks = jnp.cumsum(blocks)

    def block(i: jax.Array) -> _Block:
        expert = jnp.sum(ends_of_blocks <= i)
        number = i - (ends_of_blocks[expert] - blocks[expert])
        first = ends[expert] - sizes_E[expert] + number * rows
        # The last block is moved back into the array; `own` keeps it from touching rows of the block before.
        at = jnp.minimum(first, pairs - rows)
        place = at + jnp.arange(rows)
        own = (place >= first) & (place < jnp.minimum(first + rows, ends[expert]))
        return _Block(expert, at, own[:, None])

    return ends_of_blocks[-1], block


def _rows(x: jax.Array, block: _Block) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, block.at, len(block.own))


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, after: jax.Array) -> jax.Array:
    """Zeros that a loop begins with, which do not exist before the array `after` does.

    XLA makes constants early: the results of the loops of all layers would exist from the beginning.
    """
    return jnp.full(shape, after[0, 0] > jnp.inf, dtype)


def _over_blocks(x: jax.Array, columns: int, sizes_E: jax.Array, rows: int, product: Any) -> jax.Array:
    """[P, columns] of `product(rows, expert)`; 0 in rows of no expert."""
    count, block_at = _table(sizes_E, len(x), rows)

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        block = block_at(i)
        new = product(_rows(x, block), block.expert).astype(y.dtype)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(block.own, new, _rows(y, block)), block.at, 0)

    return lax.fori_loop(0, count, step, _zeros((len(x), columns), x.dtype, x))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocks(x_PI: jax.Array, w_EOI: jax.Array, sizes_E: jax.Array, rows: int) -> jax.Array:
    def product(x: jax.Array, expert: jax.Array) -> jax.Array:
        # The matrix comes first: of a product of few rows XLA rearranges the second factor.
        return lax.dot_general(w_EOI[expert], x, (((1,), (1,)), ((), ()))).T

    return _over_blocks(x_PI, w_EOI.shape[1], sizes_E, rows, product)


def _blocks_backward(rows: int, residuals: Any, dy_PO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """Both gradients in one loop, which reads the rows once."""
    x_PI, w_EOI, sizes_E = residuals
    count, block_at = _table(sizes_E, len(x_PI), rows)

    def step(i: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dx_PI, dw_EOI = gradients
        block = block_at(i)
        dy, x = (jnp.where(block.own, _rows(each, block), 0) for each in (dy_PO, x_PI))
        dx = jnp.where(block.own, jnp.matmul(dy, w_EOI[block.expert]), _rows(dx_PI, block))
        dw = lax.dot_general(dy, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(dx_PI, dx, block.at, 0), dw_EOI.at[block.expert].add(dw)

    zeros = _zeros(x_PI.shape, x_PI.dtype, dy_PO), _zeros(w_EOI.shape, jnp.float32, dy_PO)
    dx, dw = lax.fori_loop(0, count, step, zeros)
    return dx, dw.astype(w_EOI.dtype), None


_blocks.defvjp(lambda x, w, sizes, rows: (_blocks(x, w, sizes, rows), (x, w, sizes)), _blocks_backward)
