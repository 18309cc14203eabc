"""The section `advantage`: advantages from rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quatrain.config.algorithms import ESTIMATORS, in_words
from quatrain.config.fields import Argument, Section, Text, function_name


def _with_scale(scale: str) -> str:
    return in_words(name for name, estimator in ESTIMATORS.items() if estimator.scales[0] == scale)


class AdvantageConfig(Section):
    """Stage 3 of a training step: computing advantages from rewards."""

    estimator: Annotated[str, function_name(ESTIMATORS)] = Field(
        "grpo",
        description=f"Advantage estimator: {', '.join(f'`{name}`' for name in ESTIMATORS)} (formulas: "
        "[algorithms.md](algorithms.md#advantage-estimators)), or a function of your own as "
        "`path/file.py:function` or `package.module:function`.",
    )
    args: dict[Text, Argument] = Field({})
    """Arguments of the estimator by name, beside its inputs; checked when a run starts."""
    scale: Literal["group", "batch", "none"] | None = Field(
        None,
        description="Standard deviation that divides the advantage: of the group's rewards, of the whole "
        "batch, or none; [algorithms.md](algorithms.md#advantage-estimators) shows which of these an "
        f"estimator accepts; derived: `group` for {_with_scale('group')}, `batch` for "
        f"{_with_scale('batch')}, `none` for the others.",
    )
