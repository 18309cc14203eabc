"""The section `logprob`: forward-only passes."""

from __future__ import annotations

from quatrain.config.fields import Count, Section


class LogprobConfig(Section):
    """Forward-only passes: old and reference log-probabilities."""

    micro_batch_size: Count | None = None
    """Sequences per data shard in one forward-only pass. Derived if `update.micro_batch_size` is set and both
    keys of this section are null: 2 x `update.micro_batch_size`."""
    max_tokens_per_device: Count | None = None
    """Token budget: maximum number of tokens per data shard in one forward-only pass. Derived if
    `update.micro_batch_size` and both keys of this section are null: 2 x `update.max_tokens_per_device`."""
