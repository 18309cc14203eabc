"""A logged number as it comes from a stage: a value, a count, and how two of them combine.

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
    """One logged number as (value, count) and how such pairs combine.

    `mean`: value is a sum over `count` items, reduced to value / count once, at the end. `sum`, `max`
    and `min` reduce `value` and ignore `count`. A mean over zero items is NaN, which sinks omit.
    """

    value: float
    count: float = 1.0
    reduction: Reduction = "mean"

    def combine(self, other: Metric) -> Metric:
        """This metric and `other`, of the same reduction, as one; raises ValueError otherwise."""
        if self.reduction != other.reduction:
            raise ValueError(
                f"metrics with reductions {self.reduction!r} and {other.reduction!r} do not combine"
            )
        # numpy's, which keep a NaN; Python's max and min may drop it.
        merge = {"max": np.max, "min": np.min}.get(self.reduction, np.sum)
        value = float(merge((self.value, other.value)))
        return Metric(value, self.count + other.count, self.reduction)

    def result(self) -> float:
        """The number to log."""
        if self.reduction != "mean":
            return self.value
        return self.value / self.count if self.count else float("nan")


Metrics = Mapping[str, Metric]


def describe(name: str, values: np.ndarray | Sequence[float], stats: Sequence[str]) -> dict[str, Metric]:
    """`name/mean`, `name/std`, `name/min`, `name/max` (those in `stats`) of the finite entries of `values`.

    Nothing where no entry is finite. `std` is the population standard deviation; it is no sum over items,
    so combining two gives their mean, not the deviation of the union.
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
