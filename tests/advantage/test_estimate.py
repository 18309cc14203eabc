"""The advantage stage: per-sequence estimates over completion tokens, and what it reports."""

from dataclasses import replace

import numpy as np
import pytest
from episode_batches import episodes

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.algorithms import ESTIMATORS
from quatrain.config.schema import AdvantageConfig
from quatrain.ops.advantages import ADVANTAGE_ESTIMATORS
from quatrain.types.batches import RewardedBatch, RolloutBatch


def rewarded(rewards, group_ids, mask, **columns):
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
    columns = {name: np.where(mask, values, 0).astype(np.float32) for name, values in columns.items()}
    return RewardedBatch(rollouts, rewards, rewards[None], ("f",), **columns)


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


def test_rewards_are_compared_within_a_role():
    batch = rewarded([1, -1, 3, -3, 5], [7, 7, 7, 7, 8], MASK)
    batch = replace(
        batch, rollouts=replace(batch.rollouts, columns={"agent_role": ("a", "b", "a", "b", "a")})
    )
    advantaged = AdvantageEstimator(AdvantageConfig(estimator="dr_grpo")).estimate(batch)
    assert advantaged.advantages.max(axis=1).tolist()[:3] == [0, 1, 1]
    assert advantaged.advantages.min(axis=1).tolist() == [-1, 0, 0, -1, 0]


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


def test_estimators_of_outcomes_see_the_sum_of_all_rewards():
    batch = rewarded([1, 3, np.nan, 2, 2], [5, 5, 8, 8, 8], MASK, token_rewards=[[9, 0.5, 0, -2]] * 5)
    advantaged = AdvantageEstimator(AdvantageConfig(estimator="dr_grpo")).estimate(batch)
    # 1 - 1.5 and 3 - 1.5; 2 + 0.5 twice, without a signal.
    assert advantaged.advantages[:, 3].tolist() == [-1, 1, 0, 0, 0]
    assert not advantaged.advantages[2:].any()


def test_estimators_of_tokens_see_the_rewards_of_tokens():
    config = AdvantageConfig(estimator="reinforce_pp", scale="none", args={"gamma": 0.5})
    batch = rewarded([1, 3, np.nan, 2, 2], [5, 5, 8, 8, 8], MASK, token_rewards=[[9, 0.5, 0, -2]] * 5)
    advantages = AdvantageEstimator(config).estimate(batch).advantages
    assert advantages[:2].tolist() == [[0, 0.25, -0.5, -1], [0, 1, 0, 1]]
    without = AdvantageEstimator(config).estimate(rewarded([1, 3, np.nan, 2, 2], [5, 5, 8, 8, 8], MASK))
    assert without.advantages[:2].tolist() == [[0, 0.25, 0.5, 1], [0, 1.5, 0, 3]]
    assert without.returns is None


def test_an_estimator_of_values_brings_returns():
    estimator = AdvantageEstimator(AdvantageConfig(estimator="gae", scale="none"))
    assert "values" in estimator.inputs
    batch = rewarded([1, 3, np.nan, 2, 2], [5, 5, 8, 8, 8], MASK, values=[[1, 2, 3, 4]] * 5)
    advantaged = estimator.estimate(batch)
    assert advantaged.advantages[:2].tolist() == [[0, -1, -2, -3], [0, 1, 0, -1]]
    assert advantaged.returns.tolist()[:3] == [[0, 1, 1, 1], [0, 3, 0, 3], [0, 0, 0, 4]]


def test_values_come_with_a_critic():
    assert AdvantageEstimator(AdvantageConfig()).inputs == ("rewards", "group_ids")
    with pytest.raises(ValueError, match=r"takes values, .* come with a critic \(`advantage.estimator: gae`"):
        AdvantageEstimator(AdvantageConfig(estimator="gae")).estimate(rewarded([1] * 5, [0] * 5, MASK))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_built_in_estimator_takes_its_derived_scale(estimator):
    batch = rewarded([1, 3, np.nan, 2, 2], [5, 5, 8, 8, 8], MASK, values=[[1, 2, 3, 4]] * 5)
    batch = replace(
        batch,
        baseline_rewards=np.array([2, 2, 0, 0, 0], np.float32),
        function_weights=np.ones(len(batch.function_names), np.float32),
    )
    for scale in (None, *ESTIMATORS[estimator].scales):
        advantaged = AdvantageEstimator(AdvantageConfig(estimator=estimator, scale=scale)).estimate(batch)
        assert advantaged.advantages[:2].any()
        assert not advantaged.advantages[2].any()


