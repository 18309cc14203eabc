"""Rollout workers on Ray: what happens to a worker or to the learner changes no token."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from quatrain.config.load import load_config
from quatrain.data.prompts import load_prompts
from quatrain.loop.policy import load_policy
from quatrain.loop.stages import build_engine
from quatrain.rollout.supervisor import WorkersLost
from quatrain.rollout.worker import WorkerLost

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.slow

SETTINGS = ["rollout.n=4", "rollout.max_new_tokens=48", "data.batch_size=32", "rollout.max_concurrency=16"]
ONCE = """
async def agent(client, row):
    await client.chat(row["prompt"])
"""
QUATRAIN = Path(sys.executable).with_name("quatrain")


def config_of(*settings):
    return load_config(None, [*SETTINGS, *settings]).config


@pytest.fixture(scope="module")
def loaded():
    return load_policy(config_of())


@pytest.fixture(scope="module")
def prompts(loaded):
    config = config_of()
    source = load_prompts(config.data.train, config.data, loaded.tokenizer, seed=1)
    return source.take(0, 32)


@pytest.fixture(scope="module")
def expected(loaded, prompts):
    engine = build_engine(config_of(), loaded)
    engine.sync_weights(loaded.params, 3)
    yield engine.generate(prompts, step=2)
    engine.close()


class Watched:
    """A fleet of Ray workers, and a batch that is sampled in a thread."""

    def __init__(self, loaded, *settings):
        self.seen = []
        config = config_of(*settings)
        self.rollouts = build_engine(config, loaded, on_progress=self.seen.append)
        self.fleet = self.rollouts.sampler
        self.batch = self.error = None
        self.loaded = loaded

    def begin(self, prompts, version=3):
        def work():
            try:
                self.rollouts.sync_weights(self.loaded.params, version)
                self.batch = self.rollouts.generate(prompts, step=2)
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def until(self, reached, limit_s=120):
        end = time.monotonic() + limit_s
        while not reached():
            assert time.monotonic() < end
            time.sleep(0.02)

    def in_mid_batch(self):
        return bool(self.seen) and 0 < self.seen[-1].completions < self.seen[-1].total

    def processes(self):
        return [worker.process for worker in self.fleet.workers]

    def end(self):
        self.thread.join(200)
        assert not self.thread.is_alive()
        if self.error:
            raise self.error
        return self.batch


@pytest.fixture
def watch(loaded):
    made = []

    def make(*settings):
        made.append(Watched(loaded, *settings))
        return made[-1]

    yield make
    for each in made:
        each.rollouts.close()


def assert_same(batch, expected):
    np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
    np.testing.assert_array_equal(batch.group_ids, expected.group_ids)
    np.testing.assert_allclose(batch.rollout_logprobs, expected.rollout_logprobs, atol=1e-5)
    assert batch.columns == expected.columns


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_killed_or_stopped_in_mid_batch_changes_no_token(watch, prompts, expected, number):
    run = watch("rollout.workers=2", "rollout.timeout_s=8")
    run.begin(prompts)
    run.until(run.in_mid_batch)
    victim = run.processes()[0]
    os.kill(victim, number)
    batch = run.end()
    assert_same(batch, expected)
    assert batch.metrics["fleet/retried_groups"].result() > 0
    assert batch.metrics["fleet/restarts"].result() == 1
    run.until(lambda: len(run.processes()) == 2)
    assert victim not in run.processes()


def test_turns_of_agents_are_those_of_one_engine_though_a_worker_is_killed(
    loaded, prompts, expected, tmp_path
):
    """An agent that asks once with the prompt of its row."""
    (tmp_path / "once.py").write_text(ONCE)
    config = config_of("rollout.workers=2", f"rollout.agent={tmp_path}/once.py:agent")
    killed = []

    def watch(progress):
        if 0 < progress.completions < progress.total and not killed:
            killed.append(rollouts.sampler.workers[0].process)
            os.kill(killed[0], signal.SIGKILL)

    with closing(build_engine(config, loaded, on_progress=watch)) as rollouts:
        rollouts.sync_weights(loaded.params, 3)
        batch = rollouts.generate(prompts, step=2)
    of_rows = {name: batch.columns[name] for name in expected.columns}  # beside those of episodes
    assert_same(replace(batch, columns=of_rows), expected)
    assert len(killed) == 1
    assert batch.metrics["fleet/restarts"].result() == 1


def test_a_worker_killed_while_it_loads_weights_loads_them_anew(watch, prompts, expected):
    run = watch("rollout.workers=1", "rollout.timeout_s=30")
    run.begin(prompts[:1])
    run.end()
    os.kill(run.processes()[0], signal.SIGSTOP)
    run.begin(prompts, version=3)
    time.sleep(0.5)
    os.kill(run.processes()[0], signal.SIGKILL)
    assert_same(run.end(), expected)


def test_without_any_worker_the_run_ends_with_the_last_error(watch, prompts, monkeypatch):
    run = watch("rollout.workers=1", "rollout.timeout_s=10")
    run.begin(prompts[:1])
    run.end()
    stop = threading.Event()

    def kill():
        while not stop.wait(0.05):
            for process in run.processes():
                os.kill(process, signal.SIGKILL)

    def no_room():
        raise WorkerLost("no room on any host")

    monkeypatch.setattr(run.fleet._supervisor._slots[0], "factory", no_room)
    killer = threading.Thread(target=kill)
    killer.start()
    run.begin(prompts)
    try:
        with pytest.raises(WorkersLost, match="no rollout worker has been alive for 10 s"):
            run.end()
    finally:
        stop.set()
        killer.join()


def begun(folder, *settings, **options):
    words = [QUATRAIN, "train", *(f"--set={each}" for each in settings)]
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(words, cwd=folder, stdout=output, stderr=output, **options)


def quatrain(folder, *settings, **options):
    """The exit status of a run."""
    return begun(folder, *settings, **options).wait(300)


EVALUATION = ("eval.num_prompts=8", "eval.final_num_prompts=8")
RUN = (*EVALUATION, "run.steps=6", "sft.steps=20", "checkpoint.every_steps=2")


def weights_of(folder, name):
    return hashlib.sha256((folder / "runs" / name / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory):
    """The final weights of runs with their own engine, without and with a batch ahead."""
    folder = tmp_path_factory.mktemp("unharmed")
    for lag in (0, 1):
        assert quatrain(folder, *RUN, f"run.name=lag{lag}", f"rollout.max_staleness={lag}") == 0
    return [weights_of(folder, f"lag{lag}") for lag in (0, 1)]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_over_a_fleet_trains_what_a_run_in_process_does(tmp_path, unharmed, lag):
    assert quatrain(tmp_path, *RUN, "run.name=r", f"rollout.max_staleness={lag}", "rollout.workers=1") == 0
    assert weights_of(tmp_path, "r") == unharmed[lag]


def test_weights_through_a_folder_train_the_same(tmp_path, unharmed):
    weights = tmp_path / "weights"
    settings = (*RUN, "run.name=r", "rollout.workers=1", f"rollout.weights_dir={weights}")
    run = begun(tmp_path, *settings)
    seen, end = set(), time.monotonic() + 200
    while run.poll() is None:
        assert time.monotonic() < end
        seen |= {path.name for path in weights.glob("r-*/v*")}
        time.sleep(0.02)
    assert run.returncode == 0
    assert weights_of(tmp_path, "r") == unharmed[0]
    assert {"v000001", "v000002"} <= seen
    assert not weights.exists()


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own, with room for two versions of the weights and a bit."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False, capture_output=True
    )
    if mount.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_the_run_by_name_and_it_is_resumed_to_the_bit(tmp_path, unharmed, small_disk):
    settings = (*RUN, "run.name=r", "rollout.workers=1", "checkpoint.every_steps=1")
    assert quatrain(tmp_path, *settings, f"rollout.weights_dir={small_disk}") == 2
    last = (tmp_path / "output").read_text().splitlines()[-1]
    assert last.startswith("error: weights of version ")
    assert f"rollout.weights_dir, {small_disk}" in last
    assert "No space left on device" in last
    assert not list(small_disk.iterdir())
    assert (tmp_path / "runs" / "r" / "checkpoints" / "1").exists()
    words = [QUATRAIN, "train", "--resume", "runs/r", f"--set=rollout.weights_dir={tmp_path / 'weights'}"]
    assert subprocess.run(words, cwd=tmp_path, timeout=300, check=False).returncode == 0
    assert weights_of(tmp_path, "r") == unharmed[0]


def test_two_processes_that_train_get_the_same_batches_from_one_worker(tmp_path):
    settings = [f"--set={each}" for each in (*EVALUATION, "run.steps=2", "sft.steps=10")]
    for name, more in (("plain", []), ("fleet", ["--set=rollout.workers=1"])):
        words = [
            QUATRAIN,
            "launch",
            "--processes",
            "2",
            "--",
            "train",
            *settings,
            f"--set=run.name={name}",
            *more,
        ]
        assert subprocess.run(words, cwd=tmp_path, timeout=300, check=False).returncode == 0
    found = [sorted((tmp_path / "runs" / name / "final").glob("model*")) for name in ("plain", "fleet")]
    assert [path.name for path in found[0]] == [path.name for path in found[1]]
    assert [path.read_bytes() for path in found[0]] == [path.read_bytes() for path in found[1]]


def test_a_learner_killed_with_its_workers_alive_is_resumed_to_the_bit(tmp_path, unharmed):
    settings = (*RUN, "run.name=r", "rollout.workers=1")
    run = begun(tmp_path, *settings, start_new_session=True)
    end = time.monotonic() + 200
    while not (tmp_path / "runs" / "r" / "checkpoints" / "4").exists():
        assert time.monotonic() < end
        assert run.poll() is None
        time.sleep(0.02)
    below = psutil.Process(run.pid).children(recursive=True)
    workers = [process for process in below if "RolloutWorker" in " ".join(process.cmdline())]
    assert len(workers) == 1
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert not psutil.wait_procs(workers, timeout=60)[1]
    for process in psutil.wait_procs(below, timeout=1)[1]:  # agents of Ray, which end later
        process.kill()
    again = subprocess.run([QUATRAIN, "train", "--resume", "runs/r"], cwd=tmp_path, timeout=300, check=False)
    assert again.returncode == 0
    assert weights_of(tmp_path, "r") == unharmed[0]


def test_a_reference_to_a_cluster_that_is_not_there_is_one_error(tmp_path):
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1", "RAY_gcs_rpc_server_connect_timeout_s": "2"}
    assert quatrain(tmp_path, "rollout.workers=1", "run.name=r", env=environment) == 2
    last = (tmp_path / "output").read_text().splitlines()[-1]
    assert "rollout.workers needs a Ray cluster" in last


def test_a_worker_that_cannot_start_ends_the_run_before_its_warm_start(tmp_path):
    """On a CPU a worker has one device, and this mesh two."""
    settings = ("rollout.workers=2", "rollout.mesh=1,1,2", "run.name=r", "sft.steps=20")
    assert quatrain(tmp_path, *settings) == 2
    output = (tmp_path / "output").read_text()
    # Not the last line: Ray, which is ended while it still starts, may log an error of its own behind it.
    [error] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "whose mesh is rollout.mesh, cannot serve this run: " in error
    assert "warm start" not in output
    assert not list((tmp_path / "runs").glob("*"))
