"""Log-probabilities over kept words alone: a dense reference, tiles, parts of the vocabulary, bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.kept_words import NO_WORD, bits_from, kept_bits
from quatrain.ops.logprobs import Tile, token_logprobs

WORDS, TOKENS = 75, 7


def dot(rows, hidden):
    return hidden @ rows.T


def some_sets(rng, targets, most=6):
    """[N, most] of each token some words with its target among them; the last token keeps all words."""
    sets = np.full((len(targets), most), NO_WORD, np.int32)
    for row, target in enumerate(targets[:-1]):
        count = rng.integers(1, most + 1)
        others = rng.permutation(np.delete(np.arange(WORDS), target))[: count - 1]
        sets[row, :count] = rng.permutation([target, *others])
    return sets


@functools.cache
def given():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(TOKENS, 5)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(WORDS, 5)), jnp.float32)
    targets = rng.integers(0, WORDS, TOKENS).astype(np.int32)
    by_logprob, by_entropy = jnp.asarray(rng.normal(size=(2, TOKENS)), jnp.float32)
    return hidden, head, targets, some_sets(rng, targets), by_logprob, by_entropy


def dense(hidden, head, targets, sets):
    """By the formula, in float64: all logits, -inf outside the sets."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / 0.7
    for row, words in enumerate(sets):
        if (kept := words[words != NO_WORD]).size:
            logits[row, np.setdiff1d(np.arange(WORDS), kept)] = -np.inf
    logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    logprobs -= logits.max(1, keepdims=True)
    probs = np.exp(logprobs)
    return logprobs[np.arange(TOKENS), targets], -(probs * np.where(probs > 0, logprobs, 0)).sum(1)


def dense_gradients():
    """Of the weighted sum of both results, by the same formula in JAX."""
    hidden, head, targets, sets, by_logprob, by_entropy = given()
    outside = np.zeros((TOKENS, WORDS), bool)
    for row, words in enumerate(sets):
        if (kept := words[words != NO_WORD]).size:
            outside[row] = ~np.isin(np.arange(WORDS), kept)

    def loss(hidden, head):
        logprobs = jax.nn.log_softmax(jnp.where(outside, -1e30, hidden @ head.T / 0.7), axis=-1)
        picked = logprobs[jnp.arange(TOKENS), targets]
        entropy = -(jnp.exp(logprobs) * jnp.where(outside, 0.0, logprobs)).sum(axis=-1)
        return (by_logprob * picked + by_entropy * entropy**2).sum()

    return jax.jit(jax.grad(loss, (0, 1)))(hidden, head)


@pytest.mark.parametrize(
    "tile", [Tile(3, 10), Tile(7, 32), Tile(2, 75), Tile(7, 80, 4 * TOKENS * WORDS), Tile(1, 1)]
)
def test_values_and_gradients_are_those_of_a_dense_reference(tile):
    """Would fail if a tile that begins within a number read the bits of other words, or if the backward pass
    gave words that are not kept a gradient."""
    hidden, head, targets, sets, by_logprob, by_entropy = given()

    def loss(hidden, head):
        bits = kept_bits(jnp.asarray(sets), WORDS)
        logprobs, entropy = token_logprobs(dot, head, hidden, targets, 0.7, tile=tile, kept=bits)
        return (by_logprob * logprobs + by_entropy * entropy**2).sum(), (logprobs, entropy)

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head)
    for ours, theirs in zip(results, dense(hidden, head, targets, sets), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, dense_gradients(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    assert np.asarray(results[1])[:-1].min() >= -1e-6


def test_a_set_of_one_word_has_neither_entropy_nor_gradient():
    hidden, head, targets, *_ = given()
    bits = kept_bits(jnp.asarray(targets[:, None]), WORDS)

    def loss(hidden):
        logprobs, entropy = token_logprobs(dot, head, hidden, targets, 0.7, tile=Tile(3, 10), kept=bits)
        return (logprobs + entropy).sum(), (logprobs, entropy)

    by_hidden, results = jax.grad(loss, has_aux=True)(hidden)
    np.testing.assert_allclose(results, np.zeros((2, TOKENS)), atol=1e-6)
    np.testing.assert_allclose(by_hidden, np.zeros_like(by_hidden), atol=1e-6)


def test_parts_of_the_vocabulary_keep_their_own_words():
    """Three parts of 25 words, none of which begins with a number: each device reads bits of its words."""
    hidden, head, targets, sets, by_logprob, by_entropy = given()

    def loss(hidden, head, axis):
        first = 0 if axis is None else jax.lax.axis_index(axis) * len(head)
        bits = kept_bits(jnp.asarray(sets), len(head), first)
        logprobs, entropy = token_logprobs(
            dot, head, hidden, targets, 0.7, tile=Tile(3, 10), vocabulary_axis=axis, kept=bits
        )
        return (by_logprob * logprobs + by_entropy * entropy).sum()

    run = jax.value_and_grad(loss, (0, 1))
    whole, (to_hidden, to_head) = jax.jit(lambda: run(hidden, head, None))()
    parts = jax.jit(jax.vmap(lambda own: run(hidden, own, "tp"), axis_name="tp"))(head.reshape(3, 25, 5))
    value, (part_of_hidden, part_of_head) = parts
    np.testing.assert_allclose(value, [whole] * 3, rtol=1e-5)
    np.testing.assert_allclose(part_of_hidden.sum(axis=0), to_hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(part_of_head.reshape(WORDS, 5), to_head, rtol=1e-5, atol=1e-5)


def test_bits_are_those_of_the_words():
    sets = np.array([[0, 31, 32, 74], [74, NO_WORD, NO_WORD, NO_WORD], [NO_WORD] * 4], np.int32)
    assert kept_bits(jnp.asarray(sets), WORDS).tolist() == [
        [2**31 + 1, 1, 2**10],
        [0, 0, 2**10],
        [2**32 - 1] * 3,
    ]
    assert kept_bits(jnp.asarray(sets), 32, 32).tolist() == [[1], [0], [2**32 - 1]]


@pytest.mark.parametrize("first", [0, 1, 31, 32, 40, 74])
def test_bits_from_a_word_on(first):
    rng = np.random.default_rng(1)
    kept = rng.integers(0, 2, (5, WORDS)).astype(bool)
    masks = np.packbits(np.pad(kept, [(0, 0), (0, 96 - WORDS)]), axis=1, bitorder="little").view(np.uint32)
    found = np.asarray(bits_from(jnp.asarray(masks), WORDS - first, first))
    bits = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")[:, : WORDS - first]
    np.testing.assert_array_equal(bits.astype(bool), kept[:, first:])


def test_bits_for_other_words_are_refused():
    hidden, head, targets, *_ = given()
    bits = jnp.zeros((TOKENS, 2), jnp.uint32)
    with pytest.raises(ValueError, match=r"expected kept \[7, 3\], a bit for each word, got \(7, 2\)"):
        token_logprobs(dot, head, hidden, targets, 0.7, tile=Tile(3, 10), kept=bits)
