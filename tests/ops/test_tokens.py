"""Sums over the sequences of a micro-batch, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.tokens import ScoredTokens

MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool)
IDS = np.array([[0, 1, 1, 0, 2], [0, 0, 0, 0, 0]])
VALUES = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], np.float32)


def tokens(**columns) -> ScoredTokens:
    zeros = jnp.zeros(MASK.shape, jnp.float32)
    return ScoredTokens(zeros, zeros, jnp.asarray(MASK), jnp.asarray(IDS), columns)


def test_each_token_has_the_sum_over_its_sequence_and_padding_adds_nothing():
    sums = jax.jit(lambda t, x: t.sequence_sum(x))(tokens(), VALUES)
    assert sums.tolist() == [[5, 5, 5, 5, 5], [13, 13, 0, 0, 0]]
    assert tokens().sequence_lengths.tolist() == [[2, 2, 2, 2, 1], [2, 2, 0, 0, 0]]
    assert tokens().sequence_mean(jnp.asarray(VALUES)).tolist() == [
        [2.5, 2.5, 2.5, 2.5, 5],
        [6.5, 6.5, 0, 0, 0],
    ]


def test_the_gradient_of_a_mean_reaches_each_token_of_the_sequence():
    def first(values):
        return tokens().sequence_mean(values)[0, 1]

    gradient = jax.grad(first)(jnp.asarray(VALUES))
    assert gradient.tolist() == [[0, 0.5, 0.5, 0, 0], [0] * 5]


def test_a_column_that_is_not_there_is_named_with_what_brings_it():
    with pytest.raises(ValueError, match=r"'ref_logprobs'.*have logprobs, .*, advantages.*kl_coef"):
        _ = tokens(advantages=jnp.asarray(VALUES)).ref_logprobs
    assert tokens(advantages=VALUES).advantages is VALUES