SOURCE = """
import numpy as np
from quatrain import TokenAdvantages

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

def with_returns(rewards, completion_mask):
    return TokenAdvantages(np.nan_to_num(rewards), np.where(completion_mask, 7.0, np.nan))

def short_returns(rewards):
    return TokenAdvantages(rewards, rewards)

def infinite_returns(rewards, completion_mask):
    return TokenAdvantages(rewards, np.full(completion_mask.shape, np.inf))

def changes_token_rewards(rewards, token_rewards):
    token_rewards[:] = 1
    return rewards

def without_rewards(group_ids):
    return group_ids * 1.0

def of_tokens_and_episodes(rewards, completion_mask, episode_ids):
    return rewards + 10 * episode_ids
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


def test_an_estimator_of_ones_own_gives_returns(own):
    advantaged = own("with_returns").estimate(rewarded([1, 0, 2, 0, np.nan], [5, 5, 8, 8, 9], MASK))
    assert advantaged.advantages[:, 3].tolist() == [1, 0, 2, 0, 0]
    assert advantaged.returns.tolist() == (7.0 * np.array(MASK)).tolist()


def test_an_estimator_of_ones_own_gives_a_number_to_each_token(own):
    advantaged = own("by_position").estimate(rewarded([1, 0, 2, 0, np.nan], [5, 5, 8, 8, 9], MASK))
    assert advantaged.advantages.tolist() == [[0, 1, 2, 3], [0] * 4, [0, 0, 0, 2], [0] * 4, [0] * 4]
    results = {name: metric.result() for name, metric in advantaged.metrics.items()}
    assert results["advantage/mean"] == pytest.approx(8 / 8)  # the eight tokens with a reward
    assert results["advantage/max"] == 3
    assert results["advantage/zero_signal_fraction"] == pytest.approx(1 / 3)


def test_an_estimator_of_ones_own_gets_episodes_of_several_rows(own):
    """One item for each episode; with tokens, the rows and their episodes, if it takes these."""
    batch = rewarded([4, 1, 4, 2, 5], [5, 5, 5, 8, 8], MASK)
    batch = replace(batch, rollouts=replace(batch.rollouts, episode_ids=np.array([7, 1, 7, 3, 9])))
    advantaged = own("ranks", args={"power": 1.0}).estimate(batch)  # of 1, 2, 4 and 5
    assert advantaged.advantages.max(axis=1).tolist() == [2, 0, 2, 1, 3]
    assert advantaged.metrics["advantage/mean"].result() == 1.5
    advantaged = own("of_tokens_and_episodes").estimate(batch)
    assert advantaged.advantages.max(axis=1).tolist() == [24, 1, 24, 12, 35]
    with pytest.raises(
        ValueError, match=r"by_position' takes arrays of tokens.*must take `episode_ids` \[B\]"
    ):
        own("by_position").estimate(batch)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"one per sequence \(5,\) or one per token \(5, 4\); it returned float32 of shape \(4,\)"),
        ("not_a_number", "must return finite advantages"),
        ("changes_token_rewards", "its inputs cannot be changed: work on a copy"),
        ("changes", "its inputs cannot be changed: work on a copy"),
        ("words", "must return advantages as numbers"),
        ("short_returns", r"must return returns as numbers, one per token \(5, 4\); it returned float32"),
        ("infinite_returns", "must return finite returns"),
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


@pytest.mark.parametrize("arguments", [{"gamma": 1.5}, {"lam": -0.5}])
def test_arguments_out_of_range_are_refused_before_anything_runs(arguments):
    name = next(iter(arguments))
    with pytest.raises(
        ValueError, match=f"'gae' cannot be used: {name} must be in .*; set advantage.args.{name}"
    ):
        AdvantageEstimator(AdvantageConfig(estimator="gae", args=arguments))


def test_what_a_turn_earned_is_a_reward_of_its_last_token(monkeypatch):
    """For estimators that read rewards of tokens; the sequence keeps the rest of its reward."""
    seen = {}

    def sees(rewards, token_rewards, completion_mask):
        seen.update(rewards=rewards.tolist(), token_rewards=token_rewards.tolist())
        return rewards

    batch = episodes().rewarded
    batch = replace(batch, environment_weight=2.0, rewards=np.array([2.6, -1.0], np.float32))
    estimator = AdvantageEstimator(AdvantageConfig(estimator="grpo"))
    monkeypatch.setattr(estimator, "_function", sees)
    monkeypatch.setattr(estimator, "_arguments", {})
    monkeypatch.setattr(estimator, "inputs", ("rewards", "token_rewards", "completion_mask"))
    estimator.estimate(batch)
    assert seen["rewards"] == pytest.approx([0.1, -1.0], abs=1e-6)
    assert seen["token_rewards"] == [
        [0, 0, 0, 0.5, 0, 0, 0, 2.0],
        [0.0] * 8,
    ]  # a fault ended it


def test_returns_of_earlier_turns_include_later_rewards():
    batch = replace(episodes().rewarded, environment_weight=1.0)
    config = AdvantageConfig(estimator="reinforce_pp", args={"gamma": 0.5}, scale="none")
    advantages = AdvantageEstimator(config).estimate(batch).advantages[0]
    with_sum = AdvantageEstimator(config).estimate(replace(batch, environment_weight=0.0)).advantages[0]
    assert advantages[3] - advantages[7] != pytest.approx(with_sum[3] - with_sum[7], abs=1e-3)
    assert advantages[3] - advantages[7] == pytest.approx(0.25 + 0.25 * 1.0 - 1.0)


def with_turns(rewards, turn_rewards, weight=1.0, faults=()):
    """Episodes of one group, with a token a turn and one between two turns; `rewards` are whole ones."""
    mask = np.zeros((len(rewards), 6), bool)
    for row, turns in enumerate(turn_rewards):
        mask[row, 1 : 2 * len(turns) : 2] = True
    batch = rewarded(rewards, [7] * len(rewards), mask)
    columns = {
        "turn_rewards": tuple(turn_rewards),
        "environment_reward": tuple(float(sum(turns)) for turns in turn_rewards),
    }
    reasons = np.array(["error" if row in faults else "stop" for row in range(len(rewards))])
    rollouts = replace(batch.rollouts, columns=columns, finish_reason=reasons)
    given = np.array(columns["environment_reward"], np.float32)[None]
    return replace(
        batch,
        rollouts=rollouts,
        rewards_per_function=given,
        function_names=("environment",),
        environment_weight=weight,
    )


TURN_CREDIT = AdvantageConfig(estimator="dr_grpo", turn_credit=True)


def test_a_turn_is_credited_with_its_reward_among_the_turns_of_its_number():
    """Rewards of turns count half; the rest of the first reward, 3, comes from elsewhere."""
    batch = with_turns([3 + 0.5, 1.0, 0.5], [[0, 1.0], [2.0], [0, 0, 1.0]], weight=0.5)
    advantages = AdvantageEstimator(TURN_CREDIT).estimate(batch).advantages
    others = np.array([3 - 1.0, -1.0, -1.0])  # of 3, 0, 0
    first = np.array([-1, 2, -1]) / 3  # of 0, 1, 0
    second = np.array([0.25, 0, -0.25])  # of 0.5 and 0: the second episode has one turn
    expected = [
        [0, others[0] + first[0], 0, others[0] + second[0], 0, 0],
        [0, others[1] + first[1], 0, 0, 0, 0],
        [0, others[2] + first[2], 0, others[2] + second[2], 0, others[2]],  # the only third turn
    ]
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


OTHERS = {"token_rewards", "values", "baseline_rewards", "function_rewards"}


@pytest.mark.parametrize(
    "name", [name for name, each in ESTIMATORS.items() if OTHERS.isdisjoint(each.parameters)]
)
def test_with_one_turn_each_credit_of_turns_is_the_estimator_itself(name):
    """All of the reward is the turn's, and the rest, which is 0 everywhere, gives nothing."""
    batch = with_turns([1.0, 0.0, 3.0, 2.0], [[1.0], [0.0], [3.0], [2.0]])
    advantages, plain = (
        AdvantageEstimator(AdvantageConfig(estimator=name, turn_credit=on)).estimate(batch).advantages
        for on in (True, False)
    )
    assert plain.any()
    np.testing.assert_allclose(advantages, plain, atol=1e-5)


