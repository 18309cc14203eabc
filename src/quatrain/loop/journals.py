"""The folder of a training client's figures, like a run's: `quatrain report` makes a page of it.

Data flow: rows of `serve/tinker/journal.py` -> `metrics.jsonl`, beside the `config.yaml` that the server's
store writes.
"""

from collections.abc import Mapping
from pathlib import Path

from quatrain.run.metrics import MetricsFile
from quatrain.run.run_dir import LOCK_FILES, RunLock


class ClientRows:
    """Where the rows of one training client go; while it is open, the client trains."""

    def __init__(self, folder: Path):
        self._lock, self._owner = RunLock(folder), folder / LOCK_FILES[1]
        self._metrics = MetricsFile(folder / "metrics.jsonl")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of a step, in the order of steps; those of the last one are merged."""
        self._metrics.write(step, numbers)

    def close(self) -> None:
        """No more rows will come, although this process goes on: the page says that it has finished."""
        self._owner.unlink(missing_ok=True)
        self._lock.release()
