"""The device's thread: it does the units of all clients' work in turns, so that none waits for another's whole.

Data flow: any thread -> `Worker.submit`, `call` or `sample` -> units, one of each session that has work after
another -> the future.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from quatrain.serve.tinker.calls import Sample, Sampled, Units

T = TypeVar("T")


class Rounds(Protocol):
    """What the worker asks of `sampling.Samplers`."""

    @property
    def waiting(self) -> list[tuple[str, int]]:
        """Owner and key of each sampler that has work."""

    def start(self, key: int, sample: Sample, done: Callable[[Sampled | Exception], None]) -> int:
        """The ticket of a request, whose outcome `done` is told; raises Refused."""

    def cancel(self, ticket: int) -> None: ...

    def round(self, key: int) -> None:
        """A unit of the sampler's work; what it raises is a failure of the device."""


class Worker:
    """Does all work of the device in one thread of its own; any thread may call the methods.

    Owners (sessions) that have work take turns of one unit each. An owner's jobs are done in the order in which
    they were submitted; they and each of its samplers take turns in its turns. The error of a job is its
    future's alone. An error out of a sampler's round is the device's: it is told to all, and `error` says it.
    """

    error: str | None
    """Why the worker has ended; None: it has not."""

    def __init__(self, samplers: Rounds):
        raise NotImplementedError

    def submit(self, owner: str, units: Callable[[], Units[T]]) -> Future[T]:
        """What the generator that `units` makes returns; one step of it is a unit.

        The future can be cancelled until the first unit begins; it has ServiceFailed if the worker ends first.
        """
        raise NotImplementedError

    def call(self, owner: str, function: Callable[[], T]) -> Future[T]:
        """What `function` returns: a job of one unit."""
        raise NotImplementedError

    def sample(self, owner: str, key: int, sample: Sample) -> Future[Sampled]:
        """What comes of a request to the sampler `key`; `cancel` of the future ends the work for it."""
        raise NotImplementedError

    def forget(self, owner: str) -> None:
        """Drop all that was submitted so far for an owner, at the latest after the unit that runs.

        The futures are cancelled or fail with Refused. What is submitted from now on is done.
        """
        raise NotImplementedError

    def num_waiting(self, owner: str) -> int:
        """Jobs and requests to samplers that are not done."""
        raise NotImplementedError

    def close(self, timeout_s: float | None = None) -> bool:
        """End the thread after the unit that runs; what is not done fails with ServiceFailed.

        Whether the thread has ended within `timeout_s`.
        """
        raise NotImplementedError
