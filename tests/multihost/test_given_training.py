"""Training on data that exist in two processes of four devices each, and on meshes, is that on one device."""

import os
import subprocess
import sys

import numpy as np
import pytest
from given_runs import TASKS, given_run
from safetensors.numpy import load_file

from quatrain.config.dump import dump_yaml
from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics
from quatrain.weights.hf import save_hf

TIMEOUT_S = 400
COMPARED = ("loss", "accuracy", "margin", "grad_norm", "tokens", "perplexity")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("mesh", ["2,2,2", "{fsdp: 4, cp: 2}"])
def test_two_processes_train_on_given_data_as_one_device_does(task, mesh, tmp_path, small_arch, small_params):
    """A batch of each process alone, slopes that differ between processes, a reference that both write."""
    save_hf(tmp_path / "model", small_arch, small_params)
    own = (
        f"model.path={tmp_path / 'model'}",
        "model.tokenizer=builtin:tiny",
        f"{task}.epochs=1",
        f"{task}.learning_rate=1e-3",
    )
    settings = (*own, "optimizer.eps=1e-3", "eval.every_steps=0", "checkpoint.every_steps=0")
    alone = train(given_run(tmp_path, "alone", task, *settings)).run
    config = tmp_path / "together.yaml"
    config.write_text(dump_yaml(given_run(tmp_path, "together", task, *settings)))
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "quatrain", "launch", "--processes", "2"),
            *("--devices-per-process", "4", "--", task, str(config), "--set", f"mesh={mesh}"),
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")}
        | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert launched.returncode == 0, launched.stderr
    lines = (launched.stdout + launched.stderr).splitlines()
    assert [line for line in lines if not line.startswith("[0] ")] == []
    ours, theirs = (read_metrics(run / "metrics.jsonl") for run in (tmp_path / "together", alone))
    assert [row["step"] for row in ours] == [0, 1, 2, 3]
    for row, other in zip(ours, theirs, strict=True):
        # Until the first update of dpo all rewards are 0, and which is larger is rounding.
        ties = task == "dpo" and row["step"] < 2
        for key in (key for key in other if key.endswith(COMPARED) and not (ties and "accuracy" in key)):
            assert row[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
    weights = [_weights(run / "final") for run in (tmp_path / "together", alone)]
    for name, values in weights[1].items():
        np.testing.assert_allclose(weights[0][name], values, rtol=1e-3, atol=2e-5, err_msg=name)


def _weights(folder):
    """All arrays: each of several processes writes a file of its own."""
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
