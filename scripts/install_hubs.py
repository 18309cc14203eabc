"""Installs programs that ask quatrain into environments of their own, .hubs/NAME/ (`make test-hubs`).

    python scripts/install_hubs.py

verifiers and openenv cannot be in one environment: each pins another version of the package mcp. Of the
frameworks of `tests/frameworks`, instructor needs an older package jiter than the newest of openai and
anthropic. Claude Code comes from npm; without npm it is not installed, and its test is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".hubs"
PACKAGES = {
    "verifiers": ("verifiers==0.4.0", "uv"),
    "openenv": ("openenv==0.10.0", "uvicorn"),
    "frameworks": (
        "openai==3.57.0", "anthropic==2.14.0", "openai-agents==0.24.0", "litellm==1.110.2",
        "langchain-openai==1.7.4", "langchain-anthropic==1.7.10",
        "pydantic-ai-slim[openai,anthropic]==2.68.0", "dspy==3.4.1", "inspect-ai==0.3.285",
        "smolagents[openai]==1.26.0", "lm_eval[api]==0.4.13", "transformers",
    ),
    "instructor": ("instructor==1.17.0", "openai==3.3.0", "anthropic==2.14.0"),
}  # fmt: skip
COMMANDS = ("@anthropic-ai/claude-code@2.1.332",)


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
    _install_commands(FOLDER / "npm", "\n".join(COMMANDS))


def _install_commands(folder: Path, wanted: str) -> None:
    done = folder / "packages.txt"
    if done.is_file() and done.read_text() == wanted:
        return
    npm = shutil.which("npm")
    if npm is None:
        print(f"npm was not found: {', '.join(COMMANDS)} is not installed", file=sys.stderr)
        return
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel", "error"]
    subprocess.run([npm, "install", *options, *COMMANDS], check=True)
    done.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main())
