import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from quatrain.config.mesh import MeshShape
from quatrain.parallel.axes import partition_spec


@pytest.mark.parametrize(
    ("shape", "axes", "mesh", "expected"),
    [
        ((64, 32), ("vocab", "embed"), (1, 1, 1), P(None, None)),
        ((64, 32), ("vocab", "embed"), (8, 1, 1), P(None, None)),
        ((64, 32), ("vocab", "embed"), (1, 4, 1), P(None, "fsdp")),
        ((64, 32), ("vocab", "embed"), (1, 2, 4), P("tp", "fsdp")),
        ((2, 4, 8, 32), ("kv_heads", "group", "head", "embed"), (1, 2, 2), P("tp", None, None, "fsdp")),
        ((2, 4, 8, 32), ("kv_heads", "group", "head", "embed"), (1, 2, 4), P(None, None, None, "fsdp")),
        ((30, 48), ("embed", "mlp"), (1, 4, 2), P(None, "tp")),
        ((48, 30), ("vocab", "embed"), (1, 4, 1), P("fsdp", None)),
        ((32,), ("norm",), (1, 4, 1), P(None)),
        ((63, 30), ("vocab", "embed"), (1, 4, 2), P(None, None)),
        ((64, 32), ("vocab", "embed"), (1, 1, 1, 4), P(None, "cp")),
        ((64, 32), ("vocab", "embed"), (1, 2, 1, 4), P(None, ("fsdp", "cp"))),
        ((48, 32), ("embed", "mlp"), (1, 2, 2, 4), P(("fsdp", "cp"), "tp")),
        ((64, 12), ("vocab", "embed"), (1, 2, 1, 4), P(("fsdp", "cp"), None)),
        ((4, 6), ("vocab", "embed"), (1, 2, 1, 4), P("cp", "fsdp")),
        ((64, 32), ("vocab", "embed"), (1, 2, 1, 1, 4), P(None, ("fsdp", "ep"))),
        ((8, 48, 32), ("experts", "group", "embed"), (1, 2, 1, 1, 4), P("ep", None, "fsdp")),
        ((8, 48, 32), ("experts", "group", "embed"), (1, 1, 2, 2, 4), P(("tp", "ep"), None, "cp")),
        ((30, 9), ("vocab", "embed"), (1, 2, 1, 4), P("fsdp", None)),
    ],
    ids=str,
)
def test_tp_splits_what_it_divides_and_others_the_hidden_axis_or_the_largest(shape, axes, mesh, expected):
    assert partition_spec(shape, axes, MeshShape(*mesh)) == expected


WORKER = Path(__file__).parent / "another_axis_worker.py"
OTHER_AXES = (
    None,
    {"logical_axes": ["experts", "mlp"]},
    {"splits_batch": True, "splits_largest": True},
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(index): what the worker writes for one of OTHER_AXES, in a process of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    @cache
    def written(index):
        target = tmp_path_factory.mktemp("axes") / f"{index}.npz"
        command = [sys.executable, WORKER, target, json.dumps(OTHER_AXES[index])]
        subprocess.run(command, env=environment, check=True)
        with np.load(target) as file:
            return dict(file)

    return written


@pytest.mark.slow
@pytest.mark.parametrize("other", [1, 2])
def test_another_axis_of_size_1_changes_nothing(results, other):
    """Neither the mesh and its shardings, nor an optimizer step, nor the plan."""
    plain, extended = results(0), results(other)
    assert plain.keys() == extended.keys()
    expected, found = (json.loads(str(one.pop("found"))) for one in ({**plain}, {**extended}))
    assert found == expected
    assert expected["mesh"][:2] == ["2,2,2", {"dp": 2, "fsdp": 2, "tp": 2, "cp": 1, "ep": 1, "extra": 1}]
    for name in plain.keys() - {"found"}:
        np.testing.assert_array_equal(extended[name], plain[name], name)
