"""Runs that end early: by `run.stop_when`, and by `on_step` in library use."""

import json

import pytest
from runs import small_run

from quatrain.config.load import load_config
from quatrain.loop.train import train
from quatrain.report.page_data import run_data
from quatrain.run.run_dir import checkpoint_steps

pytestmark = pytest.mark.usefixtures("narrow_model")


def _ends(summary, step):
    rows = [json.loads(line) for line in (summary.run / "metrics.jsonl").read_text().splitlines()]
    assert summary.steps == step
    assert max(row["step"] for row in rows) == step
    assert max(checkpoint_steps(summary.run)) == step
    assert (summary.run / "final" / "config.json").is_file()
    assert run_data(summary.run, ended=True)["state"] == "finished"
    assert "eval/accuracy_strict" in summary.after


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_on_step_sees_each_step_and_ends_the_run(tmp_path, staleness):
    seen = []

    def on_step(step, metrics):
        seen.append((step, "eval/accuracy_strict" in metrics, metrics["reward/mean"] >= 0))
        return step == 3

    options = (
        "sft.steps=0", "eval.before=false", "run.steps=6", f"rollout.max_staleness={staleness}",
        "update.mini_batch_size=2",
    )  # fmt: skip
    summary = train(small_run(tmp_path, "called", *options), on_step=on_step)
    assert seen == [(1, False, True), (2, True, True), (3, False, True)]
    _ends(summary, 3)
    assert "ends with step 3 of 6: on_step returned True" in (summary.run / "run.log").read_text()


@pytest.mark.parametrize("on_step", [3, lambda metrics: None, lambda step, metrics, more: None])
def test_what_cannot_be_called_after_a_step_is_refused_before_anything_is_computed(tmp_path, on_step):
    """Catches one that ended a run as a TypeError after its warm start and its first training step."""
    with pytest.raises(ValueError, match="on_step must be a function of the step and its metrics; got"):
        train(small_run(tmp_path, "refused"), on_step=on_step)
    assert not (tmp_path / "refused").exists()


def test_a_run_stops_when_a_metric_of_evaluations_reaches_its_bound_and_can_be_resumed(tmp_path):
    bound = "run.stop_when={metric: eval/accuracy_strict, at_most: 1}"
    options = ("sft.steps=0", "eval.before=false")
    summary = train(small_run(tmp_path, "bound", *options, bound))
    _ends(summary, 2)
    assert "at most 1 (run.stop_when)" in (summary.run / "run.log").read_text()
    _ends(train(small_run(tmp_path, "bound", *options), resume="bound"), 4)


@pytest.mark.parametrize(
    ("metric", "nearest"),
    [
        ("reward/meen", "reward/mean"),
        ("reward/corect/mean", "reward/correct/mean"),
        ("eval/words/reward", "eval/reward"),
        ("eval/accuracy_strct", "eval/accuracy_strict"),
    ],
)
def test_a_metric_that_the_run_never_logs_is_an_error_before_it_begins(tmp_path, metric, nearest):
    options = ("sft.steps=0", "eval.before=false", f"run.stop_when={{metric: {metric}, at_least: 1}}")
    with pytest.raises(ValueError, match=f"the nearest is {nearest}; got '{metric}'"):
        train(small_run(tmp_path, "unknown", *options))
    assert not (tmp_path / "unknown").exists()


def test_a_metric_of_evaluations_needs_them(tmp_path):
    options = ("eval.every_steps=0", "run.stop_when={metric: eval/accuracy_strict, at_least: 1}")
    with pytest.raises(ValueError, match=r"got eval/accuracy_strict and eval\.every_steps 0"):
        train(small_run(tmp_path, "none", *options))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "value",
    ["{metric: loss}", "{metric: loss, at_least: 1, at_most: 2}", "{metric: loss, above: 1}", "{at_most: 1}"],
)
def test_a_condition_has_a_metric_and_one_bound(value):
    with pytest.raises(
        ValueError, match=r"run.stop_when must be \{metric: NAME, at_least: NUMBER\}, \{metric"
    ):
        load_config(None, [f"run.stop_when={value}"], environ={})
