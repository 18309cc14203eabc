"""Training steps with a teacher: equal to steps with the mixed advantages, however they are cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.config.schema import DistillConfig, LogprobConfig, OptimizerConfig, UpdateConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.types.batches import TeacherWords
from quatrain.update.distillation import Distillation
from quatrain.update.learner import Learner
from quatrain.update.teacher import OwnWeights, Teacher

TEACHER = {"weight": 0.7, "rl_weight": 0.5, "clip": 2.0}


@pytest.fixture
def make_learner(small_arch):
    def make(distill=None, update=None, *, tokens=None, mini_batch_size=4, steps=10) -> Learner:
        sizes = {"max_tokens_per_device": tokens} if tokens else {"micro_batch_size": 5}
        config = UpdateConfig(
            mini_batch_size=mini_batch_size, **{"loss_aggregation": "token_mean", **(update or {}), **sizes}
        )
        teacher = None if distill is None else DistillConfig(teacher="somewhere", **distill)
        return Learner(
            PolicySpec(small_arch, temperature=0.8, remat="none"),
            config,
            LogprobConfig(max_tokens_per_device=48) if tokens else LogprobConfig(micro_batch_size=7),
            OptimizerConfig(name="sgd", learning_rate=0.5, beta1=0.0),
            max_new_tokens=9,
            total_steps=10,
            seed=3,
            distillation=teacher and Distillation.of(teacher, steps),
        )

    return make


def _scored(batch, seed=0, without=()):
    """`batch` with a teacher's log-probabilities; the rows `without` have none."""
    mask = batch.rollouts.completion_mask
    teacher = np.where(mask, -np.random.default_rng(seed).exponential(3.0, mask.shape), 0).astype(np.float32)
    teacher[list(without)] = np.where(mask[list(without)], np.float32(np.nan), 0)
    rewarded = dataclasses.replace(batch.rewarded, token_logprobs={"teacher_logprobs": teacher})
    return dataclasses.replace(batch, rewarded=rewarded)


def _step(learner, params, batch):
    return learner.step(learner.init(jax.tree.map(jnp.array, params)), batch)


def _assert_same(one, other, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def _changes(params, state):
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


def _mixed(batch, params, learner):
    """`batch` with the advantages of `TEACHER` worked out on the host."""
    planner = MicroBatchPlanner(rows=7)
    own = predict_tokens(params, TokenTable.of(batch.rollouts), model=learner.policy, planner=planner)
    teacher = batch.rewarded.token_logprobs["teacher_logprobs"]
    signal = np.nan_to_num(TEACHER["weight"] * np.clip(teacher - own, -TEACHER["clip"], TEACHER["clip"]))
    mixed = TEACHER["rl_weight"] * batch.advantages + np.where(batch.rollouts.completion_mask, signal, 0)
    return dataclasses.replace(batch, advantages=mixed.astype(np.float32))


@pytest.mark.slow
def test_a_step_is_one_with_the_mixed_advantages(make_learner, make_batch, small_params):
    batch = _scored(make_batch(0, holes=True), without=(2, 5))
    learner = make_learner(TEACHER)
    state = _step(learner, small_params, batch)
    plain = _step(make_learner(), small_params, _mixed(batch, small_params, learner))
    _assert_same(state, plain)
    assert _changes(small_params, state) > 1e-3
    assert "distill/taught" not in state.metrics
    mask = batch.rollouts.completion_mask.copy()
    mask[[2, 5]] = False  # the fraction is of the tokens that have a teacher
    planner = MicroBatchPlanner(rows=7)
    own = predict_tokens(small_params, TokenTable.of(batch.rollouts), model=learner.policy, planner=planner)
    gap = np.abs(batch.rewarded.token_logprobs["teacher_logprobs"] - own)[mask]
    assert state.metrics["distill/clipped_fraction"].result() == pytest.approx((gap > 2).mean(), rel=1e-6)
    assert 0.05 < (gap > 2).mean() < 0.95


@pytest.mark.parametrize(
    ("loss", "discount", "budgets"),
    [
        ("ppo_clip", 0.9, (40,)),
        *(
            pytest.param(*case, (40, 15), marks=pytest.mark.slow)
            for case in (("ppo_clip", 0.9), ("ppo_clip", 0.0), ("gspo", 0.0), ("gspo", 0.9))
        ),
    ],
)
def test_a_training_step_is_the_same_in_rows_and_in_tokens(
    make_learner, make_batch, small_params, loss, discount, budgets
):
    batch = _scored(make_batch(1, groups=5), without=(4,))
    distill, update = {**TEACHER, "discount": discount}, {"loss": loss, "epochs": 2}
    rows, *packed = (
        _step(make_learner(distill, update, tokens=tokens, mini_batch_size=3), small_params, batch)
        for tokens in (None, *budgets)
    )
    assert rows.step == 4
    for state in packed:
        _assert_same(rows, state)
        assert state.metrics["loss"].result() == pytest.approx(
            rows.metrics["loss"].result(), rel=2e-5, abs=1e-6
        )


@pytest.mark.slow
def test_a_loss_of_whole_mini_batches_reads_the_mixed_advantages(make_learner, make_batch, small_params):
    """`clip_cov` chooses its tokens by the covariance with the advantages that it trains on."""
    batch, update = (
        _scored(make_batch(2)),
        {"loss": "clip_cov", "loss_args": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0}},
    )
    learner = make_learner(TEACHER, update)
    state = _step(learner, small_params, batch)
    plain = _step(make_learner(None, update), small_params, _mixed(batch, small_params, learner))
    _assert_same(state, plain)
    name = "update/high_covariance_fraction"
    assert state.metrics[name].result() == plain.metrics[name].result() > 0


