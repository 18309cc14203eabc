"""A fleet of rollout workers as one sampler: groups are given out, and come back in any order.

Data flow: `Request`s -> `Fleet.start` -> `GroupSpec`s in the table -> workers (`supervisor.py`) ->
`FinishedGroup`s -> the listeners of the requests. Weights go the same way: `publish.py` stores each version
once, and each worker loads it before it gets groups of it.

A group whose worker is lost is given to another. The randomness of a token depends on the seed, the step, the
sequence and the position, and not on the worker, so that the group comes out the same.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from quatrain.cluster.processes import decided_by_main, is_main_process
from quatrain.cluster.start_thread import start_thread
from quatrain.rollout.group_table import GroupTable
from quatrain.rollout.publish import Publisher, gathered
from quatrain.rollout.supervisor import Weights, WorkerFactory, WorkerSupervisor, slot_name
from quatrain.rollout.worker import FinishedGroup, GroupSpec, Worker
from quatrain.types.metrics import Metric, Metrics, combine
from quatrain.types.piece import NOTHING
from quatrain.types.sampler import Listener, Progress, Request, Sampler, ServiceFailed, Work, numbered

LOOK_S = 0.2
"""Seconds between two looks at the deadlines of workers."""
KEPT_VERSIONS = 2
"""Published versions that are kept: a worker may still load the one before the current."""
CLOSED = "the fleet was closed while turns were in flight"


@dataclass(frozen=True)
class HostWeights:
    """Parameters gathered on the host of the main process by `Fleet.copy_weights`; `seconds` it took."""

    tree: Any
    seconds: float


class _Awaited(NamedTuple):
    """A group that a listener waits for: the number of its first turn, and how many it has."""

    listener: Listener
    number: int
    turns: int


class Fleet(Sampler):
    """Samples turns on workers, which `factories` start.

    A worker that dies, or gives no answer for `timeout_s` (three times as long while it starts), is started
    anew, and its groups are given to others, each at most `retries` times. `dtype` is the dtype of published
    matrices. `prepare` makes of the parameters what is published, e.g. with adapters merged. `cannot_see`
    says why the workers get no prompts with pictures; None: they do.

    With several processes, the main process alone talks to workers; all must call `copy_weights`, `load` and
    `wait_for_start`.

    It fails with `WorkerRefused` if a worker cannot serve this run, `GroupFailed` if a group failed too
    often, and `WorkersLost` if there was no worker for `timeout_s`.
    """

    cannot_constrain = (
        "the workers of a fleet follow no grammar; sample on the devices of this run (rollout.servers empty, "
        "rollout.workers 0), or leave the grammar out"
    )

    def __init__(
        self,
        factories: Sequence[WorkerFactory],
        publisher: Publisher,
        *,
        dtype: DTypeLike,
        timeout_s: float,
        prepare: Callable[[Any], Any] | None = None,
        retries: int = 3,
        cannot_see: str | None = None,
    ):
        self._publisher, self._dtype, self.prepare = publisher, dtype, prepare
        self.cannot_see = cannot_see
        self._numbers = count()
        self._table = GroupTable(retries)
        self._awaited: dict[int, _Awaited] = {}  # by the numbers of groups; guarded by `changed`
        self._published: deque[Any] = deque()
        self._has_weights = False
        self._sync_s = 0.0
        self._closed = False
        self._completions = self._tokens = 0
        self._engines_did: list[Metrics] = []  # of the engines of workers, with each group that has ended
        self._supervisor = WorkerSupervisor(
            factories if is_main_process() else (), self._table, timeout_s=timeout_s
        )
        self._reported = self._supervisor.counts()
        self._thread: threading.Thread | None = None

    @property
    def workers(self) -> list[Worker]:
        """The workers that are alive; none in other processes than the main one."""
        return self._supervisor.workers

    @property
    def exchanges_in_flight(self) -> bool:
        """Whether every worker labels its tokens with versions; asked for once they have started."""
        return all(worker.labels_versions for worker in self.workers)

    @property
    def num_running(self) -> int:
        """Requests that are not finished."""
        return len(self._awaited)

    def wait_for_start(self) -> None:
        """Returns when each worker has started.

        Raises `WorkerRefused` if one cannot serve this run, and ValueError if one has failed to start for
        `timeout_s`.
        """

        def started() -> bool:
            with self._supervisor.changed:
                while not self._supervisor.all_started():
                    if self._closed:
                        raise RuntimeError("the fleet was closed while its workers were starting")
                    self._supervisor.changed.wait(LOOK_S)
            return True

        decided_by_main(started)

    def copy_weights(self, params: Any) -> HostWeights:
        """`params` gathered on the main process's host (`publish.gathered`), for `load`."""
        began = time.perf_counter()
        tree = gathered(params if self.prepare is None else self.prepare(params), self._dtype)
        return HostWeights(tree, time.perf_counter() - began)

    def load(self, weights: Any, version: int) -> int:
        """Sample from `weights` from now on; workers load them before they get further groups.

        Nothing is done for the version that was published last: its parameters are these. Waits for groups
        that were dropped. Raises ValueError while others are in flight, unless `exchanges_in_flight`: a group
        is then sampled from one version.
        """
        if self._has_weights and version == self.version:
            self._sync_s = 0.0
            return version
        held = weights if isinstance(weights, HostWeights) else self.copy_weights(weights)
        if is_main_process():
            self._publish(held, version)
        self.version, self._has_weights = version, True
        return version

    def _publish(self, weights: HostWeights, version: int) -> None:
        with self._supervisor.changed:
            exchanges = self.exchanges_in_flight
            if self._awaited and not exchanges:
                raise ValueError(
                    "a fleet's workers sample each group from one version of the weights; "
                    f"{len(self._awaited)} groups are in flight; wait for them before sync_weights"
                )
            while self._table.num_unfinished and not exchanges:
                if self._closed:
                    raise RuntimeError(CLOSED)
                self._supervisor.check()
                self._supervisor.changed.wait(LOOK_S)
        began = time.perf_counter()
        handle = self._publisher.publish(weights.tree, version)
        self._published.append(handle)
        self._supervisor.set_weights(Weights(handle, version))
        while len(self._published) > KEPT_VERSIONS:
            self._publisher.discard(self._published.popleft())
        self._sync_s = weights.seconds + time.perf_counter() - began

    def start(
        self, requests: Sequence[Request], listener: Listener, *, worker: int | None = None
    ) -> Future[list[int]]:
        """Queue the turns of `requests`; `listener` gets the whole of each at the end of its request.

        With `worker`, that one samples them all (`OneWorker`).
        """
        result: Future[list[int]] = Future()
        with self._supervisor.changed:
            if self._closed or self.error is not None:
                result.set_exception(ServiceFailed(self.error or CLOSED))
                return result
            specs = []
            for request, number in numbered(requests):
                own, prompt = request.own, request.prompt
                if own is not None:
                    prompt = replace(prompt, group_id=own.sequence_id)
                specs.append(GroupSpec(next(self._numbers), prompt, request.step, request.sampling, own))
                self._awaited[specs[-1].number] = _Awaited(listener, number, request.sampling.n)
            self._table.add(specs, only=None if worker is None else slot_name(worker))
            if self._thread is None:
                self._thread = start_thread(self._work, name="turns on the fleet")
            self._supervisor.changed.notify_all()
        result.set_result([spec.number for spec in specs])
        return result

    def drop(self, keys: Sequence[int]) -> None:
        """Forget requests; a worker that has one samples it to its end."""
        with self._supervisor.changed:
            self._table.withdraw([key for key in keys if self._awaited.pop(key, None) is not None])

    def work(self) -> Work:
        """What the workers have finished so far; `running`: turns of groups that a worker has."""
        with self._supervisor.changed:
            running = sum(each.turns for key, each in self._awaited.items() if self._table.is_given(key))
        return Work(self._completions, self._tokens, running)

    def work_since(self, before: Work, seconds: float) -> Metrics:
        """Metrics of the tokens since `work` was `before`, `seconds` ago, and of the workers and their
        engines since this was last called."""
        supervisor, reported = self._supervisor, self._reported
        with supervisor.changed:
            engines, self._engines_did = combine(*self._engines_did), []
        self._reported = supervisor.counts()
        since = self._reported - reported
        return {
            **engines,
            "rollout/tokens_per_s": Metric(self._tokens - before.tokens, seconds),
            "fleet/alive": Metric(len(supervisor.workers)),
            "fleet/restarts": Metric(since.restarts, reduction="sum"),
            "fleet/retried_groups": Metric(since.retried, reduction="sum"),
            "fleet/stale_groups": Metric(since.stale, reduction="sum"),
            "fleet/busy_fraction": Metric(since.busy_s, since.seconds * supervisor.num_workers),
            "time/rollout_sync_s": Metric(self._sync_s),
            "time/weights_gather_s": Metric(self._sync_s),
            "time/weights_load_s": Metric(supervisor.load_s, reduction="max"),
        }

    def close(self, timeout_s: float | None = None) -> bool:
        """Ends the workers, discards groups in flight and published weights. May be called again.

        Whether the thread has ended within `timeout_s`.
        """
        with self._supervisor.changed:
            self._closed = True
            self._supervisor.changed.notify_all()
        self._supervisor.close()
        self._published.clear()
        self._publisher.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _work(self) -> None:
        """Gives finished groups to their listeners, in a thread for that."""
        error, failure = CLOSED, None
        try:
            while finished := self._taken():
                for awaited, group in finished:
                    self._tell(awaited, group)
        except Exception as caught:
            if not self._closed:
                error, failure = str(caught), caught
        with self._supervisor.changed:
            self.error, self.failure = error, failure
            left, self._awaited = list(self._awaited.values()), {}
        for awaited in left:
            for number in range(awaited.number, awaited.number + awaited.turns):
                awaited.listener(number, Progress(error=error))

    def _taken(self) -> list[tuple[_Awaited, FinishedGroup]]:
        """Waits for finished groups; none once this is closed. Raises the error by which the fleet fails."""
        with self._supervisor.changed:
            while not self._closed:
                if not self._awaited:
                    self._supervisor.changed.wait()
                    continue
                self._supervisor.check()
                if keys := [key for key in self._awaited if self._table.finished((key,))]:
                    groups = self._table.take(keys)
                    return [(self._awaited.pop(k), group) for k, group in zip(keys, groups, strict=True)]
                self._supervisor.changed.wait(LOOK_S)
        return []

    def _tell(self, awaited: _Awaited, group: FinishedGroup) -> None:
        numbers = range(awaited.number, awaited.number + awaited.turns)
        if group.error is not None:
            for number in numbers:
                awaited.listener(number, Progress(error=f"the turn was not sampled: {group.error}"))
            return
        turns = [turn for _, turn in group.samples]
        with self._supervisor.changed:
            self._engines_did.append(group.metrics)
            self._completions += len(turns)
            self._tokens += sum(turn.num_sampled for turn in turns)
        for number, turn in zip(numbers, turns, strict=True):
            metrics = group.metrics if number == numbers[-1] else {}
            done = Progress(turn.since(NOTHING), turn.finish_reason, metrics=metrics, cached=turn.cached)
            awaited.listener(number, done)


class OneWorker(Sampler):
    """One worker of `fleet`, by the number of its factory: also if it has to be started again."""

    cannot_constrain = Fleet.cannot_constrain

    def __init__(self, fleet: Fleet, worker: int):
        self._fleet, self._worker, self.cannot_see = fleet, worker, fleet.cannot_see

    def start(self, requests: Sequence[Request], listener: Listener) -> Future[list[int]]:
        """As `Fleet.start`, on this worker."""
        return self._fleet.start(requests, listener, worker=self._worker)

    def load(self, weights: Any, version: int) -> int:
        """As `Fleet.load`, for all workers."""
        return self._fleet.load(weights, version)
