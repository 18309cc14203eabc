"""Runs in processes of their own: rollouts ahead of training, killed and in flight; a sampler that rounds."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import steady_metrics

from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.slow

STEPS = 12
EVERY = 4
SETTINGS = (
    "data.batch_size=4", "rollout.n=4", f"run.steps={STEPS}", f"checkpoint.every_steps={EVERY}",
    "sft.steps=3", "eval.every_steps=0", "eval.num_prompts=4", "eval.final_num_prompts=4",
)  # fmt: skip
LAG = ("rollout.max_staleness=2",)
TIMEOUT_S = 600.0


def start(folder: Path, *settings: str, resume: str | None = None) -> subprocess.Popen[str]:
    options = [x for s in (*SETTINGS, *settings, f"run.dir={folder}", "run.name=run") for x in ("--set", s)]
    command = [sys.executable, "-m", "quatrain", "train", *options]
    if resume:
        command += ["--resume", resume]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    with (folder / "output").open("a") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log, text=True)


def whole(folder: Path, *settings: str, resume: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    assert start(folder, *settings, resume=resume).wait(TIMEOUT_S) == 0, (folder / "output").read_text()
    return folder / "run"


def killed_after(folder: Path, step: int, seconds: float) -> None:
    """SIGKILL `seconds` after the run has logged `step`."""
    folder.mkdir()
    running = start(folder, *LAG)
    deadline = time.monotonic() + TIMEOUT_S
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) <= step:
        assert running.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(seconds)
    running.kill()
    assert running.wait(TIMEOUT_S) == -signal.SIGKILL


def prompts(run: Path, step: int) -> list[tuple[int, str]]:
    lines = (run / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [(sample["group_id"], sample["prompt"]) for sample in map(json.loads, lines)]


def test_killed_between_two_checkpoints_and_resumed_is_uninterrupted(tmp_path: Path) -> None:
    """With the prompts of a run without staleness, step by step."""
    uninterrupted = whole(tmp_path / "uninterrupted", *LAG)
    fresh = whole(tmp_path / "fresh")
    assert [prompts(uninterrupted, t) for t in range(1, STEPS + 1)] == [
        prompts(fresh, t) for t in range(1, STEPS + 1)
    ]
    rng = random.Random(0)
    for k, step in enumerate((EVERY + 1, 2 * EVERY + 2, 2 * EVERY + 3)):
        folder = tmp_path / f"killed{k}"
        killed_after(folder, step, rng.uniform(0, 0.02))
        assert not (folder / "run" / "final").exists()
        resumed = whole(folder, *LAG, resume="run")
        assert steady_metrics(resumed) == steady_metrics(uninterrupted)
        weights = [run / "final" / "model.safetensors" for run in (resumed, uninterrupted)]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_completions_in_flight_are_sampled_by_several_versions(tmp_path: Path) -> None:
    run = whole(
        tmp_path / "flight", "rollout.max_staleness=2", "rollout.in_flight=true", "rollout.max_concurrency=4",
        "checkpoint.every_steps=0", "rollout.max_new_tokens=64",
    )  # fmt: skip
    rows = read_metrics(run / "metrics.jsonl")[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["async/staleness_max"] for row in rows) <= 2
    assert max(row["async/versions_per_sequence_max"] for row in rows) > 1


def test_a_sampler_in_bfloat16_is_corrected_by_weights_near_1(tmp_path: Path) -> None:
    rows = read_metrics(whole(tmp_path / "rounded", "model.dtype=bfloat16") / "metrics.jsonl")[1:]
    weights = [row["update/behaviour_weight_mean"] for row in rows]
    assert len(weights) == STEPS
    assert all(abs(weight - 1) < 0.01 for weight in weights)
    assert any(weight != 1 for weight in weights)
