"""Loading a GGUF model takes little more memory than its parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

# In a process of its own: the peak is of a whole process, and never goes down. VmHWM, not ru_maxrss, which
# would count the process that started this one.
PROBE = """
import re, sys
from pathlib import Path
import gguf, jax, jax.numpy as jnp
from quatrain.weights.gguf import load_gguf
jax.block_until_ready(jnp.zeros(1) + 1)
peak_bytes = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_bytes()
arch, params = load_gguf(sys.argv[1])
jax.block_until_ready(params)
print((peak_bytes() - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.skipif(not MODEL.is_file(), reason="models/ has no SmolLM2: run `make smollm2`")
def test_peak_memory_is_at_most_1_3_times_the_parameters() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(MODEL)], capture_output=True, text=True, check=True
    )
    assert 0.9 < float(done.stdout) <= 1.3
