"""One device and eight, however arranged: the same losses, gradients and weights after three steps."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "mesh_worker.py"
MESHES = ("8,1,1", "1,8,1", "1,2,4", "2,2,2")
QUICK = ("2,2,2", "1,2,4")


def _train(target: Path, *specs: str) -> dict[str, np.ndarray]:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    subprocess.run([sys.executable, WORKER, target, *specs], env=environment, check=True)
    with np.load(target) as results:
        return dict(results)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return _train(tmp_path_factory.mktemp("meshes") / "quick.npz", "1,1,1", *QUICK)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return _train(tmp_path_factory.mktemp("meshes") / "every.npz", "1,1,1", *MESHES)


def _of(results, mesh, mode, kind):
    start = f"{mesh} {mode} "
    names = [name.removeprefix(start) for name in results if name.startswith(start)]
    return {
        name: results[start + name] for name in names if name.startswith("weights") == (kind == "weights")
    }


def _assert_same(results, mesh, mode):
    expected, got = (_of(results, m, mode, "weights") for m in ("1,1,1", mesh))
    for name, weights in expected.items():
        np.testing.assert_allclose(
            got[name], weights, rtol=1e-5, atol=1e-5 * np.abs(weights).max(), err_msg=name
        )
    expected, got = (_of(results, m, mode, "metrics") for m in ("1,1,1", mesh))
    assert expected["steps"] == 6
    assert expected["moved"] > 3e-3
    for name, value in expected.items():
        if not name.startswith("held"):
            np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("mode", ["rows", "tokens"])
@pytest.mark.parametrize("mesh", QUICK)
def test_eight_devices_train_as_one_does(quick, mesh, mode):
    _assert_same(quick, mesh, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rows", "tokens"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_of_eight_devices_trains_as_one_device_does(every, mesh, mode):
    _assert_same(every, mesh, mode)


def test_no_device_holds_what_is_anothers(quick):
    """On two times four devices; two key/value heads cannot be split in four, so `qkv` is in two parts."""
    for mesh, parts in (
        ("2,2,2", {"qkv": 4, "gate_up": 4, "o": 4}),
        ("1,2,4", {"qkv": 2, "o": 8, "down": 8}),
    ):
        for name, count in parts.items():
            held = quick[f"{mesh} tokens held ['layers'][0]['{name}']"]
            whole = quick[f"{mesh} tokens weights ['layers'][0]['{name}']"].size
            assert held * count == whole, (mesh, name)
        assert quick[f"{mesh} tokens held ['embed']"] * (4 if mesh == "2,2,2" else 8) == 64 * 32
