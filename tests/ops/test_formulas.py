"""Losses and estimators against torch in float64, written from their papers (tests/golden/formulas.json)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import GOLDEN

from quatrain.ops.advantages.length_adaptive_gae import length_adaptive_gae
from quatrain.ops.losses.dppo_kl import dppo_kl
from quatrain.ops.losses.dro import dro
from quatrain.ops.tokens import ScoredTokens


@pytest.fixture(scope="module")
def golden():
    return json.loads((GOLDEN / "formulas.json").read_text())


def computed(loss, inputs, advantages="advantages", **arguments):
    """(the losses, the gradient of their sum, the metrics) in each token's log-probability."""
    mask = np.array(inputs["mask"])
    columns = {name: jnp.float32(inputs[name]) for name in ("old_logprobs", "rollout_logprobs")}
    columns["advantages"] = jnp.float32(inputs[advantages])

    def total(logprobs):
        ids = jnp.zeros(mask.shape, jnp.int32)
        result = loss(ScoredTokens(logprobs, logprobs, jnp.asarray(mask), ids, columns), **arguments)
        return jnp.where(mask, result.loss, 0).sum(), result

    gradient, result = jax.grad(total, has_aux=True)(jnp.float32(inputs["logprobs"]))
    of_tokens = {name: np.where(mask, x, 0) for name, x in {"loss": result.loss, **result.means}.items()}
    return of_tokens.pop("loss"), np.asarray(gradient), of_tokens


def test_dppo_kl_leaves_out_what_is_outside_the_binary_kl(golden):
    """Catches the KL in the other direction, a bound on the wrong side, and a mask of both sides."""
    expected = golden["dppo_kl"]
    bounds = {name: expected[name] for name in ("clip_low", "clip_high")}
    loss, gradient, means = computed(dppo_kl, golden["inputs"], **bounds)
    np.testing.assert_array_equal(means["clip_fraction"] > 0, expected["out"])
    advantages = np.array(golden["inputs"]["advantages"])
    for name, side in (("clip_low_fraction", advantages < 0), ("clip_high_fraction", advantages > 0)):
        assert means[name].sum() > 2, name
        np.testing.assert_array_equal(means[name] > 0, expected["out"] & side)
    np.testing.assert_allclose(means["binary_kl"], expected["kl"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected["gradient"], rtol=1e-5, atol=1e-6)


def test_dppo_kl_is_finite_where_a_probability_is_0_or_1():
    """Catches infinite and undefined logarithms of the rest, and a certain token that counts as moved."""
    sampler, policy = np.float32([0, 0, -1e-9, -100, -100, 0]), np.float32([0, -1e-9, 0, -100, 0, -100])
    inputs = {"mask": [[True] * 6], "old_logprobs": [policy], "rollout_logprobs": [sampler]}
    inputs |= {"logprobs": [policy], "advantages": [[1, 1, 1, 1, 1, -1]]}
    loss, gradient, means = computed(dppo_kl, inputs)
    assert means["clip_fraction"].tolist() == [[0, 0, 0, 0, 1, 1]]
    np.testing.assert_allclose(
        means["binary_kl"], [[0, 0, 0, 0, np.log(1e7), 100 + 1e-7 * np.log(1e-7)]], 1e-5, 1e-8
    )
    assert loss.tolist() == gradient.tolist() == [[-1, -1, -1, -1, 0, 0]]


@pytest.mark.parametrize(
    ("case", "advantages", "level"),
    [("dro", "advantages", "token"), ("dro of sequences", "advantages_of_rows", "sequence")],
)
def test_dro_has_the_gradient_of_the_squared_error(golden, case, advantages, level):
    """Catches a factor of 2, the other sign, and the old policy in the place of the sampler."""
    expected = golden[case]
    loss, gradient, means = computed(dro, golden["inputs"], advantages, beta=expected["beta"], level=level)
    np.testing.assert_allclose(gradient, expected["gradient"], rtol=1e-5, atol=1e-6)
    inputs = {name: np.array(values) for name, values in golden["inputs"].items()}
    gaps = inputs["logprobs"] - inputs["rollout_logprobs"]
    np.testing.assert_allclose(means["sampler_kl"], gaps**2 / 2, rtol=1e-4, atol=1e-6)
    penalties = gaps**2 if level == "token" else gaps.sum(axis=1) ** 2
    of_rows = (expected["beta"] / 2 * penalties).reshape(len(gaps), -1).sum(axis=1)
    of_rows -= (inputs[advantages] * inputs["logprobs"]).sum(axis=1)
    np.testing.assert_allclose(loss.sum(axis=1), of_rows, rtol=1e-5)


def test_dro_refuses_numbers_that_it_cannot_use(golden):
    for arguments, message in (
        ({"beta": 0.0}, "beta must be above 0, got 0.0; set update.loss_args.beta"),
        ({"level": "row"}, "level must be token or sequence, got 'row'"),
    ):
        with pytest.raises(ValueError, match=message):
            computed(dro, golden["inputs"], **arguments)


@pytest.mark.parametrize("case", ["length_adaptive_gae", "length_adaptive_gae of one lambda"])
def test_length_adaptive_gae_is_the_sum_of_its_definition(golden, case):
    """Catches a length of the padded row, returns of the policy's lambda, and a negative lambda."""
    expected, inputs = golden[case], golden["inputs"]
    arrays = [np.float32(inputs[name]) for name in ("rewards", "token_rewards", "values")]
    given = dict(zip(("rewards", "token_rewards", "values"), arrays, strict=True))
    given |= {"completion_mask": np.array(inputs["mask"]), **expected["arguments"]}
    raw = length_adaptive_gae(**given, scale="none")
    np.testing.assert_allclose(raw.advantages, expected["advantages"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(raw.returns, expected["returns"], rtol=1e-6, atol=1e-6)
    whitened = length_adaptive_gae(**given)
    np.testing.assert_allclose(whitened.advantages, expected["whitened"], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(whitened.returns, raw.returns)
