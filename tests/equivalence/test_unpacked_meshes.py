"""Attention in rows of whole sequences on meshes: gradient and samples are those of one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "unpacked_mesh_worker.py"
MESHES = ("2,2,2", "1,1,1", "8,1,1", "1,8,1", "2,1,4")


@pytest.mark.slow
def test_unpacked_attention_on_a_mesh_is_that_of_one_device(tmp_path):
    """`test_partition.py` has the same on one device."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    target, expected = tmp_path / "results.npz", "1,1,1/xla"
    cases = [f"{mesh}/cudnn" for mesh in MESHES]
    subprocess.run([sys.executable, WORKER, target, expected, *cases], env=environment, check=True)
    with np.load(target) as results:
        assert np.abs(results[f"{expected} gradient"]).max() > 1e-3
        for case in cases:
            np.testing.assert_array_equal(results[f"{case} tokens"], results[f"{expected} tokens"])
            for name in ("logprobs", "gradient", "sampled logprobs", "scores", "likeliest"):
                got, wanted = results[f"{case} {name}"], results[f"{expected} {name}"]
                np.testing.assert_allclose(
                    got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max(), err_msg=case
                )
