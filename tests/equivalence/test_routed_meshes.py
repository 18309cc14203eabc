"""Routing replay on meshes: samples, routes, gradient, auxiliary loss and metrics are those of one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "routed_mesh_worker.py"
ONE = "1,1,1,1"
MESHES = (
    *("1,2,2,1,2", "1,2,2,1", "2,1,1,1", "1,1,4,1", "1,1,1,4", "1,2,2,2"),
    *("1,1,1,1,2", "1,2,1,1,2", "1,1,2,1,2"),
)


@pytest.mark.slow
def test_routes_and_what_they_decide_do_not_depend_on_the_mesh(tmp_path):
    """`test_meshes.py` has experts on a mesh, and `test_routing_replay.py` replay on one device."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    path = os.pathsep.join([str(WORKER.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    target = tmp_path / "results.npz"
    subprocess.run([sys.executable, WORKER, target, ONE, *MESHES], env=environment, check=True)
    with np.load(target) as results:
        names = {name.removeprefix(f"{ONE} ") for name in results.files if name.startswith(f"{ONE} ")}
        assert results[f"{ONE} routers changed"] > 0.5 * results[f"{ONE} routers replayed"] > 0
        assert results[f"{ONE} routers balance_loss"] > 0.1
        for mesh in MESHES:
            for name in names:
                if f"{mesh} {name}" not in results:
                    assert name in ("tokens", "routes")
                    assert mesh.split(",")[3] != "1"
                    continue
                got, wanted = results[f"{mesh} {name}"], results[f"{ONE} {name}"]
                if got.dtype.kind in "iu":
                    np.testing.assert_array_equal(got, wanted, err_msg=f"{mesh} {name}")
                else:
                    atol = 1e-5 * np.abs(wanted).max()
                    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=atol, err_msg=f"{mesh} {name}")
