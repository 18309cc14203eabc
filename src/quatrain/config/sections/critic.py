"""The section `critic`: the critic, which predicts returns."""

from __future__ import annotations

from pydantic import Field

from quatrain.config.fields import NOT_SET, Count, Derived, NonNegative, Section, Text
from quatrain.config.sections.logprob import LogprobConfig


class CriticConfig(Section):
    """The critic, which predicts returns for `advantage.estimator: gae`."""

    enabled: Derived[bool] = NOT_SET
    """Whether a critic is trained; derived: true for `advantage.estimator: gae`, else false. An estimator of
    your own that takes `values` needs true."""
    path: Text | None = None
    """The critic's model, in the forms of `model.path`; its tokenizer must be the policy's. null: the
    policy's weights at the start of training, with a new output head of zeros."""
    mini_batch_size: Derived[Count] = NOT_SET
    """Prompts per optimizer step of the critic, over all devices; derived: `update.mini_batch_size`."""
    epochs: Derived[Count] = NOT_SET
    """Passes over the sequences of a training step; derived: `update.epochs`."""
    micro_batch_size: Count | None = None
    """Sequences per data shard in one forward/backward pass of the critic. Derived if both this and
    `critic.max_tokens_per_device` are null: `update.micro_batch_size`."""
    max_tokens_per_device: Count | None = None
    """Token budget of one forward/backward pass of the critic, per data shard. Derived if both this and
    `critic.micro_batch_size` are null: `update.max_tokens_per_device`."""
    forward_micro_batch_size: Count | None = None
    """Sequences per data shard in one forward-only pass, which computes values. Derived if both this and
    `critic.forward_max_tokens_per_device` are null: 2 x `critic.micro_batch_size`."""
    forward_max_tokens_per_device: Count | None = None
    """Token budget of one forward-only pass of the critic, per data shard. Derived if both this and
    `critic.forward_micro_batch_size` are null: 2 x `critic.max_tokens_per_device`."""
    clip_value: float | None = Field(0.5, gt=0)
    """The value loss is that of the value clipped to this distance from the value at the start of the
    training step, if that loss is larger; null: not clipped."""
    warmup_steps: NonNegative = 0
    """Training steps in which only the critic is trained, before the policy is."""

    @property
    def forward_sizes(self) -> LogprobConfig:
        """The sizes of forward-only passes, in the form of the section `logprob`."""
        return LogprobConfig(
            micro_batch_size=self.forward_micro_batch_size,
            max_tokens_per_device=self.forward_max_tokens_per_device,
        )
