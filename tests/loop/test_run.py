"""How a run is put together from its parts, and how it ends them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from runs import small_run

from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config
from quatrain.data.builtin import builtin_rows
from quatrain.engine.engine import RolloutEngine
from quatrain.loop import build as build_module
from quatrain.loop.train import train
from quatrain.reward.scorer import RewardScorer

pytestmark = pytest.mark.usefixtures("narrow_model")

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
    monkeypatch.setattr(f"quatrain.loop.build.{late}", fail)
    with pytest.raises(ValueError, match="a late error"):
        train(small_run(tmp_path, "late", f"reward.functions={{'{source}:reward': 1.0}}", "sft.steps=0"))
    process, until = Path(f"/proc/{int(told.read_text())}"), time.monotonic() + 10
    while process.exists() and time.monotonic() < until:  # it has ended, and waits for its reaper, process 1
        time.sleep(0.02)
    assert not process.exists()
    assert not (tmp_path / "late").exists()
    assert bool(closed) == (late != "build_engine")


def test_every_part_is_ended_although_one_cannot_be(tmp_path, monkeypatch):
    ended: list[str] = []
    close_scorer, close_batches = RewardScorer.close, build_module.AsyncRollouts.close

    def fails(scorer):
        close_scorer(scorer)
        ended.append("scorer")
        raise OSError("cannot be ended")

    def closes(batches):
        close_batches(batches)
        ended.append("batches")

    monkeypatch.setattr(RewardScorer, "close", fails)
    monkeypatch.setattr(build_module.AsyncRollouts, "close", closes)
    with pytest.raises(OSError, match="cannot be ended"):
        train(small_run(tmp_path, "ends", "run.steps=1", "sft.steps=0", "data.eval=null"))
    # First, because the batches may wait for it; then again, and last the one whose functions were imported.
    assert ended == ["scorer", "batches", "scorer", "scorer"]


def test_rows_of_a_program_are_trained_on_shown_and_evaluated(tmp_path):
    rows = {"mine": builtin_rows("arithmetic")[:4], "shown": builtin_rows("arithmetic")[4:6]}
    rows["held out"] = builtin_rows("arithmetic-heldout")[:8]
    names = ("data.train=mine", "sft.data=shown", "data.eval=held out", "sft.steps=1", "run.steps=1")
    run = train(small_run(tmp_path, "given", *names, "eval.every_steps=0"), rows=rows).run
    for file, name in {"step_000001": "mine", "eval_000001": "held out"}.items():
        lines = (run / "samples" / f"{file}.jsonl").read_text("utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        assert {each[0]["content"] for each in prompts} == {row["prompt"][0]["content"] for row in rows[name]}


def test_what_a_program_gives_in_another_form_is_refused(tmp_path):
    resolved = load_config(None, ["run.steps=1", f"run.dir={tmp_path}"], {})
    for given, options, message in (
        (resolved.config, {}, "takes what quatrain.load_config returns; got Config"),
        (resolved, {"rows": [{"prompt": "a"}]}, "rows must be a mapping from names .* got list"),
        (resolved, {"reward_functions": [len]}, "reward_functions must be a mapping .* got list"),
    ):
        with pytest.raises(ValueError, match=message):
            train(given, **options)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"is the path of a YAML file; got {'seed': 3}"):
        load_config({"seed": 3}, (), {})
    for overrides in ("run.steps=3", {"run.steps": 3}):
        with pytest.raises(ConfigError, match="overrides must be a list of KEY=VALUE; got"):
            load_config(None, overrides, {})


def test_rows_of_a_program_that_no_key_names_are_refused(tmp_path):
    message = "must be named in data.train, data.eval or sft.data, .* rows has 'mine'; name it"
    with pytest.raises(ValueError, match=message):
        train(small_run(tmp_path, "unnamed"), rows={"mine": builtin_rows("arithmetic")})
    assert not (tmp_path / "unnamed").exists()
