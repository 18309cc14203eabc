"""Keeps the workers of a fleet at work: one thread for each, with deadlines, restarts and lost groups.

Data flow: `Fleet` adds groups to the `GroupTable` -> a `WorkerSupervisor`'s threads give them to `Worker`s
and put what these return into the table -> `Fleet` takes finished groups. A thread uses its worker alone. If
a call does not return by its deadline, the thread is left behind: what it brings later is not taken.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from quatrain.cluster.start_thread import start_thread
from quatrain.rollout.group_table import GroupFailed, GroupTable
from quatrain.rollout.worker import FinishedGroup, Worker, WorkerLost, WorkerRefused

TAKE_S = 0.1
"""Seconds that a worker may wait for a finished group before it answers that there is none yet.

What is asked for meanwhile, as the next turn of an agent, waits as long."""
STARTING = 3
"""To start, a worker may take this many times `timeout_s`: it loads a model and may be put in a queue."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before a worker is started that was lost several times without finishing a group."""
CLOSE_S = 10.0
"""Longest wait for the end of a worker."""
WorkerFactory = Callable[[], Worker]

logger = logging.getLogger(__name__)


class Weights(NamedTuple):
    """Published weights: what `Worker.load` takes, and their version."""

    handle: Any
    version: int


class WorkersLost(RuntimeError):
    """There has been no worker for too long."""


class _Ended(Exception):
    """The thread's worker was given up meanwhile."""


@dataclass
class _Slot:
    """A slot for a worker, which workers take one after another."""

    name: str
    """The slot in the table and in messages."""
    factory: WorkerFactory
    oldest: int = 0
    """The version of the weights when the first of the groups that the worker has was given."""
    generation: int = 0
    """Counts the workers of this slot; a thread whose generation is over must not touch the table."""
    worker: Worker | None = None
    started: bool = False
    """Whether any worker of this slot has started."""
    loaded: bool = False
    """Whether this worker has loaded weights."""
    unhealthy: bool = False
    """Whether the last worker that started here was lost before it had loaded weights."""
    doing: str = ""
    """The call that runs."""
    began: float = 0.0
    limit_s: float | None = None
    """The deadline of the call that runs."""
    losses: int = 0
    """Workers lost since one of this slot last finished a group."""
    last_error: str = ""
    busy_since: float | None = None
    busy_s: float = 0.0
    num_finished: int = 0
    """Groups that this worker has finished."""
    worked_s: float = 0.0
    """Seconds in which this worker had groups, up to `busy_since`."""

    def __str__(self) -> str:
        return self.name if self.worker is None else f"{self.name} ({self.worker.name})"

    def rate(self) -> float | None:
        """Groups that this worker finishes in a second; None before the first."""
        running = 0.0 if self.busy_since is None else time.monotonic() - self.busy_since
        return self.num_finished / max(self.worked_s + running, 1e-9) if self.num_finished else None

    def stop_clock(self) -> None:
        """The worker has no groups any more."""
        if self.busy_since is not None:
            seconds = time.monotonic() - self.busy_since
            self.busy_s, self.worked_s = self.busy_s + seconds, self.worked_s + seconds
            self.busy_since = None


@dataclass(frozen=True)
class WorkerCounts:
    """Totals of a supervisor so far."""

    restarts: int = 0
    stale: int = 0
    retried: int = 0
    busy_s: float = 0.0
    seconds: float = 0.0
    """Seconds since the supervisor began."""

    def __sub__(self, earlier: WorkerCounts) -> WorkerCounts:
        return WorkerCounts(*(value - getattr(earlier, name) for name, value in vars(self).items()))


