"""Adapters on several devices: the gradient, the step and the merged matrices of one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from goldens import CASES

WORKER = Path(__file__).parent / "one_step_worker.py"
ONE = "1,1,1"
ROUNDED = f"{ONE}~rounded"
"""One device, and every weight one unit in the last place larger or smaller."""


def _assert_as_on_one_device(folder, *meshes, **environment):
    """To 1e-5, or to 4 times what rounding the weights changes: up to 8e-5 in DeltaNet layers."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | environment
    subprocess.run(
        [sys.executable, WORKER, folder / "results.npz", ONE, ROUNDED, *meshes], env=environment, check=True
    )
    with np.load(folder / "results.npz") as file:
        results = dict(file)
    names = [name.removeprefix(f"{ONE} ") for name in results if name.startswith(f"{ONE} ")]
    kinds = {name.split("[")[0].split(" ")[-1] for name in names}
    assert kinds == {"logprobs", "gradient", "merged", "placed", "params"}
    for mesh in meshes:
        for name in names:
            expected, got = results[f"{ONE} {name}"], results[f"{mesh} {name}"]
            largest = np.abs(expected).max()
            change = np.abs(results[f"{ROUNDED} {name}"] - expected).max()
            off = max(1e-5, 4 * change / largest) if largest else 1e-5
            tolerance = {"rtol": off, "atol": off * largest, "err_msg": f"{mesh} {name}"}
            np.testing.assert_allclose(got, expected, **tolerance)


@pytest.mark.slow
def test_adapters_on_eight_devices_are_trained_as_on_one(tmp_path):
    """Two key/value heads: `tp` 2 shards them."""
    _assert_as_on_one_device(tmp_path, "2,2,2")


@pytest.mark.slow
def test_adapters_on_every_mesh_are_trained_as_on_one_device(tmp_path):
    """With `tp` 4, two devices share a key/value head."""
    _assert_as_on_one_device(tmp_path, "8,1,1", "1,8,1", "1,2,4", "2,1,4", "1,1,2", "4,1,2", "1,4,2", "1,2,1")
    _assert_as_on_one_device(tmp_path, "1,2,1,2", "1,1,1,2")


@pytest.mark.slow
def test_norms_of_all_heads_where_devices_share_a_key_head(tmp_path):
    _assert_as_on_one_device(tmp_path, "1,2,2", FAMILY="olmo3", SHARED_HEADS="1")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_family_is_trained_on_four_devices_as_on_one(case, tmp_path):
    _assert_as_on_one_device(tmp_path, "1,2,2", "2,2,1", "1,2,1,2", FAMILY=case)
