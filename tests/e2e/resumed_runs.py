"""Runs that go on from a copy of a finished one, which spares the run that is interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from runs import small_run

from quatrain.loop.train import train


def killed_copy(run: Path, folder: Path, step: int) -> Path:
    """A copy of `run` in `folder` as if it was killed at its end, with `step` as its last checkpoint.

    It has the metrics and samples of later steps, as a run that is killed between two checkpoints.
    """
    copy = folder / run.name
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "final")
    for path in (copy / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return copy


def resumed_copy(run: Path, folder: Path, step: int, *options: str, **given: Any) -> Path:
    """The run that goes on from checkpoint `step` of a copy of `run` in `folder`."""
    copy = killed_copy(run, folder, step)
    return train(small_run(folder, run.name, *options), resume=copy.name, **given).run
