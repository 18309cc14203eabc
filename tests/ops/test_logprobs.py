"""Token log-probabilities: literal values, the gradient of the naive formula, memory of one chunk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.logprobs import default_chunk, token_logprobs


def identity(hidden):
    return hidden


def naive(logits, targets, temperature):
    logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
    picked = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    return picked, -(jnp.exp(logprobs) * logprobs).sum(axis=-1)


def test_literal_values():
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]]))
    logprobs, entropy = token_logprobs(identity, logits, jnp.array([1, 2]), 1.0, chunk=8)
    np.testing.assert_allclose(logprobs, [-1.3862944, -0.6931472], rtol=1e-6)  # log 1/4, log 1/2
    np.testing.assert_allclose(entropy, [0.9002561, 1.0397208], rtol=1e-6)
    assert logprobs.dtype == entropy.dtype == jnp.float32


def test_temperature_divides_the_logits():
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0]]))
    logprobs, entropy = token_logprobs(identity, logits, jnp.array([2]), 0.5, chunk=8)
    np.testing.assert_allclose(logprobs, [np.log(25 / 30)], rtol=1e-6)  # weights 1, 4, 25
    np.testing.assert_allclose(entropy, [0.5339616], rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 5, 7])
def test_values_and_gradients_are_those_of_the_naive_formula(chunk):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(7, 5)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(5, 11)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 11, 7), jnp.int32)
    by_logprob, by_entropy = jnp.asarray(rng.normal(size=(2, 7)), jnp.float32)

    def loss(function):
        def value(hidden, weights):
            logprobs, entropy = function(hidden, weights)
            return (by_logprob * logprobs + by_entropy * entropy**2).sum()

        return jax.jit(jax.value_and_grad(value, (0, 1)))(hidden, weights)

    ours = loss(lambda h, w: token_logprobs(lambda x: x @ w, h, targets, 0.7, chunk=chunk))
    theirs = loss(lambda h, w: naive(h @ w, targets, 0.7))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)
    assert np.abs(theirs[1][1]).max() > 0.1  # the closed-over weights do get a gradient


def test_backward_holds_one_chunk_of_logits():
    num_tokens, vocab, width, chunk = 2048, 4096, 8, 64
    hidden, weights = jnp.zeros((num_tokens, width)), jnp.zeros((width, vocab))
    targets = jnp.zeros(num_tokens, jnp.int32)

    def loss(hidden, weights):
        logprobs, entropy = token_logprobs(lambda x: x @ weights, hidden, targets, 1.0, chunk=chunk)
        return (logprobs + entropy).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, weights).compile()
    full_logits = num_tokens * vocab * 4
    assert compiled.memory_analysis().temp_size_in_bytes < full_logits / 6


def test_only_the_logits_are_computed_twice():
    hidden, weights, targets = jnp.ones((8, 3)), jnp.ones((3, 5)), jnp.zeros(8, jnp.int32)

    def loss(hidden, weights):
        return token_logprobs(lambda x: x @ weights, hidden, targets, 1.0, chunk=2)[0].sum()

    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, weights))
    # Forward: logits. Backward: logits again, the gradient of the hidden states, that of the weights.
    assert program.count("dot_general[") == 4
    assert program.count("= exp ") == 2
    assert program.count("= log ") == 1


def test_forbidden_tokens_add_nothing():
    logits = jnp.array([[0.0, -jnp.inf, 0.0]])

    def total(logits):
        logprobs, entropy = token_logprobs(identity, logits, jnp.array([0]), 1.0, chunk=1)
        return logprobs[0] + entropy[0], (logprobs, entropy)

    gradient, (logprobs, entropy) = jax.grad(total, has_aux=True)(logits)
    np.testing.assert_allclose([logprobs[0], entropy[0]], [-np.log(2), np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.5, 0.0, -0.5]], atol=1e-6)


def test_extreme_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    logprobs, entropy = token_logprobs(identity, logits, jnp.array([1, 0]), 1.0, chunk=1)
    np.testing.assert_allclose(logprobs, [-2e4, -np.log(3)], rtol=1e-6)
    np.testing.assert_allclose(entropy, [0.0, np.log(3)], atol=1e-6)


def test_softmax_is_float32_under_bfloat16_activations():
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)), jnp.bfloat16)
    targets = jnp.zeros(6, jnp.int32)
    ours = token_logprobs(identity, hidden, targets, 1.0, chunk=4)
    np.testing.assert_allclose(ours, naive(hidden.astype(jnp.float32), targets, 1.0), rtol=1e-5)
    gradient = jax.grad(lambda h: token_logprobs(identity, h, targets, 1.0, chunk=4)[0].sum())(hidden)
    assert gradient.dtype == jnp.bfloat16


def test_no_tokens():
    logprobs, entropy = token_logprobs(identity, jnp.zeros((0, 3)), jnp.zeros(0, jnp.int32), 1.0, chunk=4)
    assert logprobs.shape == entropy.shape == (0,)


def test_default_chunk_bounds_one_chunk_of_logits():
    assert [default_chunk(v) for v in (256, 49152, 151936, 2**30)] == [65536, 256, 64, 1]


@pytest.mark.parametrize(
    ("hidden", "targets", "temperature", "chunk", "message"),
    [
        ((2, 3), (2,), 0.0, 4, "temperature > 0, got 0.0"),
        ((2, 3), (2,), 1.0, 0, "at least one token, got 0"),
        ((2, 2, 3), (2, 2), 1.0, 4, "flatten batch and time"),
        ((2, 3), (3,), 1.0, 4, r"got \(2, 3\) and \(3,\)"),
    ],
)
def test_bad_input(hidden, targets, temperature, chunk, message):
    with pytest.raises(ValueError, match=message):
        token_logprobs(identity, jnp.zeros(hidden), jnp.zeros(targets, jnp.int32), temperature, chunk=chunk)


def test_an_accelerator_takes_larger_chunks():
    assert default_chunk(151936, "gpu") == 8 * default_chunk(151936, "cpu") == 512


@pytest.mark.parametrize("num_live", [0, 1, 5, 8, 11])
def test_tokens_past_the_live_ones_are_not_computed(num_live):
    """Eleven tokens in chunks of 4, 4 and 3: results and gradients are those of the live tokens alone."""
    hidden, weight, targets = (
        jax.random.normal(jax.random.key(0), (11, 5)),
        jax.random.normal(jax.random.key(1), (5, 7)),
        jax.random.randint(jax.random.key(2), (11,), 0, 7),
    )

    def loss(hidden, weight, count, live):
        logprobs, entropy = token_logprobs(
            lambda h: h @ weight, hidden, targets[: len(hidden)], 1.3, chunk=4, num_live=live
        )
        return jnp.where(jnp.arange(len(hidden)) < count, logprobs + 0.3 * entropy, 0.0).sum(), logprobs

    part = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, logprobs), (to_hidden, to_weight) = part(hidden, weight, num_live, jnp.int32(num_live))
    assert not np.asarray(logprobs)[-(-num_live // 4) * 4 :].any()
    if not num_live:
        assert value == 0
        assert not np.asarray(to_weight).any()
        return
    (expected, _), (hidden_grad, weight_grad) = part(hidden[:num_live], weight, num_live, None)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(to_hidden[:num_live], hidden_grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(to_weight, weight_grad, rtol=1e-5, atol=1e-6)
