"""The value loss and explained variance, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.tokens import ValuedTokens
from quatrain.ops.value_loss import explained_variance, value_loss


def losses(values, old_values, returns, clip_value):
    ids = jnp.zeros(len(values), jnp.int32)

    def total(values):
        columns = {"old_values": jnp.asarray(old_values), "returns": jnp.asarray(returns)}
        result = value_loss(ValuedTokens(values, ids == 0, ids, columns), clip_value=clip_value)
        return result.loss.sum(), result

    gradient, result = jax.grad(total, has_aux=True)(jnp.asarray(values))
    return np.asarray(result.loss), np.asarray(gradient), result.means


def test_half_the_squared_error_without_a_clip():
    loss, gradient, means = losses([1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [3.0, 0.0, 0.5], None)
    np.testing.assert_allclose(loss, [2.0, 2.0, 0.0])
    np.testing.assert_allclose(gradient, [-2.0, -2.0, 0.0])
    assert means["clip_fraction"].tolist() == [0, 0, 0]
    assert means["value_mean"].tolist() == [1.0, -2.0, 0.5]
    assert means["return_mean"].tolist() == [3.0, 0.0, 0.5]


def test_a_value_far_from_the_old_one_has_the_larger_of_two_losses():
    """Towards the return and past the clip: held, gradient 0; away from the return: not held."""
    loss, gradient, means = losses([2.0, -2.0, 0.25], [0.0, 0.0, 0.0], [3.0, 3.0, 3.0], 0.5)
    np.testing.assert_allclose(loss, [0.5 * 2.5**2, 0.5 * 5.0**2, 0.5 * 2.75**2])
    np.testing.assert_allclose(gradient, [0.0, -5.0, -2.75])
    assert means["clip_fraction"].tolist() == [1, 0, 0]


def test_a_tie_on_the_clip_keeps_its_gradient():
    _, gradient, means = losses([0.5], [0.0], [3.0], 0.5)
    assert gradient.tolist() == [-2.5]
    assert means["clip_fraction"].tolist() == [0]


def test_columns_that_are_absent_are_named():
    ids = jnp.zeros(2, jnp.int32)
    tokens = ValuedTokens(jnp.zeros(2), ids == 0, ids, {"returns": jnp.zeros(2)})
    with pytest.raises(ValueError, match="got 'old_values'; they have values, mask, returns"):
        value_loss(tokens, clip_value=0.5)


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),
        ([1.0, 2.0], [5.0, 5.0], None),
        ([], [], None),
    ],
)
def test_explained_variance(values, returns, expected):
    got = explained_variance(np.array(values, np.float32), np.array(returns, np.float32))
    assert got == (None if expected is None else pytest.approx(expected))
