"""What each test file costs: seconds, seconds of processors, and seconds of compiling, in `durations.json`.

`make durations` writes the file; the order of the files in every run comes from it, the longest first.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from quatrain.parallel.compilations import compile_seconds

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"
FIGURES = ("seconds", "cpu_seconds", "compile_seconds")
"""On the wall; of processors, with those of child processes that have ended; and of those, compiling in the
test's own process."""


def file_of(nodeid: str) -> str:
    """The path of a test's file below `tests/`."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def read_durations() -> dict[str, dict[str, float]]:
    """The figures of each file, in the order of the file."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}


def measure(config: pytest.Config, record: bool) -> None:
    """Measures what each file costs, and with `record` writes it at the end of the run."""
    config.pluginmanager.register(_Clock())
    if record and not hasattr(config, "workerinput"):  # xdist's workers report to the one that has none
        config.pluginmanager.register(_Recorder())


class _Clock:
    """Gives each report what its phase took of processors and of compiling; xdist carries it."""

    def __init__(self) -> None:
        self._at = (0.0, 0.0)

    def pytest_collection_finish(self) -> None:
        self._at = self._now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        now = self._now()
        report.user_properties.append(("cost", [after - before for before, after in zip(self._at, now)]))
        self._at = now
        return report

    def _now(self) -> tuple[float, float]:
        times = os.times()
        return sum(times[:4]), compile_seconds()


class _Recorder:
    """Adds up the reports of each file, and keeps the figures of files that were not run."""

    def __init__(self) -> None:
        self._figures: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A report has the costs of its test's earlier phases too; the last is its own.
        cost = [value for name, value in report.user_properties if name == "cost"][-1]
        figures = self._figures[file_of(report.nodeid)]
        for index, seconds in enumerate((report.duration, *cost)):
            figures[index] += seconds

    def pytest_sessionfinish(self) -> None:
        known = {name: figures for name, figures in read_durations().items() if (TESTS / name).is_file()}
        ran = {
            name: dict(zip(FIGURES, (round(seconds, 1) for seconds in figures)))
            for name, figures in self._figures.items()
        }
        longest = sorted((known | ran).items(), key=lambda item: (-item[1]["seconds"], item[0]))
        lines = (f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in longest)
        DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
