"""The reward of an episode, and the penalty on completions that were cut."""

import json
from dataclasses import replace

import numpy as np
import pytest
from goldens import GOLDEN
from rollouts import make_rollouts

from quatrain.config.sections.reward import RewardConfig
from quatrain.reward.scorer import RewardScorer
from quatrain.reward.totals import Totals

NAN = np.nan


def totals(functions, **penalty):
    return Totals.of(RewardConfig(functions=functions, **penalty), tuple(functions))


@pytest.mark.parametrize(
    ("case", "penalty"),
    [("factor 0.3", {"truncated_factor": 0.3}), ("reward -0.5", {"truncated_reward": -0.5})],
)
def test_the_penalty_is_that_of_torch(case, penalty):
    """Catches a penalty on what ended by itself, and one that scales the values of `overlong`."""
    golden = json.loads((GOLDEN / "formulas.json").read_text())["stop_properly"]
    raw = np.array(list(golden["functions"].values()), np.float32)
    cut = np.array(golden["cut"])
    rewards, taken = totals(golden["weights"], **penalty)(raw, cut)
    np.testing.assert_allclose(rewards, golden[case], rtol=1e-6)
    without, nothing = totals(golden["weights"])(raw, cut)
    np.testing.assert_allclose(without - rewards, taken, rtol=1e-6, atol=1e-7)
    assert taken[cut].all()
    assert not taken[~cut].any()
    assert not nothing.any()


def test_a_penalty_raises_no_reward():
    """Catches a factor that makes a wrong answer better by being cut: -1 times 0.5."""
    raw, cut = np.float32([[-1, 2, -1]]), np.array([True, True, False])
    rewards, taken = totals({"correct": 1.0}, truncated_factor=0.5)(raw, cut)
    assert (rewards.tolist(), taken.tolist()) == ([-1, 1, -1], [0, 1, 0])
    # A reward that is set is what was asked for, also where it is higher.
    rewards, taken = totals({"correct": 1.0}, truncated_reward=-0.25)(raw, cut)
    assert (rewards.tolist(), taken.tolist()) == ([-0.25, -0.25, -1], [-0.75, 2.25, 0])


def test_what_no_function_judges_has_no_penalty():
    """Catches a reward out of nothing: all functions abstain, or all but `overlong`."""
    raw = np.float32([[NAN, NAN, 1], [NAN, -0.5, -1]])
    functions, cut = {"correct": 2.0, "overlong": 1.0}, np.ones(3, bool)
    rewards, taken = totals(functions, truncated_reward=-3.0)(raw, cut)
    np.testing.assert_array_equal(rewards, np.float32([NAN, -0.5, -4]))
    assert taken.tolist() == [0, 0, 5]
    for penalty in ({}, {"truncated_factor": 0.0}):
        assert np.isnan(totals({}, **penalty)(np.zeros((0, 2), np.float32), cut[:2])[0]).all()


def test_the_stage_gives_rewards_with_the_penalty():
    """Catches an accuracy or a raw value with a penalty, and a metric that is lost."""
    rollouts = make_rollouts(["7", "7", "8"], answer=["7"] * 3)
    rollouts = replace(rollouts, finish_reason=np.array(["stop", "length", "length"]))
    config = RewardConfig(functions={"correct": 2.0}, truncated_factor=0.25)
    scorer = RewardScorer(config)
    batch = scorer.score(rollouts)
    assert batch.rewards.tolist() == [2.0, 0.5, 0.0]
    assert batch.rewards_per_function.tolist() == [[1.0, 1.0, 0.0]]
    assert batch.metrics["reward/stop_penalty"].result() == pytest.approx(0.5)
    assert batch.metrics["reward/mean"].result() == pytest.approx(2.5 / 3)
    accuracy = RewardScorer(config, accuracy_beside=scorer).score(rollouts)
    assert accuracy.rewards.tolist() == [2.0, 2.0, 0.0]
    assert "reward/stop_penalty" not in accuracy.metrics
    plain = RewardScorer(RewardConfig(functions={"correct": 2.0})).score(rollouts)
    assert "reward/stop_penalty" not in plain.metrics
