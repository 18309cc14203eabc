"""The section `advantage`: advantages from rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quatrain.config.algorithms import ESTIMATORS
from quatrain.config.fields import Argument, Section, Text, function_choice, function_name


class AdvantageConfig(Section):
    """Stage 3 of a training step: computing advantages from rewards."""

    estimator: Annotated[str, function_name(ESTIMATORS)] = Field(
        "grpo",
        description=function_choice("Advantage estimator", ESTIMATORS, "algorithms.md#advantage-estimators"),
    )
    args: dict[Text, Argument] = Field({})
    """Arguments of the estimator by name, beside its inputs; checked when a run starts."""
    turn_credit: bool = False
    """Whether what an environment gave for a turn is credit for the tokens of this turn alone, compared with
    the same turn of the group's other episodes, in place of a part of the whole episode's reward:
    [advantage.md](advantage.md#credit-of-turns)."""
    scale: Literal["group", "batch", "none"] | None = None
    """Standard deviation that divides the advantage: of the group's rewards, of the whole batch, or none.
    Which of these an estimator accepts, and which is derived:
    [algorithms.md](algorithms.md#advantage-estimators)."""
