"""The batch types: what each refuses, in which words, and how metrics combine."""

import dataclasses

import numpy as np
import pytest

from quatrain.types.batches import AGENT_ROLE, AdvantagedBatch, Prompt, RewardedBatch, RolloutBatch
from quatrain.types.metrics import Metric, describe

ATTENTION = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
COMPLETION = np.array([[0, 0, 1, 1], [0, 1, 0, 0]], bool)


def fields():
    return {
        "input_ids": np.array([[5, 6, 7, 8], [5, 9, 4, 0]], np.int32),
        "attention_mask": ATTENTION.copy(),
        "completion_mask": COMPLETION.copy(),
        "rollout_logprobs": np.where(COMPLETION, -0.5, 0).astype(np.float32),
        "policy_version": np.where(COMPLETION, 3, -1).astype(np.int32),
        "finish_reason": np.array(["length", "stop"]),
        "group_ids": np.array([40, 40], np.int64),
        "prompts": ("2+2?", "2+2?"),
        "completions": ("four", "4"),
        "columns": {"answer": ("4", "4")},
    }


def with_value(name, index, value):
    array = fields()[name]
    array[index] = value
    return {name: array}


def rollouts(**changes):
    return RolloutBatch(**fields() | changes)


def test_lengths():
    batch = rollouts()
    assert len(batch) == 2
    assert batch.completion_lengths.tolist() == [2, 1]
    assert batch.lengths.tolist() == [4, 3]


def test_batches_are_read_only():
    batch = rollouts()
    for name in ("input_ids", "completion_mask", "rollout_logprobs", "finish_reason", "group_ids"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(batch, name)[0] = getattr(batch, name)[1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.prompts = ()


def test_batches_compare_by_identity():
    batch = rollouts()
    assert batch == batch
    assert batch != rollouts()
    assert len({batch, batch}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [[1]]}, "input_ids: expected a numpy array; got list"),
        ({"input_ids": np.zeros(4, np.int32)}, r"input_ids: expected rank 2 \[B, T\]; got shape \(4,\)"),
        ({"input_ids": np.zeros((2, 4), np.int64)}, "input_ids: expected dtype int32; got dtype int64"),
        (
            {"attention_mask": ATTENTION[:, :3]},
            r"attention_mask: expected shape \(2, 4\); got shape \(2, 3\)",
        ),
        ({"completion_mask": COMPLETION * 1}, "completion_mask: expected dtype bool; got dtype int64"),
        ({"group_ids": np.zeros((2, 1), np.int64)}, r"group_ids: expected shape \(2,\)"),
        ({"finish_reason": ("stop", "stop")}, "finish_reason: expected a numpy array; got tuple"),
        ({"finish_reason": np.array(["stop"])}, r"finish_reason: expected shape \(2,\)"),
        ({"finish_reason": np.array(["stop", "eos"])}, r"one of \('stop', 'length', .*\); got \['eos'\]"),
        ({"prompts": ("2+2?",)}, "prompts: expected 2 items, one per sequence; got 1"),
        ({"completions": ("a", "b", "c")}, "completions: expected 2 items, one per sequence; got 3"),
        ({"columns": {"answer": ("4",)}}, r"columns\['answer'\]: expected 2 items, one per sequence; got 1"),
        ({"prompts": ("2+2?", "1+3?")}, "one prompt per group; got two different prompts in group 40"),
        (
            with_value("attention_mask", (0, 1), False),
            "attention_mask: expected right padding only; got a gap",
        ),
        (with_value("attention_mask", 1, False), "attention_mask: expected a prompt of at least one token"),
        (
            with_value("completion_mask", (1, 3), True),
            "True only where attention_mask is; got True on padding",
        ),
        (with_value("completion_mask", (1, 0), True), "completion_mask: expected False on the first token"),
        (
            with_value("rollout_logprobs", (0, 0), -1.0),
            "rollout_logprobs: expected 0 outside completion_mask",
        ),
        (with_value("rollout_logprobs", (0, 2), np.nan), "expected finite values; got 1 of 8 not so"),
        (with_value("rollout_logprobs", (0, 2), -np.inf), "rollout_logprobs: expected finite values"),
        (with_value("policy_version", (0, 0), 3), "policy_version: expected -1 outside completion_mask"),
        (with_value("policy_version", (0, 2), -1), "policy_version: expected >= 0 on completions; got -1"),
        ({"episode_ids": np.array([1, 1], np.int32)}, "episode_ids: expected dtype int64; got dtype int32"),
        ({"episode_ids": np.array([1, 1])}, "episode_ids: expected one of finish_reason for the rows"),
        (
            {"episode_ids": np.array([1, 1]), "group_ids": np.array([4, 5])},
            "episode_ids: expected one of group_ids for the rows of an episode; got two in one episode",
        ),
        (
            {"baseline": RolloutBatch(**fields())},
            "baseline: expected one completion for each group and role; got 2 completions",
        ),
    ],
)
def test_a_rollout_batch_refuses(changes, message):
    with pytest.raises(ValueError, match=f"rollout stage, field .*{message}"):
        rollouts(**changes)


def test_a_baseline_may_be_an_episode_of_several_rows_and_has_each_role_once():
    stop = {"finish_reason": np.array(["stop", "stop"])}
    assert rollouts(baseline=rollouts(episode_ids=np.array([9, 9]), **stop)).baseline is not None
    played = {"episode_ids": np.array([0, 1]), "columns": {AGENT_ROLE: ("a", "b")}}
    assert rollouts(baseline=rollouts(**played)).baseline is not None
    with pytest.raises(ValueError, match="one completion for each group and role; got 2 completions"):
        rollouts(baseline=rollouts(**played | {"columns": {AGENT_ROLE: ("a", "a")}}))


