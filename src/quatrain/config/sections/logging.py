"""The section `logging`: logging of metrics and samples."""

from __future__ import annotations

from typing import Literal

from quatrain.config.fields import NonNegative, Section, Text


class LoggingConfig(Section):
    """Logging of metrics and samples, in addition to the files that every run writes."""

    wandb: Literal["disabled", "offline", "online"] | None = None
    """Mode of Weights & Biases (extra `wandb`); derived: the variable WANDB_MODE, or `online` if
    WANDB_API_KEY is set, else `disabled`."""
    wandb_project: Text = "quatrain"
    """Project in Weights & Biases."""
    trackio: Text | None = None
    """Project in Trackio (extra `trackio`) that the run is logged to; null: none."""
    tensorboard: bool = False
    """Write TensorBoard files (extra `tensorboard`)."""
    samples_per_step: NonNegative = 16
    """Completions written to `samples/` at each training step."""
    sample_tokens: bool = False
    """Write the tokens of these completions too, with the log-probabilities of sampler and trainer. The
    trainer's cost one forward pass in each training step."""
