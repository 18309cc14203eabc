"""Divergences over the vocabulary: literal values, gradients of the naive formula, tiles, and a real size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import DEFAULT_FUSION
from head_gradients import assert_head_gradients

from quatrain.ops.divergences import token_divergences
from quatrain.ops.logprobs import Head, Tile

P = np.array([0.2, -0.3, 1.1, 0.0, -1.0])
Q = np.array([1.0, 0.0, -0.5, 0.3, -2.0])
KINDS = ("reverse_kl", "forward_kl", "jsd")


def pick(rows, logits):
    return logits[:, rows.astype(jnp.int32)]


def dot(rows, hidden):
    return hidden @ rows.T


def given(policy, teacher, kind, beta=0.5, temperature=1.0, tile=None):
    """Of logits that are given: the head is the numbers of the words."""
    words = jnp.arange(policy.shape[-1], dtype=jnp.float32)
    head = Head(pick, temperature)
    divergence, log_total = token_divergences(
        head, words, policy, head, words, teacher, kind=kind, beta=beta, tile=tile or Tile(8, 2)
    )
    np.testing.assert_allclose(log_total, jax.nn.logsumexp(teacher / temperature, axis=-1), rtol=1e-5)
    return divergence


def naive(policy, teacher, kind, beta=0.5):
    """In float64 with numpy: (D [N], dD/dz [N, V])."""
    log_p, log_q = (z - np.log(np.exp(z).sum(axis=-1, keepdims=True)) for z in (policy, teacher))
    p, q = np.exp(log_p), np.exp(log_q)
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(axis=-1), p - q
    if kind == "reverse_kl":
        value = (p * (log_p - log_q)).sum(axis=-1)
        return value, p * (log_p - log_q - value[..., None])
    log_m = np.log((1 - beta) * p + beta * q)
    to_mean = (p * (log_p - log_m)).sum(axis=-1)
    value = beta * (q * (log_q - log_m)).sum(axis=-1) + (1 - beta) * to_mean
    return value, (1 - beta) * p * (log_p - log_m - to_mean[..., None])


@pytest.mark.parametrize(
    ("kind", "beta", "expected"),
    [
        ("reverse_kl", 0.5, 0.4938133762),
        ("forward_kl", 0.5, 0.3916929564),
        ("jsd", 0.5, 0.1035589930),
        ("jsd", 0.1, 0.0354062624),
    ],
)
def test_literal_values(kind, beta, expected):
    assert naive(P, Q, kind, beta)[0] == pytest.approx(expected, abs=1e-9)
    found = given(jnp.float32([P, P]), jnp.float32([Q, P]), kind, beta)
    np.testing.assert_allclose(found, [expected, 0.0], atol=1e-6)


def test_the_gradient_of_the_reverse_kl():
    gradient = jax.grad(lambda z: given(z, jnp.float32([Q]), "reverse_kl").sum())(jnp.float32([P]))
    expected = [-0.26613769, -0.10294363, 0.48366002, -0.13895937, 0.02438068]
    np.testing.assert_allclose(gradient[0], expected, atol=1e-6)


TILES = (Tile(1, 1), Tile(2, 3), Tile(3, 4), Tile(64, 64))
QUICK_TILES = {(kind, Tile(2, 3)) for kind in KINDS}


@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        pytest.param(kind, tile, marks=[pytest.mark.slow] * ((kind, tile) not in QUICK_TILES))
        for tile in TILES
        for kind in KINDS
    ],
)
def test_any_tiles_have_the_gradients_of_the_naive_formula(kind, tile):
    """Seven tokens, eleven words, five and three numbers a state, at a temperature."""
    rng = np.random.default_rng(0)
    hidden, teacher_hidden = rng.normal(size=(7, 5)), rng.normal(size=(7, 3))
    head, teacher_head, weights = rng.normal(size=(11, 5)), rng.normal(size=(11, 3)), rng.normal(size=7)
    value, by_logits = naive(hidden @ head.T / 0.7, teacher_hidden @ teacher_head.T / 0.7, kind, 0.3)
    by_logits = weights[:, None] * by_logits / 0.7

    def total(head, hidden):
        how = Head(dot, 0.7)
        found, _ = token_divergences(
            *(how, head, hidden, how, jnp.float32(teacher_head), jnp.float32(teacher_hidden)),
            kind=kind,
            beta=0.3,
            tile=tile,
        )
        return (jnp.float32(weights) * found).sum(), found

    assert_head_gradients(total, head, hidden, value, by_logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_vocabulary(kind):
    rng = np.random.default_rng(1)
    policy, teacher = rng.normal(0, 3, (2, 2, 151_936))
    value, _ = naive(policy, teacher, kind)
    found = given(jnp.float32(policy), jnp.float32(teacher), kind, tile=Tile(2, 8192))
    np.testing.assert_allclose(found, value, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_past_the_live_ones_are_zero_and_have_no_gradient(kind):
    rng = np.random.default_rng(2)
    policy, teacher = jnp.float32(rng.normal(size=(2, 6, 5)))
    words, head = jnp.arange(5, dtype=jnp.float32), Head(pick, 1.0)

    def total(policy):
        found, _ = token_divergences(
            head, words, policy, head, words, teacher, kind=kind, tile=Tile(2, 2), num_live=3
        )
        return found.sum(), found

    gradient, found = jax.grad(total, has_aux=True)(policy)
    assert found[:3].all()
    assert not found[4:].any()
    assert not gradient[4:].any()


@pytest.mark.parametrize("kind", ["jsd", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2])])
def test_memory_is_that_of_the_tiles(kind):
    """N = 2,048 tokens and V = 32,768 words: a whole array of logits would be 256 MiB."""
    tokens, words, size, tile = 2048, 32_768, 16, Tile(256, 2048)
    how = Head(dot, 1.0)

    def loss(hidden, teacher_hidden, head, teacher_head):
        divergence, _ = token_divergences(
            how, head, hidden, how, teacher_head, teacher_hidden, kind=kind, tile=tile
        )
        return divergence.sum()

    states, heads = jnp.ones((tokens, size)), jnp.ones((words, size))
    lowered = jax.jit(jax.grad(loss, (0, 2))).lower(states, states, heads, heads)
    memory = lowered.compile(DEFAULT_FUSION).memory_analysis()
    # Gradients of head and states before they are results, and some tiles of each model's logits.
    gradients, one_tile = 4 * size * (words + tokens), 4 * tile.tokens * tile.words
    assert memory.temp_size_in_bytes < gradients + 8 * one_tile
    assert memory.temp_size_in_bytes < 4 * tokens * words / 8


def test_no_tokens():
    nothing = jnp.zeros((0, 5))
    assert given(nothing, nothing, "jsd").shape == (0,)
