"""The script for accelerators, with tiny shapes where there is none."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from architectures import changed

from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.table import TokenTable
from quatrain.models.flops import linear_parameters
from quatrain.models.params import num_params
from quatrain.ops import packing


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("accelerator")


@pytest.mark.slow
def test_small_shapes_on_any_machine(script):
    bench = script.Bench(script.SMALL, peak_tflops=790, bandwidth_tb_s=2)
    arch = script.SMALL.shapes["tiny"]

    def measured(function, *arguments):
        figures = {}
        assert script.attempt(partial(function, *arguments), figures) == {"status": "done"}
        return figures

    limits = measured(bench.machine)
    with pytest.raises(script.NotPossible, match="has none"):
        bench.bfloat16_gap(arch, {})
    _check_decode(script, measured(bench.decode, arch), limits)
    updates = {layout: measured(bench.update, arch, "xla", layout) for layout in ("shared", "packed")}
    for update in updates.values():
        _check_update(script, update, limits)
    assert updates["shared"]["shared_fraction"] > 0.3
    assert updates["packed"]["shared_fraction"] == 0
    assert updates["shared"]["grad_norm"] == pytest.approx(updates["packed"]["grad_norm"], rel=0.02)
    for kernel in ("cudnn", "tokamax"):
        with pytest.raises(script.NotPossible, match="needs a GPU"):
            bench.update(arch, kernel, "shared", {})
    exact = measured(bench.float32_gap, changed(arch, num_layers=1), "highest")
    rounded = measured(bench.bfloat16_gap, arch)
    assert 0 < exact["logprob_diff_max"] < 1e-4 < rounded["logprob_diff_max"] < 0.5
    assert (exact["tokens"], rounded["tokens"]) == (2 * 8 * 12, 8 * 40)


@pytest.mark.slow
def test_the_tests_for_a_gpu_are_skipped_without_one(script):
    checks = {}
    script.Bench(script.SMALL, 1, 1).checks(checks)
    assert (checks["passed"], checks["failed"]) == (0, 0)
    assert checks["skipped"] > 10
    assert checks["why_skipped"] == ["needs a GPU, and JAX runs on cpu here"]


def _check_decode(script, decode, limits):
    """Bytes are those of the shape, shares are rates over the limits."""
    arch = script.SMALL.shapes["tiny"]
    assert decode["weight_bytes"] == 2 * num_params(arch)
    # Two prompts of 20 tokens, 16 sequences with 20 of 40 tokens on average, 2 heads of 16, keys and values.
    assert decode["cache_bytes_mean"] == (2 * 20 + 16 * 20) * 2 * 2 * 16 * 2
    assert decode["compilations_while_measured"] == 0
    moved = (decode["weight_bytes"] + decode["cache_bytes_mean"]) / decode["seconds_per_step"]
    assert decode["share_of_bandwidth"] == pytest.approx(moved / 2e12)
    assert decode["share_of_copy"] == pytest.approx(moved / 1e12 / limits["copy_tb_s"])
    assert len(decode["seconds_per_step_by_quarter"]) == 4


def _check_update(script, update, limits):
    """Operations are at least those of the weights, shares are rates over the limits."""
    computed = update["tokens"] * (1 - update["shared_fraction"])
    assert update["tflop"] * 1e12 > 6 * linear_parameters(script.SMALL.shapes["tiny"]) * computed
    rate = update["tflop"] / update["seconds_per_step"]
    assert update["share_of_peak"] == pytest.approx(rate / 790)
    assert update["share_of_matmul"] == pytest.approx(rate / limits["matmul_tflops"])
    assert update["auto_picks"] == "xla"


def test_operations_are_counted_once_for_a_shared_prompt(script, monkeypatch):
    """Two sequences of a group: a prompt of 3 tokens, completions of 1 and 2."""
    arch = script.SMALL.shapes["tiny"]
    lengths = np.array([4, 5])
    attention = np.arange(5) < lengths[:, None]
    completion = attention & (np.arange(5) >= 3)
    table = TokenTable(np.ones((2, 5), np.int32), attention, completion, {}, np.zeros(2, np.int64))
    mixer = arch.layers[0].mixer
    per_token = 2 * linear_parameters(arch)
    per_key = 4 * arch.num_layers * mixer.num_heads * mixer.head_dim
    scored = 3 * 2 * arch.hidden_size * arch.vocab_size
    alone = script.needed_flops(arch, table, MicroBatchPlanner(rows=2).plans(table))
    assert alone == pytest.approx(9 * per_token + (10 + 15) * per_key + scored)
    shared = script.needed_flops(
        arch, table, MicroBatchPlanner(max_tokens=64, share_prompts=True).plans(table)
    )
    assert shared == pytest.approx(6 * per_token + (6 + 4 + 9) * per_key + scored)
    monkeypatch.setattr(packing, "LEAST_COMMON_PREFIX", 2)
    table = replace(table, group_ids=np.arange(2))  # of two groups: three tokens once, then 1 and 2
    cuts = MicroBatchPlanner(max_tokens=64, share_prompts=True).plans(table)
    assert script.needed_flops(arch, table, cuts) == shared


def test_what_fails_is_told_and_what_was_measured_is_kept(script):
    def bad(figures):
        figures["half"] = 1
        raise RuntimeError("no memory\nand much more")

    def missing(figures):
        raise script.NotPossible("no such kernel")

    figures = {}
    status = script.attempt(bad, figures)
    assert (status["status"], figures) == ("failed", {"half": 1})
    assert status["error"].startswith("RuntimeError: no memory (test_accelerator.py:")
    assert script.attempt(missing, {}) == {"status": "not possible", "why": "no such kernel"}


def test_outcomes_are_counted_as_far_as_they_came(script):
    output = """\
collecting ... collected 5 items
tests/gpu/test_a.py::test_one[float32-rows0] PASSED   [ 20%]
tests/gpu/test_a.py::test_one[b c] FAILED  [ 40%]
tests/gpu/test_a.py::test_two SKIPPED (needs a GPU)   [ 60%]
tests/gpu/test_a.py::test_three ERROR  [ 80%]
tests/gpu/test_a.py::test_four
SKIPPED [1] tests/gpu/test_a.py:3: needs a GPU
"""
    assert script.count_outcomes(output) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failing": ["tests/gpu/test_a.py::test_one[b c]", "tests/gpu/test_a.py::test_three"],
        "why_skipped": ["needs a GPU"],
    }
