"""The section `critic_optimizer`: the critic's optimizer."""

from __future__ import annotations

from pydantic import Field

from quatrain.config.sections.optimizer import OptimizerConfig


class CriticOptimizerConfig(OptimizerConfig):
    """The critic's optimizer and its learning-rate schedule, which counts optimizer steps, applied or not."""

    part_of_a_run_with = "critic.enabled"

    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate."""
