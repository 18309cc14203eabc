"""The gradient on the real device: packed, padded or with prompts shared, the same."""

import jax
import numpy as np
import pytest
from kernels_here import usable

from quatrain.config.schema import UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.specs import PolicySpec
from quatrain.update.gradient import sum_gradients
from quatrain.update.objective import PolicyObjective

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 2e-5, "bfloat16": 6e-2}
"""Largest |got - wanted| / |wanted|, Euclidean norms over all parameters. Products of float32 are at the
highest precision: TF32 gives 3e-4 and more. In bfloat16, whatever the attention, a CPU gives 3.3e-2."""
PADDED, PACKED = MicroBatchPlanner(rows=8), MicroBatchPlanner(max_tokens=800)
SHARED = MicroBatchPlanner(max_tokens=800, share_prompts=True)


def _gradient(arch, params, table, planner, attention, dtype="float32"):
    policy = PolicySpec(arch, temperature=0.9, dtype=dtype, attention=attention)
    objective = PolicyObjective.of(UpdateConfig(entropy_coef=0.1), on_policy=True)
    batches = [batch for _, batch in micro_batches(table, planner, policy.mesh, policy.forms)]
    assert len(batches) > 1
    with jax.default_matmul_precision("highest"):
        grads, stats, _ = sum_gradients(params, batches, model=policy, objective=objective)
    leaves = [np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(grads)]
    return np.concatenate(leaves), float(stats["sum"]["loss"])


def _assert_same(got, expected, tolerance):
    (gradient, loss), (wanted, wanted_loss) = got, expected
    assert np.linalg.norm(wanted) > 1e-3
    assert np.linalg.norm(gradient - wanted) / np.linalg.norm(wanted) < tolerance
    assert loss == pytest.approx(wanted_loss, rel=tolerance, abs=tolerance)


@pytest.fixture(scope="module")
def exact(arch, params, table):
    """Of one sequence to a row, with the attention that XLA computes, in float32."""
    return _gradient(arch, params, table, PADDED, "xla")


@pytest.mark.parametrize("planner", [PACKED, SHARED])
def test_packed_and_shared_are_padded(arch, params, table, exact, planner):
    got = _gradient(arch, params, table, planner, "xla")
    _assert_same(got, exact, TOLERANCE["float32"])


@pytest.mark.parametrize("planner", [PADDED, PACKED, SHARED])
@pytest.mark.parametrize("attention", ["xla", "cudnn", "tokamax"])
def test_bfloat16_is_near_float32(arch, params, table, exact, planner, attention):
    usable(attention, arch)
    got = _gradient(arch, params, table, planner, attention, "bfloat16")
    _assert_same(got, exact, TOLERANCE["bfloat16"])
