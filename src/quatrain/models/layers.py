"""The parts of a decoder layer: RMS norm, linear maps, attention mask, soft cap.

Data flow: pure functions, which the blocks, the decoder and the attention implementations call.

Shapes: B rows, T queries, S keys, D hidden, K key/value heads, G query heads of each, H head size, F columns
of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from quatrain.models.spec import LORA_A, LORA_B, ParamSpec
from quatrain.parallel.axes import TP
from quatrain.parallel.collectives import psum_backward, psum_forward

Layer = Mapping[str, jax.Array]

BRANCHES_PER_GROUP = 2**16
"""Branch k * BRANCHES_PER_GROUP of a segment is the shared prompt of its group k; branches with the following
numbers, below (k + 1) * BRANCHES_PER_GROUP, continue this prompt. See `attention_mask`."""
MASKED = -1e30
"""Score of a masked key; finite, so that a padding query, whose keys are all masked, does not yield NaN."""


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """x / rms(x) * (offset + weight) over the last dimension, computed in float32 (Zhang & Sennrich 2019)."""
    return _rms_norm_forward(x, weight, eps, offset)[0]


def _rms_norm_forward(
    x: jax.Array, weight: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * (offset + weight.astype(jnp.float32))).astype(x.dtype), (x, weight, scale)


def _rms_norm_backward(
    eps: float, offset: float, residuals: tuple[jax.Array, jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Written by hand: both sums, over features and over rows, are matrix products; a fifth of the time."""
    x, weight, scale = residuals
    normed, dy = x.astype(jnp.float32) * scale, dy.astype(jnp.float32)
    factors = offset + weight.astype(jnp.float32)
    products = (dy * normed).reshape(-1, len(weight))
    matmul = partial(jnp.matmul, precision="highest")
    means = matmul(products, factors).reshape(scale.shape) / len(weight)
    dx = scale * (dy * factors - normed * means)
    return dx.astype(x.dtype), matmul(jnp.ones(len(products)), products).astype(weight.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@dataclass(frozen=True)
class Norm:
    """An RMS norm that multiplies by `offset` + weight (1 + weight in Gemma models)."""

    eps: float = 1e-6
    offset: float = 0.0

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """`rms_norm` over the last dimension of `x`."""
        return rms_norm(x, weight, self.eps, self.offset)

    def spec(self, size: int) -> ParamSpec:
        """The weight of a norm of vectors of this size."""
        return ParamSpec((size,), ("norm",), "constant", 1.0 - self.offset)


def matmul_transposed(
    x: jax.Array, weight: jax.Array, dtype: DTypeLike | None = None, *, few_rows: int = 0
) -> jax.Array:
    """x [..., in] times the transpose of `weight` [*out, in]: [..., *out], in `dtype` (default: of `x`).

    Weights are cast to the dtype of `x`. The leading dimensions of `x` are flattened into one: on a CPU the
    gradient of the weights, which contracts over them, is three times as fast over one dimension as over two.

    If `x` has at most `few_rows` rows (`Backend.few_rows`), the weights are the first factor of the product,
    otherwise `x` is. The optimization barrier prevents XLA from swapping the factors again.
    """
    rows, matrix = x.reshape(-1, x.shape[-1]), weight.reshape(-1, x.shape[-1]).astype(x.dtype)
    along_in = (((1,), (1,)), ((), ()))
    product = partial(jax.lax.dot_general, dimension_numbers=along_in, preferred_element_type=dtype)
    few = len(rows) <= few_rows
    y = jax.lax.optimization_barrier(product(matrix, rows)).T if few else product(rows, matrix)
    return y.reshape(*x.shape[:-1], *weight.shape[:-1])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_in(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x [n, in] times the transpose of `weight` [out, in], as [n, out] float32.

    Both are cast to `dtype` and sums are in float32. So it is in the products of the gradients, for which the
    gradient of the result is cast too; JAX itself would multiply in float32 there.
    """
    return _summed_in_float32(x.astype(dtype), weight.astype(dtype), (1, 1))


def _summed_in_float32(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)


def _product_in_backward(
    dtype: DTypeLike, residuals: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    dy = dy.astype(dtype)
    dx = _summed_in_float32(dy, weight.astype(dtype), (1, 0))
    dweight = _summed_in_float32(dy, x.astype(dtype), (0, 0))
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


product_in.defvjp(lambda x, weight, dtype: (product_in(x, weight, dtype), (x, weight)), _product_in_backward)


def linear(
    x: jax.Array,
    layer: Layer,
    name: str,
    sum_axis: str | None = None,
    few_rows: int = 0,
    lora_scale: float = 1.0,
    stacked: tuple[int, ...] = (),
) -> jax.Array:
    """x [..., in] times the transpose of matrix `name` [*out, in], plus its bias if any: [..., *out].

    With `sum_axis`, each device along this mesh axis holds a part of the inputs; the results are summed over
    the axis (psum) before the bias is added. Adapters of the matrix, if any, add `lora_scale` · B (A x);
    `stacked` has the rows of the last of `out` that each block of A is of, where shapes do not say it.
    """
    y = matmul_transposed(x, layer[name], few_rows=few_rows)
    if name + LORA_A in layer:
        y = y + lora_scale * _adapted(x, layer, name, sum_axis, few_rows, stacked)
    y = y if sum_axis is None else psum_forward(y, sum_axis)
    return y + layer[f"{name}_bias"].astype(x.dtype) if f"{name}_bias" in layer else y


def _adapted(
    x: jax.Array, layer: Layer, name: str, sum_axis: str | None, few_rows: int, stacked: tuple[int, ...]
) -> jax.Array:
    """B (A x) of the adapters of matrix `name`: [..., *out]; with `sum_axis`, this device's part of the sum.

    Over `tp`, the factor that is not sharded is on every device, each of which uses it for its part of the
    work: A where outputs are sharded, B where inputs are.
    """
    a, b = layer[name + LORA_A], layer[name + LORA_B]
    a, b = (psum_backward(a, TP), b) if sum_axis is None else (a, psum_backward(b, sum_axis))
    low = matmul_transposed(x, a, few_rows=few_rows)
    if a.ndim > 2:
        b = _one_factor(b, len(a), stacked)
    return matmul_transposed(low.reshape(*x.shape[:-1], -1), b, few_rows=few_rows)


def _one_factor(b: jax.Array, blocks: int, stacked: tuple[int, ...]) -> jax.Array:
    """B of matrices that are stored as one, as one factor of their A x in a row: [*out, blocks * r].

    An output has the r columns of its own block and zeros in the others: one product in place of one for each
    block, which are small.
    """
    # qkv [K, G + 2, H, r] has G query heads, a key head and a value head; gate_up is [2, F, r].
    if stacked:
        own = jnp.asarray(np.repeat(np.eye(blocks, dtype=np.float32), stacked, axis=0)[:, :, None], b.dtype)
        return (b[..., None, :] * own).reshape(*b.shape[:-1], -1)
    groups = b.shape[-3]
    block_of = jnp.asarray(np.maximum(np.arange(groups) - (groups - blocks), 0))
    same = (block_of[:, None, None, None] == jnp.arange(blocks)[:, None]).astype(b.dtype)
    return (b[..., None, :] * same).reshape(*b.shape[:-1], -1)


def attention_mask(
    query_positions: jax.Array,
    key_positions: jax.Array,
    query_segments: jax.Array,
    key_segments: jax.Array,
    window: int | None,
    branches: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """[B, T, S] bool: whether query t may attend to key s. Every attention mask of the model is defined here.

    A query attends to keys of its own segment (segment 0 is padding and is never attended to) that are at its
    position or before, and fewer than `window` positions before it. Positions are counted within a segment,
    so that rows of packed segments need no other mask.

    `branches` are the branch ids of the queries and of the keys, for segments with shared prefixes. A query
    then attends to keys of its own branch, of branch 0, which is the prefix that all branches of the segment
    share, and of its group's shared prompt (see `BRANCHES_PER_GROUP`).
    """
    back = query_positions[:, :, None] - key_positions[:, None, :]
    same = query_segments[:, :, None] == key_segments[:, None, :]
    mask = same & (key_segments != 0)[:, None, :] & (back >= 0)
    if branches is not None:
        queries, keys = branches
        same_branch, group_prefix = (
            x[:, :, None] == keys[:, None, :]
            for x in (queries, queries // BRANCHES_PER_GROUP * BRANCHES_PER_GROUP)
        )
        mask = mask & (same_branch | group_prefix | (keys == 0)[:, None, :])
    return mask if window is None else mask & (back < window)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap) (Gemma 2): close to x for small x, always within (-cap, cap); x if cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)
