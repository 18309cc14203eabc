"""The section `offload`: arrays that wait in the host's memory."""

from __future__ import annotations

from quatrain.config.fields import Section


class OffloadConfig(Section):
    """Arrays that are moved to the host's pinned memory while they are not in use."""

    reference: bool = False
    """Offload the reference policy while no reference log-probabilities are computed."""
    optimizer: bool = False
    """Offload the optimizer state between optimizer steps."""
    policy: bool = False
    """Offload the policy's parameters while they are not trained, so that the rollout has their room. It
    needs a rollout with a copy of the weights on the same devices (another dtype, another mesh, or merged
    adapters) and `rollout.max_staleness` 0."""
    critic: bool = False
    """Offload the critic: its weights while no values are computed and it is not trained, its optimizer state
    between its optimizer steps."""
    reward_models: bool = False
    """Offload the reward models while no scores are computed."""
    teacher: bool = False
    """Offload the teacher while no log-probabilities of it are computed."""
