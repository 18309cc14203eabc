import json
import math

import pytest

from quatrain.run import metrics as module
from quatrain.run.metrics import MetricsFile, StageTimer, metrics_row, read_metrics, reduce_metrics
from quatrain.types.metrics import Metric


def test_each_metric_is_reduced_once_and_empty_means_are_left_out():
    metrics = {
        "mean": Metric(6.0, 4),
        "sum": Metric(6.0, 4, "sum"),
        "max": Metric(3.0, 0, "max"),
        "empty": Metric(0.0, 0),
        "plain": 2,
    }
    assert reduce_metrics(metrics) == {"mean": 1.5, "sum": 6.0, "max": 3.0, "plain": 2.0}


def test_non_finite_numbers_are_null_and_named():
    numbers = {"loss": math.nan, "reward": 1.0, "ratio": math.inf}
    assert metrics_row(3, numbers) == {
        "step": 3,
        "loss": None,
        "reward": 1.0,
        "ratio": None,
        "non_finite": ["loss", "ratio"],
    }
    assert "non_finite" not in metrics_row(3, {"reward": 1.0})


def test_each_line_is_on_disk_when_write_returns(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(3):
        file.write(step, {"loss": 0.1 * step})
        text = (tmp_path / "metrics.jsonl").read_text()
        assert text.count("\n") == step + 1
        assert json.loads(text.splitlines()[-1]) == {"step": step, "loss": 0.1 * step}


def test_a_step_written_twice_has_one_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(1, {"loss": 123456.789})
    file.write(2, {"loss": math.nan, "long": 0.123456789})
    file.write(2, {"loss": 1.0, "eval/reward": math.inf})
    assert read_metrics(path)[1] == {
        "step": 2,
        "loss": 1.0,
        "long": 0.123456789,
        "eval/reward": None,
        "non_finite": ["eval/reward"],
    }
    MetricsFile(path).write(2, {"eval/reward": 2})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert read_metrics(path)[1] == {"step": 2, "loss": 1.0, "long": 0.123456789, "eval/reward": 2.0}


def test_steps_do_not_go_back(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(5, {})
    with pytest.raises(ValueError, match="got step 4 after step 5"):
        file.write(4, {})


def test_rewind_moves_later_and_broken_lines_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(5):
        file.write(step, {"loss": float(step)})
    with path.open("a") as handle:
        handle.write('{"step": 5, "lo')
    with pytest.raises(ValueError, match="its last line is incomplete"):
        MetricsFile(path).write(6, {})
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    assert MetricsFile(path).rewind(2) == 3
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
    discarded = (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in discarded[:2]] == [3, 4]
    assert discarded[2] == '{"step": 5, "lo'
    assert MetricsFile(path).rewind(2) == 0
    MetricsFile(path).write(3, {"loss": 9.0})
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    assert MetricsFile(tmp_path / "none.jsonl").rewind(0) == 0


def test_stage_times_add_up_and_average_over_ten_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    timer = StageTimer()
    for step in range(12):
        with timer.stage("step"):
            for _ in range(2):
                with timer.stage("reward"):
                    now[0] += step
            timer.add("rollout", 0.5)
        assert timer.seconds("reward") == 2 * step
        metrics = reduce_metrics(timer.metrics())
    assert metrics == {
        "time/reward_s": 22.0,
        "time/reward_s_mean10": 13.0,
        "time/rollout_s": 0.5,
        "time/rollout_s_mean10": 0.5,
        "time/step_s": 22.0,
        "time/step_s_mean10": 13.0,
    }
    assert timer.metrics() == {}


def test_a_stage_that_raises_is_timed():
    timer = StageTimer()
    with pytest.raises(RuntimeError), timer.stage("update"):
        raise RuntimeError
    assert timer.metrics()["time/update_s"].value >= 0
