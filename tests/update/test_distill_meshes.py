"""Teachers on eight devices, on meshes of every axis, on devices of their own: as on one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from distill_mesh_worker import steps

WORKER = Path(__file__).parent / "distill_mesh_worker.py"
LAYOUTS = (
    "mesh={fsdp: 2, tp: 2, cp: 2}",
    "mesh=8,1,1",
    "mesh=1,2,4",
    "mesh=2,2,2; offload.teacher=true",
    "mesh={dp: 2, tp: 1, cp: 4}",
    "placement.train=0-3; mesh=1,2,2; placement.teacher=4-7; distill.mesh=1,4,1",
)


@pytest.mark.slow
def test_every_mesh_computes_what_one_device_computes(tmp_path):
    devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    folder = str(Path(__file__).parents[1])
    target = tmp_path / "found.npz"
    subprocess.run(
        [sys.executable, WORKER, target, *LAYOUTS],
        env=environment | {"PYTHONPATH": folder},
        check=True,
    )
    found, expected = dict(np.load(target)), steps("placement.train=0")
    for layout in LAYOUTS:
        own = {name.partition("|")[2]: x for name, x in found.items() if name.startswith(f"{layout}|")}
        assert own
        for name, values in own.items():
            np.testing.assert_allclose(
                values, expected[name], rtol=1e-5, atol=2e-6, err_msg=f"{layout} {name}"
            )
