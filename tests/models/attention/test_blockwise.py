"""The attention that skips blocks is the attention that does not."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import dense, inputs, value_and_gradients, with_branches, with_grouped_branches

from quatrain.backend import BlockSizes
from quatrain.models.attention.blockwise import block_attention, block_pattern

SOME, ALL = (BlockSizes(block=8, queries=queries, keys=keys) for queries, keys in ((3, 2), (None, 1)))
BOTH = pytest.mark.parametrize("sizes", [SOME, ALL], ids=["some at a time", "all at once"])


@pytest.fixture(
    params=[SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some at a time", "all at once"]
)
def sizes(request):
    return request.param


def _block(q, k, v, positions, segments, branches, window, cap, *, sizes):
    pattern = block_pattern(positions, segments, branches, window, sizes)
    return block_attention(q, k, v, pattern, window, cap)


@functools.cache
def _expected(*case, window, cap):
    """Dense attention's, which both block sizes are held to."""
    return value_and_gradients(dense, inputs(*case), window, cap)


def _assert_dense(*case, window, cap, sizes):
    got = value_and_gradients(functools.partial(_block, sizes=sizes), inputs(*case), window, cap)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(_expected(*case, window=window, cap=cap))):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


SIZES = ((1, 61), (3, 37), (2, 4))
LIMITS = ((None, None), (5, None), (None, 2.0), (13, 3.0))
QUICK = {((3, 37), (13, 3.0))}


@BOTH
@pytest.mark.parametrize(
    ("size", "limits"),
    [
        pytest.param(size, limits, marks=[pytest.mark.slow] * ((size, limits) not in QUICK))
        for size in SIZES
        for limits in LIMITS
    ],
)
def test_values_and_gradients_are_those_of_dense_attention(size, limits, sizes):
    window, cap = limits
    _assert_dense(*size, 6, window=window, cap=cap, sizes=sizes)


def _one_segment(segments, positions):
    """Makes all tokens one segment, without branches or padding."""
    segments[:] = 1
    return np.broadcast_to(np.arange(segments.shape[1], dtype=np.int32), segments.shape), segments * 0


def test_no_key_counts_twice_where_an_odd_number_of_blocks_is_seen(sizes):
    """Five blocks, looked at by two."""
    _assert_dense(1, 40, 6, _one_segment, window=None, cap=None, sizes=sizes)


@BOTH
def test_blocks_with_nothing_to_see_are_left_out(sizes):
    """Four sequences of 8 tokens in one row of blocks of 8: each block looks at itself alone."""
    positions = jnp.tile(jnp.arange(8, dtype=jnp.int32), 4)[None]
    segments = jnp.repeat(jnp.arange(1, 5, dtype=jnp.int32), 8)[None]
    pattern = block_pattern(positions, segments, jnp.zeros_like(segments), None, sizes)
    counts = dict(zip(np.ravel(pattern.queries)[:4].tolist(), np.ravel(pattern.counts)[:4].tolist()))
    assert counts == {0: 1, 1: 1, 2: 1, 3: 1}
    row, ones = jnp.arange(32, dtype=jnp.int32)[None], jnp.ones((1, 32), jnp.int32)
    one = block_pattern(row, ones, jnp.zeros_like(ones), None, sizes)
    fillers = {3: [0, 0], None: []}[sizes.queries]  # blocks that fill the last group
    assert sorted(np.ravel(one.counts).tolist()) == [*fillers, 1, 2, 3, 4]
    windowed = block_pattern(row, ones, jnp.zeros_like(ones), 8, sizes)
    assert sorted(np.ravel(windowed.counts).tolist()) == [*fillers, 1, 2, 2, 2]


def test_padding_comes_out_as_zero(sizes):
    positions = jnp.arange(10, dtype=jnp.int32)[None]
    segments = jnp.asarray([[1] * 6 + [0] * 4], jnp.int32)
    q = jnp.ones((1, 10, 2, 4))
    run = jax.jit(functools.partial(_block, window=None, cap=None, sizes=sizes))
    out = run(q, q, q, positions, segments, jnp.zeros_like(segments))
    assert not np.asarray(out)[0, 6:].any()
    np.testing.assert_allclose(out[0, :6], 1.0, rtol=1e-6)


QUICK_BRANCHES = {(with_branches, (1, 90), 6), (with_grouped_branches, (2, 70), None)}


@pytest.mark.parametrize(
    ("split", "size", "window"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK_BRANCHES))
        for case in itertools.product((with_branches, with_grouped_branches), ((1, 90), (2, 70)), (None, 6))
    ],
)
def test_branches_see_where_they_begin_and_themselves(split, size, window, sizes):
    _assert_dense(*size, 4, split, window=window, cap=None, sizes=sizes)
    positions, segments, branches, *_ = inputs(*size, 4, split)
    whole = block_pattern(positions, segments, jnp.zeros_like(segments), window, sizes)
    branched = block_pattern(positions, segments, branches, window, sizes)
    assert branched.counts.sum() <= whole.counts.sum()
