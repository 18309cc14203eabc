"""Installs verifiers and openenv into environments of their own, .hubs/NAME/ (`make test-hubs`).

    python scripts/install_hubs.py

They cannot be in one environment: each pins another version of the package mcp.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".hubs"
PACKAGES = {"verifiers": ("verifiers==0.4.0", "uv"), "openenv": ("openenv==0.10.0", "uvicorn")}


def main() -> None:
    """Installs what is not installed yet."""
    for name, packages in PACKAGES.items():
        folder, wanted = FOLDER / name, "\n".join(packages)
        done = folder / "packages.txt"
        if done.is_file() and done.read_text() == wanted:
            continue
        python = folder / "bin" / "python"
        if not python.is_file():
            venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
        done.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main())
