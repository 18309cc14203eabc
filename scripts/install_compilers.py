"""Installs XLA's compilers for GPUs and TPUs, without drivers and devices, into .hlo/ (`make test-hlo`).

    python scripts/install_compilers.py

The versions are those that the installed jax asks for (its extras `cuda13` and `tpu`). About 800 MB are
installed. A compiler that cannot be had is reported, and the tests that need it are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import jaxlib
from packaging.requirements import Requirement

FOLDER = Path(__file__).parents[1] / ".hlo"


def wanted(package: str, extra: str) -> str:
    """`package` with the versions that jax's `extra` asks for, as pip takes it."""
    for text in requires("jax") or []:
        needed = Requirement(text)
        if needed.name == package and needed.marker and needed.marker.evaluate({"extra": extra}):
            return f"{needed.name}{needed.specifier}"
    raise SystemExit(f"the installed jax has no extra {extra!r} with {package}; nothing to install")


def compilers() -> dict[str, list[str]]:
    """The packages of each folder of .hlo/."""
    return {
        "cuda": [
            wanted("jax-cuda13-plugin", "cuda13"),
            f"jax-cuda13-pjrt=={jaxlib.__version__}",
            "nvidia-cuda-nvcc>=13,<14",
            "nvidia-nvvm>=13,<14",
        ],
        "tpu": [wanted("libtpu", "tpu")],
    }


def install(packages: list[str], folder: Path) -> bool:
    """Installs `packages`, unless `folder` was made for just these; whether it now holds them."""
    done, names = folder / "packages.txt", "\n".join(packages)
    if done.is_file() and done.read_text() == names:
        return True
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    to = ["--no-deps", "--no-compile", "--upgrade", "--target", str(folder)]
    if subprocess.run([*pip, *to, *packages]).returncode:
        print(f"not installed, so tests that need it are skipped: {', '.join(packages)}", file=sys.stderr)
        return False
    done.write_text(names)
    return True


if __name__ == "__main__":
    for name, packages in compilers().items():
        install(packages, FOLDER / name)
