"""The critic: values against the whole row, exact under any cut, warm-up, KL in the reward."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import at_version

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.schema import (
    AdvantageConfig,
    CriticConfig,
    LogprobConfig,
    OptimizerConfig,
    UpdateConfig,
)
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import CriticSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.decoder import forward
from quatrain.models.params import init_params
from quatrain.ops.kl import adapted_kl_coef
from quatrain.parallel.mesh import one_device
from quatrain.update.critic import Critic, ValueObjective, critic_params
from quatrain.update.gradient import sum_gradients
from quatrain.update.learner import KLReward, Learner, TooManyBadSteps

LONGEST = 9
SIZES = {"mini_batch_size": 2, "epochs": 1, "micro_batch_size": 5, "forward_micro_batch_size": 7}


@pytest.fixture(scope="module")
def critic_arch(small_arch):
    return replace(small_arch, head="value_head")


@pytest.fixture(scope="module")
def value_params(critic_arch):
    """A critic with a head that is not zero."""
    params = init_params(critic_arch, jax.random.key(7))
    score = jax.random.normal(jax.random.key(8), (1, critic_arch.hidden_size))
    return params | {"score": jax.device_put(score, params["score"].sharding)}


def _table(batch, **columns) -> TokenTable:
    r = batch.rollouts
    return TokenTable(r.input_ids, r.attention_mask, r.completion_mask, columns, r.group_ids)


def _copy(params):
    return jax.tree.map(jnp.array, params)


def _same(before, after) -> bool:
    return all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)))


@pytest.fixture
def make_learner(small_arch, critic_arch):
    def make(*, critic=None, kl_reward=None, reference=None, **update) -> Learner:
        sizes = {"mini_batch_size": 2, "micro_batch_size": 5, "loss_aggregation": "token_mean"}
        config = UpdateConfig(**sizes, **update)
        optimizer = OptimizerConfig(name="sgd", learning_rate=0.1, beta1=0.0)
        made = None
        if critic is not None:
            made = Critic(
                CriticSpec(critic_arch, remat="none"),
                CriticConfig(**SIZES | critic),
                config,
                optimizer,
                max_new_tokens=LONGEST,
                total_steps=10,
                seed=3,
            )
        return Learner(
            PolicySpec(small_arch, remat="none"),
            config,
            LogprobConfig(micro_batch_size=7),
            optimizer,
            max_new_tokens=LONGEST,
            total_steps=10,
            seed=3,
            reference=reference,
            critic=made,
            kl_reward=kl_reward,
        )

    return make


def test_values_are_those_of_the_state_before_each_token(make_batch, critic_arch, value_params):
    batch = make_batch(0)
    r = batch.rollouts
    positions = np.broadcast_to(np.arange(r.input_ids.shape[1]), r.input_ids.shape)
    compiled = jax.jit(forward, static_argnames="arch")
    segments = r.attention_mask.astype(np.int32)
    hidden = compiled(value_params, critic_arch, r.input_ids, positions, segments).hidden
    before = np.pad(np.asarray(hidden @ value_params["score"][0])[:, :-1], ((0, 0), (1, 0)))
    got = predict_tokens(
        value_params,
        _table(batch),
        model=CriticSpec(critic_arch, remat="none"),
        planner=MicroBatchPlanner(rows=5),
    )
    np.testing.assert_allclose(got, np.where(r.completion_mask, before, 0), rtol=1e-5, atol=1e-5)


CUTTINGS = (
    MicroBatchPlanner(max_tokens=15),
    MicroBatchPlanner(max_tokens=32, num_shards=3, share_prompts=True),
)
MORE_CUTTINGS = (MicroBatchPlanner(rows=5), MicroBatchPlanner(max_tokens=32, num_shards=3))


@pytest.mark.parametrize("cuttings", [CUTTINGS, pytest.param(MORE_CUTTINGS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_no_cut_changes_the_gradient_of_the_value_loss(
    make_batch, critic_arch, value_params, aggregation, cuttings
):
    batch = make_batch(20, holes=True)
    rng = np.random.default_rng(0)
    shape = batch.rollouts.input_ids.shape
    columns = {name: rng.normal(size=shape).astype(np.float32) for name in ("old_values", "returns")}
    table = _table(batch, **columns).weighted(aggregation, LONGEST)
    model = CriticSpec(critic_arch, remat="none")

    def gradient(planner):
        batches = (b for _, b in micro_batches(table, planner, one_device()))
        total = sum_gradients(value_params, batches, model=model, objective=ValueObjective(0.5))
        return jax.tree.map(np.asarray, total)

    whole = gradient(MicroBatchPlanner(rows=100))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(whole[0]))
    assert largest > 1e-3
    assert 0 < whole[1]["sum"]["critic/clip_fraction"] < whole[1]["sum"]["tokens"]
    for planner in cuttings:
        for a, b in zip(jax.tree.leaves(gradient(planner)), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest)


def _gae_batch(learner, state, batch):
    estimator = AdvantageEstimator(AdvantageConfig(estimator="gae"))
    return estimator.estimate(learner.compute_logprobs_and_values(state, batch.rewarded))


def test_a_critic_of_the_policys_weights_starts_at_zero_and_learns(
    make_learner, make_batch, small_params, critic_arch
):
    learner, batch = make_learner(critic={"epochs": 3}), make_batch(1)
    started = critic_params(small_params, critic_arch, one_device())
    state = learner.init(_copy(small_params), started)
    errors = []
    for _ in range(3):
        advantaged = _gae_batch(learner, state, batch)
        mask = batch.rollouts.completion_mask
        errors.append(float(np.square(advantaged.rewarded.values - advantaged.returns)[mask].mean()))
        state = learner.step(state, at_version(advantaged, state.step))
    assert not _same(small_params["layers"], state.params["layers"])
    assert state.critic.step == 3 * 3 * 2
    assert errors[0] > errors[1] > errors[2]
    assert state.metrics["critic/optimizer_steps"].result() == 6
    assert state.metrics["critic/value_mean"].result() != 0
    assert state.metrics["critic/explained_variance"].result() < 1


def test_a_critic_needs_parameters_of_its_own(make_learner, small_params):
    with pytest.raises(
        ValueError, match=r"update\.init got none; call update\.init\(params, critic_params\)"
    ):
        make_learner(critic={}).init(small_params)


@pytest.mark.slow
def test_the_policy_rests_while_the_critic_warms_up(make_learner, make_batch, small_params, value_params):
    learner, batch = make_learner(critic={"warmup_steps": 1}), make_batch(2)
    state = learner.init(_copy(small_params), _copy(value_params))
    state = learner.step(state, _gae_batch(learner, state, batch))
    assert _same(small_params, state.params)
    assert not _same(value_params, state.critic.params)
    assert (state.train_step, state.step) == (1, 0)
    assert "update/optimizer_steps" not in state.metrics
    state = learner.step(state, _gae_batch(learner, state, batch))
    assert not _same(small_params, state.params)
    assert state.metrics["update/optimizer_steps"].result() == 2


def test_a_batch_without_values_or_returns_is_refused(make_learner, make_batch, small_params, value_params):
    learner, batch = make_learner(critic={}), make_batch(3)
    state = learner.init(_copy(small_params), _copy(value_params))
    with pytest.raises(ValueError, match="the batch has no values: call compute_logprobs_and_values before"):
        learner.step(state, batch)
    scored = learner.compute_logprobs_and_values(state, batch.rewarded)
    with pytest.raises(ValueError, match=r"the batch has no returns: return TokenAdvantages"):
        learner.step(state, replace(batch, rewarded=scored))


def test_a_critic_that_is_not_finite_ends_the_run(make_learner, make_batch, small_params, value_params):
    learner, batch = make_learner(critic={}, max_bad_steps=2), make_batch(4)
    state = learner.init(_copy(small_params), _copy(value_params))
    advantaged = _gae_batch(learner, state, batch)
    broken = value_params | {"score": value_params["score"] * jnp.nan}
    state = replace(state, critic=replace(state.critic, params=broken))
    with pytest.raises(TooManyBadSteps) as stopped:
        learner.step(state, advantaged)
    assert stopped.value.state.critic.bad_steps == 2
    assert stopped.value.state.metrics["critic/bad_steps"].result() == 2


def test_kl_in_the_reward_is_subtracted_from_each_token(make_learner, make_batch, small_arch, small_params):
    reference = init_params(small_arch, jax.random.key(5))
    learner = make_learner(kl_reward=KLReward(0.1, target=None, horizon=100), reference=reference)
    batch = make_batch(5)
    state = learner.init(_copy(small_params))
    scored = learner.compute_logprobs_and_values(state, batch.rewarded)
    old, ref = (
        predict_tokens(params, _table(batch), model=learner.policy, planner=MicroBatchPlanner(rows=4))
        for params in (small_params, reference)
    )
    np.testing.assert_allclose(scored.token_rewards, -0.1 * (old - ref), rtol=1e-4, atol=1e-6)
    lengths = np.maximum(batch.rollouts.completion_lengths, 1)
    kl = ((old - ref).sum(axis=1) / lengths).mean()
    assert scored.metrics["reward/kl"].result() == pytest.approx(kl, rel=1e-4)
    assert scored.metrics["reward/kl_penalty"].result() == pytest.approx(
        0.1 * (old - ref).sum(axis=1).mean(), rel=1e-4
    )
    advantaged = AdvantageEstimator(AdvantageConfig(estimator="dr_grpo")).estimate(scored)
    total = batch.rewarded.rewards - 0.1 * (old - ref).sum(axis=1)
    groups = batch.rollouts.group_ids
    expected = total - np.array([total[groups == group].mean() for group in groups])
    mask = batch.rollouts.completion_mask
    np.testing.assert_allclose(
        advantaged.advantages[mask], np.broadcast_to(expected[:, None], mask.shape)[mask], atol=1e-4
    )
    assert learner.step(state, advantaged).reward_kl_coef == 0.1


@pytest.mark.slow
def test_the_update_does_not_compute_log_probabilities_again(
    make_learner, make_batch, small_params, monkeypatch
):
    learner = make_learner(
        kl_reward=KLReward(0.1, 0.5, 100),
        reference=_copy(small_params),
        kl_coef=0.1,
        old_logprobs="recompute",
    )
    state = learner.init(_copy(small_params))
    advantaged = AdvantageEstimator(AdvantageConfig()).estimate(
        learner.compute_logprobs_and_values(state, make_batch(6).rewarded)
    )

    def again(*args, **kwargs):
        raise AssertionError("computed again")

    for module in ("learner", "teacher_scores"):
        monkeypatch.setattr(f"quatrain.update.{module}.predict_tokens", again)
    after = learner.step(state, advantaged)
    assert after.reward_kl_coef == pytest.approx(0.1 * (1 - 0.2 * 12 / 100))


def test_log_probabilities_for_samples_are_the_old_ones_too(
    make_learner, make_batch, small_params, monkeypatch
):
    """The policy's log-probabilities are computed once: for samples, for the KL and for the update."""
    passes = []

    def counted(*args, **kwargs):
        passes.append(kwargs["model"])
        return predict_tokens(*args, **kwargs)

    for module in ("learner", "teacher_scores"):
        monkeypatch.setattr(f"quatrain.update.{module}.predict_tokens", counted)
    for kl_reward, expected in ((KLReward(0.1, None, 100), 2), (None, 1)):
        learner = make_learner(kl_reward=kl_reward, reference=_copy(small_params), old_logprobs="recompute")
        learner.logs_logprobs = True
        state = learner.init(_copy(small_params))
        passes.clear()
        scored = learner.compute_logprobs_and_values(state, make_batch(6).rewarded)
        if kl_reward:
            np.testing.assert_array_equal(
                *(scored.token_logprobs[f"{x}_logprobs"] for x in ("old", "trainer"))
            )
        learner.step(state, AdvantageEstimator(AdvantageConfig()).estimate(scored))
        assert len(passes) == expected


def test_adapted_coefficient():
    """Ziegler et al.: proportional error, clipped at 0.2, per sequence of the horizon."""
    assert adapted_kl_coef(0.2, 1.1, target=1.0, num_sequences=10, horizon=100) == pytest.approx(
        0.2 * (1 + 0.1 * 0.1)
    )
    assert adapted_kl_coef(0.2, 9.0, target=1.0, num_sequences=10, horizon=100) == pytest.approx(0.2 * 1.02)
    assert adapted_kl_coef(0.2, -1.0, target=1.0, num_sequences=10, horizon=100) == pytest.approx(0.2 * 0.98)
