"""The section `run`: the run as a whole."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from quatrain.config.fields import Count, Section, Text, must

FolderName = Annotated[
    Text,
    must(
        "be letters, digits, '_', '.' and '-': it names a folder",
        re.compile(r"\w[\w.-]*").fullmatch,
    ),
]


class RunConfig(Section):
    """The run as a whole."""

    name: FolderName | None = None
    """Name of the run's folder; derived: the configuration file's name and the time (UTC)."""
    dir: Text = "runs"
    """Folder that holds all runs."""
    steps: Count | None = None
    """Number of training steps (rollout batches); derived from `run.epochs` and the data."""
    epochs: float = Field(1.0, gt=0, le=1e6)
    """Passes over the training prompts; has no effect if `run.steps` is set."""
    profile_steps: tuple[Count, ...] = Field((), strict=False)
    """Training steps, as `[3, 4]`, of which the main process writes a trace of JAX's profiler to `profile/`
    in the run's folder; consecutive steps are one trace."""
    compilation_cache: Text | None = "auto"
    """Folder that keeps compiled programs for later runs; in it, every kind of machine and every version of
    JAX has a folder of its own. `auto`: `quatrain/compiled` in `XDG_CACHE_HOME` or `~/.cache`, on
    accelerators and, under Linux, on CPUs; where JAX's own variables name a folder or switch its cache off,
    they hold. null: nothing is kept or read."""
