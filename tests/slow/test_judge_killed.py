"""A run in a process of its own that is killed while a server judges, and resumed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from judge_server import JudgeServer, said
from safetensors.numpy import load_file

from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.slow

SETTINGS = (
    "data.batch_size=4", "rollout.n=4", "run.steps=2", "checkpoint.every_steps=1", "sft.steps=0",
    "eval.before=false", "eval.every_steps=0", "eval.num_prompts=1", "eval.final_num_prompts=1",
)  # fmt: skip
AT_ONCE = 3
ANSWERED = (4, 20)
"""Judgements after which the server is silent and the run is killed: in the first step, and the second."""
TIMEOUT_S = 600.0


class Judging:
    """A server that judges a text by its digest, and is silent while it has given `most` answers."""

    def __init__(self):
        self.most: float = math.inf
        self.answered: Counter[str] = Counter()
        self.silent = 0
        self._lock = threading.Lock()
        self.server = JudgeServer(self._answer)

    def _answer(self, number, body):
        text = body["messages"][-1]["content"]
        with self._lock:
            most = self.most
            is_silent = self.answered.total() >= most
            if is_silent:
                self.silent += 1
            else:
                self.answered[text] += 1
        while is_silent and self.most == most:
            time.sleep(0.01)
        digest = hashlib.sha256(text.encode()).digest()
        return said(json.dumps({"reason": "r", "score": digest[0] / 255}))


def start(folder: Path, address: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "template").write_text("{completion}\n{rubric}\n")
    keys = f"base_url: {address}, served_model: one, template: {folder / 'template'}, rubric: ok"
    judge = f"reward.judge={{{keys}, concurrency: {AT_ONCE}}}"
    options = [x for s in (*SETTINGS, judge, f"run.dir={folder}", "run.name=run") for x in ("--set", s)]
    command = [sys.executable, "-m", "quatrain", "train", *options, "--resume", "auto"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    with (folder / "output").open("a") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log, text=True)


def spent(folder: Path) -> int:
    return json.loads((folder / "run" / "judge_spent.json").read_text())["requests"]


def judgements(folder: Path) -> int:
    return len(list((folder / "run" / "judgements").rglob("[!.]*.json")))


def killed(folder: Path, address: str, judging: Judging, most: int) -> None:
    """A run that is killed once `most` judgements are kept, and others are asked for and not answered."""
    judging.most, judging.silent = most, 0
    running = start(folder, address)
    deadline = time.monotonic() + TIMEOUT_S
    while judging.silent < AT_ONCE or judgements(folder) < most:
        assert running.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.kill()
    assert running.wait(TIMEOUT_S) == -signal.SIGKILL
    judging.most = math.inf


def whole(folder: Path, address: str) -> None:
    assert start(folder, address).wait(TIMEOUT_S) == 0, (folder / "output").read_text()


def weights(folder: Path) -> dict[str, bytes]:
    arrays = {}
    for path in sorted((folder / "run" / "final").glob("*.safetensors")):
        arrays |= {name: array.tobytes() for name, array in load_file(path).items()}
    return arrays


def test_a_run_killed_in_the_middle_of_judging_asks_nothing_twice(tmp_path: Path) -> None:
    """Catches judgements or requests that a kill loses: they would be asked, or paid for, a second time."""
    uninterrupted, folder = tmp_path / "uninterrupted", tmp_path / "killed"
    expected = Judging()
    with expected.server.running() as address:
        whole(uninterrupted, address)
    assert set(expected.answered.values()) == {1}
    assert spent(uninterrupted) == len(expected.server.requests)

    judging = Judging()
    with judging.server.running() as address:
        for most in ANSWERED:
            killed(folder, address, judging, most)
            assert judging.silent == AT_ONCE
            assert spent(folder) == len(judging.server.requests), "also of those without an answer"
        whole(folder, address)
    assert judging.answered == expected.answered
    num_silent = AT_ONCE * len(ANSWERED)
    assert spent(folder) == len(judging.server.requests) == expected.answered.total() + num_silent
    means = [
        [row.get("reward/judge/mean") for row in read_metrics(each / "run" / "metrics.jsonl")]
        for each in (uninterrupted, folder)
    ]
    assert means[0] == means[1]
    assert weights(uninterrupted) == weights(folder) != {}
