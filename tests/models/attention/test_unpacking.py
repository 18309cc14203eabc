"""Packed sequences in rows of their own: a plain causal kernel computes what packed attention does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import dense, inputs, value_and_gradients, with_branches, with_grouped_branches

from quatrain.models.attention import kernels
from quatrain.models.attention.unpacking import unpacked_attention, unpacking
from quatrain.models.layers import BRANCHES_PER_GROUP

SPLITS = (None, with_branches, with_grouped_branches)


def _unpacked(q, k, v, positions, segments, branches, window, cap, *, layout):
    causal = functools.partial(kernels._causal_attention, window=window, cap=cap, implementation="xla")
    y = unpacked_attention(causal, q, k, v, layout)
    return jnp.where((segments != 0)[..., None, None], y, 0)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("size", "window"), [((2, 70), None), ((1, 90), 6)])
def test_values_and_gradients_are_those_of_dense_attention(split, size, window):
    case = inputs(*size, 4, split)
    layout = unpacking(*map(np.asarray, case[1:3]))
    attend = functools.partial(_unpacked, layout=jax.tree.map(jnp.asarray, layout))
    got, expected = (value_and_gradients(each, case, window, None) for each in (attend, dense))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("split", SPLITS)
def test_rows_are_whole_sequences(split):
    positions, segments, branches, *_ = (np.asarray(x) for x in inputs(3, 70, 4, split)[:3])
    layout = unpacking(segments, branches)
    for buffer in range(3):
        real = np.flatnonzero(segments[buffer])
        taken = layout.rows[buffer].reshape(-1)[layout.places[buffer, real]]
        np.testing.assert_array_equal(taken, real)
        at = layout.places[buffer, real] % layout.rows.shape[2]
        np.testing.assert_array_equal(at, positions[buffer, real])


def test_a_shared_prompt_is_in_the_row_of_each_of_its_sequences():
    segments = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 0]], np.int32)
    group = BRANCHES_PER_GROUP
    branches = np.array([[0, 0, group, group + 1, group + 2, group + 2, 0, 0, 0]], np.int32)
    layout = unpacking(segments, branches)
    assert layout.rows.shape == (1, 3, 128)
    assert layout.rows[0, :, :5].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 4, 5], [6, 7, 0, 0, 0]]
    assert layout.places.tolist() == [[0, 1, 2, 3, 128 + 3, 128 + 4, 256, 257, 0]]


def test_a_buffer_of_padding_has_a_row():
    layout = unpacking(np.zeros((2, 5), np.int32), np.zeros((2, 5), np.int32))
    assert (layout.rows.shape, layout.places.shape) == ((2, 1, 128), (2, 5))
