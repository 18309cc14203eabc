"""KL estimators: literal values, exact expectations over a small distribution, bounded exponents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.kl import KL_ESTIMATORS

POLICY, REFERENCE = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.0, 0.6931472, -0.6931472]),
        ("k2", [0.0, 0.2402265, 0.2402265]),
        ("k3_straight", [0.0, 0.1931472, 0.3068528]),
        ("k3", [0.0, 0.1931472, 0.3068528]),  # exp(-d) - 1 + d at d = log 2, -log 2
    ],
)
def test_literal_values(name, expected):
    logprobs = jnp.log(jnp.array([0.5, 0.5, 0.25]))
    reference = jnp.log(jnp.array([0.5, 0.25, 0.5]))
    np.testing.assert_allclose(KL_ESTIMATORS[name](logprobs, reference), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["k1", "k3", "k3_straight"])
def test_unbiased_values(name):
    values = KL_ESTIMATORS[name](jnp.log(jnp.asarray(POLICY)), jnp.log(jnp.asarray(REFERENCE)))
    np.testing.assert_allclose(
        (POLICY * values).sum(), (POLICY * np.log(POLICY / REFERENCE)).sum(), rtol=1e-5
    )


def gradient_as_loss(name):
    """Expected gradient with respect to the policy's logits, over samples the policy itself drew."""

    def loss(logits):
        values = KL_ESTIMATORS[name](jax.nn.log_softmax(logits), jnp.log(jnp.asarray(REFERENCE, jnp.float32)))
        return (jnp.asarray(POLICY, jnp.float32) * values).sum()

    return np.asarray(jax.grad(loss)(jnp.log(jnp.asarray(POLICY, jnp.float32))))


def test_gradients_are_what_the_docstrings_say():
    kl = (POLICY * np.log(POLICY / REFERENCE)).sum()
    reverse = POLICY * (np.log(POLICY / REFERENCE) - kl)  # d KL(policy || reference) / d logits
    forward = POLICY - REFERENCE  # d KL(reference || policy) / d logits
    np.testing.assert_allclose(gradient_as_loss("k1"), 0.0, atol=1e-6)
    np.testing.assert_allclose(gradient_as_loss("k2"), reverse, atol=1e-6)
    np.testing.assert_allclose(gradient_as_loss("k3"), forward, atol=1e-6)
    np.testing.assert_allclose(gradient_as_loss("k3_straight"), reverse, atol=1e-6)


def test_k3_stays_finite_and_keeps_its_gradient_where_nothing_overflows():
    value, gradient = jax.value_and_grad(lambda x: KL_ESTIMATORS["k3"](x, jnp.float32(0)))(jnp.float32(-300))
    np.testing.assert_allclose(value, np.exp(20) - 21, rtol=1e-6)
    assert gradient == 0
    value, gradient = jax.value_and_grad(lambda x: KL_ESTIMATORS["k3"](x, jnp.float32(-300)))(jnp.float32(0))
    assert (value, gradient) == (299, 1)


def test_k3_straight_keeps_a_finite_value_and_the_gradient_of_k2():
    estimator = KL_ESTIMATORS["k3_straight"]
    value, gradient = jax.value_and_grad(lambda x: estimator(x, jnp.float32(0)))(jnp.float32(-300))
    np.testing.assert_allclose((value, gradient), (np.exp(20) - 21, -300), rtol=1e-6)


def test_k3_is_never_negative_near_zero():
    reference = jnp.linspace(-1e-3, 1e-3, 1001)
    assert KL_ESTIMATORS["k3"](jnp.zeros(1001), reference).min() >= -1e-9
