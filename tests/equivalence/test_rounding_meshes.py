"""Stochastic rounding on one device and on eight: the same random bits, so the same parameters."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "rounding_worker.py"
ONE = "1,1,1"


@pytest.mark.parametrize("meshes", [("2,2,2",), pytest.param(("1,8,1", "8,1,1"), marks=pytest.mark.slow)])
def test_rounding_is_that_of_one_device_to_the_bit(tmp_path, meshes):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    target = tmp_path / "results.npz"
    subprocess.run([sys.executable, WORKER, target, ONE, *meshes], env=environment, check=True)
    with np.load(target) as file:
        results = dict(file)
    names = [name.removeprefix(f"{ONE} ") for name in results if name.startswith(f"{ONE} ")]
    assert len(names) > 10
    for mesh in meshes:
        for name in names:
            np.testing.assert_array_equal(results[f"{mesh} {name}"], results[f"{ONE} {name}"], name)
    embed = [results[f"{ONE} {how} ['embed']"] for how in ("stochastic", "nearest")]
    assert (
        0.1 < np.mean(embed[0] != embed[1]) < 0.5
    )  # a half of those within half the distance of two numbers
