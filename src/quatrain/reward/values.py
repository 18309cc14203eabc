"""What reward functions return, as plain numbers, and what the stage keeps of one function.

Used where a function is called: in a worker process by `workers/worker.py`, or in the process of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

LONGEST_SHOWN_VALUE = 80
_NOT_LISTS = (str, bytes, bytearray, Mapping, Set)


class Scores(NamedTuple):
    """What one reward function or reward model says of B sequences."""

    values: Sequence[float] | np.ndarray
    """[B] raw rewards, NaN for an abstention."""
    counts: Mapping[str, int]
    """Numbers of sequences or tokens, by the last part of the metric `reward/<name>/…`."""
    seconds: float = 0.0
    """Seconds that it took."""


def plain_rewards(returned: Any) -> list[float | None] | str:
    """The returned values as a list of numbers, None for abstentions.

    If they are no list of numbers, a description of what the function must return and did: sets are refused,
    because their order is random, and generators, because they cannot be counted. An error that is raised by
    a method of a returned object is the function's error.
    """
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
