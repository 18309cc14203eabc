"""The interface of what plays the episodes of a batch, asking a sampler for the turns of the policy.

Data flow: list of `Prompt` -> `Player.begin` -> `Playing` -> the rows of a `RolloutBatch`. Players are single
turns (`rollout/rollouts.py`), environments and agents (`episodes/`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from quatrain.types.batches import Prompt
from quatrain.types.metrics import Metrics
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.sampler import Pause, Sampler

Row = tuple[Prompt, Completion]
"""A sequence of an episode; its prompt may have more columns than that of the data, and other tokens."""


class Playing(ABC):
    """The episodes of a batch that is being played."""

    futures: Sequence[Future[Any]]
    """One of each episode, with the error that ends the run if there is one."""

    @property
    def num_ended(self) -> int:
        """Episodes that have ended."""
        return sum(future.done() for future in self.futures)

    @abstractmethod
    def rows(self) -> Sequence[Sequence[Row]]:
        """Of each episode that has ended, in order, its sequences; of an agent, each role is an episode."""

    def metrics(self) -> Metrics:
        """Metrics of the episodes."""
        return {}


class Player(ABC):
    """What plays the episodes of prompts, asking a sampler for the turns of the policy."""

    is_everywhere: bool = False
    """Whether it plays in every process alike: it has no input but the prompts."""
    has_rows: bool = False
    """Whether an episode may have several sequences."""
    pause: Pause | None = None
    """What the sampler waits for before a round, so that runs are repeatable."""

    @abstractmethod
    def begin(self, prompts: Sequence[Prompt], step: int, sampling: Sampling, sampler: Sampler) -> Playing:
        """Begin `sampling.n` episodes of each prompt, whose randomness derives from the training `step`."""

    def close(self) -> None:  # noqa: B027 - may stay as it is
        """End what it holds; episodes that are being played get an error."""