def test_episodes_of_several_rows():
    assert rollouts().episodes.of_row.tolist() == rollouts().episodes.first_rows.tolist() == [0, 1]
    same = rollouts(episode_ids=np.array([9, 9]), finish_reason=np.array(["stop", "stop"]))
    assert same.episodes.of_row.tolist() == [0, 0]
    assert same.episodes.first_rows.tolist() == [0]
    assert same.episodes.total(same.completion_lengths).tolist() == [3]
    with pytest.raises(ValueError, match="rewards: expected one reward for the rows of an episode; got two"):
        RewardedBatch(same, np.float32([1, 2]), np.float32([[1, 2]]), ("r",))


def test_groups_need_not_be_neighbours_and_may_share_a_prompt():
    shared = {"role": "user", "content": "hi"}
    assert len(rollouts(group_ids=np.array([9, -3], np.int64), prompts=((shared,), (dict(shared),)))) == 2


def test_an_empty_batch():
    batch = RolloutBatch(
        **{name: value[:0] for name, value in fields().items() if name != "columns"}, columns={"answer": ()}
    )
    assert len(batch) == 0


def rewarded(**changes):
    raw = np.array([[1.0, np.nan], [0.5, np.nan]], np.float32)
    values = {
        "rewards": np.array([1.5, np.nan], np.float32),
        "rewards_per_function": raw,
        "function_names": ("a", "b"),
    }
    return RewardedBatch(rollouts(), **values | changes)


def test_abstentions_are_nan():
    assert np.isnan(rewarded().rewards).tolist() == [False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.ones(3, np.float32)}, r"rewards: expected shape \(2,\); got shape \(3,\)"),
        ({"rewards": np.ones(2)}, "rewards: expected dtype float32; got dtype float64"),
        (
            {"rewards": np.array([np.inf, np.nan], np.float32)},
            "rewards: expected no infinite value; got 1 of 2",
        ),
        ({"rewards": np.ones(2, np.float32)}, "rewards: expected NaN exactly where every function abstained"),
        ({"values": np.ones((2, 4), np.float32)}, "values: expected 0 outside completion_mask; got another"),
        ({"values": np.zeros((2, 4))}, "values: expected dtype float32; got dtype float64"),
        (
            {"token_rewards": np.where(COMPLETION, np.nan, 0).astype(np.float32)},
            "token_rewards: expected finite values; got 3 of 8 not so",
        ),
        ({"function_names": ("a",)}, r"rewards_per_function: expected shape \(1, 2\); got shape \(2, 2\)"),
    ],
)
def test_a_rewarded_batch_refuses(changes, message):
    with pytest.raises(ValueError, match=f"reward stage, field {message}"):
        rewarded(**changes)


def test_an_advantaged_batch_reaches_down_to_its_rollouts():
    batch = AdvantagedBatch(rewarded(), np.where(COMPLETION, 2.0, 0).astype(np.float32))
    assert batch.rollouts is batch.rewarded.rollouts


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        (np.zeros(2, np.float32), r"expected shape \(2, 4\); got shape \(2,\)"),
        (np.ones((2, 4), np.float32), "expected 0 outside completion_mask; got another value there"),
        (np.where(COMPLETION, np.nan, 0).astype(np.float32), "expected finite values; got 3 of 8 not so"),
    ],
)
def test_an_advantaged_batch_refuses(advantages, message):
    with pytest.raises(ValueError, match=f"advantage stage, field advantages: {message}"):
        AdvantagedBatch(rewarded(), advantages)
    zeros = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=f"advantage stage, field returns: {message}"):
        AdvantagedBatch(rewarded(), zeros, returns=advantages)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(0, np.int32), "at least one token; got none"),
        (np.zeros(3, np.int64), "dtype int32; got dtype int64"),
        (np.zeros((1, 3), np.int32), r"shape \(1,\); got shape \(1, 3\)"),
        ([1, 2], "a numpy array; got list"),
    ],
)
def test_a_prompt_refuses(ids, message):
    with pytest.raises(ValueError, match=f"data stage, field input_ids: expected {message}"):
        Prompt(0, ids, "2+2?")


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.0), ("sum", 8.0), ("max", 6.0), ("min", 2.0)])
def test_metrics_combine(reduction, expected):
    combined = Metric(2.0, 1, reduction).combine(Metric(6.0, 3, reduction))
    assert combined.result() == expected
    assert combined.count == 4


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_a_nan_is_never_lost(reduction):
    good, bad = Metric(1.0, 1, reduction), Metric(np.nan, 1, reduction)
    assert np.isnan([good.combine(bad).result(), bad.combine(good).result()]).all()


def test_metrics_of_different_reductions_do_not_combine():
    with pytest.raises(ValueError, match="same reduction can be combined; got 'mean' and 'max'"):
        Metric(1.0).combine(Metric(1.0, reduction="max"))


def test_a_mean_over_nothing_is_nan():
    assert np.isnan(Metric(0.0, 0).result())


def test_describe_leaves_out_what_is_not_finite():
    metrics = describe("reward", [1.0, np.nan, 3.0, np.inf], ("mean", "std", "min", "max"))
    assert {name: metric.result() for name, metric in metrics.items()} == {
        "reward/mean": 2.0,
        "reward/std": 1.0,
        "reward/min": 1.0,
        "reward/max": 3.0,
    }
    assert metrics["reward/mean"] == Metric(4.0, 2)
    assert describe("reward", [np.nan], ("mean",)) == {}