@pytest.mark.parametrize("name", ["maxrl", "grpo", "dr_grpo"])
def test_rounding_is_no_rest_of_the_rewards_of_turns(name):
    """Turns that earned all of the reward leave 0: `maxrl` divided the rounding of their sum by its mean."""
    turns = np.array([[0.1, 0.2], [0.1, 0.7], [0.2, 0.1], [0.0, 0.0]])
    config = AdvantageConfig(estimator=name, turn_credit=True)
    advantages = AdvantageEstimator(config).estimate(with_turns(turns.sum(1), turns))
    for turn, place in enumerate((1, 3)):
        expected = ADVANTAGE_ESTIMATORS[name](turns[:, turn], np.full(4, 7))
        np.testing.assert_allclose(advantages.advantages[:, place], expected, atol=1e-6)


def test_a_faults_turns_are_compared_with_nothing():
    batch = with_turns([1.0, 0.0, -1.0], [[1.0], [0.0], [0.0]], faults=[2])
    advantages = AdvantageEstimator(TURN_CREDIT).estimate(batch).advantages[:, 1]
    np.testing.assert_allclose(advantages, np.array([1, 1, -2]) / 3 + [0.5, -0.5, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "why"),
    [("reinforce_pp", "last token anyway"), ("remax", "greedy completion"), ("gdpo", "of turns")],
)
def test_credit_of_turns_is_refused_where_it_means_nothing(name, why):
    with pytest.raises(ValueError, match=rf"turn_credit must be false .* '{name}'.*{why}"):
        AdvantageEstimator(AdvantageConfig(estimator=name, turn_credit=True))
