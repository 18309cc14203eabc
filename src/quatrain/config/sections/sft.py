"""The section `sft`: supervised warm start."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quatrain.config.fields import NOT_SET, Count, DataSets, Derived, MustAgreeOnResume, NonNegative, Section


class SFTConfig(Section):
    """Supervised warm start: training on demonstrations before the first training step."""

    steps: Annotated[NonNegative, MustAgreeOnResume(where="lora.rank")] = 0
    """Optimizer steps of the warm start; 0: no warm start."""
    data: Derived[DataSets] = NOT_SET
    """Demonstrations: rows with a column `completion`, or with `messages` that end with the assistant's; a
    data set or a list of them, as `data.train`; derived: `data.train`."""
    batch_size: Count = 64
    """Demonstrations per optimizer step, over all devices."""
    learning_rate: Derived[float] = Field(NOT_SET, ge=0)
    """Peak learning rate, between a linear warm-up and a cosine decay to zero; derived: 1e-3 for a built-in
    model, whose weights are random, else 1e-5; ten times that with adapters (`lora.rank`)."""
    warmup_steps: NonNegative = 10
    """Optimizer steps of linear warm-up."""
