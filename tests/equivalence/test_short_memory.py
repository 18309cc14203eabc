"""Preempted samples, rings of several lengths and a prompt in parts, on meshes: the tokens of one device."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "short_memory_worker.py"
ENOUGH = "1,1,1/1000000//0"


@pytest.mark.slow
def test_states_of_delta_layers_go_with_samples_on_a_mesh(tmp_path):
    _assert_as_with_enough(tmp_path, ["2,1,2/3300/32,64/0.1"], FAMILY="qwen3_5_text")


@pytest.mark.slow
def test_preempted_samples_on_a_mesh_have_the_tokens_of_one_device(tmp_path):
    """In rings of two lengths; without a prompt in parts, which `engine/` has on one device."""
    _assert_as_with_enough(tmp_path, ["2,1,2/500/32/0.3"], LENGTHS="3,1,9,30,2,4", MOST_NEW="40")


@pytest.mark.slow
def test_with_drafts_tokens_on_a_mesh_are_those_of_one_device_without(tmp_path):
    """Fails if a replica looks drafts up in prompts of another, or `tp` devices keep different tokens."""
    _assert_as_with_enough(tmp_path, ["2,1,2/500/32/0.3/3"], LENGTHS="3,1,9,30,2,4", MOST_NEW="40")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        ["2,1,2/3300/32,64/0.1"],
        ["4,1,1/3300/32,64/0.2", "1,2,2/3300//0.2", "1,1,1/6000/32/0"],
    ],
)
def test_with_little_memory_tokens_are_those_of_one_device_with_enough(tmp_path, cases):
    _assert_as_with_enough(tmp_path, cases)


def _assert_as_with_enough(tmp_path, cases, **environment):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | environment
    target = tmp_path / "results.npz"
    subprocess.run([sys.executable, WORKER, target, ENOUGH, *cases], env=environment, check=True)
    with np.load(target) as results:
        assert results[f"{ENOUGH} recomputed"] == 0
        for case in cases:
            np.testing.assert_array_equal(results[f"{case} tokens"], results[f"{ENOUGH} tokens"])
            wanted = results[f"{ENOUGH} logprobs"]
            np.testing.assert_allclose(results[f"{case} logprobs"], wanted, atol=1e-4, err_msg=case)
            assert results[f"{case} recomputed"] > 0 or case.endswith("/0")
