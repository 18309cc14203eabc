"""The metrics of evaluations, of batches with given verdicts; whole runs are in `e2e/test_evaluation.py`."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rollouts import make_rollouts

from quatrain.config.schema import Config
from quatrain.loop.evaluate import Evaluator, _greedy_metrics, _mean, _sampled_metrics
from quatrain.reward.functions import format
from quatrain.reward.scorer import RewardScorer
from quatrain.types.batches import RewardedBatch
from quatrain.types.metrics import Metric
from quatrain.types.rollouts import Sampling

NAN = float("nan")


def rewarded(rewards, group_ids=None, reasons=None, completions=None, names=("given",)):
    rows = len(rewards)
    rollouts = make_rollouts(completions or ["text"] * rows)
    rollouts = replace(
        rollouts,
        group_ids=np.array(group_ids if group_ids is not None else range(rows), np.int64),
        finish_reason=np.array(reasons or ["stop"] * rows),
    )
    values = np.array(rewards, np.float32)
    return RewardedBatch(rollouts, values, np.stack([values] * len(names)), names)


def results(metrics):
    return {name: metric.result() for name, metric in metrics.items()}


def test_of_sampled_completions_one_right_passes_its_prompt():
    """Group 1 has one right of three, group 2 none, group 3 one that was not judged and one half right."""
    right = np.array([0, 1, 0, 0, 0, NAN, 0.5])
    batch = rewarded([0.0] * 7, [1, 1, 1, 2, 2, 3, 3])
    metrics = results(_sampled_metrics(batch, right))
    assert metrics == {"mean_at_n": pytest.approx(1.5 / 6), "pass_at_n": pytest.approx(2 / 3)}
    assert _sampled_metrics(batch, None) == {}
    nobody = _sampled_metrics(rewarded([0.0] * 3, [1, 1, 2]), np.array([NAN, NAN, 1.0]))
    assert (nobody["pass_at_n"].value, nobody["pass_at_n"].count) == (1, 1)  # group 1 was not judged


def test_the_metrics_of_greedy_completions():
    batch = rewarded([1.0, NAN, 0.0, 2.0], reasons=["stop", "length", "stop", "stop"])
    right, strict = np.array([1.0, NAN, 0.0, 1.0]), np.array([0.0, NAN, 0.0, 1.0])
    assert results(_greedy_metrics(batch, right, strict)) == {
        "num_prompts": 4,
        "truncated_fraction": 0.25,
        "completion_length": 1.0,
        "reward": 1.0,  # the one without a reward is left out
        "reward/given": 1.0,
        "accuracy_lenient": pytest.approx(2 / 3),
        "accuracy_strict": pytest.approx(1 / 3),
    }


def test_a_mean_leaves_out_what_is_not_there():
    assert (_mean(np.array([1.0, NAN, 3.0])).value, _mean(np.array([1.0, NAN, 3.0])).count) == (4.0, 2)


@pytest.fixture
def evaluator():
    made = Evaluator.__new__(Evaluator)
    made._config = SimpleNamespace(
        accuracy="given", n=3, temperature=0.6, top_p=0.9, max_new_tokens=None, batch_size=4
    )
    made._accuracy, made._own, made._format = "given", None, format
    return made


def with_errors(batch, *failed):
    where = np.zeros(batch.rewards_per_function.shape, bool)
    where[:, [*failed]] = True
    return replace(batch, metrics={"reward/given/errors": Metric(len(failed), reduction="sum")}, failed=where)


def test_accuracy_is_bounded_and_without_what_failed(evaluator):
    """A failed call has the reward -1, which is no wrong answer; the same of a faulty episode is one, and
    so is -1 that the function gave to another completion of a batch with a failure."""
    values = [2.0, -3.0, 0.25, -1.0, -1.0, -1.0]
    batch = rewarded(values, reasons=["stop", "stop", "stop", "stop", "error", "stop"])
    right, errors = evaluator._right(with_errors(batch, 3))
    np.testing.assert_array_equal(right, [1, 0, 0.25, NAN, 0, 0])
    assert errors.value == 1
    right, _ = evaluator._right(with_errors(batch))
    np.testing.assert_array_equal(right, [1, 0, 0.25, 0, 0, 0])  # none failed: -1 was given


def test_strict_accuracy_is_right_and_in_the_format(evaluator):
    formed, plain = "<think>a</think>\n<answer>b</answer>", "b"
    batch = with_errors(rewarded([1.0, 1.0, 0.0], completions=[formed, plain, formed]))
    metrics = results(evaluator._judge(batch, greedy=True).metrics)
    assert metrics["accuracy_lenient"] == pytest.approx(2 / 3)
    assert metrics["accuracy_strict"] == pytest.approx(1 / 3)


def test_completions_are_greedy_and_then_sampled_as_the_section_says(evaluator):
    training = Sampling(n=8, max_new_tokens=20, temperature=1.2, top_p=0.5, top_k=7, min_p=0.1)
    greedy, sampled = evaluator._samplings(SimpleNamespace(sampling=training))
    assert greedy == replace(training, n=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    assert sampled == replace(greedy, n=3, temperature=0.6, top_p=0.9)
    evaluator._config.n, evaluator._config.max_new_tokens = 0, 5
    assert evaluator._samplings(SimpleNamespace(sampling=training)) == [replace(greedy, max_new_tokens=5)]


@pytest.mark.parametrize("rewards", [{"correct": 1.0}, {"environment": 1.0}])
@pytest.mark.parametrize(("failure", "accuracy"), [("abstain", [1, NAN]), ("penalise", [1, 0])])
def test_a_fault_of_an_agent_counts_alike_whether_accuracy_is_a_reward_or_not(
    monkeypatch, rewards, failure, accuracy
):
    """With `abstain`, an accuracy that is no reward counted it as a wrong answer."""
    config = Config(reward={"functions": rewards}, rollout={"agent": "a.py:a", "agent_failure": failure})
    scorer = RewardScorer(config.reward, episodes=True, faults_abstain=failure == "abstain")
    monkeypatch.setattr(Evaluator, "_load_sets", lambda *_: [])
    evaluator = Evaluator(config, None, scorer)
    of_episodes = {"messages": [[]] * 2, "environment_reward": [0.0] * 2, "turn_rewards": [[0.0]] * 2}
    rollouts = make_rollouts(["2", "2"], answer=["2", "2"], **of_episodes)
    rollouts = replace(rollouts, finish_reason=np.array(["stop", "error"]))
    np.testing.assert_array_equal(evaluator._right(scorer.score(rollouts))[0], accuracy)
    evaluator.close()
