"""Sequences with pictures on several devices: features, log-probabilities and gradients of one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "picture_mesh_worker.py"
ONE = "1,1,1"


def _assert_as_on_one_device(folder, model_type, trained, *meshes, devices=8):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    given = [sys.executable, WORKER, folder / "results.npz", model_type, trained, ONE, *meshes]
    subprocess.run(given, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, check=True)
    with np.load(folder / "results.npz") as file:
        results = dict(file)
    for kind in trained.split(","):
        start = f"{kind} {ONE} "
        names = [name.removeprefix(start) for name in results if name.startswith(start)]
        assert sum(name.startswith("gradient") for name in names) > 10
        gradients = (np.abs(results[start + name]).max() for name in names if name.startswith("gradient"))
        largest_gradient = max(gradients)
        for mesh in meshes:
            for name in [name for name in names if name != "held"]:
                expected, got = results[start + name], results[f"{kind} {mesh} {name}"]
                # Biases of keys have no gradient but rounding: of the largest of all.
                largest = largest_gradient if name.startswith("gradient") else np.abs(expected).max()
                bound = {"rtol": 2e-5, "atol": 2e-5 * largest, "err_msg": f"{kind} {mesh} {name}"}
                np.testing.assert_allclose(got, expected, **bound)
    return results


def test_a_trained_tower_on_eight_devices_is_that_of_one(tmp_path):
    """Over `fsdp`, `tp` and `cp`, of which `fsdp` and `cp` hold a part of the tower each."""
    results = _assert_as_on_one_device(tmp_path, "small", "all", "1,2,2,2")
    assert results["all 1,2,2,2 held"] <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm", "qwen2_5_vl"])
def test_every_mesh_computes_pictures_as_one_device(tmp_path, model_type):
    meshes = ("1,4,1", "1,1,2", "1,1,1,2", "1,1,2,2", "2,2,1", "2,1,1,2")
    _assert_as_on_one_device(tmp_path, model_type, "frozen,projector,all", *meshes)
