"""Weights of tokens that another policy sampled, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.ops.corrections import behaviour_weights, rejected_tokens
from quatrain.ops.tokens import ScoredTokens

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
    found, outside = behaviour_weights(OLD - ROLLOUT, correction=correction, cap=2.0)
    np.testing.assert_allclose(found, np.float32(weights), rtol=1e-6)
    np.testing.assert_array_equal(outside, np.float32(changed))


@pytest.mark.parametrize(
    ("floor", "weights"), [(0.0, [1, 1.5, 3, 0.4]), (0.39, [1, 1.5, 3, 0.4]), (0.41, [1, 1.5, 3, 0])]
)
def test_mask_has_a_lower_bound_of_its_own(floor, weights):
    found, outside = behaviour_weights((OLD - ROLLOUT)[:4], correction="mask", cap=4.0, floor=floor)
    np.testing.assert_allclose(found, np.float32(weights), rtol=1e-5)
    np.testing.assert_array_equal(outside, np.float32(weights) == 0)


def test_a_ratio_above_every_cap_is_held_at_exp_20():
    found, _ = behaviour_weights(OLD - ROLLOUT, correction="truncate", cap=1e12)
    np.testing.assert_allclose(found[4], np.exp(20), rtol=1e-5)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_no_gradient_flows_through_a_weight(correction):
    def total(old, rollout):
        return behaviour_weights(old - rollout, correction=correction, cap=2.0)[0].sum()

    for gradient in jax.grad(total, argnums=(0, 1))(OLD, ROLLOUT):
        np.testing.assert_array_equal(gradient, np.zeros(6))


GAPS = np.array([0.1, -0.05, 0.2])
"""Of one sequence: exp of the sum 1.28402542, of the mean 1.08690405, mean of k3 0.00926770."""


def _tokens(gaps, ids, advantages):
    """Tokens in two rows of a buffer, the second of which ends in padding."""
    rollout = jnp.full((2, 4), -2.0)
    columns = {"rollout_logprobs": rollout, "old_logprobs": rollout + jnp.float32(gaps)}
    mask = jnp.array([[True] * 4, [True, True, True, False]])
    columns["advantages"] = jnp.float32(advantages)
    return ScoredTokens(jnp.zeros((2, 4)), jnp.zeros((2, 4)), mask, jnp.int32(ids), columns)


@pytest.mark.parametrize(
    ("name", "below", "above"),
    [
        ("product", (0.5, 1.28402), (0.5, 1.28403)),
        ("geometric", (0.9, 1.086903), (0.9, 1.086905)),
        ("k3", (0.009267,), (0.009268,)),
        ("geometric", (1.086905, 1.2), (1.086903, 1.2)),
    ],
)
def test_a_sequence_is_rejected_where_a_bound_is_crossed(name, below, above):
    """The tokens of the sequence stand between those of another, whose policy has not moved."""
    moved = [[0, 0.1, -0.05, 0.2], [0.1, -0.05, 0.2, 9.0]]
    tokens = _tokens(moved, [[3, 1, 1, 1], [0, 0, 0, 0]], np.ones((2, 4)))
    found = rejected_tokens(tokens, ((name, below),))[name]
    own = np.array([[False, True, True, True], [True, True, True, False]])
    np.testing.assert_array_equal(found & tokens.mask & (own | False), own)
    if below[0] < 1:
        assert not found[0, 0]
    kept = rejected_tokens(tokens, ((name, above),))[name]
    assert not (kept & own).any()


def test_negative_kl_rejects_what_an_old_policy_discourages():
    gaps = [[-0.6, -0.5, -0.6, -0.5], [-0.6, -0.5, -0.4, 0.0]]
    tokens = _tokens(gaps, [[0, 0, 1, 1], [0, 0, 0, 0]], [[-1, -1, 1, 1], [-1, -1, -1, 0]])
    found = rejected_tokens(tokens, (("negative_kl", (0.5001,)), ("product", (0.2, 5.0))))
    np.testing.assert_array_equal(found["negative_kl"], [[True, True, False, False], [False] * 4])
    np.testing.assert_array_equal(found["product"] & tokens.mask, [[False] * 4, [False] * 4])
