"""The advantage stage: per-sequence estimates over completion tokens, and what it reports."""

import numpy as np
import pytest

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.schema import AdvantageConfig
from quatrain.types import RewardedBatch, RolloutBatch


def rewarded(rewards, group_ids, mask):
    mask = np.array(mask, bool)
    rewards = np.array(rewards, np.float32)
    rollouts = RolloutBatch(
        input_ids=np.ones(mask.shape, np.int32),
        attention_mask=np.ones(mask.shape, bool),
        completion_mask=mask,
        rollout_logprobs=np.zeros(mask.shape, np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.full(len(mask), "stop"),
        group_ids=np.array(group_ids, np.int64),
        prompts=("p",) * len(mask),
        completions=("c",) * len(mask),
    )
    return RewardedBatch(rollouts, rewards, rewards[None], ("f",))


MASK = [[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0]]


def test_each_completion_token_has_the_advantage_of_its_sequence():
    batch = rewarded([1, 3, 2, 2, np.nan], [5, 5, 8, 8, 8], MASK)
    advantaged = AdvantageEstimator(AdvantageConfig(estimator="dr_grpo")).estimate(batch)
    assert advantaged.advantages.tolist() == [[0, -1, -1, -1], [0, 1, 0, 1], [0] * 4, [0] * 4, [0] * 4]
    assert advantaged.advantages.dtype == np.float32
    assert advantaged.rewarded is batch
    results = {name: metric.result() for name, metric in advantaged.metrics.items()}
    assert results == {
        "advantage/mean": 0.0,
        "advantage/std": pytest.approx(np.sqrt(0.5)),  # over the four sequences with a reward
        "advantage/min": -1.0,
        "advantage/max": 1.0,
        "advantage/zero_signal_fraction": 0.5,
    }


def test_a_batch_without_signal_is_no_error():
    batch = rewarded([1, 1, 0, 0, 0], [0, 0, 1, 1, 1], MASK)
    advantaged = AdvantageEstimator(AdvantageConfig()).estimate(batch)
    assert not advantaged.advantages.any()
    assert advantaged.metrics["advantage/zero_signal_fraction"].result() == 1.0


def test_a_batch_without_rewards_is_no_error():
    batch = rewarded([np.nan] * 5, [0, 0, 1, 1, 1], MASK)
    advantaged = AdvantageEstimator(AdvantageConfig(estimator="reinforce")).estimate(batch)
    assert not advantaged.advantages.any()
    assert list(advantaged.metrics) == ["advantage/zero_signal_fraction"]


def test_the_scale_is_the_configured_one():
    batch = rewarded([0, 4, 1, 1, 1], [0, 0, 1, 1, 1], MASK)
    by_scale = {
        scale: AdvantageEstimator(AdvantageConfig(estimator="grpo", scale=scale))
        .estimate(batch)
        .advantages[1, 1]
        for scale in (None, "group", "batch", "none")
    }
    std = np.std([0, 4, 1, 1, 1])
    assert by_scale == pytest.approx({None: 1, "group": 1, "batch": 2 / std, "none": 2}, rel=2e-4)


def test_a_scale_the_estimator_does_not_know_is_refused_at_once():
    with pytest.raises(
        ValueError, match=r"advantage\.scale='group' does not go with .*'reinforce': use batch or none"
    ):
        AdvantageEstimator(AdvantageConfig(estimator="reinforce", scale="group"))


SOURCE = """
import numpy as np

def ranks(rewards, group_ids, *, power: float = 1.0):
    return np.nan_to_num(np.argsort(np.argsort(rewards)) ** power)

def by_position(rewards, completion_mask):
    return np.nan_to_num(rewards)[:, None] * completion_mask.cumsum(axis=1)

def short(rewards):
    return rewards[1:]

def not_a_number(rewards):
    return rewards * np.nan

def changes(rewards):
    rewards[:] = 0
    return rewards

def words(rewards):
    return ["a"] * len(rewards)

def leaves(rewards):
    raise SystemExit

def without_rewards(group_ids):
    return group_ids * 1.0
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("estimators") / "mine.py"
    path.write_text(SOURCE)
    return lambda name, **config: AdvantageEstimator(AdvantageConfig(estimator=f"{path}:{name}", **config))


def test_an_estimator_of_ones_own_gives_a_number_to_each_sequence(own):
    batch = rewarded([4, 1, 3, 2, 5], [5, 5, 8, 8, 8], MASK)
    advantaged = own("ranks", args={"power": 2.0}).estimate(batch)
    assert advantaged.advantages[:, 3].tolist() == [9, 0, 4, 0, 0]
    assert advantaged.advantages[0].tolist() == [0, 9, 9, 9]


def test_an_estimator_of_ones_own_gives_a_number_to_each_token(own):
    advantaged = own("by_position").estimate(rewarded([1, 0, 2, 0, np.nan], [5, 5, 8, 8, 9], MASK))
    assert advantaged.advantages.tolist() == [[0, 1, 2, 3], [0] * 4, [0, 0, 0, 2], [0] * 4, [0] * 4]
    results = {name: metric.result() for name, metric in advantaged.metrics.items()}
    assert results["advantage/mean"] == pytest.approx(8 / 8)  # the eight tokens with a reward
    assert results["advantage/max"] == 3
    assert results["advantage/zero_signal_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"one per sequence \(5,\) or one per token \(5, 4\); it returned float32 of shape \(4,\)"),
        ("not_a_number", "must return finite advantages"),
        ("changes", "its inputs cannot be changed: work on a copy"),
        ("words", "must return numbers"),
        ("leaves", "failed: SystemExit"),
    ],
)
def test_an_estimator_that_fails_is_named(own, name, message):
    with pytest.raises(ValueError, match=rf"mine.py:{name}'.*{message}"):
        own(name).estimate(rewarded([1, 0, 2, 0, 1], [5, 5, 8, 8, 9], MASK))


def test_an_estimator_that_cannot_be_used_is_refused_at_the_start(own):
    with pytest.raises(ValueError, match=r"takes from advantage.args power: float = 1.0; got skale"):
        own("ranks", args={"skale": 1})
    with pytest.raises(ValueError, match=r"takes from advantage.args no arguments; got scale"):
        own("by_position", scale="group")
    with pytest.raises(ValueError, match="must take `rewards`"):
        own("without_rewards")
    with pytest.raises(ValueError, match=r"set the key advantage\.scale instead"):
        AdvantageEstimator(AdvantageConfig(scale="group", args={"scale": "batch"}))
