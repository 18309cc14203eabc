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
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.buckets
MOTO = Path(__file__).parents[2] / ".buckets" / "bin" / "python"
QUATRAIN = (sys.executable, "-m", "quatrain.cli")
TIMEOUT_S = 600
CAPTURED = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
TOGETHER = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
SETTINGS = (
    "model.path=s3://bucket/start", "sft.data=s3://bucket/part-*.jsonl", "sft.eval=s3://bucket/eval.jsonl",
    "sft.batch_size=8", "sft.epochs=4", "sft.warmup_steps=0", "update.max_tokens_per_device=64",
    "eval.every_steps=4", "checkpoint.every_steps=1", "checkpoint.keep=2", "run.name=run",
)  # fmt: skip
REINFORCED = (
    "run.steps=3", "sft.steps=0", "data.batch_size=4", "rollout.n=4", "eval.before=false",
    "eval.every_steps=0", "eval.final_num_prompts=4", "checkpoint.every_steps=1", "run.name=run",
    "update.kl_coef=0.1", "mesh=2,1,1",
)  # fmt: skip


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """The variables with which processes reach the server, which has an empty bucket `bucket`."""
    assert MOTO.is_file(), "run make test-buckets, which installs moto there"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {
        **{name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")},
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing-secret",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "JAX_PLATFORMS": "cpu",
    }
    with subprocess.Popen([MOTO, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name in given.keys() - os.environ.keys():
                    patch.setenv(name, given[name])
                _made(port)
                yield given
        finally:
            server.kill()


def _made(port):
    import s3fs

    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    s3fs.S3FileSystem().mkdir("bucket")


@pytest.fixture(scope="module")
def files(environ):
    """The client of the test itself; the data and the model of its runs are in the bucket."""
    import s3fs

    files = s3fs.S3FileSystem(use_listings_cache=False)
    folder = Path(environ["XDG_CACHE_HOME"])
    for name, first, count in (("part-1", 10, 14), ("part-2", 40, 10), ("eval", 60, 9)):
        sums = [(a, 3 * a % 17) for a in range(first, first + count)]
        rows = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in sums]
        files.pipe_file(f"bucket/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    started = _finished(environ, folder, "sft", "run.name=start", "sft.epochs=1", "model.path=builtin:tiny")
    for file in (started / "final").iterdir():
        files.put_file(str(file), f"bucket/start/{file.name}")
    return files


def _command(command, folder, *settings, resume=None):
    given = [word for each in settings for word in ("--set", each)]
    own = folder / "own.yaml"
    own.write_text("{}\n")
    return [*QUATRAIN, command, str(own), *given, *(("--resume", resume) if resume else ())]


def _finished(environ, folder, command, *settings, resume=None):
    """The folder of a run that came to its end."""
    base = SETTINGS if command == "sft" else ()
    words = _command(command, folder, *base, *settings, resume=resume)
    done = subprocess.run(words, cwd=folder, env=environ, **CAPTURED)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return max((folder / "runs").iterdir(), key=lambda run: run.stat().st_mtime)


def _killed(environ, folder, step, *settings):
    """The run, ended by SIGKILL once it has logged `step`, most likely while a checkpoint is written."""
    words = _command("sft", folder, *SETTINGS, *settings, resume="auto")
    process = subprocess.Popen(words, cwd=folder, env=environ, **TOGETHER)
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
    return said


def test_a_run_that_is_killed_goes_on_from_the_bucket_to_the_bit(environ, files, tmp_path):
    """Catches half a checkpoint that is taken for one, and other numbers after a kill on another machine."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = _finished(environ, tmp_path / "whole", "sft")
    store = "checkpoint.dir=s3://bucket/runs"
    for step in (3, 6, 9):
        _killed(environ, tmp_path / "cut", step, store)
        found = [int(name.rpartition("/")[2]) for name in files.ls("bucket/runs/run/checkpoints")]
        print(f"killed after step {step}: the bucket has {sorted(found)}")
        shutil.rmtree(tmp_path / "cut" / "runs")
    run = _finished(environ, tmp_path / "cut", "sft", store, resume="auto")
    assert "resuming run from step" in (run / "run.log").read_text()
    weights = [(each / "final" / "model.safetensors").read_bytes() for each in (whole, run)]
    assert weights[0] == weights[1]
    steps = [name.rpartition("/")[2] for name in files.ls("bucket/runs/run/checkpoints")]
    assert sorted(steps, key=int) == ["11", "12"]

    out = "s3://bucket/models/out"
    export = partial(subprocess.run, [*QUATRAIN, "export", str(run), out], env=environ, **CAPTURED)
    done = export()
    assert done.returncode == 0, done.stderr[-3000:]
    assert files.cat(f"{out}/model.safetensors") == weights[0]
    again = export()
    assert again.returncode == 2
    assert f"{out} exists and is not an empty folder" in again.stderr


@contextmanager
def _running(environ, folders, *settings, resume=None):
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
            [*hidden, *words], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ))  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def test_two_processes_without_a_shared_folder_save_into_the_bucket(environ, files, tmp_path):
    """Catches what needs the folder of process 0 elsewhere: the reference, the checkpoint, the best one."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed, which hides the folder of one process from the other")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    store = "checkpoint.dir=s3://bucket/pairs"
    for resume, steps in ((None, 2), ("auto", 3)):
        with _running(environ, folders, store, f"run.steps={steps}", resume=resume) as processes:
            said = [process.communicate(timeout=TIMEOUT_S)[0].decode() for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said[0][-3000:] + said[1][-3000:]
        assert not (folders[1] / "runs").exists()
        if resume is None:
            shutil.rmtree(folders[0] / "runs")
    assert "resuming run from step 2" in said[0]
    assert {name.rpartition("/")[2] for name in files.ls("bucket/pairs/run")} == {"checkpoints", "reference"}
    parts = files.glob("bucket/pairs/run/checkpoints/3/arrays/ocdbt.process_*")
    assert len(parts) == 2
