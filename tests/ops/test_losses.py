"""Policy losses and token weights, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quatrain.ops.aggregation import LOSS_AGGREGATIONS, token_weights
from quatrain.ops.losses import POLICY_LOSSES
from quatrain.ops.losses.cispo import cispo
from quatrain.ops.losses.clip_cov import clip_cov
from quatrain.ops.losses.dppo import dppo
from quatrain.ops.losses.dppo_kl import dppo_kl
from quatrain.ops.losses.gmpo import gmpo
from quatrain.ops.losses.gpg import gpg
from quatrain.ops.losses.gspo import gspo
from quatrain.ops.losses.kl_cov import kl_cov
from quatrain.ops.losses.ppo_clip import ppo_clip
from quatrain.ops.losses.reinforce import reinforce
from quatrain.ops.losses.sapo import sapo
from quatrain.ops.tokens import ScoredTokens

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": None}


def clipped(logprobs, old_logprobs, advantages, **options):
    """`ppo_clip` of one row of tokens: the loss, and 1 where a token was clipped."""
    columns = {"old_logprobs": old_logprobs, "advantages": advantages}
    zeros = jnp.zeros(jnp.shape(logprobs), jnp.int32)
    result = ppo_clip(ScoredTokens(logprobs, zeros, zeros == 0, zeros, columns), **options)
    kinds = ("clip_low", "clip_high", "clip_dual")
    total = sum(result.means[f"{name}_fraction"] for name in kinds)
    np.testing.assert_array_equal(result.means["clip_fraction"], total)
    return result.loss, {name: result.means[f"{name}_fraction"] for name in kinds}


def losses(ratios, advantages, **options):
    old = jnp.full(len(ratios), -1.5)
    logprobs = old + jnp.log(jnp.asarray(ratios, jnp.float32))
    advantages = jnp.asarray(advantages, jnp.float32)

    def total(logprobs):
        loss, hits = clipped(logprobs, old, advantages, **CLIP | options)
        return loss.sum(), (loss, hits)

    gradient, (loss, hits) = jax.grad(total, has_aux=True)(logprobs)
    assert all(h.dtype == jnp.float32 for h in hits.values())
    return np.asarray(loss), np.asarray(gradient), {name: np.asarray(h).tolist() for name, h in hits.items()}


def test_positive_advantages_are_clipped_above():
    loss, gradient, hits = losses([0.5, 1.0, 1.25, 2.0], [2.0, 2.0, 2.0, 2.0])
    np.testing.assert_allclose(loss, [-1.0, -2.0, -2.5, -2.6], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.0, -2.0, -2.5, 0.0], rtol=1e-6)
    assert hits == {"clip_low": [0, 0, 0, 0], "clip_high": [0, 0, 0, 1], "clip_dual": [0, 0, 0, 0]}


def test_negative_advantages_are_clipped_below():
    loss, gradient, hits = losses([0.5, 0.9, 1.0, 6.0], [-1.0, -1.0, -1.0, -1.0])
    np.testing.assert_allclose(loss, [0.8, 0.9, 1.0, 6.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 0.9, 1.0, 6.0], rtol=1e-6)
    assert hits == {"clip_low": [1, 0, 0, 0], "clip_high": [0, 0, 0, 0], "clip_dual": [0, 0, 0, 0]}


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    loss, gradient, hits = losses([0.5, 2.0, 6.0, 6.0], [-2.0, -2.0, -2.0, 2.0], dual_clip=3.0)
    np.testing.assert_allclose(loss, [1.6, 4.0, 6.0, -2.6], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 4.0, 0.0, 0.0], rtol=1e-6)
    assert hits == {"clip_low": [1, 0, 0, 0], "clip_high": [0, 0, 0, 1], "clip_dual": [0, 0, 1, 0]}


def test_ratio_one_has_the_gradient_of_reinforce_even_without_room():
    loss, gradient, hits = losses([1.0, 1.0, 1.0], [3.0, -3.0, 0.0], clip_low=0.0, clip_high=0.0)
    np.testing.assert_array_equal(loss, [-3.0, 3.0, 0.0])
    np.testing.assert_array_equal(gradient, [-3.0, 3.0, 0.0])
    assert not any(sum(hit) for hit in hits.values())


def test_log_ratios_stop_at_twenty():
    logprobs, old = jnp.array([0.0, -5000.0, 0.0]), jnp.array([-5000.0, 0.0, -5000.0])
    advantages = jnp.array([-1.0, 1.0, 0.0])
    loss, _ = clipped(logprobs, old, advantages, **CLIP)
    np.testing.assert_allclose(loss, [np.exp(20), -np.exp(-20), 0.0], rtol=1e-5)
    gradient = jax.grad(lambda x: clipped(x, old, advantages, **CLIP)[0].sum())(logprobs)
    np.testing.assert_array_equal(gradient, [0.0, 0.0, 0.0])


@settings(max_examples=50, deadline=None)
@given(
    log_ratio=hnp.arrays(np.float32, 8, elements=st.floats(-3, 3, width=32)),
    advantages=hnp.arrays(np.float32, 8, elements=st.floats(-3, 3, width=32)),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
)
def test_equals_the_max_and_min_of_the_papers(log_ratio, advantages, dual_clip):
    loss, _ = clipped(
        jnp.asarray(log_ratio),
        jnp.zeros(8),
        jnp.asarray(advantages),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
    )
    ratio = np.exp(log_ratio.astype(np.float64))
    expected = np.maximum(-ratio * advantages, -np.clip(ratio, 0.8, 1.3) * advantages)
    if dual_clip is not None:
        expected = np.where(advantages < 0, np.minimum(expected, -dual_clip * advantages), expected)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)


def measured(loss, log_ratios, advantages, ids=None, chosen=None, **arguments):
    """Loss, gradient of its sum, and means, of one row of tokens whose old log-probability is -1.5."""
    old = jnp.full((1, len(log_ratios)), -1.5)
    columns = {"old_logprobs": old, "advantages": jnp.asarray([advantages], jnp.float32)}
    columns["rollout_logprobs"] = old
    if chosen is not None:
        columns["high_covariance"] = jnp.asarray([chosen], jnp.float32)
        columns["moved"] = columns["high_covariance"] * jnp.sign(jnp.asarray([log_ratios], jnp.float32))
    ids = jnp.asarray([ids if ids else [0] * len(log_ratios)])

    def total(logprobs):
        result = loss(ScoredTokens(logprobs, old, ids >= 0, ids, columns), **arguments)
        return result.loss.sum(), result

    gradient, result = jax.grad(total, has_aux=True)(old + jnp.asarray([log_ratios], jnp.float32))
    return result.loss[0], gradient[0], {name: mean[0].tolist() for name, mean in result.means.items()}


LOG_2, LOG_8 = np.log(2), np.log(8)


@pytest.mark.parametrize("loss", [reinforce, gpg])
def test_reinforce(loss):
    value, gradient, means = measured(loss, [0.5, -0.5], [2, -3])
    np.testing.assert_allclose(value, [2.0, -6.0])
    np.testing.assert_allclose(gradient, [-2.0, 3.0])
    assert means == {}


def test_gspo_has_one_ratio_for_a_sequence():
    log_ratios, ids = [0.2, -0.2, 0.4, 0.1], [3, 1, 3, 1]  # means 0.3 and -0.05
    value, gradient, means = measured(gspo, log_ratios, [1, 1, 1, 1], ids)
    np.testing.assert_allclose(value, [-1.0004, -np.exp(-0.05), -1.0004, -np.exp(-0.05)], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, -np.exp(-0.05), 0, -np.exp(-0.05)], rtol=1e-6)
    assert means["clip_high_fraction"] == means["clip_fraction"] == [1, 0, 1, 0]
    value, gradient, means = measured(gspo, log_ratios, [-2, -2, -2, -2], ids)
    np.testing.assert_allclose(value, [2 * np.exp(0.3), 1.9994, 2 * np.exp(0.3), 1.9994], rtol=1e-6)
    np.testing.assert_allclose(gradient, [2 * np.exp(0.3), 0, 2 * np.exp(0.3), 0], rtol=1e-6)
    assert means["clip_low_fraction"] == means["clip_fraction"] == [0, 1, 0, 1]
    value, _, _ = measured(gspo, log_ratios, [1, 1, 1, 1], ids, clip_low=0.0, clip_high=1.0)
    np.testing.assert_allclose(value[0], -np.exp(0.3), rtol=1e-6)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    log_ratios, advantages = [-LOG_2, LOG_2, LOG_8, LOG_8], [1, -1, 1, -1]
    weights = np.array([0.5, 2, 5, 5])
    value, gradient, means = measured(cispo, log_ratios, advantages)
    np.testing.assert_allclose(gradient, -weights * advantages, rtol=1e-6)
    np.testing.assert_allclose(value, -weights * advantages * (np.array(log_ratios) - 1.5), rtol=1e-6)
    assert means["clip_high_fraction"] == means["clip_fraction"] == [0, 0, 1, 1]
    _, gradient, means = measured(cispo, log_ratios, advantages, clip_low=0.2, clip_high=0.5)
    np.testing.assert_allclose(gradient, [-0.8, 1.5, -1.5, 1.5], rtol=1e-6)
    assert means["clip_low_fraction"] == [1, 0, 0, 0]


def test_sapo():
    value, gradient, means = measured(sapo, [0.0, 0.0], [3, -3])
    np.testing.assert_allclose(value, [-6, 6 / 1.05], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-3, 3], rtol=1e-6)
    assert means == {}
    # sigmoid(1) = 0.7310586, sigmoid(-1) = 0.2689414, their derivative 0.1966119.
    value, gradient, _ = measured(sapo, [LOG_2, -LOG_2], [1, -2], tau_neg=2.0)
    np.testing.assert_allclose(value, [-4 * 0.7310586, 2 * 2 * 0.2689414], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-4 * 0.1966119 * 2, 4 * 0.1966119 * 0.5 * 2], rtol=1e-6)
    for name in ("tau_pos", "tau_neg"):
        with pytest.raises(ValueError, match=f"{name} must be above 0, got 0.0; set update.loss_args.{name}"):
            measured(sapo, [0.0], [1], **{name: 0.0})


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    # Sequence 0: min(0.6, 0.4) and -1.0, mean -0.3; sequence 1: max(-0.6, -0.4) and 1.0, mean 0.3.
    value, gradient, means = measured(gmpo, [0.6, -0.6, -1.0, 1.0], [1, -1, 1, -1], [0, 1, 0, 1])
    np.testing.assert_allclose(value, np.exp([-0.3, 0.3, -0.3, 0.3]) * [-1, 1, -1, 1], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 0, -np.exp(-0.3), np.exp(0.3)], rtol=1e-6)
    assert means["clip_high_fraction"] == [1, 0, 0, 0]
    assert means["clip_low_fraction"] == [0, 1, 0, 0]
    value, _, means = measured(gmpo, [0.6, -1.0], [1, 1], clip_high=0.8)
    np.testing.assert_allclose(value, [-np.exp(-0.2)] * 2, rtol=1e-6)
    assert means["clip_fraction"] == [0, 0]


def test_clip_cov_leaves_out_the_chosen_tokens():
    log_ratios, advantages = [0.1, 0.1, 1.0, -LOG_2], [1, 1, 2, -1]
    value, gradient, means = measured(clip_cov, log_ratios, advantages, chosen=[0, 1, 0, 1], **CLIP)
    np.testing.assert_allclose(value, [-np.exp(0.1), 0, -2.6, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-np.exp(0.1), 0, 0, 0], rtol=1e-6)
    assert means["high_covariance_fraction"] == [0, 1, 0, 1]
    assert means["clip_high_fraction"] == [0, 0, 1, 0]


def test_kl_cov_makes_the_chosen_tokens_pay():
    value, gradient, means = measured(
        kl_cov, [LOG_2, LOG_2, -LOG_2, 0.0], [1, 1, -1, 1], chosen=[0, 1, 1, 1], ppo_kl_coef=0.5
    )
    np.testing.assert_allclose(value, [-2, -2 + 0.5 * LOG_2, 0.5 + 0.5 * LOG_2, -1], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-2, -1.5, 0.5 - 0.5, -1], rtol=1e-6, atol=1e-7)
    assert means == {"high_covariance_fraction": [0, 1, 1, 1]}


def test_dppo_leaves_out_tokens_whose_probability_moved_too_far():
    """The sampler gave each token e^-1.5 = 0.223; times 2 that is 0.223 more, and 0.2 more is the bound."""
    value, gradient, means = measured(dppo, [LOG_2, LOG_2, np.log(1.8), -LOG_8], [1, -1, 1, -1])
    np.testing.assert_allclose(value, [0, 2, -1.8, 1 / 8], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 2, -1.8, 1 / 8], rtol=1e-6)
    assert means["clip_high_fraction"] == [1, 0, 0, 0]
    value, gradient, means = measured(dppo, [-LOG_8, -LOG_8, -LOG_2], [-1, 1, -1], clip_low=0.19)
    np.testing.assert_allclose(value, [0, -1 / 8, 1 / 2], rtol=1e-6)
    assert means["clip_low_fraction"] == means["clip_fraction"] == [1, 0, 0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gspo", [-np.exp(-20), np.exp(20)]),
        ("sapo", [-4 / (1 + np.e), 4 / 1.05]),
        ("gmpo", [-np.exp(-20), np.exp(20)]),
        ("clip_cov", [-np.exp(-20), np.exp(20)]),
        ("kl_cov", [-np.exp(-20) + 20, np.exp(20) + 20]),
        ("dppo", [-np.exp(-20), np.exp(20)]),
        ("dppo_kl", [-np.exp(-20), np.exp(20)]),
    ],
)
def test_the_log_ratio_of_every_loss_stops_at_twenty(name, expected):
    chosen = {"clip_cov": [0, 0], "kl_cov": [1, 1]}.get(name)
    arguments = CLIP if name == "clip_cov" else {}
    log_ratios, ids = [-5000.0, 5000.0], [0, 1]
    value, gradient, _ = measured(POLICY_LOSSES[name], log_ratios, [1, -1], ids, chosen, **arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_array_equal(gradient, [0, 0])


def test_the_weight_of_cispo_is_bounded():
    _, gradient, _ = measured(cispo, [-5000.0, 5000.0], [1, -1], clip_high=1e12)
    np.testing.assert_allclose(gradient, [-np.exp(-20), np.exp(20)], rtol=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_at_ratio_one_every_loss_has_the_gradient_of_reinforce(name):
    chosen = [0, 0, 0] if name.endswith("_cov") else None
    arguments = CLIP if name in ("ppo_clip", "clip_cov") else {}
    _, gradient, _ = measured(POLICY_LOSSES[name], [0, 0, 0], [3, 3, -1], [0, 0, 1], chosen, **arguments)
    np.testing.assert_allclose(gradient, [-3, -3, 1], rtol=1e-6)


MASK = np.array([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], bool)  # n = 3, 1, 0; N = 4; B' = 2


@pytest.mark.parametrize(
    ("name", "first_row", "second_row"),
    [
        ("token_mean", 1 / 4, 1 / 4),
        ("seq_mean_token_mean", 1 / 6, 1 / 2),
        ("seq_mean_token_sum", 1 / 2, 1 / 2),
        ("seq_mean_token_sum_norm", 1 / 20, 1 / 20),  # L = 10
    ],
)
def test_token_weights(name, first_row, second_row):
    weights = token_weights(name, MASK, 10)
    expected = [[0, first_row, first_row, first_row], [0, 0, second_row, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(weights, np.array(expected, np.float32))
    assert weights.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "episode", "other"),
    [
        ("token_mean", 1 / 5, 1 / 5),
        ("seq_mean_token_mean", 1 / 8, 1 / 2),
        ("seq_mean_token_sum", 1 / 2, 1 / 2),
        ("seq_mean_token_sum_norm", 1 / 20, 1 / 20),  # L = 10
    ],
)
def test_token_weights_of_episodes_of_several_rows(name, episode, other):
    """Rows 0 and 2 are one episode of four tokens, row 1 is another of one, and row 3 has none."""
    mask = np.array([[0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
    weights = token_weights(name, mask, 10, np.array([9, 4, 9, 5]))
    np.testing.assert_array_equal(weights, np.float32(mask * np.array([[episode], [other], [episode], [0]])))


@given(mask=hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=6)))
def test_rows_without_completion_tokens_change_nothing(mask):
    padded = np.concatenate([mask, np.zeros((3, mask.shape[1]), bool)])
    for name in LOSS_AGGREGATIONS:
        weights = token_weights(name, mask, 6)
        assert not weights[~mask].any()
        np.testing.assert_array_equal(token_weights(name, padded, 6)[: len(mask)], weights)
        if name.endswith("token_mean") or name == "token_mean":
            np.testing.assert_allclose(weights.sum(), float(mask.any()), rtol=1e-5)


def test_weights_of_many_tokens_are_exact():
    weights = token_weights("token_mean", np.ones((300, 70_001), bool), 1)
    assert weights[0, 0] == np.float32(1 / (300 * 70_001))


@pytest.mark.parametrize(
    ("name", "mask", "longest", "message"),
    [
        ("mean", MASK, 4, "unknown loss aggregation 'mean'; use one of token_mean, seq_mean_token_mean"),
        ("token_mean", MASK.astype(np.float32), 4, r"bool \[B, T\], got float32 \(3, 4\)"),
        ("token_mean", MASK[0], 4, r"got bool \(4,\)"),
        ("token_mean", MASK, 0, "at least 1, got 0"),
    ],
)
def test_bad_input(name, mask, longest, message):
    with pytest.raises(ValueError, match=message):
        token_weights(name, mask, longest)


def _of_papers(name, d, rollout_gap, old, advantages, mean, chosen, moved):
    """The loss of each token by the formula of its paper, with the arguments of `ARGUMENTS`, in float64.

    `d` is the log-ratio to the old policy, `rollout_gap` that to the sampler; `mean` is over a sequence.
    """
    r, logprobs = np.exp(d), old + d
    up, down = advantages > 0, advantages < 0
    surrogate = np.maximum(-r * advantages, -np.clip(r, 0.8, 1.3) * advantages)
    surrogate = np.where(down, np.minimum(surrogate, -1.6 * advantages), surrogate)
    if name in ("reinforce", "gpg"):
        return -advantages * logprobs
    if name == "cispo":
        return -np.clip(r, 0.8, 1.3) * advantages * logprobs
    if name == "gspo":
        s = np.exp(mean(d))
        return np.maximum(-s * advantages, -np.clip(s, 0.9, 1.2) * advantages)
    if name == "gmpo":
        bounded = np.where(up, np.minimum(d, 0.3), np.where(down, np.maximum(d, -0.2), d))
        return -np.exp(mean(bounded)) * advantages
    if name == "sapo":
        tau = np.where(up, 0.7, 1.4)
        return -4 / tau / (1 + np.exp(-tau * (r - 1))) * advantages
    if name == "dppo":
        moved_by = np.exp(logprobs) * (1 - np.exp(-rollout_gap))
        left = (up & (moved_by > 0.03)) | (down & (moved_by < -0.02))
        return np.where(left, 0, -r * advantages)
    if name == "dppo_kl":
        pi, mu = np.exp(logprobs), np.exp(logprobs - rollout_gap)
        rests = np.maximum(1 - mu, 1e-7), np.maximum(1 - pi, 1e-7)
        kl = -mu * rollout_gap + rests[0] * np.log(rests[0] / rests[1])
        left = (up & (pi > mu) & (kl > 0.03)) | (down & (pi < mu) & (kl > 0.02))
        return np.where(left, 0, -r * advantages)
    if name == "dro":
        return 0.2 * rollout_gap**2 - advantages * logprobs
    if name == "kl_cov":
        return -r * advantages + 0.5 * moved * d
    return np.where(chosen > 0, 0, surrogate) if name == "clip_cov" else surrogate


ARGUMENTS = {
    "cispo": {"clip_low": 0.2, "clip_high": 0.3},
    "gspo": {"clip_low": 0.1, "clip_high": 0.2},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.3},
    "sapo": {"tau_pos": 0.7, "tau_neg": 1.4},
    "dppo": {"clip_low": 0.02, "clip_high": 0.03},
    "dppo_kl": {"clip_low": 0.02, "clip_high": 0.03},
    "dro": {"beta": 0.4},
    "kl_cov": {"ppo_kl_coef": 0.5},
    "ppo_clip": CLIP | {"dual_clip": 1.6},
    "clip_cov": CLIP | {"dual_clip": 1.6},
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_is_the_formula_of_its_paper(name):
    """On ragged tokens with padding, whose old and sampled log-probabilities differ, some without advantage.

    It would notice a bound or a column in the place of another, and a comparison that is not strict.
    """
    rng = np.random.default_rng(5)
    shape, ids = (2, 40), np.stack([rng.permutation(np.repeat(np.arange(5), 8)), np.arange(40) // 10])
    mask = np.arange(40) < np.array([[40], [33]])
    old = np.where(mask, -rng.exponential(1.5, shape), 0)
    d = np.where(mask, rng.normal(0, 0.5, shape), 0)
    rollout_gap = np.where(mask, rng.normal(0, 0.5, shape), 0)
    advantages = np.where(mask & (rng.random(shape) < 0.8), rng.normal(0, 1, shape), 0)
    chosen = np.where(mask, rng.random(shape) < 0.3, 0).astype(np.float64)
    moved = chosen * rng.choice([-1, 1], shape)

    def mean(values):
        means = np.zeros(shape)
        for row in range(2):
            for of in range(5):
                here = mask[row] & (ids[row] == of)
                means[row, here] = values[row, here].mean() if here.any() else 0
        return means

    columns = {"old_logprobs": old, "rollout_logprobs": old + d - rollout_gap, "advantages": advantages}
    columns |= {"high_covariance": chosen, "moved": moved}
    columns = {key: jnp.asarray(values, jnp.float32) for key, values in columns.items()}
    logprobs = jnp.asarray(old + d, jnp.float32)
    tokens = ScoredTokens(logprobs, logprobs, jnp.asarray(mask), jnp.asarray(ids), columns)
    result = POLICY_LOSSES[name](tokens, **ARGUMENTS.get(name, {}))
    expected = _of_papers(name, d, rollout_gap, old, advantages, mean, chosen, moved)
    np.testing.assert_allclose(np.where(mask, result.loss, 0), expected * mask, rtol=1e-4, atol=1e-5)


def test_tokens_without_an_advantage_are_not_clipped_by_gmpo():
    """They are a part of the mean, as they are: their log-ratio is not bounded, and they are not counted."""
    value, _, means = measured(gmpo, [2.0, -2.0, 0.3], [0, 0, 1])
    np.testing.assert_allclose(value, [0, 0, -np.exp(0.1)], atol=1e-6)
    assert means == {
        "clip_fraction": [0, 0, 0],
        "clip_low_fraction": [0, 0, 0],
        "clip_high_fraction": [0, 0, 0],
    }


@pytest.mark.parametrize("loss", [dppo, dppo_kl])
def test_dppo_measures_the_way_from_the_sampler_and_not_from_the_old_policy(loss):
    tokens = jnp.log(jnp.array([[0.5, 0.5]]))
    zeros = jnp.zeros((1, 2), jnp.int32)
    columns = {
        "old_logprobs": jnp.log(jnp.array([[0.5, 0.2]])),
        "rollout_logprobs": jnp.log(jnp.array([[0.2, 0.5]])),
        "advantages": jnp.ones((1, 2)),
    }
    result = loss(ScoredTokens(tokens, tokens, zeros == 0, zeros, columns))
    np.testing.assert_allclose(result.loss, [[0, -2.5]], rtol=1e-6)
