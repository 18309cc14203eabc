"""Packed rows with random inputs, and the attention with all scores at once that they are compared with."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from reference import attention

from quatrain.models.layers import BRANCHES_PER_GROUP, attention_mask


def rows_of_segments(rng: np.random.Generator, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
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


@functools.cache
def inputs(rows: int, width: int, heads: int, split=None):
    """Positions, segments, branches, queries, keys, values and the gradient that reaches the output."""
    rng = np.random.default_rng(rows * width)
    positions, segments = rows_of_segments(rng, rows, width)
    branches = np.zeros_like(segments)
    if split is not None:
        positions, branches = split(segments, positions)
    shapes = [(rows, width, n, 4) for n in (heads, 2, 2, heads)]
    q, k, v, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    dy = jnp.where((jnp.asarray(segments) != 0)[..., None, None], dy, 0.0)  # nothing reads padding's output
    return (*map(jnp.asarray, (positions, segments, branches)), (q, k, v), dy)


def with_branches(segments: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each segment becomes a common prefix and up to three branches at the positions after it."""
    positions, branches = positions.copy(), np.zeros_like(segments)
    for row in range(len(segments)):
        for segment in np.unique(segments[row][segments[row] > 0]):
            places = np.flatnonzero(segments[row] == segment)
            common, *rest = np.array_split(places, 4)
            positions[row, common] = np.arange(len(common))
            for branch, own in enumerate(rest, start=1):
                positions[row, own] = len(common) + np.arange(len(own))
                branches[row, own] = branch
    return positions, branches


def with_grouped_branches(segments: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each segment becomes a common prefix and two groups: a shared prompt and two branches after it."""
    positions, branches = positions.copy(), np.zeros_like(segments)
    for row in range(len(segments)):
        for segment in np.unique(segments[row][segments[row] > 0]):
            common, *rest = np.array_split(np.flatnonzero(segments[row] == segment), 7)
            positions[row, common] = np.arange(len(common))
            for group in (0, 3):
                first = len(common)
                for branch, own in enumerate(rest[group : group + 3]):
                    positions[row, own] = first + np.arange(len(own))
                    branches[row, own] = (group + 1) * BRANCHES_PER_GROUP + branch
                    first += len(own) * (branch == 0)
    return positions, branches


def dense(q, k, v, positions, segments, branches, window, cap):
    mask = attention_mask(positions, positions, segments, segments, window, (branches, branches))
    return attention(q, k, v, mask, cap)


def value_and_gradients(attend, inputs, window, cap):
    def loss(qkv, positions, segments, branches, dy):
        return jnp.sum(attend(*qkv, positions, segments, branches, window, cap) * dy)

    positions, segments, branches, qkv, dy = inputs
    return jax.jit(jax.value_and_grad(loss))(qkv, positions, segments, branches, dy)