def test_advantages_of_whole_sequences_on_the_host_are_those_of_scored_tokens_alone(make_learner, make_batch):
    """Sequences with prompts and given tokens, and micro-batches without them, have the same discounts."""
    batch = _scored(make_batch(6, holes=True), without=(1,))
    term = make_learner({**TEACHER, "discount": 0.5}).objective
    r = batch.rewarded.rollouts
    columns = term.distillation.columns(batch.rewarded, 0, None)
    table = TokenTable.of(r).with_columns(
        advantages=batch.advantages, rollout_logprobs=r.rollout_logprobs, **columns
    )
    old = np.where(r.completion_mask, r.rollout_logprobs - 0.3, 0).astype(np.float32)
    found, expected = term.advantages_on_host(table, old), np.zeros(old.shape, np.float32)
    gap = columns["teacher_weights"] * np.clip(columns["teacher_logprobs"] - old, -2, 2)
    holes = 0
    for row, mask in enumerate(r.completion_mask):
        total, places = 0.0, np.flatnonzero(mask)
        holes += int((np.diff(places) > 1).sum())
        for place in places[::-1]:
            total = gap[row, place] + 0.5 * total
            expected[row, place] = 0.5 * batch.advantages[row, place] + total
    np.testing.assert_allclose(found[r.completion_mask], expected[r.completion_mask], rtol=1e-5, atol=1e-6)
    assert holes > 0


def test_a_step_without_rewards_is_not_skipped(make_learner, make_batch, small_params):
    batch = _scored(make_batch(3))
    batch = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    state = _step(make_learner(TEACHER, {"mask_zero_signal": True}), small_params, batch)
    assert state.metrics["update/skipped_steps"].result() == 0
    assert state.metrics["update/masked_groups"].result() == 0
    assert _changes(small_params, state) > 1e-3
    nobody = _scored(batch, without=range(len(batch.rollouts)))
    state = _step(make_learner(TEACHER), small_params, nobody)
    assert state.metrics["update/skipped_steps"].result() == 1


@pytest.mark.parametrize("loss", ["sampled", pytest.param("jsd", marks=pytest.mark.slow)])
def test_rewards_that_are_not_trained_on_are_no_signal(make_learner, make_batch, small_params, loss):
    """A step without teacher and with a weight of rewards of 0 would move weights by momentum alone."""
    batch = make_batch(3)
    nobody, width = _scored(batch, without=range(len(batch.rollouts))), batch.rollouts.completion_mask.shape
    words = TeacherWords(np.full((*width, 2), -1, np.int32), np.zeros((*width, 3), np.float32))
    nobody = dataclasses.replace(nobody, rewarded=dataclasses.replace(nobody.rewarded, teacher_words=words))
    distill = {"rl_weight": 0, "loss": loss, "top_k": 2 * (loss == "jsd")}
    for weight, skipped in ((0, 1), (0.5, 0)):
        state = _step(make_learner({**distill, "rl_weight": weight}), small_params, nobody)
        assert state.metrics["update/skipped_steps"].result() == skipped
        assert state.metrics["update/optimizer_steps"].result() == 1 - skipped


@pytest.mark.slow
def test_the_weight_falls_over_the_last_steps(make_learner, make_batch, small_params):
    term = make_learner({**TEACHER, "warmdown_steps": 4}, steps=10).objective.distillation
    weights = [term.weight_at(step) / 0.7 for step in (0, 6, 7, 8, 9, 10, 11)]
    np.testing.assert_allclose(weights, [1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert Distillation.of(DistillConfig(teacher="x"), 10).weight_at(10) == 1
    batch = _scored(make_batch(4))
    learner = make_learner({**TEACHER, "warmdown_steps": 4, "rl_weight": 1.0}, steps=0)
    _assert_same(_step(learner, small_params, batch), _step(make_learner(), small_params, batch), rtol=0)


def test_a_batch_without_a_teachers_scores_is_an_error(make_learner, make_batch, small_params):
    with pytest.raises(ValueError, match=r"the batch has none; call teacher\.score"):
        _step(make_learner(TEACHER), small_params, make_batch(5))


def test_greedy_answers_of_an_evaluation_need_no_sets(make_learner, make_batch, small_params):
    """With top_p, top_k or min_p, an evaluation ended a run with a teacher: greedy answers, which no filter
    cuts, had to have the words that each token was drawn from."""
    learner, rollouts = make_learner(TEACHER), make_batch(1).rollouts
    learner.needs_kept = True
    found = learner.teacher_kl(Teacher({"default": OwnWeights("policy", 1.6, 100)}), small_params, rollouts)
    policy, teacher = (
        predict_tokens(
            small_params,
            TokenTable.of(rollouts),
            model=dataclasses.replace(learner.policy, temperature=temperature),
            planner=learner.logprob_planner,
        )
        for temperature in (0.8, 1.6)
    )
    expected = (policy - teacher)[rollouts.completion_mask].mean()
    assert found.result() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="the sampler has recorded none of"):
        learner.sampler_mismatch(learner.init(small_params), rollouts)
