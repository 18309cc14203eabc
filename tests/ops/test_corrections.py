"""Weights of tokens that another policy sampled, against numbers worked out by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.config.sections.update import MOST_RATIO
from quatrain.ops.corrections import behaviour_weights, rejected_tokens
from quatrain.ops.kl import MAX_LOG_RATIO
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


def test_bounds_of_the_configuration_are_ratios_that_a_rule_can_see():
    assert pytest.approx(np.exp(MAX_LOG_RATIO)) == MOST_RATIO


def test_negative_kl_rejects_what_an_old_policy_discourages():
    gaps = [[-0.6, -0.5, -0.6, -0.5], [-0.6, -0.5, -0.4, 0.0]]
    tokens = _tokens(gaps, [[0, 0, 1, 1], [0, 0, 0, 0]], [[-1, -1, 1, 1], [-1, -1, -1, 0]])
    rules = (("negative_kl", (0.5001,)), ("product", (0.2, 5.0)))
    found = rejected_tokens(tokens, rules, before=True)
    np.testing.assert_array_equal(found["negative_kl"], [[True, True, False, False], [False] * 4])
    np.testing.assert_array_equal(found["product"] & tokens.mask, [[False] * 4, [False] * 4])


@pytest.mark.parametrize(("moved", "rejected"), [(-1.0, True), (1.0, False)])
def test_negative_kl_is_that_of_the_current_policy(moved, rejected):
    """Would fail if the second optimizer step of a training step were judged by the policy before the first:
    DeepSeek-V3.2 and TRL compare what sampled with the policy that is trained."""
    tokens = _tokens(np.zeros((2, 4)), [[0] * 4, [0] * 4], -np.ones((2, 4)))
    tokens = replace(tokens, logprobs=tokens.rollout_logprobs + moved)
    rules = (("negative_kl", (0.5,)), ("k3", (0.01,)))
    found = rejected_tokens(tokens, rules)
    np.testing.assert_array_equal(found["negative_kl"] & tokens.mask, tokens.mask & rejected)
    assert not found["k3"].any()  # the others are of the policy at the start, as in verl
    assert not rejected_tokens(tokens, rules, before=True)["negative_kl"].any()


def test_the_presets_of_verl_on_a_batch_in_float64():
    """`decoupled_seq_is` (2.0), `decoupled_geo_rs`, `decoupled_k3_rs` and `decoupled_seq_is_rs`."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, 24)
    mask = np.arange(12) < lengths[:, None]
    rollout = np.where(mask, -rng.exponential(1.0, mask.shape), 0)
    spread = np.geomspace(1e-4, 1.5, len(lengths))[:, None]
    old = np.where(mask, rollout + spread * rng.normal(size=mask.shape), 0)
    gaps = np.where(mask, old - rollout, 0)
    sums, means = gaps.sum(axis=1), gaps.sum(axis=1) / lengths
    k3 = np.where(mask, np.exp(gaps) - 1 - gaps, 0).sum(axis=1) / lengths
    expected = {
        "geometric": (np.exp(means) < 0.999) | (np.exp(means) > 1.001),
        "k3": k3 > 0.01,
        "product": (np.exp(sums) < 0.5) | (np.exp(sums) > 2.0),
    }
    columns = {"rollout_logprobs": jnp.float32(rollout), "old_logprobs": jnp.float32(old)}
    zeros = jnp.zeros(mask.shape)
    tokens = ScoredTokens(zeros, zeros, jnp.asarray(mask), jnp.zeros(mask.shape, jnp.int32), columns)
    rules = (("geometric", (0.999, 1.001)), ("k3", (0.01,)), ("product", (0.5, 2.0)))
    for name, found in rejected_tokens(tokens, rules).items():
        assert 0 < expected[name].sum() < len(lengths)
        np.testing.assert_array_equal(np.asarray(found) & mask, mask & expected[name][:, None], err_msg=name)
    of_sequence = tokens.sequence_sum(tokens.old_logprobs - tokens.rollout_logprobs)
    weights, _ = behaviour_weights(of_sequence, correction="truncate", cap=2.0)
    by_row = np.minimum(np.exp(np.clip(sums, -20, 20)), 2.0)
    np.testing.assert_allclose(weights, np.where(mask, by_row[:, None], 1), rtol=1e-5)
