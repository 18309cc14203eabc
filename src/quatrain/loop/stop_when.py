"""`run.stop_when`: ends a run before `run.steps` when a metric of a training step reaches a bound.

Data flow: the numbers that a step logged, its evaluation's among them -> `StopWhen.reached` -> `train.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from quatrain.config.errors import listed, nearest_keys, shown
from quatrain.config.schema import Config
from quatrain.loop.evaluate import Evaluator
from quatrain.run.catalogue import CATALOGUE


class StopWhen:
    """The condition of one run; raises ValueError if the run never has the metric while it trains."""

    def __init__(self, config: Config, evaluator: Evaluator):
        self._condition = config.run.stop_when
        self._evaluated = evaluator.metric_names() if self._condition else []
        self._first = True
        metric = self._condition.get("metric")
        if metric in self._evaluated and not config.eval.every_steps:
            raise ValueError(
                f"run.stop_when needs evaluations between steps for a metric of theirs; got {metric} and "
                "eval.every_steps 0; set eval.every_steps"
            )

    def reached(self, numbers: Mapping[str, float]) -> str | None:
        """What the step with the metrics `numbers` has reached; None if it has not, or lacks the metric.

        Raises ValueError at the first step if there is no such metric.
        """
        if not self._condition:
            return None
        metric = str(self._condition["metric"])
        (bound, limit), *_ = ((name, each) for name, each in self._condition.items() if name != "metric")
        assert isinstance(limit, int | float), "checked in the configuration"
        first, self._first = self._first, False
        known = [*numbers, *self._evaluated]
        if first and metric not in known and metric not in CATALOGUE:
            raise ValueError(
                "run.stop_when must name a metric of a training step or of an evaluation, of which the "
                f"nearest is {nearest_keys(metric, known)[0]}; got {shown(metric)}; "
                f"they are {listed(sorted(known))}"
            )
        value = numbers.get(metric)
        if value is None or not (value >= limit if bound == "at_least" else value <= limit):
            return None
        return f"{metric} is {value:.4g}, {bound.replace('_', ' ')} {limit:g} (run.stop_when)"
