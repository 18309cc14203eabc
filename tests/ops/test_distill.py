"""The teacher's part of the advantages, against numbers worked out by hand and against all words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.distill import sampled_advantages, sums_from_here_on
from quatrain.ops.tokens import ScoredTokens

P = np.array([0.2, -0.3, 1.1, 0.0, -1.0])
Q = np.array([1.0, 0.0, -0.5, 0.3, -2.0])
"""Logits of a policy and a teacher over five words."""


def _tokens(**columns):
    arrays = {name: jnp.float32([values]) for name, values in columns.items()}
    ids = jnp.int32(arrays.pop("sequence_ids", jnp.zeros((1, len(columns["advantages"])))))
    mask = arrays.pop("mask", jnp.ones(ids.shape)) > 0
    return ScoredTokens(jnp.zeros(ids.shape), jnp.zeros(ids.shape), mask, ids, arrays)


ROW = {
    "advantages": (1.0, 1.0, -0.5, -0.5),
    "old_logprobs": (-1.0, -2.0, -0.5, -4.0),
    "teacher_logprobs": (-0.25, -9.0, 0.0, -1.0),
    "teacher_weights": (2.0, 2.0, 0.0, 2.0),
}


def test_advantages_are_mixed_clipped_and_counted():
    """Differences 0.75, -7, 0.5 without a teacher, and 3, held at 2.5."""
    found, clipped = sampled_advantages(_tokens(**ROW), rl_weight=0.5, clip=2.5, discount=0.0)
    np.testing.assert_allclose(found[0], [0.5 + 1.5, 0.5 - 5.0, -0.25, -0.25 + 5.0], rtol=1e-6)
    np.testing.assert_array_equal(clipped[0], [0, 1, 0, 1])


def test_a_discount_adds_what_follows_in_the_sequence():
    row = {**ROW, "sequence_ids": (0, 1, 0, 1), "teacher_weights": (1.0, 1.0, 1.0, 1.0)}
    found, _ = sampled_advantages(_tokens(**row), rl_weight=0.0, clip=10.0, discount=0.5)
    np.testing.assert_allclose(found[0], [0.75 + 0.25, -7 + 1.5, 0.5, 3.0], rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_those_of_a_loop_in_any_order_of_sequences(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, (3, 17))
    values = rng.normal(size=ids.shape)
    padded = 17 - 5 * seed % 7
    ids[:, padded:], values[:, padded:] = 0, 0.0
    expected = np.zeros(ids.shape)
    for row in range(3):
        for sequence in range(4):
            total = 0.0
            for place in reversed(np.flatnonzero(ids[row, :padded] == sequence)):
                expected[row, place] = total = values[row, place] + 0.9 * total
    mask = jnp.asarray(np.arange(17) < padded)[None].repeat(3, axis=0)
    found = sums_from_here_on(jnp.float32(values), mask, jnp.int32(ids), 0.9)
    np.testing.assert_allclose(found[:, :padded], expected[:, :padded], rtol=1e-5, atol=1e-6)


def test_a_discount_does_not_count_given_tokens():
    """Two given tokens, one scored, three given, one scored: 1 + 0.5 and 1, as where the given are absent."""
    mask = jnp.asarray([[False, False, True, False, False, False, True]])
    found = sums_from_here_on(jnp.ones((1, 7)), mask, jnp.zeros((1, 7), jnp.int32), 0.5)
    np.testing.assert_array_equal(found[mask], [1.5, 1.0])


def test_no_gradient_flows_through_the_advantages():
    def total(old, teacher):
        columns = {**ROW, "old_logprobs": old, "teacher_logprobs": teacher}
        arrays = {name: jnp.float32(values)[None] for name, values in columns.items()}
        ids = jnp.zeros((1, 4), jnp.int32)
        tokens = ScoredTokens(jnp.zeros((1, 4)), jnp.zeros((1, 4)), ids == 0, ids, arrays)
        return sampled_advantages(tokens, rl_weight=1.0, clip=10.0, discount=0.5)[0].sum()

    for gradient in jax.grad(total, argnums=(0, 1))(
        *(jnp.float32(ROW[f"{x}_logprobs"]) for x in ("old", "teacher"))
    ):
        np.testing.assert_array_equal(gradient, np.zeros(4))


def test_the_expected_gradient_over_all_words_is_that_of_the_reverse_kl():
    """sum_y p(y) A(y) grad log p(y) = -grad KL(p || q), whose value for these logits is 0.4938133762."""
    log_p, log_q = (logits - np.log(np.exp(logits).sum()) for logits in (P, Q))
    p = np.exp(log_p)
    kl = (p * (log_p - log_q)).sum()
    assert kl == pytest.approx(0.4938133762, abs=1e-9)
    tokens = _tokens(
        advantages=np.zeros(5), old_logprobs=log_p, teacher_logprobs=log_q, teacher_weights=np.ones(5)
    )
    found = np.asarray(sampled_advantages(tokens, rl_weight=1.0, clip=10.0, discount=0.0)[0][0], np.float64)
    by_logits = p @ (found[:, None] * (np.eye(5) - p))
    expected = [-0.26613769, -0.10294363, 0.48366002, -0.13895937, 0.02438068]
    np.testing.assert_allclose(-by_logits, expected, atol=1e-6)


def test_over_whole_sequences_the_expected_gradient_is_that_of_the_reverse_kl_in_each_state():
    """All 125 sequences of three of five words: a table of logits for each prefix is the policy's parameters.

    The expectation of c grad log p over p's own sequences is that of -grad KL(p || q) in the states that p
    visits, the gradient of the loss `reverse_kl` at the sampled states.
    """
    rng = np.random.default_rng(0)
    prefixes = [()] + [(a,) for a in range(5)] + [(a, b) for a in range(5) for b in range(5)]
    places = {prefix: number for number, prefix in enumerate(prefixes)}
    policy, teacher = rng.normal(size=(2, len(prefixes), 5))
    log_p, log_q = (z - np.log(np.exp(z).sum(axis=1, keepdims=True)) for z in (policy, teacher))
    sampled, exact = np.zeros_like(policy), np.zeros_like(policy)
    for words in np.ndindex(5, 5, 5):
        states = [places[words[:length]] for length in range(3)]
        chance = np.exp(sum(log_p[state, word] for state, word in zip(states, words)))
        tokens = _tokens(
            advantages=np.zeros(3),
            old_logprobs=[log_p[state, word] for state, word in zip(states, words)],
            teacher_logprobs=[log_q[state, word] for state, word in zip(states, words)],
            teacher_weights=np.ones(3),
        )
        advantages, _ = sampled_advantages(tokens, rl_weight=1.0, clip=50.0, discount=0.0)
        for state, word, advantage in zip(states, words, np.asarray(advantages[0], np.float64)):
            p = np.exp(log_p[state])
            sampled[state] += chance * advantage * (np.eye(5)[word] - p)
            kl = (p * (log_p[state] - log_q[state])).sum()
            exact[state] -= chance * p * (log_p[state] - log_q[state] - kl)
    np.testing.assert_allclose(sampled, exact, atol=1e-6)
    assert np.abs(exact).max() > 0.05
