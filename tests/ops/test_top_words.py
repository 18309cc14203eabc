"""The top k words and the rest: literals, gradients in float64, any tiles, and what equals all words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import DEFAULT_FUSION
from head_gradients import assert_head_gradients
from test_divergences import KINDS, QUICK_TILES, P, Q, dot, given, naive, pick

from quatrain.ops.logprobs import LOWEST, Head, Tile
from quatrain.ops.top_words import (
    NO_WORD,
    listed_logprobs,
    outcome_divergence,
    outcome_logits,
    top_words,
)

TILES = (Tile(1, 1), Tile(2, 3), Tile(3, 4), Tile(64, 64))


def naive_outcomes(policy, teacher, words, kind, beta=0.5):
    """In float64: (D [N], dD/dz [N, V]) of the outcomes `words` [N, k] and the rest."""
    rows, (num, size) = np.arange(len(policy))[:, None], policy.shape
    inside = np.zeros((num, size), bool)
    inside[rows, words] = True

    def outcomes(logits):
        probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        rest = np.where(inside, 0, probs).sum(axis=-1, keepdims=True)
        return probs, np.log(np.concatenate([probs[rows, words], rest], axis=-1))

    (probs, log_p), (_, log_q) = outcomes(policy), outcomes(teacher)
    value, to_outcomes = naive(log_p, log_q, kind, beta)
    of_rest = np.where(inside, 0, probs) / np.exp(log_p[:, -1:]) * to_outcomes[:, -1:]
    of_rest[rows, words] = to_outcomes[:, :-1]
    return value, of_rest


def found_of(policy, teacher, k, kind, beta=0.5, tile=TILES[1]):
    """By the two ops, of logits that are given: the head is the numbers of the words."""
    head, words = Head(pick, 1.0), jnp.arange(policy.shape[-1], dtype=jnp.float32)
    chosen, of_teacher, _ = top_words(head, words, teacher, k, tile=tile)
    log_q = jax.nn.log_softmax(of_teacher)
    logits = outcome_logits(head, words, policy, chosen, tile=tile)
    return outcome_divergence(kind, logits, log_q, beta=beta)


@pytest.mark.parametrize(("kind", "expected"), [("reverse_kl", 0.2698441355), ("forward_kl", 0.2728012184)])
def test_literal_values(kind, expected):
    """The sum over the two words alone would be -0.23191862."""
    top = np.array([[0, 3]])
    assert naive_outcomes(P[None], Q[None], top, kind)[0] == pytest.approx(expected, abs=1e-9)
    found = found_of(jnp.float32([P, Q]), jnp.float32([Q, Q]), 2, kind)
    np.testing.assert_allclose(found, [expected, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        pytest.param(kind, tile, marks=[pytest.mark.slow] * ((kind, tile) not in QUICK_TILES))
        for tile in TILES
        for kind in KINDS
    ],
)
def test_any_tiles_have_the_gradients_of_the_naive_formula(kind, tile):
    """Seven tokens, eleven words of which the top four, at a temperature; a gradient of each token's own."""
    rng = np.random.default_rng(0)
    hidden, teacher_hidden = rng.normal(size=(7, 5)), rng.normal(size=(7, 3))
    head, teacher_head, weights = rng.normal(size=(11, 5)), rng.normal(size=(11, 3)), rng.normal(size=7)
    policy, teacher = hidden @ head.T / 0.7, teacher_hidden @ teacher_head.T / 0.7
    top = np.argsort(-teacher, axis=-1)[:, :4]
    value, by_logits = naive_outcomes(policy, teacher, top, kind, 0.3)
    by_logits = weights[:, None] * by_logits / 0.7
    how = Head(dot, 0.7)
    given_to = how, jnp.float32(teacher_head), jnp.float32(teacher_hidden), 4
    words, of_teacher, outside = top_words(*given_to, tile=tile)
    log_q = jax.nn.log_softmax(of_teacher)
    assert not outside.any()
    np.testing.assert_array_equal(words, top)

    def total(head, hidden):
        found = outcome_divergence(kind, outcome_logits(how, head, hidden, words, tile=tile), log_q, beta=0.3)
        return (jnp.float32(weights) * found).sum(), found

    assert_head_gradients(total, head, hidden, value, by_logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsd", *KINDS[:2]])
def test_more_words_come_closer_to_the_whole_divergence_from_below(kind):
    rng = np.random.default_rng(1)
    policy, teacher = jnp.float32(rng.normal(0, 2, (2, 6, 9)))
    whole = given(policy, teacher, kind, 0.3)
    before = np.zeros(6)
    for k in (1, 3, 6, 9):
        found = np.asarray(found_of(policy, teacher, k, kind, 0.3))
        assert (found > before - 1e-6).all()
        assert (found < whole + 1e-6).all()
        before = found
    np.testing.assert_allclose(before, whole, rtol=1e-5, atol=1e-6)

    def by_logits(of):
        return jax.grad(lambda z: of(z).sum())(policy)

    every = by_logits(lambda z: found_of(z, teacher, 9, kind, 0.3))
    np.testing.assert_allclose(every, by_logits(lambda z: given(z, teacher, kind, 0.3)), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_vocabulary(kind):
    rng = np.random.default_rng(2)
    policy, teacher = rng.normal(0, 3, (2, 2, 151_936))
    top = np.argsort(-teacher, axis=-1)[:, :64]
    value, by_logits = naive_outcomes(policy, teacher, top, kind)
    tile = Tile(2, 8192)
    found, gradient = jax.value_and_grad(
        lambda z: found_of(z, jnp.float32(teacher), 64, kind, tile=tile).sum()
    )(jnp.float32(policy))
    np.testing.assert_allclose(found, value.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, by_logits, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    "tile", [pytest.param(tile, marks=[pytest.mark.slow] * (tile is not TILES[1])) for tile in TILES]
)
def test_words_that_do_not_count(tile):
    """Of eleven words the first eight, as if the head had no others; the others' mass is told."""
    rng = np.random.default_rng(4)
    logits = jnp.float32(rng.normal(0, 2, (5, 11)))
    words, head = jnp.arange(11, dtype=jnp.float32), Head(pick, 1.0)
    chosen, found, outside = top_words(head, words, logits, 3, tile=tile, num_words=8)
    expected = top_words(head, words[:8], logits[:, :8], 3, tile=Tile(64, 64))
    np.testing.assert_array_equal(chosen, expected[0])
    np.testing.assert_allclose(found, expected[1], rtol=1e-5)
    np.testing.assert_allclose(outside, jax.nn.softmax(logits)[:, 8:].sum(axis=1), rtol=1e-5)

    def total(logits, num_words):
        of_words = words[: logits.shape[1]]
        found = outcome_logits(head, of_words, logits, chosen, tile=tile, num_words=num_words)
        return (jnp.float32([[1, 2, 3, 4]]) * jax.nn.log_softmax(found)).sum()

    value, gradient = jax.value_and_grad(total)(logits, 8)
    short, of_short = jax.value_and_grad(total)(logits[:, :8], None)
    np.testing.assert_allclose(value, short, rtol=1e-5)
    np.testing.assert_allclose(gradient[:, :8], of_short, rtol=1e-5, atol=1e-6)
    assert not gradient[:, 8:].any()


def test_listed_words_have_the_log_probabilities_of_the_whole_vocabulary():
    """In any order, some listed twice, which must count once in the total, or not at all."""
    rng = np.random.default_rng(5)
    hidden, head, weights = rng.normal(size=(4, 5)), rng.normal(size=(11, 5)), rng.normal(size=(4, 4))
    words = np.array([[3, 10, 3, 0], [7, NO_WORD, 7, 7], [NO_WORD] * 4, [9, 1, 4, NO_WORD]])
    logits = hidden @ head.T / 0.7
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    value = np.where(words >= 0, np.take_along_axis(logprobs, np.maximum(words, 0), axis=-1), 0)
    by_logits = -np.exp(logprobs) * np.where(words >= 0, weights, 0).sum(axis=-1, keepdims=True)
    for row, word in zip(*np.nonzero(words >= 0)):
        by_logits[row, words[row, word]] += weights[row, word]

    def total(head, hidden):
        outcomes = outcome_logits(Head(dot, 0.7), head, hidden, jnp.int32(words), tile=Tile(3, 4))
        found = listed_logprobs(outcomes, jnp.int32(words))
        return (jnp.float32(weights) * found).sum(), found

    assert_head_gradients(total, head, hidden, value, by_logits / 0.7)


@pytest.mark.slow
def test_a_rest_that_the_policy_has_left_has_a_finite_gradient():
    """Probabilities of the policy's rest below what 1 - (sum of the others) could tell from 0 in float32."""
    policy, teacher = np.array([[40.0, 39, 0, 1]]), np.array([[2.0, 1, 0, 1.5]])
    top = np.array([[0, 1]])
    words, head = jnp.arange(4, dtype=jnp.float32), Head(pick, 1.0)
    _, log_q = naive_log_outcomes(teacher, top)
    for kind in KINDS:
        value, by_logits = naive_outcomes(policy, teacher, top, kind)

        def total(z, kind=kind):
            logits = outcome_logits(head, words, z, jnp.int32(top), tile=Tile(8, 2))
            return outcome_divergence(kind, logits, jnp.float32(log_q)).sum()

        found, gradient = jax.value_and_grad(total)(jnp.float32(policy))
        assert found == pytest.approx(value[0], rel=1e-5)
        np.testing.assert_allclose(gradient, by_logits, rtol=1e-4, atol=1e-6)


def naive_log_outcomes(logits, words):
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(probs, words, axis=-1)
    return probs, np.log(np.concatenate([chosen, 1 - chosen.sum(axis=-1, keepdims=True)], axis=-1))


def test_fewer_words_a_rest_of_none_and_forbidden_words():
    """A token with one word beside one with three; all words; a teacher's rest of less than its least."""
    words, head = jnp.arange(3, dtype=jnp.float32), Head(pick, 1.0)
    logits = jnp.float32([[1.0, -jnp.inf, 0.5], [0.2, 0.1, -0.3]])
    chosen = jnp.int32([[2, NO_WORD, NO_WORD], [1, 0, 2]])
    found = np.asarray(outcome_logits(head, words, logits, chosen, tile=Tile(1, 2)))
    np.testing.assert_allclose(found, [[0.5, LOWEST, LOWEST, 1.0], [0.1, 0.2, -0.3, LOWEST]], rtol=1e-6)
    log_q = jnp.float32([[np.log(0.5), LOWEST, LOWEST, np.log(0.5)], [np.log(1 / 3)] * 3 + [LOWEST]])
    for kind in KINDS:
        divergence = np.asarray(outcome_divergence(kind, jnp.float32(found), log_q))
        assert np.isfinite(divergence).all()
        assert (divergence > 0).all()
        assert (divergence < 1).all()
    sure = outcome_divergence("reverse_kl", jnp.float32([[0.0, 0.0]]), jnp.float32([[0.0, LOWEST]]))
    np.testing.assert_allclose(sure, 0.5 * (np.log(0.5) * 2 - np.log(1e-9)), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_past_the_live_ones_have_no_gradient(kind):
    rng = np.random.default_rng(3)
    policy, log_q = jnp.float32(rng.normal(size=(6, 5))), jnp.log(jnp.full((6, 3), 1 / 3))
    words, head = jnp.arange(5, dtype=jnp.float32), Head(pick, 1.0)
    chosen = jnp.tile(jnp.int32([[4, 1]]), (6, 1))

    def total(policy):
        logits = outcome_logits(head, words, policy, chosen, tile=Tile(2, 2), num_live=3)
        return outcome_divergence(kind, logits, log_q)[:4].sum()

    gradient = jax.grad(total)(policy)
    assert gradient[:3].any(axis=1).all()
    assert not gradient[4:].any()


def test_memory_is_that_of_the_tiles():
    """N = 2,048 tokens and V = 32,768 words: a whole array of logits would be 256 MiB."""
    tokens, size, k, tile = 2048, 16, 8, Tile(256, 2048)
    how = Head(dot, 1.0)

    def loss(hidden, teacher_hidden, head, teacher_head):
        words, of_teacher, _ = top_words(how, teacher_head, teacher_hidden, k, tile=tile)
        log_q = jax.nn.log_softmax(of_teacher)
        return outcome_divergence(
            "reverse_kl", outcome_logits(how, head, hidden, words, tile=tile), log_q
        ).sum()

    states, heads = jnp.ones((tokens, size)), jnp.ones((32_768, size))
    lowered = jax.jit(jax.grad(loss, (0, 2))).lower(states, states, heads, heads)
    memory = lowered.compile(DEFAULT_FUSION).memory_analysis()
    assert memory.temp_size_in_bytes < 4 * tokens * 32_768 / 8


def test_no_tokens():
    head, words, nothing = Head(pick, 1.0), jnp.arange(5.0), jnp.zeros((0, 5))
    found = outcome_logits(head, words, nothing, jnp.zeros((0, 2), jnp.int32), tile=Tile(2, 2))
    assert found.shape == (0, 3)
