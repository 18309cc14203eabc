"""How a run is put together from its parts, and how it ends them."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import small_run

from quatrain.engine.engine import RolloutEngine
from quatrain.loop import run as run_module
from quatrain.loop.train import train
from quatrain.reward.scorer import RewardScorer

REWARD = """
import os
print(os.getpid(), file=open({path!r}, "w"))
def reward(completions, **_):
    return [0.0] * len(completions)
"""


@pytest.mark.parametrize("late", ["build_engine", "AsyncRollouts", "Checkpoints"])
def test_a_late_error_leaves_no_worker_process_and_no_folder(tmp_path, monkeypatch, late):
    source, told = tmp_path / "mine.py", tmp_path / "pid"
    source.write_text(REWARD.format(path=str(told)))

    def fail(*arguments, **keywords):
        raise ValueError("a late error")

    closed = []
    close_engine = RolloutEngine.close
    monkeypatch.setattr(RolloutEngine, "close", lambda self: (closed.append(self), close_engine(self)))
    monkeypatch.setattr(run_module, late, fail)
    with pytest.raises(ValueError, match="a late error"):
        train(small_run(tmp_path, "late", f"reward.functions={{'{source}:reward': 1.0}}", "sft.steps=0"))
    assert not Path(f"/proc/{int(told.read_text())}").exists()
    assert not (tmp_path / "late").exists()
    assert bool(closed) == (late != "build_engine")


def test_every_part_is_ended_although_one_cannot_be(tmp_path, monkeypatch):
    ended: list[str] = []
    close_scorer, close_batches = RewardScorer.close, run_module.AsyncRollouts.close

    def fails(scorer):
        close_scorer(scorer)
        ended.append("scorer")
        raise OSError("cannot be ended")

    def closes(batches):
        close_batches(batches)
        ended.append("batches")

    monkeypatch.setattr(RewardScorer, "close", fails)
    monkeypatch.setattr(run_module.AsyncRollouts, "close", closes)
    with pytest.raises(OSError, match="cannot be ended"):
        train(small_run(tmp_path, "ends", "run.steps=1", "sft.steps=0", "data.eval=null"))
    assert ended == ["scorer", "batches", "scorer"]  # first, because the batches may wait for it
