"""The checkpoint with the best value of one evaluation metric (`checkpoint.best_metric`).

Data flow: the numbers of an evaluation -> `Best.note` -> `best.json` in the run's folder, which `quatrain
export RUN OUTPUT --step best` reads with `best_step`.
"""

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from quatrain.cluster.processes import decided_by_main, is_main_process
from quatrain.config.files import Description, checked, read_json
from quatrain.run.run_dir import write_whole

FILE = "best.json"
logger = logging.getLogger(__name__)


class _Found(Description):
    metric: str
    mode: str
    step: int = Field(ge=0, le=2**62)
    value: float


class Best:
    """The best value so far, in the run's folder `run`; a larger one is better if `mode` is `max`."""

    def __init__(self, run: Path, metric: str, mode: str):
        self._path, self._metric, self._mode = run / FILE, metric, mode
        self.found: dict[str, Any] | None = None
        """Metric, mode, step and value; None before the first evaluation with a checkpoint."""
        self._before: dict[str, Any] | None = None

    def note(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Whether the evaluation of a step is better than all before it; if so, it is written to the file.

        An evaluation without a finite value of the metric is passed over with a warning.
        """
        if self._metric not in numbers:
            logger.warning("the evaluation of step %d has no finite %s", step, self._metric)
            return False
        value = numbers[self._metric]
        sign = 1 if self._mode == "max" else -1
        if step == 0 or (self.found is not None and sign * value <= sign * self.found["value"]):
            return False
        self._before = self.found
        self._set({"metric": self._metric, "mode": self._mode, "step": step, "value": value})
        return True

    def withdraw(self) -> None:
        """Go back to what was found before the last `note`, because that step has no checkpoint."""
        if self._before is None:
            self._forget()
        else:
            self._set(self._before)

    def restore(self, saved: dict[str, Any] | None, step: int, checkpoints: Collection[int]) -> None:
        """What was found up to `step`, to which a run goes back: the later of that in the file, and `saved`
        in its checkpoint.

        The file may know of a later evaluation of `step`, or of steps that are gone; with checkpoints in
        another place it may be older, of the last time that the run was on this machine. What was found for
        another metric does not count.
        """
        candidates = [
            found
            for found in (decided_by_main(lambda: _read(self._path)), saved)
            if found is not None
            and (found["metric"], found["mode"]) == (self._metric, self._mode)
            and found["step"] <= step
            and found["step"] in checkpoints
        ]
        if candidates:
            self._set(max(candidates, key=lambda found: int(found["step"])))
        else:
            self._forget()

    def __str__(self) -> str:
        if self.found is None:
            return f"no checkpoint has a value of {self._metric}"
        value, step = self.found["value"], self.found["step"]
        return f"best {self._metric}: {value:.4g}, in the checkpoint of step {step}"

    def _forget(self) -> None:
        self.found = None
        if is_main_process():
            self._path.unlink(missing_ok=True)

    def _set(self, found: dict[str, Any]) -> None:
        self.found = found
        if is_main_process():
            write_whole(self._path, json.dumps(found) + "\n")


def best_step(run: Path) -> int:
    """The step of the best checkpoint of the run at `run`; raises ValueError if it has none."""
    found = _read(run / FILE)
    if found is None:
        raise ValueError(
            f"{run} has no best checkpoint (no {FILE} in it), which runs with checkpoint.best_metric keep; "
            "give the step itself, or leave --step out for the latest"
        )
    return int(found["step"])


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    return checked(_Found, read_json(path), str(path), remedy="it is damaged; remove it").model_dump()
