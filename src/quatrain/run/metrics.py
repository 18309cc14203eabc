"""Reduces metrics to numbers, and writes them to a file with one JSON object per training step.

Data flow: the `metrics` of all stages -> `reduce_metrics` -> `report.writer` writes the numbers -> `plot`
reads them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quatrain.types.metrics import Metric

LARGEST_STEP = 2**62
AVERAGED_STEPS = 10
"""Steps that `time/<stage>_s_mean10` averages over."""


def reduce_metrics(metrics: Mapping[str, Metric | float]) -> dict[str, float]:
    """The reduced value of each metric, by name; a mean over zero items is left out."""
    numbers = {}
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            numbers[name] = float(metric)
        elif metric.reduction != "mean" or metric.count:
            numbers[name] = float(metric.result())
    return numbers


def metrics_row(step: int, numbers: Mapping[str, float]) -> dict[str, Any]:
    """The JSON object of a step; a non-finite number becomes null, and its name is listed in `non_finite`."""
    row = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return _with_non_finite({"step": step, **row})


def _with_non_finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with `non_finite`, which lists the names of null values."""
    values = {name: value for name, value in row.items() if name != "non_finite"}
    non_finite = sorted(name for name, value in values.items() if value is None)
    return values | ({"non_finite": non_finite} if non_finite else {})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in order; lines that a crash or damage left without a row are skipped."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    rows = [_parse(line) for line in lines]
    return [row for row in rows if row is not None]


def row_of(path: Path, step: int) -> dict[str, Any]:
    """The row of a step in a metrics file; empty if it has none."""
    return next((row for row in reversed(read_metrics(path)) if row["step"] == step), {})


class MetricsFile:
    """`metrics.jsonl`: one JSON object per step, in step order; `write` returns once it is on disk."""

    def __init__(self, path: Path):
        self.path = path
        self._last: _LastRow | None = None
        """The last line; None until the first `write`."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append the row of `step`; a second write of the last step merges into its row.

        Raises ValueError for a step before the last one written: the file has one row per step, in order.
        After an OSError, such as that of a full disk, the row can be written again.
        """
        last = self._last or self._find_last()
        row = metrics_row(step, numbers)
        if last.row and step < last.row["step"]:
            raise ValueError(
                f"metrics must be written in the order of steps: got step {step} after step "
                f"{last.row['step']}; on resume, rewind the metrics to the restored step first"
            )
        offset = last.end
        if last.row and step == last.row["step"]:
            row, offset = _with_non_finite({**last.row, **row}), last.begin
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.seek(offset)
            file.write(line)
            file.truncate()
        self._last = _LastRow(offset, offset + len(line), row)

    def rewind(self, step: int) -> int:
        """Move the rows after `step`, and any incomplete line, to `metrics.discarded.jsonl`.

        Returns the number of moved lines. A run resumed from `step` can then write its rows after `step`.
        """
        kept: list[bytes] = []
        moved: list[bytes] = []
        for line in self._lines():
            row = _parse(line)
            (kept if row is not None and row["step"] <= step else moved).append(line)
        if moved:
            with self.path.with_suffix(".discarded.jsonl").open("ab") as file:
                file.writelines(line.rstrip(b"\n") + b"\n" for line in moved)
            draft = self.path.with_suffix(".draft")
            draft.write_bytes(b"".join(kept))
            os.replace(draft, self.path)
        self._last = None
        return len(moved)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []

    def _find_last(self) -> _LastRow:
        lines = self._lines()
        if not lines:
            return _LastRow(0, 0, None)
        row = _parse(lines[-1])
        if row is None:
            raise ValueError(
                f"every line of {self.path} must be one JSON object; its last line is incomplete; resume the "
                "run, which rewinds the metrics to the restored step"
            )
        end = sum(len(line) for line in lines)
        return _LastRow(end - len(lines[-1]), end, row)


class _LastRow(NamedTuple):
    """The last line of a metrics file: its first byte, the byte after it, and its row."""

    begin: int
    end: int
    row: dict[str, Any] | None


def _parse(line: str | bytes) -> dict[str, Any] | None:
    """The row on a line, or None if a crash or damage left no row there."""
    if isinstance(line, bytes) and not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and _is_row(row) else None


def is_finite(value: float) -> bool:
    """Whether a number is finite as a float, which a whole number of hundreds of digits is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_row(row: Mapping[str, Any]) -> bool:
    """Whether a row has a step, and numbers, as `metrics_row` makes them."""
    numbers = all(
        value is None or (isinstance(value, int | float) and is_finite(value))
        for name, value in row.items()
        if name != "non_finite"
    )
    return numbers and type(row.get("step")) is int and 0 <= row["step"] <= LARGEST_STEP


class StageTimer:
    """Measures the seconds of each stage of a step, and their mean over the last 10 steps.

    ```python
    with timer.stage("rollout"):
        rollouts = engine.generate(prompts)
    metrics = timer.metrics()   # {"time/rollout_s": ..., "time/rollout_s_mean10": ...}
    ```
    Stages may nest (`step` around all others). A stage entered twice in a step counts both times.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=AVERAGED_STEPS))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`, even if it raises an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds`, measured by the caller, to stage `name`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Seconds of stage `name` so far in this step."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, Metric]:
        """`time/<stage>_s` and `time/<stage>_s_mean10` of the stages timed since the last call."""
        metrics = {}
        for name, seconds in self._seconds.items():
            history = self._history[name]
            history.append(seconds)
            metrics[f"time/{name}_s"] = Metric(seconds)
            metrics[f"time/{name}_s_mean{AVERAGED_STEPS}"] = Metric(sum(history), len(history))
        self._seconds = {}
        return metrics
