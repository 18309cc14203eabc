"""Optimizer steps on one device and on eight, from the same gradient: rounding, Muon and Adafactor."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "optimizer_worker.py"
ONE = "1,1,1"
QUICK, SLOW = ("2,2,2",), ("1,8,1", "8,1,1", "1,2,4")


@pytest.fixture(scope="module", params=[QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """(results on one device, those on each mesh)."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    target = tmp_path_factory.mktemp("meshes") / "results.npz"
    subprocess.run([sys.executable, WORKER, target, ONE, *request.param], env=environment, check=True)
    with np.load(target) as file:
        results = dict(file)
    return [
        {name.removeprefix(f"{mesh} "): x for name, x in results.items() if name.startswith(f"{mesh} ")}
        for mesh in (ONE, *request.param)
    ]


def test_rounding_is_that_of_one_device_to_the_bit(found):
    one, *meshes = (
        {name: x for name, x in each.items() if name.startswith(("stochastic", "nearest"))} for each in found
    )
    assert len(one) > 10
    for results in meshes:
        for name, expected in one.items():
            np.testing.assert_array_equal(results[name], expected, name)
    embed = [one[f"{how} ['embed']"] for how in ("stochastic", "nearest")]
    assert (
        0.1 < np.mean(embed[0] != embed[1]) < 0.5
    )  # a half of those within half the distance of two numbers


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_are_those_of_one_device(found, name):
    """Parameters and state after two steps, to 1e-5 of the largest; each device holds a part of the state.

    Catches an iteration or a mean over the part of a matrix that a device has. The worker asserts that the
    state stays where it is, and that the plan counts it.
    """
    one, *meshes = ({key: x for key, x in each.items() if key.startswith(name)} for each in found)
    held = one.pop(f"{name}: held")
    assert len(one) > 20
    for results in meshes:
        for key, expected in one.items():
            np.testing.assert_allclose(
                results[key], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(), err_msg=key
            )
    shares = [results[f"{name}: held"] / held for results in meshes]
    assert min(shares) < 0.6
