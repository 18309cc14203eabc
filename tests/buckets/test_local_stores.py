"""Buckets with a real client, s3fs, and a local S3 server, moto (`make test-buckets`)."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

pytestmark = pytest.mark.buckets
MOTO = Path(__file__).parents[2] / ".buckets" / "bin" / "python"
QUATRAIN = (sys.executable, "-m", "quatrain")
TIMEOUT_S = 600
CAPTURED = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
TOGETHER = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
SETTINGS = (
    "sft.batch_size=8", "sft.epochs=4", "sft.warmup_steps=0", "update.max_tokens_per_device=64",
    "eval.every_steps=4", "checkpoint.every_steps=1", "checkpoint.keep=2", "run.name=run",
)  # fmt: skip
CHECKPOINTS = "bucket/runs/run/checkpoints"
REINFORCED = (
    "run.steps=3", "sft.steps=0", "data.batch_size=4", "rollout.n=4", "eval.before=false",
    "eval.every_steps=0", "eval.final_num_prompts=4", "checkpoint.every_steps=1", "run.name=run",
    "update.kl_coef=0.1", "mesh=2,1,1",
)  # fmt: skip


@dataclass
class Store:
    """A server with the bucket at `url`, the variables by which processes find it, and a client."""

    url: str
    environ: dict[str, str]
    files: Any


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A `Store` with data, and the model that runs begin with."""
    cache = tmp_path_factory.mktemp("cache")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [MOTO, "-m", "moto.server", "-p", str(port)]
    given = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "no", "AWS_SECRET_ACCESS_KEY": "none"}
    assert MOTO.is_file(), "run make test-buckets, which installs the server"
    base = {name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")}
    environ = {**base, **given, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        try:
            yield _with_inputs(Store("s3://bucket", environ, _client(port)), cache)
        finally:
            server.kill()


def _client(port):
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    files = fsspec.filesystem("s3", use_listings_cache=False)
    files.mkdir("bucket")
    return files


def _with_inputs(store, folder):
    for name, first, count in (("part-1", 10, 14), ("part-2", 40, 10), ("eval", 60, 9)):
        sums = [(a, 3 * a % 17) for a in range(first, first + count)]
        rows = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in sums]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        store.files.pipe_file(f"bucket/{name}.jsonl", text.encode())
    started = _finished(store, folder, "run.name=start", "sft.epochs=1", "model.path=builtin:tiny")
    for file in (started / "final").iterdir():
        store.files.put_file(str(file), f"bucket/start/{file.name}")
    return store


def _supervised(store, folder, *settings, resume=None):
    """The command of a run whose model and data are in the bucket."""
    inputs = ("model.path=URL/start", "sft.data=URL/part-*.jsonl", "sft.eval=URL/eval.jsonl")
    inputs = [each.replace("URL", store.url) for each in inputs]
    return _command("sft", folder, *SETTINGS, *inputs, *settings, resume=resume)


def _command(command, folder, *settings, resume=None):
    given = [word for each in settings for word in ("--set", each)]
    own = folder / "own.yaml"
    own.write_text("{}\n")
    return [*QUATRAIN, command, str(own), *given, *(("--resume", resume) if resume else ())]


def _finished(store, folder, *settings, resume=None):
    """The folder of a run that came to its end."""
    words = _supervised(store, folder, *settings, resume=resume)
    done = subprocess.run(words, cwd=folder, env=store.environ, **CAPTURED)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return max((folder / "runs").iterdir(), key=lambda run: run.stat().st_mtime)


def _killed(store, folder, step, *settings):
    """Ends the run by SIGKILL once it has logged `step`, most likely while a checkpoint is written."""
    words = _supervised(store, folder, *settings, resume="auto")
    process = subprocess.Popen(words, cwd=folder, env=store.environ, **TOGETHER)
    metrics, deadline = folder / "runs" / "run" / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            lines = metrics.read_text().splitlines() if metrics.is_file() else []
            if lines and json.loads(lines[-1])["step"] >= step:
                break
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[0].decode()
    assert process.returncode == -signal.SIGKILL, said[-3000:]


def test_a_run_that_is_killed_goes_on_from_the_bucket_to_the_bit(store, tmp_path):
    """Catches half a checkpoint that is taken for one, and other numbers after a kill on another machine."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = _finished(store, tmp_path / "whole")
    place = f"checkpoint.dir={store.url}/runs"
    for step in (3, 7):
        _killed(store, tmp_path / "cut", step, place)
        found = [int(name.rstrip("/").rpartition("/")[2]) for name in store.files.ls(CHECKPOINTS)]
        print(f"{store.url}: killed after step {step}, the bucket has {sorted(found)}")
        shutil.rmtree(tmp_path / "cut" / "runs")
    run = _finished(store, tmp_path / "cut", place, resume="auto")
    assert "resuming run from step" in (run / "run.log").read_text()
    weights = [(each / "final" / "model.safetensors").read_bytes() for each in (whole, run)]
    assert weights[0] == weights[1]
    steps = [name.rstrip("/").rpartition("/")[2] for name in store.files.ls(CHECKPOINTS)]
    assert sorted(steps, key=int) == ["11", "12"]

    out = f"{store.url}/models/out"
    export = partial(subprocess.run, [*QUATRAIN, "export", str(run), out], env=store.environ, **CAPTURED)
    done = export()
    assert done.returncode == 0, done.stderr[-3000:]
    assert store.files.cat(f"{out}/model.safetensors") == weights[0]
    again = export()
    assert again.returncode == 2
    assert f"{out} exists and is not an empty folder" in " ".join(again.stderr.split())


@contextmanager
def _running(store, folders, *settings, resume=None):
    """Two processes of one run, of which the second sees no file of the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for process, folder in enumerate(folders):
        words = _command("train", folder, *REINFORCED, *settings, resume=resume)
        words += ["--coordinator", address, "--num-processes", "2", "--process-id", str(process)]
        hidden = ["bwrap", "--dev-bind", "/", "/", "--tmpfs", str(folders[0])] if process else []
        processes.append(subprocess.Popen(
            [*hidden, *words], cwd=folder, env=store.environ, **TOGETHER
        ))  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def test_two_processes_without_a_shared_folder_save_into_the_bucket(store, tmp_path):
    """Catches what needs the folder of process 0 elsewhere: the reference, the checkpoint, the best one."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed, which hides the folder of one process from the other")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    place = f"checkpoint.dir={store.url}/pairs"
    for resume, steps in ((None, 2), ("auto", 3)):
        with _running(store, folders, place, f"run.steps={steps}", resume=resume) as processes:
            said = [process.communicate(timeout=TIMEOUT_S)[0].decode() for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said[0][-3000:] + said[1][-3000:]
        assert not (folders[1] / "runs").exists()
        if resume is None:
            shutil.rmtree(folders[0] / "runs")
    assert "resuming run from step 2" in said[0]
    names = [name.rstrip("/").rpartition("/")[2] for name in store.files.ls("bucket/pairs/run")]
    assert sorted(names) == ["checkpoints", "reference"]
    assert len(store.files.glob("bucket/pairs/run/checkpoints/3/arrays/ocdbt.process_*")) == 2
