"""The type of a logged metric: a value, a count, and a rule for combining two metrics.

Data flow: every stage -> the `metrics` of its batch -> `report`, which reduces each to one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """A metric as (value, count), and the reduction that combines such pairs.

    `mean`: `value` is a sum over `count` items; it is divided by `count` once, by `result`. `sum`, `max` and
    `min` combine `value` and ignore `count`. A mean over zero items is NaN and is not logged.
    """

    value: float
    count: float = 1.0
    reduction: Reduction = "mean"

    def combine(self, other: Metric) -> Metric:
        """This metric combined with `other`; raises ValueError if their reductions differ."""
        if self.reduction != other.reduction:
            raise ValueError(
                "only metrics with the same reduction can be combined; got "
                f"{self.reduction!r} and {other.reduction!r}"
            )
        # numpy's functions propagate NaN; Python's max and min may not.
        merge = {"max": np.max, "min": np.min}.get(self.reduction, np.sum)
        value = float(merge((self.value, other.value)))
        return Metric(value, self.count + other.count, self.reduction)

    def result(self) -> float:
        """The number to log."""
        if self.reduction != "mean":
            return self.value
        return self.value / self.count if self.count else float("nan")


Metrics = Mapping[str, Metric]


def combine(*parts: Metrics) -> dict[str, Metric]:
    """All metrics of `parts`, those of the same name combined into one."""
    combined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            combined[name] = combined[name].combine(metric) if name in combined else metric
    return combined


def mean_of_rows(name: str, sums: np.ndarray, counts: np.ndarray, sources: np.ndarray) -> dict[str, Metric]:
    """The mean of rows with these sums over so many items, [B] each, and as `name/<source>` that of each
    source [B] with a name.

    Whatever other sources the rows have: parts of a whole may be combined.
    """
    found = {name: np.ones(len(sums), bool)}
    found |= {f"{name}/{source}": sources == source for source in np.unique(sources) if source}
    return {each: Metric(float(sums[own].sum()), float(counts[own].sum())) for each, own in found.items()}


def describe(name: str, values: np.ndarray | Sequence[float], stats: Sequence[str]) -> dict[str, Metric]:
    """`name/mean`, `name/std`, `name/min`, `name/max` (those in `stats`) of the finite entries of `values`.

    Empty if no entry is finite. `std` is the population standard deviation; combining two of them gives their
    mean, not the standard deviation of the union.
    """
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return {}
    known = {
        "mean": lambda: Metric(float(finite.sum()), finite.size),
        "std": lambda: Metric(float(finite.std())),
        "min": lambda: Metric(float(finite.min()), reduction="min"),
        "max": lambda: Metric(float(finite.max()), reduction="max"),
    }
    return {f"{name}/{stat}": known[stat]() for stat in stats}
