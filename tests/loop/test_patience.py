"""When the patience of `run.stop_when` ends a run; runs that end so are in `e2e/`."""

import math

import pytest

from quatrain.config.schema import Config
from quatrain.loop.stop_when import StopWhen


def _patient(metric, patience):
    task = metric.partition("/")[0].replace("eval", "sft")
    condition = {"stop_when": {"metric": metric, "patience": patience}}
    config = Config(run={"task": task, **condition}, **{task: {"data": "rows.jsonl"}})
    return StopWhen(config, ["eval/loss", "eval/loss/easy", "eval/reward"], ())


def _ended(stop_when, metric, values):
    """The place of the value with which the run ends; None: it does not."""
    reached = [stop_when.reached({} if value is None else {metric: value}) for value in values]
    return next((place for place, text in enumerate(reached) if text), None)


@pytest.mark.parametrize(
    ("metric", "values", "ends"),
    [
        ("eval/loss", [3.0, 2.0, 2.0, 2.5], 3),  # an equal value is not better, a smaller one is
        ("eval/loss", [3.0, 3.5, 2.9, 3.0, 2.8], None),  # a better one begins the count anew
        ("eval/loss", [3.0, 3.5, None, None, None, 3.5], 5),  # steps without an evaluation do not count
        ("eval/loss", [math.nan, 3.0, math.inf, math.nan], 3),
        ("eval/reward", [0.1, 0.2, 0.2, 0.1], 3),  # a larger one is better
        ("eval/reward", [0.3, 0.2, 0.1], 2),
        ("eval/loss/easy", [3.0, 2.0, 1.0, 0.5], None),
        ("sft/loss", [3.0, 2.0, 1.0, 0.5], None),  # of training steps too, a smaller loss is better
        ("dpo/accuracy", [0.3, 0.2, 0.1], 2),
    ],
)
def test_a_run_ends_with_the_second_evaluation_in_a_row_that_is_not_better(metric, values, ends):
    assert _ended(_patient(metric, 2), metric, values) == ends


def test_a_metric_of_training_is_named_where_it_is_nearest():
    """Without reward functions too; the loss of another command, which is never logged, is refused."""
    with pytest.raises(ValueError, match="of which the nearest is sft/loss; got 'sft/los'"):
        _patient("sft/los", 2)
    condition = {"stop_when": {"metric": "sft/loss", "patience": 2}}
    with pytest.raises(ValueError, match=r"must name a metric .* got 'sft/loss'"):
        StopWhen(Config(run={"task": "dpo", **condition}, dpo={"data": "a"}), [], ())


def test_a_run_without_evaluations_is_told_which_key_names_them():
    condition = {"stop_when": {"metric": "eval/loss", "patience": 2}}
    for task, key in (("sft", "set sft.eval or data.eval"), ("rm", "set rm.eval")):
        with pytest.raises(ValueError, match=f"got 'eval/loss'; there are no evaluations: {key}"):
            StopWhen(Config(run={"task": task, **condition}, **{task: {"data": "a"}}), [], ())


def test_a_resumed_run_goes_on_with_the_patience_that_is_left():
    first, resumed = _patient("eval/loss", 2), _patient("eval/loss", 2)
    assert _ended(first, "eval/loss", [2.0, 2.5]) is None
    resumed.restore(first.to_save())
    assert "eval/loss is 2.4" in resumed.reached({"eval/loss": 2.4})
    assert resumed.reached({"eval/loss": 1.9}) is None


@pytest.mark.parametrize(
    ("metric", "same_evaluations", "ends"),
    [("eval/loss", True, 0), ("eval/loss", False, 2), ("sft/loss", False, 0), ("eval/loss/easy", True, 2)],
)
def test_patience_begins_anew_for_values_that_cannot_be_compared(metric, same_evaluations, ends):
    """Those of another metric, or of other evaluations, were held against the best of the old ones."""
    first, resumed = _patient("eval/loss" if "easy" in metric else metric, 2), _patient(metric, 2)
    assert _ended(first, "eval/loss" if "easy" in metric else metric, [0.1, 0.2]) is None
    resumed.restore(first.to_save(), same_evaluations=same_evaluations)
    assert _ended(resumed, metric, [2.0, 2.5, 2.4]) == ends
