"""V10 of the sampler: on a mesh, prompts with pictures give the samples of one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "seen_mesh_worker.py"
MESHES = ("4,1,1", "1,1,2", "2,1,2")


@pytest.mark.slow
def test_prompts_with_pictures_on_a_mesh_are_those_of_one_device(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    target, one = tmp_path / "results.npz", "1,1,1"
    subprocess.run([sys.executable, WORKER, target, one, *MESHES], env=environment, check=True)
    with np.load(target) as results:
        for mesh in MESHES:
            np.testing.assert_array_equal(results[f"{mesh} tokens"], results[f"{one} tokens"], mesh)
            found, expected = results[f"{mesh} logprobs"], results[f"{one} logprobs"]
            np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=mesh)
