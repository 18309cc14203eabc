"""The interface between the fleet and a rollout worker: groups in, finished groups out, weights by version.

Data flow: `Fleet` -> `GroupSpec` -> `Worker` -> `FinishedGroup` -> `Fleet`. A worker is outside the processes
that train: its death costs time, and no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from quatrain.types.batches import Prompt
from quatrain.types.metrics import Metrics
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.sampler import PerRequestSampling

State = Literal["starting", "compiling", "idle", "busy"]
"""What a worker does; each state has a deadline of its own."""


class WorkerLost(Exception):
    """A worker died, or did not do in time what it was asked; another may take its place."""


class WorkerRefused(ValueError):
    """A worker cannot serve this run as it is configured; to start it again would not help."""


@dataclass(frozen=True)
class GroupSpec:
    """The samples to draw of one prompt; `number` is unique among the groups that a fleet gives out.

    The randomness of a token derives from the seed of the run, `step`, `prompt.group_id`, the index of the
    sample and the token's position alone, so that the group comes out the same on every worker.
    """

    number: int
    prompt: Prompt
    step: int
    sampling: Sampling
    own: PerRequestSampling | None = None
    """Of a turn of an agent, the only sample: `sampling`, `step`, and what its randomness derives from."""


@dataclass(frozen=True)
class FinishedGroup:
    """The samples of the group `number`, in order; in an episode, their prompts have more columns.

    `error` is what the worker raised about this group, in one line; then there are no samples.
    """

    number: int
    samples: Sequence[tuple[Prompt, Completion]] = ()
    error: str | None = None
    metrics: Metrics = field(default_factory=dict)


class Worker(Protocol):
    """Samples groups from weights of a version. One thread uses it at a time.

    Each method raises `WorkerLost` if the worker died or does not answer in time, and `WorkerRefused` if it
    cannot serve this run.
    """

    name: str
    """Names the worker in messages."""
    num_slots: int | None
    """Sequences that it decodes at the same time; None: as many as it is given."""

    @property
    def labels_versions(self) -> bool:
        """Whether it may load weights while it has groups, whose tokens say which version sampled each."""
        ...

    def load(self, weights: Any, version: int, timeout_s: float) -> int:
        """Sample from `weights` from now on; the version that the worker has afterwards.

        `weights` are what the fleet's publisher made of the parameters.
        """
        ...

    def submit(self, groups: Sequence[GroupSpec], version: int) -> None:
        """Queue groups, to be sampled from the weights of `version`, which it has."""
        ...

    def take(self, timeout_s: float) -> list[FinishedGroup]:
        """Groups that have finished since the last call; waits up to `timeout_s` for one. May be none."""
        ...

    def state(self) -> State:
        """What it does now; answers also while it computes."""
        ...

    def close(self) -> None:
        """End it; groups that it has are forgotten. May be called again, and for a worker that is dead."""
        ...
