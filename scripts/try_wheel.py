"""Installs a wheel in an empty environment and trains with it for a few steps (`make test-dist`).

    python scripts/try_wheel.py WHEEL oldest    # dependencies in the oldest versions of pyproject.toml
    python scripts/try_wheel.py WHEEL newest    # in the newest

Ends with the status of the first command that fails, or with an error if the run lacks one of its files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
STEPS = 3
RUN = [f"run.steps={STEPS}", "run.name=tried", "sft.steps=3", "data.batch_size=4", "eval.num_prompts=8"]
RUN += ["eval.final_num_prompts=8"]


def oldest() -> list[str]:
    """The dependencies, each with the version of its lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = [(needed.name, str(needed.specifier)) for needed in map(Requirement, project["dependencies"])]
    assert all(bound.startswith(">=") and "," not in bound for _, bound in bounds), bounds
    return [f"{name}=={bound.removeprefix('>=')}" for name, bound in bounds]


def try_wheel(wheel: Path, versions: list[str], folder: Path) -> None:
    """Install `wheel` and `versions` in `folder`, and train there; raises if either fails."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "QUATRAIN"))}
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, wheel, *versions], check=True, cwd=folder, env=alone)
    subprocess.run([python, "-m", "pip", "check"], check=True, cwd=folder, env=alone)
    settings = [word for setting in RUN for word in ("--set", setting)]
    quatrain = python.with_name("quatrain")
    subprocess.run([quatrain, "train", *settings], check=True, cwd=folder, env=alone)
    run = folder / "runs" / "tried"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    missing = [name for name in ("final/model.safetensors", "report.html") if not (run / name).is_file()]
    if max(steps) != STEPS or missing:
        raise SystemExit(f"the run has steps up to {max(steps)} of {STEPS}, and lacks {missing or 'nothing'}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in ("oldest", "newest") or not Path(sys.argv[1]).is_file():
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        versions = oldest() if sys.argv[2] == "oldest" else []
        try:
            try_wheel(Path(sys.argv[1]).resolve(), versions, Path(folder))
        except subprocess.CalledProcessError as error:
            raise SystemExit(error.returncode) from error
