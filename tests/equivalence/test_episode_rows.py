"""Episodes of several rows: the gradient is that of the tree of turns, whatever rows it is written in."""

import jax
import numpy as np
import pytest
from episode_trees import as_rows, cut_rows, draw_episodes, episode_gradients, leaf_rows, turn_rows
from goldens import GOLDEN, probes
from rollouts import take_rows

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.schema import AdvantageConfig, LogprobConfig, OptimizerConfig, UpdateConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.ops.losses import LOSS_AGGREGATIONS
from quatrain.update.learner import Learner

CUTS = {
    "fixed": {"micro_batch_size": 3},
    "packed": {"max_tokens_per_device": 48},
    "shared": {"max_tokens_per_device": 64, "share_prompts": True},
}


def _step(arch, params, rewarded, aggregation="token_mean", cut="fixed", estimator="grpo", **update):
    """The parameters after one step of the learner, and the metrics."""
    config = UpdateConfig(mini_batch_size=2, loss_aggregation=aggregation, **CUTS[cut], **update)
    learner = Learner(
        PolicySpec(arch, temperature=0.8, remat="none"),
        config,
        LogprobConfig(max_tokens_per_device=48),
        OptimizerConfig(name="sgd", learning_rate=0.1, beta1=0.0, max_grad_norm=None),
        max_new_tokens=20,
        total_steps=10,
        seed=3,
    )
    state = learner.init(jax.tree.map(jax.numpy.array, params))
    batch = AdvantageEstimator(AdvantageConfig(estimator=estimator)).estimate(rewarded)
    state = learner.step(state, batch)
    return jax.tree.map(np.asarray, state.params), state.metrics


def _assert_same(found, expected, before):
    changes = jax.tree.leaves(jax.tree.map(lambda new, old: new - np.asarray(old), expected[0], before))
    largest = max(np.abs(change).max() for change in changes)
    assert largest > 1e-3
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0])):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest)
    for name in ("loss", "update/grad_norm", "update/entropy"):
        assert found[1][name].result() == pytest.approx(expected[1][name].result(), rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
def test_the_update_is_that_of_turns_one_by_one(small_arch, small_params, aggregation):
    """Two mini-batches; rows of leaves, with owners that are drawn, cut at turns, and in another order."""
    episodes = draw_episodes(3)
    leaves = leaf_rows(episodes)
    assert len(turn_rows(episodes).rollouts) > len(leaves.rollouts) > len(episodes)
    expected = _step(small_arch, small_params, turn_rows(episodes), aggregation)
    shuffled = np.random.default_rng(4).permutation(len(leaves.rollouts))
    for rows, cut in (
        (leaf_rows(episodes, owners=1), "packed"),
        (cut_rows(episodes, 2), "shared"),
        (take_rows(leaves, shuffled), "packed"),
    ):
        _assert_same(_step(small_arch, small_params, rows, aggregation, cut), expected, small_params)


def test_the_gradient_is_that_of_turns_one_by_one():
    """Elements differ by at most 2e-6 of the norm of their tensor's gradient, which is rounding."""
    episodes = draw_episodes(8)
    expected = episode_gradients("seq_mean_token_mean", turn_rows(episodes))
    for rows in (leaf_rows(episodes), cut_rows(episodes, 2)):
        for name, gradient in episode_gradients("seq_mean_token_mean", rows).items():
            limit = 2e-6 * np.linalg.norm(expected[name])
            np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=limit, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_update_is_that_of_turns_one_by_one_on_more_episodes(small_arch, small_params, seed):
    rng = np.random.default_rng(seed)
    aggregation, loss = rng.choice(list(LOSS_AGGREGATIONS)), rng.choice(["ppo_clip", "cispo", "reinforce"])
    estimator = rng.choice(["grpo", "rloo", "opo", "gpg", "passk", "reinforce"])
    episodes = draw_episodes(seed, 4, 4)
    settings = {"aggregation": aggregation, "estimator": estimator, "loss": loss, "epochs": 2}
    expected = _step(small_arch, small_params, turn_rows(episodes), **settings)
    for cut in CUTS:
        rows = cut_rows(episodes, seed)
        rows = take_rows(rows, rng.permutation(len(rows.rollouts)))
        _assert_same(_step(small_arch, small_params, rows, cut=cut, **settings), expected, small_params)


def test_a_turn_in_two_masks_is_noticed(small_arch, small_params):
    """The control: a turn that is trained on twice changes the update."""
    episodes = draw_episodes(3)
    expected = _step(small_arch, small_params, leaf_rows(episodes), cut="packed")
    twice = as_rows(episodes, [[*e.leaves, e.leaves[0]] for e in episodes], None)
    rollouts = twice.rollouts
    assert len(rollouts) == len(leaf_rows(episodes).rollouts)  # the second path owns nothing, and is left out
    rows = np.append(np.arange(len(rollouts)), 0)
    found = _step(small_arch, small_params, take_rows(twice, rows), cut="packed")
    with pytest.raises(AssertionError):
        _assert_same(found, expected, small_params)


@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
def test_gradients_are_those_of_torch(aggregation):
    """Norm and one direction of each tensor's gradient; `make oracles` compares all elements, in float64."""
    with np.load(GOLDEN / "gradients.npz") as file:
        expected = file[f"episodes_{aggregation}"]
    found = probes(episode_gradients(aggregation, leaf_rows(draw_episodes(8), owners=1)))
    norms = expected[:, :1]
    assert norms.min() > 0
    np.testing.assert_allclose(found / norms, expected / norms, atol=1e-5)


ESTIMATORS = ["grpo", "dr_grpo", "rloo", "gpg", "passk", "reinforce", "opo", "reinforce_pp_baseline"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_statistics_are_over_episodes(estimator):
    """An episode has the same advantage in few rows and in many, also where its length counts."""
    # Of REINFORCE++ unwhitened: a row is a trajectory, and tokens are whitened over all.
    scale = "none" if estimator == "reinforce_pp_baseline" else None
    estimate = AdvantageEstimator(AdvantageConfig(estimator=estimator, scale=scale)).estimate
    episodes = draw_episodes(5)
    found = []
    for rows in (leaf_rows(episodes), turn_rows(episodes)):
        batch = estimate(rows)
        found.append({e: advantage_of_row(batch, r) for r, e in enumerate(rows.rollouts.episode_ids)})
        if scale is None:  # else described over tokens
            mean = np.mean([*found[-1].values()])
            assert batch.metrics["advantage/mean"].result() == pytest.approx(mean, abs=1e-6)
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert len(set(found[0].values())) > 2


def advantage_of_row(batch, row) -> float:
    found = np.unique(batch.advantages[row][batch.rollouts.completion_mask[row]])
    assert len(found) == 1
    return float(found[0])


def test_shared_prompts_are_found_where_rows_begin_anew():
    """Rows of a group that do not begin with its prompt do not keep the others from sharing it."""
    table = TokenTable.of(leaf_rows(draw_episodes(3)).rollouts)
    (plan,) = MicroBatchPlanner(max_tokens=4096, share_prompts=True).plans(table)
    shared = [s for buffer in plan.buffers for s in buffer if len(s.rows) > 1]
    assert len({int(table.group_ids[s.rows[0]]) for s in shared}) == 3
    for segment in shared:
        prompts = table.input_ids[segment.rows, : segment.num_shared]
        assert (prompts == prompts[0]).all()
        assert not table.completion_mask[segment.rows, : segment.num_shared].any()
    assert sorted(plan.sequences) == list(range(len(table)))
