"""Gradients of every family are those of torch."""

import numpy as np
import pytest
from architectures import family_cases
from goldens import GOLDEN, golden_gradients, probes, read_golden


@pytest.mark.parametrize("case", family_cases("ministral3", "olmo3", "phi3_longrope", "gpt_oss", "qwen2_moe"))
def test_gradients_are_those_of_torch(case):
    """Norm and one direction of each tensor's gradient; `make oracles` compares all elements."""
    with np.load(GOLDEN / "gradients.npz") as file:
        expected = file[case]
    found = probes(golden_gradients(read_golden(case)))
    norms = expected[:, :1]
    assert norms.min() > 0
    np.testing.assert_allclose(found / norms, expected / norms, atol=1e-4)
