"""The figures of `benchmarks/weights.py`."""

import itertools

import jax
import numpy as np
import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("weights")


def test_a_version_differs_from_the_one_before_in_few_numbers(script):
    """Catches versions that are the same array, or whose rounding forgets what was below it."""
    arch = script.qwen25(*script.SIZES["tiny"])
    first, *_, last = itertools.islice(script.versions_of(arch, 1e-6), 3)
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True)
    share = np.mean(np.concatenate([(one != other).ravel() for one, other in leaves]))
    assert 0.005 < share < 0.1


def test_adapters_are_those_of_all_matrices(script):
    """Of Qwen2.5-0.5B: r (in + out) numbers for each of seven matrices of 24 layers."""
    hidden, middle, layers, heads = script.SIZES["0.5B"]
    kv = 2 * hidden // heads
    sides = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + middle)
    assert script.adapter_bytes(script.qwen25(*script.SIZES["0.5B"])) == 4 * script.RANK * sides * layers


@pytest.mark.slow
def test_an_exchange_over_http(script):
    found = script.measured(script.qwen25(*script.SIZES["tiny"]), 1e-6)
    assert 0 < found["bytes"]["changes"] < 0.2 * found["bytes"]["whole"]
    assert set(found["seconds"]) == {"folder", "load", "send_whole", "publish", "send_changes"}
