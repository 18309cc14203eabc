"""The script for accelerators, with tiny shapes where there is none."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from quatrain.models.flops import linear_parameters
from quatrain.models.params import num_params
from quatrain.ops import packing
from quatrain.update.cuts import Cutting
from quatrain.update.table import TokenTable


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("accelerator")


@pytest.mark.slow
def test_a_small_run_fills_in_every_section(script, tmp_path):
    path = tmp_path / "figures.json"
    assert script.main(["--small", "--json", str(path), "--bandwidth-tb-s", "2"]) == 0
    report = json.loads(path.read_text("utf-8"))
    sections = report["sections"]
    states = {name: section["status"] for name, section in sections.items()}
    kernels = {name: states.pop(name) for name in ("update tiny cudnn shared", "update tiny tokamax shared")}
    assert set(kernels.values()) == {"not possible"}
    assert "cudnn needs a GPU" in sections["update tiny cudnn shared"]["why"]
    assert set(states.values()) == {"done"}, states
    assert (report["device"]["platform"], report["small"]) == ("cpu", True)
    for layout in ("shared", "packed"):
        _check_update(script, sections[f"update tiny xla {layout}"], sections["limits"])
    _check_decode(script, sections["decode tiny"], sections["limits"])
    assert sections["update tiny xla shared"]["shared_fraction"] > 0.3
    norms = [sections[f"update tiny xla {layout}"]["grad_norm"] for layout in ("shared", "packed")]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    checks = sections["checks"]
    assert (checks["passed"], checks["failed"]) == (0, 0)
    assert checks["skipped"] > 10
    assert checks["why_skipped"] == ["needs a GPU, and JAX runs on cpu here"]
    exact, rounded = (sections[f"gap tiny {rest}"] for rest in ("of 1 layers, float32 highest", "bfloat16"))
    assert 0 < exact["logprob_diff_max"] < 1e-4 < rounded["logprob_diff_max"] < 0.5
    assert (exact["tokens"], rounded["tokens"]) == (2 * 8 * 12, 8 * 40)


@pytest.mark.slow
def test_named_sections_alone(script, tmp_path):
    """Without `decode`, there is nothing to compare log-probabilities on."""
    path = tmp_path / "figures.json"
    names = ["update tiny xla packed", "gap tiny bfloat16"]
    only = [argument for name in names for argument in ("--only", name)]
    assert script.main(["--small", "--json", str(path), "--bandwidth-tb-s", "2", *only]) == 0
    sections = json.loads(path.read_text("utf-8"))["sections"]
    assert list(sections) == ["limits", *names]
    _check_update(script, sections["update tiny xla packed"], sections["limits"])
    assert sections["update tiny xla packed"]["shared_fraction"] == 0
    assert sections["gap tiny bfloat16"]["status"] == "not possible"


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
    assert max(max(seconds) for seconds in update["compile_s"].values()) < update["first_step_s"]


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
    alone = script.needed_flops(arch, table, Cutting(rows=2).cut(table))
    assert alone == pytest.approx(9 * per_token + (10 + 15) * per_key + scored)
    shared = script.needed_flops(arch, table, Cutting(max_tokens=64, share_prompts=True).cut(table))
    assert shared == pytest.approx(6 * per_token + (6 + 4 + 9) * per_key + scored)
    monkeypatch.setattr(packing, "LEAST_COMMON_PREFIX", 2)
    table = replace(table, group_ids=np.arange(2))  # of two groups: three tokens once, then 1 and 2
    cuts = Cutting(max_tokens=64, share_prompts=True).cut(table)
    assert script.needed_flops(arch, table, cuts) == shared


def test_what_fails_or_does_not_fit_is_told_and_the_rest_is_kept(script, monkeypatch):
    monkeypatch.setattr(script, "EXPECTED_S", {"good": 1, "bad": 1, "long": 100, "missing": 1})
    saved = []

    def bad(figures):
        figures["half"] = 1
        raise RuntimeError("no memory\nand much more")

    def missing(figures):
        raise script.NotPossible("no such kernel")

    sections = [
        ("good one", lambda figures: figures.update(answer=42)),
        ("bad one", bad),
        ("long one", lambda figures: figures.update(answer=43)),
        ("missing one", missing),
        ("good two", lambda figures: figures.update(answer=44)),
    ]
    done = script.run_sections(
        sections,
        budget_s=30,
        began=time.monotonic(),
        save=lambda report: saved.append(json.loads(json.dumps(report))),
    )
    assert {name: section["status"] for name, section in done.items()} == {
        "good one": "done",
        "bad one": "failed",
        "long one": "not begun",
        "missing one": "not possible",
        "good two": "done",
    }
    assert (done["bad one"]["half"], done["good two"]["answer"]) == (1, 44)
    assert done["bad one"]["error"].startswith("RuntimeError: no memory (test_accelerator.py:")
    assert "100 s are expected" in done["long one"]["why"]
    assert saved[0]["good one"]["answer"] == 42
    assert saved[0]["good two"] == {"status": "not begun"}
    assert saved[-1] == json.loads(json.dumps(done))


def test_exit_status_tells_of_a_failure(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script.Bench, "machine", lambda self, figures: 1 / 0)
    path = tmp_path / "figures.json"
    assert script.main(["--small", "--json", str(path), "--only", "nothing"]) == 1
    sections = json.loads(path.read_text("utf-8"))["sections"]
    assert list(sections) == ["limits"]
    assert sections["limits"]["error"].startswith("ZeroDivisionError: division by zero (")
    assert script.main(["--small", "--json", str(path), "--budget-s", "0"]) == 0
    sections = json.loads(path.read_text("utf-8"))["sections"]
    assert {section["status"] for section in sections.values()} == {"not begun"}


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
