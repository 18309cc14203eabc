"""Scores of a reward model on one device and on eight, in one process and in two: the same up to rounding.

In two processes, both get the same bits.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from classifiers import save_classifier

sys.path.insert(0, str(Path(__file__).parent))
from score_worker import scores

WORKER = Path(__file__).parent / "score_worker.py"
QUICK = ("mesh=2,2,2",)
EVERY = (
    "mesh=8,1,1",
    "mesh=1,8,1",
    "mesh=1,2,4",
    "mesh=2,2,2 offload.reward_models=true",
    "mesh=auto",
    "placement.train=0,1 placement.reward=2,3",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory, small_arch, tokenizer):
    return save_classifier(tmp_path_factory.mktemp("models") / "judge", small_arch, tokenizer)


def _start(model: Path, target: Path, layouts: tuple[str, ...], devices: int, **environment: str):
    environment |= {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen([sys.executable, WORKER, model, target, *layouts], env=os.environ | environment)


def _in_two_processes(model, folder, layouts):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"COORDINATOR": f"127.0.0.1:{free.getsockname()[1]}", "NUM_PROCESSES": "2"}
    targets = [folder / f"{i}.npz" for i in range(2)]
    started = [
        _start(model, target, layouts, devices=4, PROCESS_ID=str(i), **place)
        for i, target in enumerate(targets)
    ]
    assert [process.wait() for process in started] == [0, 0]
    return [dict(np.load(target)) for target in targets]


def _assert_like_one_device(model, results):
    expected = scores(str(model), "placement.train=0")
    assert np.isfinite(expected).sum() == len(expected)
    assert expected.std() > 0.1
    for layout, values in results.items():
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5, err_msg=layout)


@pytest.mark.slow
def test_two_processes_compute_the_same_bits_and_what_one_device_computes(model, tmp_path):
    one, other = _in_two_processes(model, tmp_path, QUICK)
    _assert_like_one_device(model, one)
    assert {name: values.tobytes() for name, values in one.items()} == {
        name: values.tobytes() for name, values in other.items()
    }


@pytest.mark.slow
def test_every_layout_of_eight_devices_computes_what_one_device_computes(model, tmp_path):
    process = _start(model, tmp_path / "one.npz", EVERY, devices=8)
    assert process.wait() == 0
    _assert_like_one_device(model, dict(np.load(tmp_path / "one.npz")))
    for results in _in_two_processes(model, tmp_path, EVERY):
        _assert_like_one_device(model, results)
