"""The thread of the device: units of all work in turns, so that none waits for the whole of another.

Data flow: any thread -> `Worker.submit`, `call` or `sample` -> units, one of each session that has work after
another -> the future.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import jax

from quatrain.cluster.start_thread import start_thread
from quatrain.serve.tinker.calls import Refused, Sample, Sampled, Units
from quatrain.types.sampler import ServiceFailed

T = TypeVar("T")
CLOSED = "the server was closed before this was done"
FORGOTTEN = "the session has ended"

logger = logging.getLogger(__name__)


def is_of_device(error: Exception) -> bool:
    """Whether the device has failed for all; not for want of memory, of which other requests need less.

    What a device or its driver says after a fault is JAX's own error. After it nothing more is computed.
    """
    text = str(error).lower().replace("_", " ")
    no_memory = "resource exhausted" in text or "out of memory" in text
    return isinstance(error, jax.errors.JaxRuntimeError) and not no_memory


class Rounds(Protocol):
    """What the worker asks of `sampling.Samplers`."""

    @property
    def waiting(self) -> list[tuple[str, int]]:
        """Owner and key of each sampler that has work."""

    def start(self, key: int, sample: Sample, done: Callable[[Sampled | Exception], None]) -> int:
        """The ticket of a request, whose outcome `done` is told; raises Refused."""

    def cancel(self, ticket: int) -> None:
        """Ends the work for a request, of whose outcome nobody is told."""

    def round(self, key: int) -> None:
        """A unit of the sampler's work; what it raises is a failure of the device."""


class _Turns:
    """Who is next of those that wait: whoever has waited the longest since its last turn."""

    def __init__(self) -> None:
        self._queue: list[Hashable] = []
        self._last: Hashable = None

    def next(self, waiting: Collection[Any]) -> Any:
        """One of `waiting`, which is not empty.

        Whoever had the last turn queues after those that came during it: else they would wait for two.
        """
        queue = [each for each in self._queue if each in waiting]
        queue += [each for each in waiting if each not in queue and each != self._last]
        if self._last in waiting:
            queue.append(self._last)
        self._last, *self._queue = queue
        return self._last


@dataclass(eq=False)
class _Job:
    """Units of an owner."""

    units: Callable[[], Units[Any]]
    future: Future[Any]
    steps: Units[Any] | None = None
    """None: it has not begun."""

    def step(self) -> None:
        """A unit; raises what it raises, and StopIteration with the result."""
        if self.steps is None:
            self.steps = self.units()
        computed = next(self.steps)
        try:
            # JAX queues what it is to compute: else others would wait for all that is queued, not for a unit.
            jax.block_until_ready(computed)
        except Exception as error:  # which the job must see as its own
            self.steps.throw(error)

    def drop(self, error: Exception) -> None:
        """Ends it between two units, with `error` unless it is done."""
        if self.steps is not None:
            with suppress(Exception):  # out of the end of a job that nobody waits for
                self.steps.close()
        with suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(eq=False)
class _Sampling:
    """A request to a sampler."""

    key: int
    sample: Sample
    future: Future[Sampled]
    ticket: int | None = None
    """None: it has not started."""


_JOBS = -1
"""Stands beside the keys of samplers for an owner's jobs."""


