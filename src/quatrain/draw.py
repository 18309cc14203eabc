"""The prompts that each training step is trained on, with dynamic sampling.

Data flow: `PromptSource` -> `Draws.take`, which has prompts completed and scored -> `RewardedBatch`, for the
rest of the training step in `train.py`. The place in the stream of prompts is part of every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quatrain.data.prompts import PromptSource
from quatrain.join import join_groups
from quatrain.metrics import Metric
from quatrain.types import Prompt, RewardedBatch

STEPS_WITHOUT_SIGNAL = 5
"""Training steps in a row in which dynamic sampling finds no group with signal, after which the run ends."""


@dataclass(frozen=True)
class Place:
    """Where the next training step begins."""

    next_prompt: int = 0
    """The first position of the stream of prompts that no step has used."""
    steps_without_signal: int = 0
    """Number of last training steps in which dynamic sampling found no group with signal."""


class NoSignal(RuntimeError):
    """Dynamic sampling found no group with signal in `STEPS_WITHOUT_SIGNAL` training steps in a row."""

    def __init__(self, rounds: int, prompts: int):
        super().__init__(
            f"in {STEPS_WITHOUT_SIGNAL} training steps in a row, no two samples of a prompt had different "
            f"rewards, and nothing can be learned (rollout.dynamic_sampling_rounds={rounds} drew {prompts} "
            "prompts in the last of them); take easier or harder prompts, raise rollout.n or "
            "rollout.temperature, or look at the rewards and samples"
        )


class Draws:
    """Which prompts a training step is trained on: the stream of `prompts`, and dynamic sampling.

    A step has `batch_size` groups. With one round they are the next prompts of the stream. With several
    (`rollout.dynamic_sampling_rounds`), they are the next `batch_size` groups with signal, whose samples have
    different rewards: further prompts are drawn until so many are found. The stream goes on after the last
    group used, so that groups beyond it are drawn again by the next step, and groups without signal are the
    only ones that are not trained on. If the rounds do not suffice, the first groups without signal fill the
    batch.
    """

    def __init__(self, prompts: PromptSource, *, batch_size: int, rounds: int):
        self._prompts, self._batch_size, self._rounds = prompts, batch_size, rounds
        self.place = Place()
        """Where the next step begins, once the batch of this one is taken."""

    def take(self, sample: Callable[[Sequence[Prompt]], RewardedBatch]) -> RewardedBatch:
        """The rewarded batch of the next training step; `sample` completes and scores prompts.

        Raises NoSignal in the fifth step in a row in which dynamic sampling finds no group with signal.
        """
        first, wanted = self.place.next_prompt, self._batch_size
        if self._rounds == 1:
            self.place = Place(first + wanted)
            return sample(self._prompts.take(first, wanted))
        parts: list[RewardedBatch] = []
        signal: list[int] = []
        end = first
        while len(parts) < self._rounds and len(signal) < wanted:
            missing = wanted - len(signal)
            expected = math.ceil(missing * (end - first) / len(signal)) if signal else wanted
            parts.append(sample(self._prompts.take(end, min(expected, wanted))))
            end += min(expected, wanted)
            signal += groups_with_signal(parts[-1])
        without = 0 if signal else self.place.steps_without_signal + 1
        if without == STEPS_WITHOUT_SIGNAL:
            raise NoSignal(self._rounds, end - first)
        used = signal[:wanted]
        fill = [group for group in range(first, end) if group not in signal][: wanted - len(used)]
        self.place = Place(end if fill else used[-1] + 1, without)
        counts = {
            "rounds": len(parts),
            "drawn_groups": end - first,
            "dropped_groups": self.place.next_prompt - first - wanted,
            "returned_groups": end - self.place.next_prompt,
            "filled_groups": len(fill),
        }
        batch = join_groups(parts, sorted(used + fill))
        counted = {f"dynamic_sampling/{name}": Metric(n, reduction="sum") for name, n in counts.items()}
        return replace(batch, metrics={**batch.metrics, **counted})


def groups_with_signal(batch: RewardedBatch) -> list[int]:
    """The ids, in increasing order, of the groups in which two samples have different rewards.

    A sample without a reward, on which all reward functions abstained, counts for neither side.
    """
    groups, membership = np.unique(batch.rollouts.group_ids, return_inverse=True)
    least, most = np.full(len(groups), np.inf), np.full(len(groups), -np.inf)
    np.fmin.at(least, membership, batch.rewards)
    np.fmax.at(most, membership, batch.rewards)
    return [int(group) for group in groups[least < most]]
