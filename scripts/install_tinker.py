"""Installs the real client and its cookbook into an environment of their own, .tinker/ (`make test-tinker`).

python scripts/install_tinker.py
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".tinker"
# The cookbook without what it names as required: tml-renderers, which only models of Thinking Machines' own
# need, is not published for every machine.
COOKBOOK = "tinker-cookbook==0.6.1"
PACKAGES = (
    "tinker==0.38.0", "aiohttp", "blobfile", "chz>=0.4.0", "cloudpickle", "datasets", "math-verify", "pillow",
    "pylatexenc", "pyrage", "rich", "safetensors", "sympy", "termcolor", "tiktoken", "torch==2.13.0", "tqdm",
    "transformers",
)  # fmt: skip


def main() -> None:
    """Installs what is not installed yet."""
    done, wanted = FOLDER / "packages.txt", "\n".join((COOKBOOK, *PACKAGES))
    if done.is_file() and done.read_text() == wanted:
        return
    python = FOLDER / "bin" / "python"
    if not python.is_file():
        venv.create(FOLDER, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for packages in (PACKAGES, ("--no-deps", COOKBOOK)):
        subprocess.run([*pip, *packages], check=True)
    done.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main())
