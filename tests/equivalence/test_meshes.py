"""One device and eight, however arranged, in one process or two: the same tokens, losses and weights."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "mesh_worker.py"
ONE = "1,1,1"
QUICK = ("2,2,2", "1,2,4 4,2,1")
MESHES = ("8,1,1", "1,8,1", "1,2,4", "2,2,2", "2,1,4 1,4,2", "1,4,2 1,1,8")
IN_TWO_PROCESSES = ("1,8,1", "2,4,1", "2,2,2 1,2,4")
MODES = ("rows", "tokens")


def _start(target: Path, specs: tuple[str, ...], devices: int, **environment: str) -> subprocess.Popen:
    environment |= {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen([sys.executable, WORKER, target, *specs], env=os.environ | environment)


def _results(target: Path, *processes: subprocess.Popen) -> dict[str, np.ndarray]:
    assert [process.wait() for process in processes] == [0] * len(processes)
    with np.load(target) as results:
        return dict(results)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    target = tmp_path_factory.mktemp("meshes") / "quick.npz"
    return _results(target, _start(target, (ONE, *QUICK), devices=8))


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """All meshes of one process, and beside them those of two processes, `2 x 4` before the mesh."""
    folder = tmp_path_factory.mktemp("meshes")
    results = _results(folder / "one.npz", _start(folder / "one.npz", (ONE, *MESHES), devices=8))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"COORDINATOR": f"127.0.0.1:{free.getsockname()[1]}", "NUM_PROCESSES": "2"}
    two = [
        _start(folder / "two.npz", IN_TWO_PROCESSES, devices=4, PROCESS_ID=str(i), **place) for i in range(2)
    ]
    return results | {f"2 x 4: {name}": value for name, value in _results(folder / "two.npz", *two).items()}


def _of(results, mesh, mode):
    start = f"{mesh} {mode} "
    return {name.removeprefix(start): results[name] for name in results if name.startswith(start)}


def _assert_same(results, mesh, mode):
    expected, got = (_of(results, m, mode) for m in (ONE, mesh))
    assert expected["steps"] == 6
    assert expected["moved"] > 3e-3
    for name, value in expected.items():
        kind = name.split()[0]
        if kind in ("tokens", "lengths"):
            np.testing.assert_array_equal(got[name], value, err_msg=name)
        elif kind != "held":
            largest = np.abs(value).max()
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5 * largest, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", QUICK)
def test_eight_devices_train_as_one_does(quick, mesh, mode):
    _assert_same(quick, mesh, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", [*MESHES, *(f"2 x 4: {mesh}" for mesh in IN_TWO_PROCESSES)])
def test_every_mesh_of_eight_devices_trains_as_one_device_does(every, mesh, mode):
    _assert_same(every, mesh, mode)


def test_what_is_sampled_differs_by_step_and_has_ragged_lengths(quick):
    """So that equal tokens mean something."""
    found = _of(quick, ONE, "tokens")
    assert len({found[f"tokens {step}"].tobytes() for step in range(3)}) == 3
    assert {found[f"lengths {step}"].min() for step in range(3)} <= set(range(1, 5))
    assert {found[f"lengths {step}"].max() for step in range(3)} == {9}
    assert found["tokens 0 greedy"].tobytes() != found["tokens 2 greedy"].tobytes()


def test_no_device_holds_what_is_anothers(quick):
    """On two times four devices; two key/value heads cannot be split in four, so `qkv` is in two parts."""
    for mesh, parts in (
        ("2,2,2", {"qkv": 4, "gate_up": 4, "o": 4}),
        ("1,2,4 4,2,1", {"qkv": 2, "o": 8, "down": 8}),
    ):
        for name, count in parts.items():
            held = quick[f"{mesh} tokens held ['layers'][0]['{name}']"]
            whole = quick[f"{mesh} tokens weights ['layers'][0]['{name}']"].size
            assert held * count == whole, (mesh, name)
        assert quick[f"{mesh} tokens held ['embed']"] * (4 if mesh == "2,2,2" else 8) == 64 * 32
