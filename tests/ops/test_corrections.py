"""Weights of tokens that another policy sampled, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.corrections import behaviour_weights

ROLLOUT = jnp.float32([-2.0, -2.0, -2.0, -2.0, -30.0, -1.0])
OLD = ROLLOUT + jnp.float32([0.0, np.log(1.5), np.log(3.0), np.log(0.4), 25.0, -25.0])


@pytest.mark.parametrize(
    ("correction", "weights", "changed"),
    [
        ("truncate", [1, 1.5, 2, 0.4, 2, np.exp(-20)], [0, 0, 1, 0, 1, 0]),
        ("mask", [1, 1.5, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]),
    ],
)
def test_six_tokens(correction, weights, changed):
    found, outside = behaviour_weights(OLD, ROLLOUT, correction=correction, cap=2.0)
    np.testing.assert_allclose(found, np.float32(weights), rtol=1e-6)
    np.testing.assert_array_equal(outside, np.float32(changed))


@pytest.mark.parametrize(
    ("floor", "weights"), [(0.0, [1, 1.5, 3, 0.4]), (0.39, [1, 1.5, 3, 0.4]), (0.41, [1, 1.5, 3, 0])]
)
def test_mask_has_a_lower_bound_of_its_own(floor, weights):
    found, outside = behaviour_weights(OLD[:4], ROLLOUT[:4], correction="mask", cap=4.0, floor=floor)
    np.testing.assert_allclose(found, np.float32(weights), rtol=1e-5)
    np.testing.assert_array_equal(outside, np.float32(weights) == 0)


def test_a_ratio_above_every_cap_is_held_at_exp_20():
    found, _ = behaviour_weights(OLD, ROLLOUT, correction="truncate", cap=1e12)
    np.testing.assert_allclose(found[4], np.exp(20), rtol=1e-5)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_no_gradient_flows_through_a_weight(correction):
    def total(old, rollout):
        return behaviour_weights(old, rollout, correction=correction, cap=2.0)[0].sum()

    for gradient in jax.grad(total, argnums=(0, 1))(OLD, ROLLOUT):
        np.testing.assert_array_equal(gradient, np.zeros(6))
