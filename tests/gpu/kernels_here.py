"""Which attention kernels can be tested on this device."""

import pytest

from quatrain.models.attention.kernels import obstacle
from quatrain.models.attention.probe import probe


def usable(kernel, arch):
    """Skips a test of a kernel that cannot run here, with the reason."""
    reason = (
        None if kernel == "xla" else obstacle(kernel, arch, "bfloat16") or probe(kernel, arch, "bfloat16")
    )
    if reason is not None:
        pytest.skip(f"{kernel} cannot be used: {reason}")