class Worker:
    """Does all work of the device in one thread of its own; any thread may call the methods.

    Owners (sessions) that have work take turns of one unit each. An owner's jobs are done in the order in
    which they were submitted; they and each of its samplers take turns in its turns. The error of a job is
    its future's alone, unless it `is_of_device`. That, or an error out of a sampler's round, is told to all.
    """

    def __init__(self, samplers: Rounds):
        self.error: str | None = None
        """Why the worker has ended; None: it has not."""
        self._samplers = samplers
        self._changed = threading.Condition()
        self._closed = False
        self._open: dict[str, set[Future[Any]]] = {}  # by owner: all that is not done
        self._jobs: dict[str, deque[_Job]] = {}  # by owner: those that wait, after the one that runs
        self._dropped: list[_Job] = []
        self._asked: list[_Sampling] = []
        self._cancelled: list[_Sampling] = []
        self._sampling: set[_Sampling] = set()  # started, and not done; the thread's alone
        self._owners = _Turns()
        self._sources: dict[str, _Turns] = {}  # by owner: of its jobs and its samplers
        self._thread = start_thread(self._work, name="tinker worker")

    def submit(self, owner: str, units: Callable[[], Units[T]]) -> Future[T]:
        """What the generator that `units` makes returns; one step of it is a unit, which ends once what it
        yields is computed.

        The future can be cancelled until the first unit begins; it has ServiceFailed if the worker ends
        before.
        """
        job = _Job(units, Future())
        self._queue(owner, job.future, lambda: self._jobs.setdefault(owner, deque()).append(job))
        return job.future

    def call(self, owner: str, function: Callable[[], T]) -> Future[T]:
        """What `function` returns: a job of one unit."""

        def units() -> Units[T]:
            return function()
            yield

        return self.submit(owner, units)

    def sample(self, owner: str, key: int, sample: Sample) -> Future[Sampled]:
        """What comes of a request to the sampler `key`; `cancel` of the future ends the work for it."""
        sampling = _Sampling(key, sample, Future())
        self._queue(owner, sampling.future, lambda: self._asked.append(sampling))
        sampling.future.add_done_callback(lambda done: self._cancel(sampling) if done.cancelled() else None)
        return sampling.future

    def forget(self, owner: str) -> None:
        """Drop all that was submitted so far for an owner, at the latest after the unit that runs.

        The futures are cancelled, but that of the job that runs, which fails with Refused. What is submitted
        from now on is done.
        """
        with self._changed:
            self._dropped += self._jobs.pop(owner, ())
            left = list(self._open.get(owner, ()))
            self._changed.notify_all()
        for future in left:
            future.cancel()

    def num_waiting(self, owner: str) -> int:
        """Jobs and requests to samplers that are not done."""
        return len(self._open.get(owner, ()))

    def close(self, timeout_s: float | None = None) -> bool:
        """End the thread after the unit that runs; what is not done fails with ServiceFailed.

        Whether the thread has ended within `timeout_s`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _queue(self, owner: str, future: Future[Any], put: Callable[[], None]) -> None:
        with self._changed:
            if self.error is not None:
                future.set_exception(ServiceFailed(self.error))
                return
            put()
            self._open.setdefault(owner, set()).add(future)
            self._changed.notify_all()
        future.add_done_callback(partial(self._end, owner))

    def _end(self, owner: str, future: Future[Any]) -> None:
        with self._changed:
            still = self._open[owner]
            still.remove(future)
            if not still:
                del self._open[owner]

    def _cancel(self, sampling: _Sampling) -> None:
        with self._changed:
            self._cancelled.append(sampling)
            self._changed.notify_all()

    def _work(self) -> None:
        error = CLOSED
        try:
            while self._wait():
                self._take_in()
                self._one_unit()
        except BaseException as failure:
            error = f"the device failed: {type(failure).__name__}: {failure}; start the server again"
            logger.error("the device failed; the server answers no more requests", exc_info=failure)
        finally:
            self._fail(ServiceFailed(error))

    def _wait(self) -> bool:
        """Waits until there is something to do; False if the worker was closed."""

        def is_asked() -> bool:
            return bool(self._jobs or self._dropped or self._asked or self._cancelled)

        with self._changed:
            self._changed.wait_for(lambda: self._closed or is_asked() or self._samplers.waiting)
            return not self._closed

    def _take_in(self) -> None:
        """Starts requests to samplers, and ends what nobody waits for: no unit of the device."""
        with self._changed:
            dropped, asked, cancelled = self._dropped, self._asked, self._cancelled
            self._dropped, self._asked, self._cancelled = [], [], []
        for job in dropped:
            job.drop(Refused(FORGOTTEN))
        for sampling in asked:
            if sampling.future.cancelled():
                continue
            self._sampling.add(sampling)
            try:
                done = partial(self._sampled, sampling)
                sampling.ticket = self._samplers.start(sampling.key, sampling.sample, done)
            except Exception as error:  # of this request alone
                self._sampled(sampling, error)
        for sampling in cancelled:
            if sampling in self._sampling and sampling.ticket is not None:
                self._sampling.remove(sampling)
                self._samplers.cancel(sampling.ticket)

    def _one_unit(self) -> None:
        """A unit of whoever is next, if anybody has work."""
        with self._changed:
            if self._dropped or self._cancelled:  # what was asked for after this must be done after it
                return
            first = {owner: jobs[0] for owner, jobs in self._jobs.items()}
        waiting = {owner: [_JOBS] for owner in first}
        for owner, key in self._samplers.waiting:
            waiting.setdefault(owner, []).append(key)
        self._sources = {owner: self._sources.get(owner) or _Turns() for owner in waiting}
        if not waiting:
            return
        owner = self._owners.next(waiting)
        source = self._sources[owner].next(waiting[owner])
        if source == _JOBS:
            self._step(owner, first[owner])
        else:
            self._samplers.round(source)

    def _step(self, owner: str, job: _Job) -> None:
        """A unit of the owner's first job, which may have been forgotten meanwhile."""
        if job.steps is None and not job.future.set_running_or_notify_cancel():
            self._leave(owner, job)
            return
        try:
            job.step()
        except StopIteration as end:
            self._leave(owner, job)
            job.future.set_result(end.value)
        except Exception as error:
            self._leave(owner, job)
            job.future.set_exception(error)
            if is_of_device(error):
                raise

    def _leave(self, owner: str, job: _Job) -> None:
        """Takes a job that has ended from its owner's, if it was not forgotten meanwhile."""
        with self._changed:
            jobs = self._jobs.get(owner)
            if jobs is not None and jobs[0] is job:
                jobs.popleft()
                if not jobs:
                    del self._jobs[owner]

    def _sampled(self, sampling: _Sampling, outcome: Sampled | Exception) -> None:
        """Tells what came of a request to a sampler, unless it was cancelled."""
        self._sampling.discard(sampling)
        if not sampling.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            sampling.future.set_exception(outcome)
        else:
            sampling.future.set_result(outcome)

    def _fail(self, error: ServiceFailed) -> None:
        with self._changed:
            self.error = str(error)
            jobs = [job for several in self._jobs.values() for job in several] + self._dropped
            samplings = [*self._asked, *self._sampling]
            for items in (self._jobs, self._dropped, self._asked, self._sampling, self._cancelled):
                items.clear()
        for job in jobs:
            job.drop(error)
        for sampling in samplings:
            with suppress(InvalidStateError):
                sampling.future.set_exception(error)
