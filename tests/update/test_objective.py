"""Policy losses, built in and of one's own: their arguments, and what is refused before anything runs."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import GOLDEN

from quatrain.config.schema import UpdateConfig
from quatrain.forward.table import TokenTable
from quatrain.ops.losses import POLICY_LOSSES
from quatrain.ops.tokens import DistilledTokens, ScoredTokens
from quatrain.update.distillation import Distillation
from quatrain.update.objective import PolicyObjective

SOURCE = """
import jax.numpy as jnp
import numpy as np
from quatrain.ops.tokens import TokenLoss, with_mini_batch_columns

def longest(logprobs, advantages, mask, rng, *, factor, sign):
    return {"longest": np.full(mask.shape, factor * sign * mask.sum(axis=1).max(), np.float32)}

@with_mini_batch_columns(longest)
def by_longest(tokens, *, sign: int, factor: float = 0.5, unused: int = 1):
    return TokenLoss(tokens.logprobs / tokens.column("longest"))

@with_mini_batch_columns(lambda logprobs, advantages, mask, rng: {"short": logprobs[1:]})
def short_columns(tokens):
    return TokenLoss(tokens.logprobs)

@with_mini_batch_columns(lambda logprobs, advantages, mask: {})
def few_inputs(tokens):
    return TokenLoss(tokens.logprobs)

def scaled(tokens, *, scale: float = 2.0, sign: int):
    return TokenLoss(sign * scale * tokens.logprobs, {"scaled": tokens.logprobs}, {"most": tokens.entropy})

def clipped(tokens, clip_high, clip_low: float = 0.5):
    return TokenLoss(jnp.clip(tokens.logprobs, -clip_low, clip_high))

def wants_reference(tokens):
    return TokenLoss(tokens.logprobs - tokens.ref_logprobs)

def wants_values(tokens):
    return TokenLoss(tokens.column("values"))

def one_number(tokens):
    return TokenLoss(tokens.logprobs.mean())

def metric_of_another_shape(tokens):
    return TokenLoss(tokens.logprobs, {"short": tokens.logprobs[:1]})

def with_more(tokens):
    return TokenLoss(tokens.logprobs, weighted=3 * tokens.entropy)

def one_weighted_number(tokens):
    return TokenLoss(tokens.logprobs, weighted=tokens.entropy.mean())

def own_entropy(tokens):
    return TokenLoss(tokens.logprobs, {"entropy": tokens.logprobs})

def twice(tokens):
    return TokenLoss(tokens.logprobs, {"mine": tokens.logprobs}, {"mine": tokens.entropy})

def bare(tokens):
    return tokens.logprobs

def changes(tokens):
    tokens.logprobs[0] = 1.0
    return TokenLoss(tokens.logprobs)

def leaves(tokens):
    raise SystemExit

def no_tokens(*, scale: float = 1.0):
    return None

