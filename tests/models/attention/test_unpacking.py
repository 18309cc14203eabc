"""Packed sequences in rows of their own: a plain causal kernel computes what packed attention does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_rows import dense, inputs, value_and_gradients, with_branches, with_grouped_branches

from quatrain.models.attention import kernels
from quatrain.models.attention import unpacking as module
from quatrain.models.attention.unpacking import unpacked_attention, unpacking
from quatrain.models.layers import BRANCHES_PER_GROUP

SPLITS = (None, with_branches, with_grouped_branches)


def _unpacked(q, k, v, positions, segments, branches, window, cap, *, layout):
    causal = functools.partial(kernels.cudnn_attention, window=window, cap=cap, implementation="xla")
    y = unpacked_attention(causal, q, k, v, layout)
    return jnp.where((segments != 0)[..., None, None], y, 0)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("size", "window", "fewest"), [((2, 70), None, 128), ((1, 90), 6, 2)])
def test_values_and_gradients_are_those_of_dense_attention(split, size, window, fewest, monkeypatch):
    """In one block of rows, or in two."""
    monkeypatch.setattr(module, "FEWEST_COLUMNS", fewest)
    case = inputs(*size, 4, split)
    layout = unpacking(*map(np.asarray, case[1:3]))
    attend = functools.partial(_unpacked, layout=jax.tree.map(jnp.asarray, layout))
    got, expected = (value_and_gradients(each, case, window, None) for each in (attend, dense))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def _where(layout, buffer):
    """For each column of all rows of all blocks: the index of its token in the buffer, and the column."""
    return tuple(
        np.concatenate([array.reshape(-1) for array in arrays])
        for arrays in (
            [rows[buffer] for rows in layout.blocks],
            [np.broadcast_to(np.arange(rows.shape[2]), rows.shape[1:]) for rows in layout.blocks],
        )
    )


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("fewest", [2, 128])
def test_rows_are_whole_sequences(split, fewest, monkeypatch):
    monkeypatch.setattr(module, "FEWEST_COLUMNS", fewest)
    positions, segments, branches, *_ = (np.asarray(x) for x in inputs(3, 70, 4, split)[:3])
    layout = unpacking(segments, branches)
    assert len(layout.blocks) == (2 if fewest == 2 else 1)
    for buffer in range(3):
        real = np.flatnonzero(segments[buffer])
        tokens, columns = _where(layout, buffer)
        np.testing.assert_array_equal(tokens[layout.places[buffer, real]], real)
        np.testing.assert_array_equal(columns[layout.places[buffer, real]], positions[buffer, real])


def test_a_shared_prompt_is_in_the_row_of_each_of_its_sequences():
    segments = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 0]], np.int32)
    group = BRANCHES_PER_GROUP
    branches = np.array([[0, 0, group, group + 1, group + 2, group + 2, 0, 0, 0]], np.int32)
    (rows,) = unpacking(segments, branches).blocks
    assert rows.shape == (1, 3, 128)
    assert rows[0, :, :5].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 4, 5], [6, 7, 0, 0, 0]]
    places = unpacking(segments, branches).places
    assert places.tolist() == [[128, 129, 130, 3, 128 + 3, 128 + 4, 256, 257, 0]]


def test_one_long_sequence_does_not_widen_the_rows_of_all_others():
    lengths = [300] * 40 + [4352]
    segments = np.repeat(np.arange(1, 42), lengths)[None].astype(np.int32)
    short, long = unpacking(segments, np.zeros_like(segments)).blocks
    assert (short.shape, long.shape) == ((1, 48, 384), (1, 1, 6144))
    assert short.size + long.size < 1.6 * segments.size


def test_a_buffer_of_padding_has_a_row():
    layout = unpacking(np.zeros((2, 5), np.int32), np.zeros((2, 5), np.int32))
    assert ([rows.shape for rows in layout.blocks], layout.places.shape) == ([(2, 1, 128)], (2, 5))
