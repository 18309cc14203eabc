"""The section `checkpoint`: checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from quatrain.config.fields import Count, MustAgreeOnResume, NonNegative, Section, Text


class CheckpointConfig(Section):
    """Checkpoints, which contain everything needed to resume a run."""

    every_steps: Annotated[NonNegative, MustAgreeOnResume(where="rollout.max_staleness")] = 50
    """Training steps between checkpoints; 0: only after the last step."""
    keep: Count = 3
    """Number of checkpoints kept; older ones are deleted."""
    best_metric: Text | None = None
    """Metric of every evaluation, such as `eval/accuracy_lenient` or `eval/reward`. An evaluation with a new
    best value saves a checkpoint, which is kept beside the newest `checkpoint.keep`; `quatrain export RUN
    OUTPUT --step best` exports it. null: no evaluation does."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value of `checkpoint.best_metric` is the best."""