NUMBER = 3
"""


@pytest.fixture(scope="module")
def objective(tmp_path_factory):
    path = tmp_path_factory.mktemp("losses") / "mine.py"
    path.write_text(SOURCE)

    def make(name, **config) -> PolicyObjective:
        made = PolicyObjective.of(UpdateConfig(loss=f"{path}:{name}", **config), on_policy=True)
        made.check()
        return made

    return make


def test_a_loss_of_ones_own_gets_its_arguments_and_logs_its_metrics(objective):
    tokens = ScoredTokens(
        jnp.array([[-1.0, -2.0]]),
        jnp.array([[0.5, 0.25]]),
        jnp.array([[True, True]]),
        jnp.zeros((1, 2), jnp.int32),
        {"advantages": jnp.ones((1, 2)), "rollout_logprobs": jnp.zeros((1, 2))},
    )
    mine = objective("scaled", loss_args={"sign": -1}, entropy_coef=0.5)
    result = mine(tokens)
    np.testing.assert_allclose(result.loss, [[2.0 - 0.25, 4.0 - 0.125]])
    assert result.means["update/scaled"].tolist() == [[-1.0, -2.0]]
    assert result.means["update/ratio_mean"].tolist() == [[1.0, 1.0]]
    assert result.peaks["update/most"].tolist() == [[0.5, 0.25]]
    assert dict(objective("scaled", loss_args={"sign": 1, "scale": 3}).arguments) == {"sign": 1, "scale": 3}


def test_losses_of_ones_own_that_have_their_weights_are_added(objective):
    """`TokenLoss.weighted` of a policy loss was dropped in silence."""
    columns = {"advantages": jnp.ones((1, 2)), "rollout_logprobs": jnp.zeros((1, 2))}
    columns["teacher_weights"] = jnp.array([[0.5, 0.0]])
    given = jnp.array([[-1.0, -2.0]]), jnp.array([[0.5, 0.25]])
    place = jnp.ones((1, 2), bool), jnp.zeros((1, 2), jnp.int32)
    mine = objective("with_more")
    assert mine(ScoredTokens(*given, *place, columns)).weighted.tolist() == [[1.5, 0.75]]
    assert objective("scaled", loss_args={"sign": 1})(ScoredTokens(*given, *place, columns)).weighted is None
    taught = replace(mine, distillation=Distillation(1.0, 1.0, 10.0, 0.0, None, 1, "reverse_kl", top_k=2))
    tokens = DistilledTokens(*given, *place, columns, jnp.full((1, 2), 4.0), jnp.zeros((1, 2)))
    assert taught(tokens).weighted.tolist() == [[1.5 + 2.0, 0.75]]
    with pytest.raises(ValueError, match=r"one number per token.*'weighted' has shape"):
        objective("one_weighted_number")


OLD, ROLLOUT = (-1.0, -1.2, -2.0, -1.0), (-1.0, -1.5, -3.5, -0.5)
ADVANTAGES = (1.0, -2.0, 1.0, -1.0)


def _corrected(correction, logprobs, *, on_policy=False, **config):
    """The corrected loss of four tokens: ratios of policy to sampler of 1, e^0.3, e^1.5 and e^-0.5."""
    columns = {
        "advantages": ADVANTAGES,
        "rollout_logprobs": ROLLOUT,
        "ref_logprobs": OLD,
        "old_logprobs": OLD,
    }
    tokens = ScoredTokens(
        logprobs,
        jnp.full((1, 4), 0.5),
        jnp.ones((1, 4), bool),
        jnp.zeros((1, 4), jnp.int32),
        {
            name: jnp.array([values])
            for name, values in columns.items()
            if name != "old_logprobs" or not on_policy
        },
    )
    return PolicyObjective.of(UpdateConfig(correction=correction, **config), on_policy=on_policy)(tokens)


def test_a_correction_weighs_the_policy_loss_and_no_other_term():
    logprobs = jnp.array([OLD])
    terms = {"kl_coef": 0.5, "kl_estimator": "k2", "entropy_coef": 0.1}
    weights = np.array([1.0, np.exp(0.3), 2.0, np.exp(-0.5)])
    # The ratio to the old policy is 1, and the KL to a reference like it 0.
    found = _corrected("truncate", logprobs, **terms)
    np.testing.assert_allclose(found.loss[0], -weights * ADVANTAGES - 0.05, rtol=1e-6)
    np.testing.assert_allclose(found.means["update/behaviour_weight_mean"][0], weights, rtol=1e-6)
    assert found.means["update/corrected_fraction"].tolist() == [[0, 0, 1, 0]]
    gaps = np.array([0, 0.3, 1.5, -0.5])
    np.testing.assert_allclose(
        found.means["update/behaviour_kl"][0], np.exp(gaps) - 1 - gaps, rtol=1e-5, atol=1e-7
    )
    masked = _corrected("mask", logprobs, **terms)
    np.testing.assert_allclose(masked.loss[0], -weights * [1, 1, 0, 1] * ADVANTAGES - 0.05, rtol=1e-6)
    plain = _corrected("none", logprobs, **terms)
    assert not any(name.startswith("update/behaviour") for name in plain.means)


def test_the_quadratic_term_to_the_sampler_is_that_of_torch():
    """Catches the old policy or the reference in the place of the sampler, and a factor of 2."""
    golden = json.loads((GOLDEN / "formulas.json").read_text())
    inputs, expected = golden["inputs"], golden["sampler_kl"]
    names = ("old_logprobs", "rollout_logprobs", "advantages")
    mask, columns = np.array(inputs["mask"]), {name: jnp.float32(inputs[name]) for name in names}
    config = UpdateConfig(loss="reinforce", sampler_kl_coef=expected["coef"])

    def total(logprobs):
        zeros = jnp.zeros(mask.shape)
        tokens = ScoredTokens(logprobs, zeros, jnp.asarray(mask), zeros.astype(jnp.int32), columns)
        result = PolicyObjective.of(config, on_policy=False)(tokens)
        return jnp.where(mask, result.loss, 0).sum(), result

    gradient, result = jax.grad(total, has_aux=True)(jnp.float32(inputs["logprobs"]))
    np.testing.assert_allclose(gradient, expected["gradient"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.loss * mask, expected["loss"], rtol=1e-5, atol=1e-6)
    squares = (np.array(inputs["logprobs"]) - np.array(inputs["rollout_logprobs"])) ** 2 / 2
    np.testing.assert_allclose(result.means["update/sampler_kl"] * mask, squares, rtol=1e-5, atol=1e-6)


def test_the_quadratic_term_is_not_corrected():
    """Catches a penalty that a correction for the same distance cuts to nothing."""
    logprobs = jnp.array([OLD])
    with_term, without = (_corrected("mask", logprobs, sampler_kl_coef=coef).loss for coef in (0.5, 0.0))
    np.testing.assert_allclose(with_term - without, 0.25 * (logprobs - jnp.array([ROLLOUT])) ** 2, rtol=1e-5)


def test_a_correction_of_sequences_weighs_all_tokens_alike():
    """The sum over the sequence is 1.3, and e^1.3 is 3.67."""
    found = _corrected("truncate", jnp.array([OLD]), correction_level="sequence", correction_cap=3.0)
    np.testing.assert_allclose(found.loss[0], -3.0 * np.array(ADVANTAGES), rtol=1e-6)
    found = _corrected("truncate", jnp.array([OLD]), correction_level="sequence", correction_cap=5.0)
    np.testing.assert_allclose(found.means["update/behaviour_weight_mean"][0], [np.exp(1.3)] * 4, rtol=1e-6)
    np.testing.assert_allclose(found.peaks["update/behaviour_weight_max"][0], [np.exp(1.3)] * 4, rtol=1e-6)
    masked = _corrected("mask", jnp.array([OLD]), correction_level="sequence", correction_cap=3.0)
    assert not masked.loss.any()


def test_rejected_sequences_have_weight_0_and_keep_their_other_terms():
    """Mean difference 0.325: e^0.325 is 1.384."""
    terms = {"kl_coef": 0.5, "kl_estimator": "k2", "entropy_coef": 0.1}
    found = _corrected("none", jnp.array([OLD]), reject={"geometric": [0.5, 1.38], "k3": 10.0}, **terms)
    np.testing.assert_allclose(found.loss[0], [-0.05] * 4, rtol=1e-6)
    assert found.means["update/rejected_fraction/geometric"].tolist() == [[1] * 4]
    assert found.means["update/rejected_fraction/k3"].tolist() == [[0] * 4]
    kept = _corrected("none", jnp.array([OLD]), reject={"geometric": [0.5, 1.39]}, **terms)
    np.testing.assert_allclose(kept.loss[0], -np.array(ADVANTAGES) - 0.05, rtol=1e-6)
    one_sided = _corrected("none", jnp.array([OLD]), reject={"negative_kl": 0.1})
    assert not one_sided.means["update/rejected_fraction/negative_kl"].any()


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_gradient_of_a_corrected_loss_is_that_of_finite_differences(on_policy):
    logprobs = np.add([OLD], [0.02, -0.01, 0.03, 0.01])  # no ratio near a bound of the clip
    gradient = jax.grad(lambda x: _corrected("truncate", x, on_policy=on_policy).loss.sum())(
        jnp.float32(logprobs)
    )
    gaps = logprobs - ROLLOUT if on_policy else np.array([OLD]) - ROLLOUT
    weights = np.minimum(np.exp(gaps), 2.0)
    ratio = np.ones(4) if on_policy else np.exp(logprobs - np.array([OLD]))
    np.testing.assert_allclose(gradient, -weights * ratio * ADVANTAGES, rtol=1e-5)
    if not on_policy:  # the weights do not depend on the policy that is trained
        step = 1e-2
        for k in range(4):
            moved = [jnp.float32(logprobs + sign * step * (np.arange(4) == k)) for sign in (1, -1)]
            up, down = (float(_corrected("truncate", x).loss.sum()) for x in moved)
            assert gradient[0, k] == pytest.approx((up - down) / (2 * step), rel=1e-3)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("on_policy", [False, True])
def test_every_built_in_loss_can_be_used(loss, on_policy):
    made = PolicyObjective.of(
        UpdateConfig(loss=loss, kl_coef=0.1, kl_estimator="k3_straight"), on_policy=on_policy
    )
    made.check()
    assert (made.mini_batch_columns is not None) == loss.endswith("_cov")


def test_columns_of_a_mini_batch_get_the_arguments_of_the_loss():
    config = UpdateConfig(loss="kl_cov", loss_args={"kl_cov_ratio": 0.5})
    columns = PolicyObjective.of(config, on_policy=False).mini_batch_columns
    logprobs = np.array([[0, -1, -2], [0, -3, 0]], np.float32)
    advantages = np.array([[0, 2, 2], [0, -2, 0]], np.float32)
    mask = np.array([[0, 1, 1], [0, 1, 0]], bool)
    # Covariances: advantages 4/3, 4/3, -8/3 times log-probabilities 1, 0, -1.
    old = logprobs + np.float32(0.5)
    chosen = columns(logprobs, advantages, mask, np.random.default_rng(0), old_logprobs=old)
    assert chosen["high_covariance"].tolist() == [[0, 0, 0], [0, 1, 0]]
    assert chosen["moved"].tolist() == [[0, 0, 0], [0, -1, 0]]


def test_columns_of_a_loss_of_ones_own(objective):
    mine = objective("by_longest", loss_args={"sign": -1})
    zeros = np.zeros((2, 3), np.float32)
    rng = np.random.default_rng(0)
    columns = mine.mini_batch_columns(zeros, zeros, zeros == 0, rng, old_logprobs=zeros)
    assert columns["longest"].tolist() == [[-1.5] * 3] * 2


@pytest.mark.parametrize(
    ("loss", "name", "value", "rule"),
    [
        ("cispo", "clip_low", -0.1, "0 or more"),
        ("cispo", "clip_high", -2.0, "0 or more"),
        ("dppo", "clip_low", -0.2, r"in \[0, 1\]"),
        ("dppo", "clip_high", 20.0, r"in \[0, 1\]"),
        ("dppo_kl", "clip_low", -1.0, "0 or more"),
        ("gmpo", "clip_low", -0.4, "0 or more"),
        ("gspo", "clip_low", -3e-4, "0 or more"),
        ("sapo", "tau_pos", 0.0, "above 0"),
        ("dro", "beta", 0.0, "above 0"),
        ("kl_cov", "ppo_kl_coef", -1.0, "0 or more"),
    ],
)
def test_an_argument_that_turns_a_loss_round_is_refused_at_the_start(loss, name, value, rule):
    """Would fail if a bound below 0 were taken: some raise what they should lower, or train no token."""
    made = PolicyObjective.of(UpdateConfig(loss=loss, loss_args={name: value}), on_policy=False)
    with pytest.raises(ValueError, match=f"{name} must be {rule}, got {value}; set update.loss_args.{name}"):
        made.check()


@pytest.mark.parametrize("loss", ["gspo", "cispo", "gmpo"])
def test_a_loss_with_bounds_of_its_own_does_not_take_those_of_the_update(loss):
    made = PolicyObjective.of(UpdateConfig(loss=loss, loss_args={"clip_low": 0.1}), on_policy=False)
    assert dict(made.arguments) == {"clip_low": 0.1}
    message = rf"update.clip_low is 0.3, which .*{loss}' does not take; .*; set update.loss_args.clip_low"
    for arguments in ({}, {"clip_low": 0.1}):
        config = UpdateConfig(loss=loss, clip_low=0.3, loss_args=arguments)
        with pytest.raises(ValueError, match=message):
            PolicyObjective.of(config, on_policy=False)


def test_an_argument_without_a_default_is_the_key_of_the_update_of_that_name(objective):
    assert dict(objective("clipped", clip_high=0.9).arguments) == {"clip_high": 0.9}
    own = objective("clipped", loss_args={"clip_low": 0.1})
    assert dict(own.arguments) == {"clip_high": 0.2, "clip_low": 0.1}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("absent", {}, "has no attribute 'absent'; it defines .*clipped.*; name one of them"),
        ("NUMBER", {}, "must be callable; it is a int"),
        ("scaled", {}, r"takes from update.loss_args scale: float = 2.0, sign: int; sign is missing"),
        ("scaled", {"loss_args": {"sign": 1, "skale": 2}}, r"scale: float = 2.0, sign: int; got skale"),
        ("scaled", {"loss_args": {"sign": 0.5}}, r"takes sign as int; update.loss_args.sign is 0.5"),
        ("clipped", {"loss_args": {"clip_high": 0.3}}, "takes it from update.clip_high; set that instead"),
        ("bare", {"clip_low": 0.3}, r"update.clip_low is 0.3, which .*bare' does not take"),
        ("wants_reference", {}, r"'ref_logprobs'.*update.kl_coef above 0"),
        ("wants_values", {}, r"got 'values'; they have logprobs, entropy, mask, advantages"),
        ("one_number", {}, r"one number per token, shape \(2, 8\); 'loss' has shape \(\)"),
        ("metric_of_another_shape", {}, r"'short' has shape \(1, 8\)"),
        ("own_entropy", {}, "names of its own .* got 'entropy', which is logged already"),
        ("twice", {}, "each once; got 'mine'"),
        ("short_columns", {}, r"float32 of its shape \(2, 8\); 'short' is float32 of shape \(1, 8\)"),
        ("few_inputs", {}, r"failed: TypeError"),
        ("bare", {}, "must return a TokenLoss; it returned"),
        ("changes", {}, "immutable"),
        ("leaves", {}, "failed: SystemExit"),
        ("no_tokens", {}, "must take the tokens as its first argument"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_at_the_start(objective, name, config, message):
    with pytest.raises(ValueError, match=message):
        objective(name, **config)


def test_the_reference_is_there_with_a_kl_coefficient(objective):
    assert objective("wants_reference", kl_coef=0.1).kl_coef == 0.1


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "ppo",
            "update.loss must be one of .*, ppo_clip, reinforce, .*, or a function of your own "
            "as path/file.py",
        ),
        ("no/such/file.py:f", "no such file"),
        ("no.such.module:f", "no.such.module cannot be imported"),
    ],
)
def test_a_loss_that_cannot_be_found(loss, message):
    from quatrain.config.load import load_config

    with pytest.raises(ValueError, match=message):
        PolicyObjective.of(
            load_config(None, [f"update.loss={loss}"], environ={}).config.update, on_policy=True
        )


def test_the_kl_to_the_reference_is_a_term_of_its_own():
    """Where the reference is not the old policy; the correction does not weigh it, and it is no bonus."""
    logprobs = jnp.array([OLD]) + jnp.array([[0.1, -0.2, 0.0, 0.3]])
    gap = np.array([0.1, -0.2, 0.0, 0.3])  # to the reference, which is as the old policy here
    plain = _corrected("truncate", logprobs)
    for estimator, kl in (("k1", gap), ("k2", gap**2 / 2), ("k3", np.exp(-gap) - 1 + gap)):
        found = _corrected("truncate", logprobs, kl_coef=0.5, kl_estimator=estimator)
        np.testing.assert_allclose(found.loss - plain.loss, [0.5 * kl], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.means["update/kl"], [kl], rtol=1e-4, atol=1e-6)


def test_a_rejected_sequence_counts_nothing_although_it_is_corrected():
    found = _corrected("truncate", jnp.array([OLD]), reject={"geometric": [0.5, 1.38]})
    assert not found.loss.any()
    assert not found.means["update/behaviour_weight_mean"].any()
    kept = _corrected("truncate", jnp.array([OLD]), reject={"geometric": [0.5, 1.39]})
    weights = np.array([1.0, np.exp(0.3), 2.0, np.exp(-0.5)])
    np.testing.assert_allclose(kept.loss[0], -weights * ADVANTAGES, rtol=1e-6)
    np.testing.assert_allclose(kept.means["update/behaviour_weight_squares"][0], weights**2, rtol=1e-6)


def test_what_one_rule_rejects_is_dropped_whatever_the_others_say():
    """Of two sequences with mean gaps of 0.4 and -0.4, the second is rejected by `geometric` alone."""
    gaps = np.float32([[0.4, 0.4, 0], [-0.4, -0.4, 0]])
    mask = np.array([[True, True, False]] * 2)
    rollout = np.where(mask, np.float32(-2), np.float32(0))
    columns = {"rollout_logprobs": rollout, "old_logprobs": rollout + gaps, "advantages": gaps}
    table = TokenTable(np.ones((2, 3), np.int32), np.ones((2, 3), bool), mask, columns)
    config = UpdateConfig(reject={"geometric": [0.7, 2.0], "k3": 5.0}, rejected="drop")
    rejected = PolicyObjective.of(config, on_policy=False).rejected_on_host(table)
    assert rejected.tolist() == [[False] * 3, [True, True, False]]
