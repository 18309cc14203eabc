"""The devices that programs are compiled for, none of which is needed: XLA's compilers alone are.

`make test-hlo` installs them into .hlo/ (scripts/install_compilers.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPILERS = ROOT / ".hlo"
H100 = Path(__file__).with_name("h100.txtpb")
"""XLA's description of an H100: sizes, limits and rates that the compiler asks for."""


@dataclass(frozen=True)
class Target:
    """A kind of device: JAX's name of it, the folder of its compiler, and the environment this needs."""

    kind: str
    folder: Path
    attention: str
    """The attention implementation that programs are compiled with; cuDNN's needs a device to compile."""
    needs: str
    """A path in `folder` without which there is no compiler."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str | None:
        """Why programs cannot be compiled for this device; None where they can."""
        if (self.folder / self.needs).exists():
            return None
        return f"no compiler for {self.kind} in {self.folder}; run `make test-hlo`, which installs it"

    def child_environment(self) -> dict[str, str]:
        """The environment of a process that compiles for this device."""
        paths = [str(self.folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        return {
            **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
            **self.environment,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    def devices(self, number: int = 1) -> Any:
        """So many devices that programs can be lowered for, in a process with `child_environment`."""
        from jax.experimental import topologies

        if self.kind == "gpu":
            options = {"target_config": H100.read_text(), "topology": f"1x1x{number}"}
            return topologies.get_topology_desc("", "cuda", **options).devices
        return topologies.get_topology_desc("v5e:2x2", "tpu").devices[:number]


TARGETS = {
    "h100": Target(
        "gpu",
        COMPILERS / "cuda",
        "xla",
        "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
        {
            # Without a device, kernels cannot be timed against each other.
            "XLA_FLAGS": "--xla_gpu_autotune_level=0 "
            f"--xla_gpu_cuda_data_dir={COMPILERS / 'cuda' / 'nvidia' / 'cu13'}",
        },
    ),
    "v5e": Target(
        "tpu",
        COMPILERS / "tpu",
        "splash",
        "libtpu/libtpu.so",
        {
            "TPU_LIBRARY_PATH": str(COMPILERS / "tpu" / "libtpu" / "libtpu.so"),
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
        },
    ),
}
