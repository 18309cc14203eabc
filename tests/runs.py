"""What two runs that compute the same have in common."""

import re
from pathlib import Path

from quatrain.report.metrics import read_metrics

CHANGING = re.compile(r"^time/|_per_s$|compilations$|^rollout/(prefill|decode)_s$")
"""Timings differ between runs; whether something compiles depends on what ran before in the process."""


def steady_metrics(run: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics without those that differ between runs that compute the same."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not CHANGING.search(key)} for row in rows]
