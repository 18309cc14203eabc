import numpy as np

from quatrain.run.catalogue import _entries, unknown_metrics
from quatrain.run.metrics import StageTimer
from quatrain.types.metrics import describe


def test_names_and_patterns_are_known():
    timer = StageTimer()
    timer.add("rollout", 1.0)
    names = {
        "loss",
        "reward/correct/errors",
        *describe("reward/tag_count", np.ones(2), ("mean", "std", "min", "max")),
        *describe("length/prompt", np.ones(2), ("mean", "max")),
        *timer.metrics(),
    }
    assert unknown_metrics(names) == []


def test_each_metric_is_described_once():
    names = [name for name, _ in _entries()]
    assert sorted({*names}) == sorted(names)


def test_other_names_are_told_sorted():
    names = ["update/kl2", "time/rollout", "reward//mean", "losses", "loss", "x_reward/mean"]
    assert unknown_metrics(names) == ["losses", "reward//mean", "time/rollout", "update/kl2", "x_reward/mean"]


def test_the_metrics_of_an_evaluations_episodes_are_known_by_those_of_training():
    names = ["eval/episode/turns/mean", "eval/gsm8k/episode/turns/mean", "eval/episode/tunrs/mean"]
    assert unknown_metrics(names) == ["eval/episode/tunrs/mean"]
