"""Gradients of every family are those of torch."""

import numpy as np
import pytest
from architectures import family_cases
from goldens import GOLDEN, golden_gradients, probes, read_golden


@pytest.mark.parametrize("case", family_cases("olmo3", "gpt_oss"))
def test_gradients_are_those_of_torch(case):
    """Norm and one direction of each tensor's gradient; `make oracles` compares all elements."""
    with np.load(GOLDEN / "gradients.npz") as file:
        expected = file[case]
    gradients = golden_gradients(read_golden(case))
    found, norms = probes(gradients), expected[:, :1]
    unused = norms[:, 0] == 0  # experts that no token chose
    assert all(".experts." in name for name, none in zip(sorted(gradients), unused, strict=True) if none)
    np.testing.assert_array_equal(found[unused], 0)
    norms = np.where(norms > 0, norms, 1)
    np.testing.assert_allclose(found / norms, expected / norms, atol=1e-4)