class WorkerSupervisor:
    """Workers made by `factories`, each started anew when it is lost, on the groups of `table`.

    A worker is lost if it says so, raises another error, or does not answer within `timeout_s` (three times
    as long while it starts). `changed` guards the table; it is notified when a group is finished.
    """

    def __init__(self, factories: Sequence[WorkerFactory], table: GroupTable, *, timeout_s: float):
        self.changed = threading.Condition()
        self.load_s = 0.0
        """Longest time that a worker took for the current weights."""
        self._table, self._timeout_s = table, timeout_s
        self._weights: Weights | None = None
        self._versions: set[int] = set()
        """Of all weights so far."""
        self._error: Exception | None = None
        self._closed, self._began = False, time.monotonic()
        self._restarts = self._stale = 0
        self._none_since: float | None = None
        """Since when no worker could sample; until one has loaded weights, because it may fail to."""
        self._slots = [_Slot(slot_name(number), factory) for number, factory in enumerate(factories)]
        for slot in self._slots:
            start_thread(self._work, slot, slot.generation, name="worker of the fleet")

    @property
    def num_workers(self) -> int:
        """Workers that there should be."""
        return len(self._slots)

    @property
    def workers(self) -> list[Worker]:
        """The workers that have started and are not lost."""
        return [slot.worker for slot in self._slots if slot.worker is not None]

    def counts(self) -> WorkerCounts:
        """Totals so far; `busy_s`: seconds in which a worker had groups, summed over workers."""
        with self.changed:
            now = time.monotonic()
            running = sum(now - slot.busy_since for slot in self._slots if slot.busy_since is not None)
            busy_s = running + sum(slot.busy_s for slot in self._slots)
            return WorkerCounts(self._restarts, self._stale, self._table.retried, busy_s, now - self._began)

    def set_weights(self, weights: Weights) -> None:
        """Workers load these weights before they get another group."""
        with self.changed:
            self._weights, self.load_s = weights, 0.0
            self._versions.add(weights.version)
            self.changed.notify_all()

    def check(self) -> None:
        """Gives up workers that are overdue. Raises the error by which the supervisor cannot go on.

        To be called, with `changed` held, while waiting for groups.
        """
        now = self._give_up_overdue()
        since = self._none_since
        if since is not None and not self._able() and now - since > self._timeout_s:
            errors = "; ".join(f"{slot.name}: {slot.last_error}" for slot in self._slots)
            self._error = self._error or WorkersLost(
                f"no rollout worker has been alive for {self._timeout_s:g} s (rollout.timeout_s); the last "
                f"error of each: {errors}; see why they end, and resume the run"
            )
        if self._error is not None:
            raise self._error

    def all_started(self) -> bool:
        """Whether each worker has started, also if it was lost since.

        To be called, with `changed` held, while waiting for the start. Raises the error by which the
        supervisor cannot go on, and ValueError if a worker has failed to start for `timeout_s`.
        """
        late = self._give_up_overdue() - self._began > self._timeout_s
        failed = [slot for slot in self._slots if late and slot.last_error and not slot.started]
        if failed:
            errors = "; ".join(f"{slot.name}: {slot.last_error}" for slot in failed)
            self._error = self._error or ValueError(
                f"each rollout worker or server must start before training begins; {len(failed)} of "
                f"{self.num_workers} did not within rollout.timeout_s ({self._timeout_s:g} s), the last "
                f"error of each: {errors}; see why, correct rollout.workers or rollout.servers, or raise "
                "rollout.timeout_s"
            )
        if self._error is not None:
            raise self._error
        return all(slot.started for slot in self._slots)

    def _able(self) -> list[str]:
        """The places of the workers which have loaded weights, or of which nothing says that they cannot."""
        return [slot.name for slot in self._slots if slot.worker is not None and not slot.unhealthy]

    def _give_up_overdue(self) -> float:
        """Gives up workers whose calls are overdue; the time now."""
        now = time.monotonic()
        for slot in self._slots:
            if slot.limit_s is not None and now - slot.began > slot.limit_s:
                self._lose(slot, f"no answer for {slot.limit_s:g} s while {slot.doing}")
        return now

    def close(self) -> None:
        """Ends the workers; groups that they have are forgotten. May be called again."""
        with self.changed:
            self._closed = True
            workers = self.workers
            for slot in self._slots:
                slot.generation += 1
                slot.worker = slot.limit_s = None
            self.changed.notify_all()
        closing = [start_thread(_close_quietly, worker, name="end of a worker") for worker in workers]
        for thread in closing:
            thread.join(CLOSE_S)

    def _work(self, slot: _Slot, generation: int) -> None:
        """The life of one worker: started, and kept at work until it is lost."""
        worker = None
        try:
            # A first loss is often a machine that was taken away: at once; after further ones it waits.
            pause_s = min(2.0 ** (slot.losses - 2), LONGEST_PAUSE_S) if slot.losses > 1 else 0.0
            with self.changed:
                self.changed.wait_for(lambda: slot.generation != generation, pause_s)
            with self._call(slot, generation, "starting", STARTING * self._timeout_s):
                worker = slot.factory()
            with self._in_term(slot, generation):
                slot.worker, slot.started = worker, True
                if self._weights is None:
                    # Before there are weights to load, to have started is all that a worker can show.
                    self._none_since = None
                self.changed.notify_all()
            self._keep_at_work(slot, generation, worker)
        except _Ended:
            pass
        except GroupFailed as error:
            self._fail(error)
        except WorkerRefused as error:
            # Of one that was given up, it may be the fault of the next: that has taken its server over.
            with self.changed:
                if slot.generation == generation:
                    self._fail(error)
        except Exception as error:
            why = str(error) if isinstance(error, WorkerLost) else f"{type(error).__name__}: {error}"
            with self.changed:
                if slot.generation == generation:
                    self._lose(slot, why)
                    worker = None
        if worker is not None:
            _close_quietly(worker)

    @contextmanager
    def _in_term(self, slot: _Slot, generation: int) -> Iterator[None]:
        """Holds `changed`; raises _Ended if the worker was given up."""
        with self.changed:
            if slot.generation != generation:
                raise _Ended
            yield

    def _keep_at_work(self, slot: _Slot, generation: int, worker: Worker) -> None:
        version: int | None = None
        table = self._table
        while True:
            with self._in_term(slot, generation):
                weights = self._weights
                if weights is None or (
                    weights.version == version
                    and not table.held(slot.name)
                    and not table.num_waiting(slot.name, self._able())
                ):
                    self.changed.wait()
                    continue
            if weights.version != version:
                version = self._load(slot, generation, worker, weights)
            else:
                self._exchange(slot, generation, worker, weights.version)

    def _load(self, slot: _Slot, generation: int, worker: Worker, weights: Weights) -> int:
        began = time.monotonic()
        with self._call(slot, generation, f"loading weights of version {weights.version}", self._timeout_s):
            version = worker.load(weights.handle, weights.version, self._timeout_s)
        if version != weights.version:
            raise WorkerLost(
                f"it has weights of version {version} after it was to load version {weights.version}"
            )
        with self.changed:
            self.load_s = max(self.load_s, time.monotonic() - began)
            if slot.generation == generation:
                slot.loaded, slot.unhealthy, self._none_since = True, False, None
        return version

    def _exchange(self, slot: _Slot, generation: int, worker: Worker, version: int) -> None:
        """Gives groups to the worker and takes those that it has finished."""
        with self._in_term(slot, generation):
            given = self._table.give(slot.name, self._room(slot, worker), self._able())
            held = bool(self._table.held(slot.name))
            if len(given) == len(self._table.held(slot.name)):
                slot.oldest = version
            if held and slot.busy_since is None:
                slot.busy_since = time.monotonic()
            if not held:  # what waits must be given out alone, and another worker is about to take it
                self.changed.wait(TAKE_S)
                return
        if given:
            with self._call(slot, generation, f"taking groups of version {version}", self._timeout_s):
                worker.submit(given, version)
        with self._call(slot, generation, "sampling", self._timeout_s):
            finished = worker.take(TAKE_S)
            # Asked again, as it may have finished between the two; one that forgot its groups never will.
            if not finished and worker.state() == "idle":
                finished = worker.take(0)
                if not finished:
                    raise WorkerLost("it is idle and has not returned the groups that it was given")
        with self._in_term(slot, generation):
            self._accept(slot, finished, version)

    def _room(self, slot: _Slot, worker: Worker) -> int:
        """Groups that a worker may have: as many as fill its slots, and one more.

        Without a number of slots, its part of the groups that are not finished, by the speeds of the workers.
        Before the first of a worker, whose speed is unknown then, a quarter of an equal part.
        """
        if worker.num_slots is not None:
            return worker.num_slots // self._table.largest_waiting(slot.name, self._able()) + 1
        unfinished = self._table.num_unfinished
        if self.num_workers == 1:
            return unfinished
        own, rates = slot.rate(), [each.rate() for each in self._slots]
        if own is None:
            return math.ceil(unfinished / self.num_workers / 4)
        known = [rate for rate in rates if rate is not None]
        part = own / sum(known) * len(known) / self.num_workers
        return math.ceil(unfinished * part)

    def _accept(self, slot: _Slot, finished: Sequence[FinishedGroup], version: int) -> None:
        """Puts what a worker returned into the table."""
        for group in finished:
            versions = {each for _, completion in group.samples for each in completion.versions}
            # Another version would be trained with the wrong old policy. A worker that had groups when it
            # loaded newer weights labels their tokens; -1 is of tokens that were given.
            known = {each for each in self._versions if slot.oldest <= each <= version}
            if others := versions - known - {-1}:
                self._stale += 1
                raise WorkerLost(
                    f"it returned group {group.number} with tokens of version {min(others)}, and was asked "
                    f"for version {version}"
                )
            try:
                self._table.finish(slot.name, group)
            except ValueError as error:
                raise WorkerLost(f"it {error}") from error
            if group.error is None:
                # One whole group shows that it works: pauses before a restart begin anew.
                slot.losses = 0
                slot.num_finished += 1
            else:
                logger.warning("a group failed on rollout %s: %s; it is given out again", slot, group.error)
        if not self._table.held(slot.name):
            slot.stop_clock()
        if finished:
            self.changed.notify_all()

    def _lose(self, slot: _Slot, why: str) -> None:
        """Gives up the worker of a slot and starts another; `changed` is held."""
        if self._closed:
            return
        name, worker = str(slot), slot.worker
        if worker is not None and self._weights is not None:
            slot.unhealthy = not slot.loaded
        # Its thread may hang in a call for ever; what that returns later must not touch the table.
        slot.generation += 1
        slot.worker = None
        slot.limit_s, slot.last_error = None, why
        slot.losses += 1
        self._restarts += 1
        slot.stop_clock()
        slot.loaded, slot.num_finished, slot.worked_s = False, 0, 0.0
        if worker is not None:
            # In a thread: closing one that does not answer may take as long as asking it did.
            start_thread(_close_quietly, worker, name="end of a worker")
        if self._none_since is None and not self._able():
            self._none_since = time.monotonic()
        try:
            retried = self._table.lose(slot.name, why)
        except GroupFailed as error:
            self._fail(error)
            return
        if slot.started:
            what = f"{retried} groups are given to others, and it is started again"
            logger.warning("rollout %s was lost: %s; %s", name, why, what)
        else:
            limit = f"until rollout.timeout_s ({self._timeout_s:g} s) is over"
            logger.warning("rollout %s has not started: %s; it is tried again %s", name, why, limit)
        start_thread(self._work, slot, slot.generation, name="worker of the fleet")
        self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self.changed:
            if not self._closed:
                self._error = self._error or error
            self.changed.notify_all()

    @contextmanager
    def _call(self, slot: _Slot, generation: int, doing: str, limit_s: float) -> Iterator[None]:
        """A call of a worker's method, which has `limit_s` seconds."""
        with self._in_term(slot, generation):
            slot.doing, slot.began, slot.limit_s = doing, time.monotonic(), limit_s
        try:
            yield
        finally:
            with self.changed:
                if slot.generation == generation:
                    slot.limit_s = None


def slot_name(number: int) -> str:
    """The name of a worker's slot in the table and in messages; `number` is that of its factory."""
    return f"worker {number}"


def _close_quietly(worker: Worker) -> None:
    """Closes a worker that may be dead already."""
    with suppress(Exception):
        worker.close()
