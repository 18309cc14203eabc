"""The section `run`: the run as a whole."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from quatrain.config.fields import NOT_SET, Argument, Count, Derived, Section, Text, must

FolderName = Annotated[
    Text,
    must(
        "be letters, digits, '_', '.' and '-': it names a folder",
        re.compile(r"\w[\w.-]*").fullmatch,
    ),
]


def _is_condition(value: dict[str, object]) -> bool:
    """Whether `run.stop_when` is empty, or names a metric and one bound."""
    bounds = [bound for name, bound in value.items() if name != "metric"]
    named = isinstance(value.get("metric"), str) and value.keys() <= {"metric", "at_least", "at_most"}
    number = len(bounds) == 1 and isinstance(bounds[0], int | float) and not isinstance(bounds[0], bool)
    return not value or (named and number)


class RunConfig(Section):
    """The run as a whole."""

    name: Derived[FolderName] = NOT_SET
    """Name of the run's folder; derived: the configuration file's name and the time (UTC)."""
    dir: Text = "runs"
    """Folder that holds all runs."""
    steps: Count | None = None
    """Number of training steps (rollout batches); derived from `run.epochs` and the data."""
    epochs: float = Field(1.0, gt=0, le=1e6)
    """Passes over the training prompts; has no effect if `run.steps` is set."""
    stop_when: Annotated[
        dict[Text, Argument],
        must("be {metric: NAME, at_least: NUMBER} or {metric: NAME, at_most: NUMBER}, or {}", _is_condition),
    ] = Field({})
    """The run ends before `run.steps` after the first step whose metric reaches a bound, as in
    `{metric: eval/accuracy_strict, at_least: 0.9}` or `{metric: update/entropy, at_most: 0.1}`, with its last
    checkpoint, final evaluation and export. A metric of evaluations is compared after the steps that have one
    (`eval.every_steps`). `{}`: never. A run that ended so and is resumed trains on, and compares again after
    each step."""
    profile_steps: tuple[Count, ...] = Field((), strict=False)
    """Training steps, as `[3, 4]`, of which the main process writes a trace of JAX's profiler to `profile/`
    in the run's folder; consecutive steps are one trace."""
    compilation_cache: Text | None = "auto"
    """Folder that keeps compiled programs for later runs; in it, every kind of machine and every version of
    JAX has a folder of its own. `auto`: `quatrain/compiled` in `XDG_CACHE_HOME` or `~/.cache`, on
    accelerators and, under Linux, on CPUs; where JAX's own variables name a folder or switch its cache off,
    they hold. null: nothing is kept or read."""
