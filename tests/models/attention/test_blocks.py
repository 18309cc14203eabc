"""The attention that skips blocks is the attention that does not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import attention

from quatrain.backend import BlockSizes
from quatrain.models.attention.blocks import block_attention, block_pattern
from quatrain.models.layers import TWIGS, attention_mask


@pytest.fixture(params=[(3, 2), (None, 1)], ids=["some at a time", "all at once"])
def sizes(request):
    queries, keys = request.param
    return BlockSizes(block=8, queries=queries, keys=keys)


def _rows(rng: np.random.Generator, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segment ids of rows filled with segments of random lengths; some padding at the ends."""
    positions, segments = np.zeros((2, rows, width), np.int32)
    for row in range(rows):
        start, number = 0, 0
        while start < width - 3:
            length = min(int(rng.integers(1, width // 2)), width - start)
            number += 1
            positions[row, start : start + length] = np.arange(length)
            segments[row, start : start + length] = number
            start += length
    return positions, segments


def _dense(q, k, v, positions, segments, window, cap):
    mask = attention_mask(positions, positions, segments, segments, window)
    return attention(q, k, v, mask, cap)


def _block(q, k, v, positions, segments, window, cap, sizes):
    pattern = block_pattern(positions, segments, jnp.zeros_like(segments), window, sizes)
    return block_attention(q, k, v, pattern, window, cap)


def _assert_dense(qkv, dy, positions, segments, window, cap, sizes):
    block = partial(_block, sizes=sizes)

    def loss(attend, q, k, v):
        return jnp.sum(attend(q, k, v, positions, segments, window, cap) * dy)

    expected = jax.value_and_grad(loss, argnums=(1, 2, 3))(_dense, *qkv)
    got = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3)), static_argnums=0)(block, *qkv)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (None, 2.0), (13, 3.0)])
@pytest.mark.parametrize(("rows", "width"), [(1, 61), (3, 37), (2, 4)])
def test_values_and_gradients_are_those_of_dense_attention(window, cap, rows, width, sizes):
    rng = np.random.default_rng(rows * width)
    positions, segments = map(jnp.asarray, _rows(rng, rows, width))
    q, k, v, dy = (
        jnp.asarray(rng.normal(size=(rows, width, heads, 4)), jnp.float32) for heads in (6, 2, 2, 6)
    )
    dy = jnp.where((segments != 0)[..., None, None], dy, 0.0)  # nothing reads the output of padding
    _assert_dense((q, k, v), dy, positions, segments, window, cap, sizes)


def test_no_key_counts_twice_where_an_odd_number_of_blocks_is_seen(sizes):
    rng = np.random.default_rng(40)
    positions, segments = jnp.arange(40)[None], jnp.ones((1, 40), jnp.int32)  # 5 blocks, looked at by two
    q, k, v, dy = (jnp.asarray(rng.normal(size=(1, 40, heads, 4)), jnp.float32) for heads in (6, 2, 2, 6))
    _assert_dense((q, k, v), dy, positions, segments, None, None, sizes)


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
    out = _block(q, q, q, positions, segments, None, None, sizes)
    assert not np.asarray(out)[0, 6:].any()
    np.testing.assert_allclose(out[0, :6], 1.0, rtol=1e-6)


def _branches(segments: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each segment becomes a trunk and up to three branches at the positions after it."""
    positions, branches = positions.copy(), np.zeros_like(segments)
    for row in range(len(segments)):
        for segment in np.unique(segments[row][segments[row] > 0]):
            places = np.flatnonzero(segments[row] == segment)
            trunk, *rest = np.array_split(places, 4)
            positions[row, trunk] = np.arange(len(trunk))
            for branch, own in enumerate(rest, start=1):
                positions[row, own] = len(trunk) + np.arange(len(own))
                branches[row, own] = branch
    return positions, branches


def _twigs(segments: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each segment becomes a trunk and two branches after it, with two twigs each at the positions after."""
    positions, branches = positions.copy(), np.zeros_like(segments)
    for row in range(len(segments)):
        for segment in np.unique(segments[row][segments[row] > 0]):
            trunk, *rest = np.array_split(np.flatnonzero(segments[row] == segment), 7)
            positions[row, trunk] = np.arange(len(trunk))
            for stem in (0, 3):
                first = len(trunk)
                for twig, own in enumerate(rest[stem : stem + 3]):
                    positions[row, own] = first + np.arange(len(own))
                    branches[row, own] = (stem + 1) * TWIGS + twig
                    first += len(own) * (twig == 0)
    return positions, branches


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("rows", "width"), [(1, 90), (2, 70)])
@pytest.mark.parametrize("split", [_branches, _twigs])
def test_branches_see_where_they_begin_and_themselves(split, window, rows, width, sizes):
    rng = np.random.default_rng(width)
    positions, segments = _rows(rng, rows, width)
    positions, branches = (jnp.asarray(x) for x in split(segments, positions))
    segments = jnp.asarray(segments)
    q, k, v, dy = (
        jnp.asarray(rng.normal(size=(rows, width, heads, 4)), jnp.float32) for heads in (4, 2, 2, 4)
    )
    dy = jnp.where((segments != 0)[..., None, None], dy, 0.0)

    def dense(q, k, v):
        mask = attention_mask(positions, positions, segments, segments, window, (branches, branches))
        return attention(q, k, v, mask, None)

    def block(q, k, v):
        pattern = block_pattern(positions, segments, branches, window, sizes)
        return block_attention(q, k, v, pattern, window, None)

    expected, got = (
        jax.value_and_grad(lambda *x, f=f: jnp.sum(f(*x) * dy), argnums=(0, 1, 2))(q, k, v)
        for f in (dense, block)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    whole = block_pattern(positions, segments, jnp.zeros_like(segments), window, sizes)
    branched = block_pattern(positions, segments, branches, window, sizes)
    assert branched.counts.sum() <= whole.counts.sum()
