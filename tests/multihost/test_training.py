"""Training in two processes of four devices each is training on one device, and process 0 alone speaks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from architectures import changed
from safetensors.numpy import load_file

from quatrain.config.load import load_config
from quatrain.config.settings import QUICKSTART
from quatrain.data.builtin import builtin_rows
from quatrain.loop.export import export_policy
from quatrain.loop.policy import load_policy
from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics
from quatrain.weights.hf import save_hf

# Of a test that fails; none waits that long.
TIMEOUT_S = 400
STEPS = 2
SEES = Path(__file__).parents[2] / "configs" / "shapes.yaml"
SETTINGS = (
    "data.batch_size=5",
    "rollout.n=3",
    "sft.steps=0",
    "eval.num_prompts=4",
    "eval.final_num_prompts=4",
    "update.kl_coef=0",
    "update.max_tokens_per_device=128",
    "optimizer.eps=1e-3",
    "model.tokenizer=builtin:tiny",
)
# What depends on how the devices are arranged, or on the time.
OF_THE_MACHINE = (
    *("time/", "throughput/", "memory/", "rollout/", "batch/", "global_seqlen/", "update/compilations"),
    *("vision/tower_pictures", "vision/patches", "vision/padding_fraction"),
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory, small_arch, small_params):
    """A small model, and prompts in three files, of which each of two processes reads its share."""
    folder = tmp_path_factory.mktemp("inputs")
    save_hf(folder / "model", small_arch, small_params)
    rows = [json.dumps(row) for row in builtin_rows("arithmetic")[:31]]
    for i in range(3):
        (folder / f"part-{i}.jsonl").write_text("\n".join(rows[i::3]))
    data = (f"data.train={folder}/part-*.jsonl", "data.eval=builtin:arithmetic-heldout")
    return (*SETTINGS, f"model.path={folder / 'model'}", *data)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, settings):
    """The run of one device, a step longer than the others."""
    return _train(tmp_path_factory.mktemp("alone"), settings).run


def _train(folder, settings, resume=None):
    return train(_resolved(folder, (*settings, f"run.steps={STEPS + 1}")), resume=resume)


def _resolved(folder, settings):
    return load_config(QUICKSTART, (*settings, f"run.dir={folder}", "run.name=run"), environ={})


def _launch(folder, settings, *more, devices=4, resume=None):
    overrides = (*settings, f"run.dir={folder}", "run.name=run", f"run.steps={STEPS}", *more)
    arguments = [part for override in overrides for part in ("--set", override)]
    return subprocess.run(
        [
            *(sys.executable, "-m", "quatrain", "launch", "--processes", "2"),
            *("--devices-per-process", str(devices), "--", "train", str(QUICKSTART), *arguments),
            *(("--resume", resume) if resume else ()),
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")}
        # Of two that write and read one folder at a time, one might warn, and only the first may speak.
        | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.slow
def test_two_processes_take_a_step_as_one_device_does(tmp_path, settings, small_arch, small_params):
    """The small form: a device each, a model of one layer, one step."""
    arch = changed(small_arch, num_layers=1)
    save_hf(tmp_path / "model", arch, small_params | {"layers": small_params["layers"][:1]})
    small = (*settings, f"model.path={tmp_path / 'model'}", "run.steps=1")
    alone = train(_resolved(tmp_path / "alone", small)).run
    launched = _launch(tmp_path, small, "mesh=1,-1,1", "run.steps=1", devices=1)
    assert launched.returncode == 0, launched.stderr
    lines = (launched.stdout + launched.stderr).splitlines()
    assert [line for line in lines if not line.startswith("[0] ")] == []
    _assert_same_run(tmp_path / "run", alone, steps=1)


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        pytest.param("1,-1,1", "1 x 8", id="documents"),
        pytest.param("auto", "2 x 4", id="auto"),
    ],
)
@pytest.mark.slow
def test_two_processes_train_as_one_device_does(tmp_path, settings, alone, mesh, shape):
    launched = _launch(tmp_path, settings, f"mesh={mesh}")
    lines = (launched.stdout + launched.stderr).splitlines()
    assert launched.returncode == 0, launched.stderr
    (plan,) = tmp_path.rglob("plan.json")
    assert f"dp x fsdp = {shape}" in json.loads(plan.read_text())["why"]["data_shards"]
    assert [line for line in lines if not line.startswith("[0] ")] == []
    _assert_same_run(tmp_path / "run", alone)
    _assert_resumed_alone(tmp_path, settings, alone)


@pytest.mark.slow
def test_two_processes_train_adapters_as_one_device_does(tmp_path, settings):
    adapters = (*settings, "lora.rank=4", "update.kl_coef=0.1")
    alone = _train(tmp_path / "alone", adapters).run
    assert (alone / "final" / "adapter" / "adapter_model.safetensors").is_file()
    launched = _launch(tmp_path, adapters, "mesh=1,-1,1")
    assert launched.returncode == 0, launched.stderr
    _assert_same_run(tmp_path / "run", alone)
    _assert_resumed_alone(tmp_path, adapters, alone)


@pytest.mark.parametrize("trained", ["frozen", "all"])
@pytest.mark.slow
def test_two_processes_train_a_model_that_sees_as_one_device_does(tmp_path, trained):
    """Processes that call the tower in orders of their own hang; one that reads others' pictures differs."""
    config = load_config(SEES, environ={}).config
    loaded = load_policy(config)
    export_policy(tmp_path / "model", loaded.arch, loaded.params, loaded.tokenizer, whole=loaded.whole)
    rows = []
    for number, row in enumerate(builtin_rows("shapes")[:31]):
        picture, question = row["prompt"][0]["content"]
        (tmp_path / f"{number}.png").write_bytes(picture["image"])
        chat = [{"role": "user", "content": question["text"]}]
        rows.append(json.dumps({"prompt": chat, "images": [f"{number}.png"], "answer": row["answer"]}))
    for i in range(3):
        (tmp_path / f"part-{i}.jsonl").write_text("\n".join(rows[i::3]))
    settings = (
        *SETTINGS,
        f"model.path={tmp_path / 'model'}",
        "model.tokenizer=null",
        f"model.vision={trained}",
        f"data.train={tmp_path}/part-*.jsonl",
        "data.eval=builtin:shapes-heldout",
        "rollout.max_new_tokens=8",
        "reward.functions={correct: 1.0, tag_count: 0.5}",
    )
    alone = _train(tmp_path / "alone", settings).run
    launched = _launch(tmp_path, settings, "mesh=1,-1,1", devices=2)
    assert launched.returncode == 0, launched.stderr
    _assert_same_run(tmp_path / "run", alone)
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[1]
    assert first["vision/pictures"] == 9, "of 5 prompts, and of 4 of the evaluation before"


