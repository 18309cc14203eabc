"""Runs in processes of their own that are stopped by signals, alone and two together, and resumed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import steady_metrics

pytestmark = pytest.mark.slow

SETTINGS = (
    "data.batch_size=4", "rollout.n=4", "run.steps=9", "checkpoint.every_steps=0", "sft.steps=3",
    "eval.every_steps=3", "eval.num_prompts=4", "eval.final_num_prompts=4",
)  # fmt: skip
TWO = ("launch", "--processes", "2", "--devices-per-process", "1", "--")
QUATRAIN = (  # where a shell had SIGINT ignored, too
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from quatrain.cli.main import main; main()"
)
TIMEOUT_S = 600.0
ENDS_WITHIN_S = 60.0
"""A signal may come while a program is being compiled, on a machine that does other things too."""


def start(folder: Path, *launcher: str, resume: bool = False) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    options = [x for s in (*SETTINGS, f"run.dir={folder}", "run.name=run") for x in ("--set", s)]
    command = [sys.executable, "-c", QUATRAIN, *launcher, "train", *options]
    if resume:
        command += ["--resume", "auto"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    with (folder / "output").open("a") as log:
        return subprocess.Popen(
            command,
            env=environ,
            stdout=log,
            stderr=log,
            text=True,
        )


def rows(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


def wait_for_rows(folder: Path, count: int, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while rows(folder) < count:
        assert running.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def whole(folder: Path, *launcher: str, resume: bool = False) -> Path:
    status = start(folder, *launcher, resume=resume).wait(TIMEOUT_S)
    assert status == 0, (folder / "output").read_text()
    return folder / "run"


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def assert_same(run: Path, other: Path) -> None:
    assert steady_metrics(run) == steady_metrics(other)
    weights = [sorted((each / "final").glob("*.safetensors")) for each in (run, other)]
    assert weights[0]
    for ours, theirs in zip(*weights, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("launcher", [(), TWO], ids=["one process", "two processes"])
def test_stopped_at_any_moment_and_resumed_is_uninterrupted(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """To two processes the signal comes through the launcher, or to one of them alone."""
    uninterrupted = whole(tmp_path / "whole", *launcher)
    rng = random.Random(1)
    stopped = tmp_path / "stopped"
    for count, number in ((3, signal.SIGTERM), (5, signal.SIGHUP), (7, signal.SIGINT)):
        running = start(stopped, *launcher, resume=True)
        wait_for_rows(stopped, count, running)
        time.sleep(rng.uniform(0, 0.1))
        target = running.pid
        if launcher and number != signal.SIGTERM:
            target = children(running.pid)[number == signal.SIGHUP]
        os.kill(target, number)
        output = (stopped / "output").read_text
        assert running.wait(ENDS_WITHIN_S) == 128 + number, output()
        last = max(int(path.name) for path in (stopped / "run" / "checkpoints").iterdir())
        assert last >= count - 1
        said = (
            rf"stopped: {number.name}; step {last} is saved; go on with:\n(\[0\] )?  cd \S+ && quatrain train"
        )
        assert len(re.findall(said, output())) == 1
        assert "Traceback" not in output()
    assert_same(whole(stopped, *launcher, resume=True), uninterrupted)


COMPILES = """
import hashlib, os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from quatrain.cli.main import main
{where}
plain = getattr(owner, name)

def compiles(self, *arguments, **options):
    if {when}:
        Path(os.environ["MARK"]).touch()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # in C, for half an hour
    return plain(self, *arguments, **options)

setattr(owner, name, compiles)
main()
"""
ROLLOUT = "from quatrain.engine.engine import RolloutEngine as owner\nname = 'advance'"
UPDATE = "from quatrain.update.trainer import Trainer as owner\nname = 'step'"


@pytest.mark.parametrize(
    ("where", "when", "number"),
    [(ROLLOUT, "self._version == 2", signal.SIGTERM), (UPDATE, "arguments[0].step == 2", signal.SIGINT)],
    ids=["rollout", "update"],
)
def test_a_signal_while_a_program_is_compiled_leaves_the_last_step(
    tmp_path: Path, where: str, when: str, number: signal.Signals
) -> None:
    """Within the 30 s that a preempted machine gives; the run then goes on as if nothing had been."""
    settings = ("sft.steps=0", "run.steps=4", "eval.every_steps=0", "eval.before=false")
    options = [x for s in (*SETTINGS, *settings, f"run.dir={tmp_path}") for x in ("--set", s)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    mark = tmp_path / "compiles"
    environ["MARK"] = str(mark)

    def train(name: str, code: str = QUATRAIN, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, "train", *options, "--set", f"run.name={name}", *more]
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    running = train("stopped", COMPILES.format(where=where, when=when))
    deadline = time.monotonic() + TIMEOUT_S
    while not mark.exists():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(number)
    output, _ = running.communicate(timeout=30)
    assert running.returncode == 128 + number, output
    assert f"stopped: {number.name}; step 2 is saved; go on with:\n  cd " in output
    log = (tmp_path / "stopped" / "run.log").read_text()
    assert f"stopped: {number.name}; step 2 is saved" in log
    for name, more in (("stopped", ("--resume", "stopped")), ("whole", ())):
        again = train(name, QUATRAIN, *more)
        output, _ = again.communicate(timeout=TIMEOUT_S)
        assert again.returncode == 0, output
    assert_same(tmp_path / "stopped", tmp_path / "whole")


def test_a_run_whose_reader_leaves_finishes(tmp_path: Path) -> None:
    options = [x for s in (*SETTINGS, f"run.dir={tmp_path}", "run.name=run") for x in ("--set", s)]
    quatrain = [sys.executable, "-m", "quatrain", "train", *options]
    training = subprocess.Popen(quatrain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert training.stdout is not None
    assert subprocess.run(["head", "-2"], stdin=training.stdout, capture_output=True).stdout.count(b"\n") == 2
    training.stdout.close()
    assert training.wait(TIMEOUT_S) == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_processes_whose_launcher_is_killed_end(tmp_path: Path) -> None:
    running = start(tmp_path, *TWO)
    wait_for_rows(tmp_path, 2, running)
    processes = children(running.pid)
    assert len(processes) == 2
    running.kill()
    running.wait()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
