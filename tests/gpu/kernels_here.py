"""Which attention kernels can be tested on this device."""

import pytest

from quatrain.models.attention.kernels import obstacle
from quatrain.models.probe import probe_attention


def usable(kernel, arch):
    """Skips a test of a kernel that cannot run here, with the reason."""
    case = kernel, arch, "bfloat16"
    reason = None if kernel == "xla" else obstacle(*case) or probe_attention(*case)
    if reason is not None:
        pytest.skip(f"{kernel} cannot be used: {reason}")