def _assert_same_run(run, alone, steps=STEPS):
    for step in range(1, steps + 1):
        _assert_same_samples(run, alone, step)
    ours, theirs = read_metrics(run / "metrics.jsonl"), read_metrics(alone / "metrics.jsonl")
    assert [row["step"] for row in ours] == list(range(steps + 1))
    for row, other in zip(ours[:2], theirs, strict=False):
        assert row.keys() == other.keys()
        for key in row:
            if not key.startswith(OF_THE_MACHINE) and not key.endswith("/seconds"):
                assert row[key] == pytest.approx(other[key], rel=1e-4, abs=1e-7), key


def _assert_same_samples(run, alone, step):
    """Completions and rewards; advantages up to rounding."""
    ours, theirs = (
        [json.loads(line) for line in (folder / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]
        for folder in (run, alone)
    )
    assert [row["completion"] for row in ours] == [row["completion"] for row in theirs]
    assert [row["rewards"] for row in ours] == [row["rewards"] for row in theirs]


def _assert_resumed_alone(folder, settings, alone):
    """What eight devices saved, one device goes on with: to the weights of the run that one device made."""
    shutil.rmtree(folder / "run" / "final")
    again = _train(folder, settings, resume="run").run
    _assert_same_samples(again, alone, STEPS + 1)
    for path in alone.glob("final/**/*.safetensors"):
        ours, theirs = load_file(again / path.relative_to(alone)), load_file(path)
        assert ours.keys() == theirs.keys()
        for name, weights in theirs.items():
            np.testing.assert_allclose(ours[name], weights, rtol=1e-5, atol=1e-5 * np.abs(weights).max())


@pytest.mark.slow
def test_two_processes_agree_on_the_checkpoint_that_is_whole(tmp_path, settings):
    """One process reads the damaged numbers, both use the checkpoint before."""
    every = ("checkpoint.every_steps=1", "mesh=1,-1,1")
    assert _launch(tmp_path, settings, *every).returncode == 0
    arrays = tmp_path / "run" / "checkpoints" / str(STEPS) / "arrays"
    for process in (0, 1):
        shutil.copytree(tmp_path / "run", tmp_path / f"kept{process}")
        file = max(arrays.glob(f"ocdbt.process_{process}/d/*"), key=lambda path: path.stat().st_size)
        file.write_bytes(bytes(file.stat().st_size))  # parts of it may hold numbers that nothing reads
        resumed = _launch(tmp_path, settings, *every, f"run.steps={STEPS + 1}", resume="run")
        assert resumed.returncode == 0, resumed.stderr
        output = resumed.stdout + resumed.stderr
        assert output.count(f"; the checkpoint of step {STEPS - 1} is used") == 1
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(STEPS + 2))
        shutil.rmtree(tmp_path / "run")
        (tmp_path / f"kept{process}").rename(tmp_path / "run")
