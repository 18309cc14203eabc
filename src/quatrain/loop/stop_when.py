"""`run.stop_when`: ends a run early when a metric reaches a bound, or has not become better for some time.

Data flow: the numbers that a step logged, its evaluation's among them -> `StopWhen.reached` -> `train.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from quatrain.config.errors import of_which_nearest, shown
from quatrain.config.schema import Config
from quatrain.config.sections.whole_run import smaller_is_better
from quatrain.config.tasks import EVALUATED, SECTIONS
from quatrain.run.catalogue import CATALOGUE, pattern_of

PATIENCE = "patience"
WAITS = 50
"""Steps without the metric after which the run says that it waits for it."""
logger = logging.getLogger(__name__)


class StopWhen:
    """The condition of one run, whose evaluations have the metrics `evaluated`, and its reward `functions`.

    Raises ValueError if the run never has the metric while it trains.
    """

    def __init__(self, config: Config, evaluated: Sequence[str], functions: Sequence[str]):
        self._condition, self._evaluated = config.run.stop_when, frozenset(evaluated)
        self._waited: float = 0
        self._best: float | None = None
        self._without_better = 0
        if not self._condition:
            return
        metric = str(self._condition["metric"])
        others = {"eval", *SECTIONS} - {config.run.task}
        listed = [name for name in CATALOGUE if name.partition("/")[0] not in others]
        trained = [
            name.replace("<name>", function) for name in listed for function in functions or ("<name>",)
        ]
        if metric in evaluated and not config.eval.every_steps:
            raise ValueError(
                f"run.stop_when needs evaluations between steps for a metric of theirs; got {metric} and "
                "eval.every_steps 0; set eval.every_steps"
            )
        pattern = "" if metric.partition("/")[0] in others else pattern_of(metric) or ""
        if metric not in (*evaluated, *trained) and (not pattern or "<name>" in pattern):
            known = [*dict.fromkeys([*evaluated, *trained])]
            asked = metric.startswith("eval/") and not evaluated
            remedy = f"; there are no evaluations: set {EVALUATED[config.run.task]}" if asked else ""
            raise ValueError(
                "run.stop_when must name a metric of a training step or of the run's evaluations "
                f"(docs/metrics.md){of_which_nearest(metric, known)}; got {shown(metric)}{remedy}"
            )

    def reached(self, numbers: Mapping[str, float]) -> str | None:
        """What the step with the metrics `numbers` has reached; None if it has not, or lacks the metric."""
        if not self._condition:
            return None
        metric = str(self._condition["metric"])
        (bound, limit), *_ = ((name, each) for name, each in self._condition.items() if name != "metric")
        assert isinstance(limit, int | float), "checked in the configuration"
        value = numbers.get(metric)
        if value is None:
            self._waited += 1
            if self._waited == WAITS:
                logger.warning("run.stop_when: none of %d steps has logged %s", WAITS, metric)
            return None
        self._waited = -math.inf
        if bound == PATIENCE:
            return self._out_of_patience(metric, value, int(limit))
        if not (value >= limit if bound == "at_least" else value <= limit):
            return None
        return f"{metric} is {value:.4g}, {bound.replace('_', ' ')} {limit:g} (run.stop_when)"

    def _out_of_patience(self, metric: str, value: float, patience: int) -> str | None:
        sign = -1 if smaller_is_better(metric) else 1
        # A value that is not finite is no better one.
        if math.isfinite(value) and (self._best is None or sign * value > sign * self._best):
            self._best, self._without_better = value, 0
            return None
        self._without_better += 1
        if self._without_better < patience:
            return None
        return (
            f"{metric} is {value:.4g}, the {self._without_better}. value in a row that is not better than "
            f"{self._best if self._best is None else format(self._best, '.4g')} (run.stop_when)"
        )

    def to_save(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run ends with the same step."""
        values = {"best": self._best, "without_better": self._without_better}
        return {**values, "metric": self._condition.get("metric")}

    def restore(self, saved: Mapping[str, Any], *, same_evaluations: bool = True) -> None:
        """Goes on from what a checkpoint kept of the same metric, if that has not changed its meaning.

        Without `same_evaluations` those before the checkpoint were of another kind than those to come.
        """
        metric = self._condition.get("metric")
        # A checkpoint of an earlier version does not say of which metric its values are.
        same = saved.get("metric", metric) == metric
        if same and (same_evaluations or metric not in self._evaluated):
            self._best, self._without_better = saved["best"], saved["without_better"]
