"""The host data of a checkpoint: what a run saves besides arrays, and its types and bounds.

`loop/checkpoints.py` saves it (`_host` must have what `_SavedState` names), and it is checked here when a run
resumes, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from quatrain.config.files import Description, checked

Number = Annotated[int, Field(ge=0, le=2**62)]


class _Counts(Description):
    model_config = ConfigDict(extra="forbid")

    step: Number
    bad_steps: Number


class _Place(Description):
    model_config = ConfigDict(extra="forbid")

    next_prompt: Number
    steps_without_signal: Number


class _SavedState(Description):
    step: Number
    bad_steps: Number
    train_step: Number
    place: _Place
    reward_kl_coef: Annotated[float, Field(ge=0)]
    critic: _Counts | None
    config: dict[str, Any]
    num_prompts: Number
    data: dict[str, Any] | None = None
    before: dict[str, float]
    accuracy: float | None
    evaluation_due: bool
    best: dict[str, Any] | None = None
    base: str | None = None
    base_form: str | None = None


def check_saved_state(host: Mapping[str, Any], folder: Path) -> None:
    """Raises ValueError unless `host`, from a checkpoint in `folder`, is what a run saves."""
    checked(
        _SavedState,
        host,
        f"the state of a checkpoint in {folder}",
        remedy="it is damaged: remove the checkpoint, and resume from the one before",
    )
