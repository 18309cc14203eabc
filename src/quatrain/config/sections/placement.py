"""The section `placement`: devices of each role."""

from __future__ import annotations

from quatrain.config.fields import Devices, Section


class PlacementConfig(Section):
    """Which devices training, rollout, reference policy, critic, reward models and teacher use.

    Devices are given by their numbers within a process, the same in every process. Two of these roles must
    have either the same devices or none in common.
    """

    train: Devices | None = None
    """Devices of training, e.g. `0-3` or `0,2`; null: all."""
    rollout: Devices | None = None
    """Devices of the rollout; null: the training devices."""
    reference: Devices | None = None
    """Devices of the reference policy; null: the training devices."""
    critic: Devices | None = None
    """Devices of the critic; null: the training devices."""
    reward: Devices | None = None
    """Devices of the reward models; null: the training devices."""
    teacher: Devices | None = None
    """Devices of the teacher; null: the training devices."""
