"""What reward functions return, as plain numbers, and what the stage keeps of one function.

Used where a function is called: in a worker process by `workers/worker_script.py`, or in the process of the
run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

LONGEST_SHOWN_VALUE = 80
_NOT_LISTS = (str, bytes, bytearray, Mapping, Set)


_METRIC = re.compile(r"[\w.@-]+(?:/[\w.@-]+)*")
_TAKEN = frozenset(("mean", "std", "min", "max", "errors", "abstained", "seconds", "unlogged"))


class Log:
    """What a reward function logs in one call, beside its rewards."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}
        """Sum and number of the values of each metric."""
        self.columns: dict[str, list[Any]] = {}
        """A value for each sample of the call."""
        self.unlogged: list[str] = []
        """Why a value is in neither."""

    def takes(self, name: Any, value: Any) -> bool:
        """Adds a value to a metric, if it is a finite number and the name is that of a metric."""
        if not (isinstance(name, str) and _METRIC.fullmatch(name)) or _TAKEN & set(name.split("/")):
            return False
        try:
            number = _number(value)
        except Exception:  # of the value's own __float__
            return False
        if number is None or not math.isfinite(number):
            return False
        total = self.metrics.setdefault(name, [0.0, 0])
        total[0] += number
        total[1] += 1
        return True

    def log_metric(self, name: str, value: float) -> None:
        """TRL's argument: adds a value of this call to a metric, the mean over values."""
        if not self.takes(name, value):
            self.unlogged.append(f"log_metric({_shown(name)}, {_shown(value)})")

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's argument: adds a column to the samples, one value for each."""
        self.columns.setdefault(str(column), []).extend(map(plain_json, values))

    def with_(self, returned: Any) -> Logged:
        """What the function returned, with what it logged."""
        return Logged(returned, vars(self))


class Logged(NamedTuple):
    """What a reward function returned, and the fields of its `Log`."""

    returned: Any
    log: Mapping[str, Any]


def plain_json(value: Any) -> Any:
    """`value` as JSON can hold it; what JSON has no form for, such as a date, becomes its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    return str(value)


class FunctionScores(NamedTuple):
    """What one reward function or reward model says of B sequences."""

    values: Sequence[float] | np.ndarray
    """[B] raw rewards, NaN for an abstention."""
    counts: Mapping[str, int]
    """Numbers of sequences or tokens, by the last part of the metric `reward/<name>/…`."""
    seconds: float = 0.0
    """Seconds that it took."""
    metrics: Mapping[str, Sequence[float]] = MappingProxyType({})
    """Sum and number of the values that it logged, by the last part of the metric `reward/<name>/…`."""
    columns: Mapping[str, Sequence[Any]] = MappingProxyType({})
    """[B] each: what it logged for samples."""


def plain_rewards(returned: Any) -> list[float | None] | str | dict[str, Any]:
    """The returned values as a list of numbers, None for abstentions; of `Logged`, {"values": …, "log": …}.

    If they are no list of numbers, a description of what the function must return and did: sets are refused,
    because their order is random, and generators, because they cannot be counted. An error that is raised by
    a method of a returned object is the function's error.
    """
    if isinstance(returned, Logged):
        return {"values": plain_rewards(returned.returned), "log": returned.log}
    try:
        if isinstance(returned, _NOT_LISTS) or not hasattr(returned, "__len__"):
            raise TypeError
        values = iter(returned)
    except TypeError:
        return f"a list with one number per completion; it returned {type(returned).__name__}"
    numbers: list[float | None] = []
    for value in values:
        try:
            numbers.append(_number(value))
        except (TypeError, ValueError, OverflowError):
            return f"numbers, or None to abstain; it returned a value {_shown(value)}"
    return numbers


def _number(value: Any) -> float | None:
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError
    return None if value is None else float(value)


def _shown(value: Any) -> str:
    name = type(value).__name__
    try:
        text = repr(value)
    except Exception:  # of the value's own __repr__
        return name
    # Whole or not at all: part of a secret cannot be redacted.
    return f"{name} {text}" if len(text) <= LONGEST_SHOWN_VALUE else f"{name} of {len(text)} characters"
