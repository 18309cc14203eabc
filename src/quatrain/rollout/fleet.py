"""A fleet of rollout workers as one rollout engine: groups are given out, and put together in order.

Data flow: list of `Prompt` -> `Fleet.submit` -> `GroupSpec`s in the table -> workers (`supervisor.py`) ->
`FinishedGroup`s -> `Fleet.wait` -> `RolloutBatch`. Weights go the same way: `publish.py` stores each version
once, and each worker loads it before it gets groups of it.

A group whose worker is lost is given to another. The randomness of a token depends on the seed, the step, the
sequence and the position, and not on the worker, so that the group comes out the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from quatrain.cluster.processes import decided_by_main, is_main_process
from quatrain.engine.groups import PerRequestSampling
from quatrain.rollout.group_table import GroupTable
from quatrain.rollout.publish import Publisher, gathered
from quatrain.rollout.supervisor import Weights, WorkerFactory, WorkerSupervisor, slot_name
from quatrain.rollout.worker import FinishedGroup, GroupSpec, Worker
from quatrain.types.batches import EPISODE_COLUMNS, Prompt, RolloutBatch
from quatrain.types.metrics import Metric, combine
from quatrain.types.rollouts import Completion, RolloutProgress, Rollouts, Sampling, rollout_batch

LOOK_S = 0.2
"""Seconds between two looks at the deadlines of workers."""
KEPT_VERSIONS = 2
"""Published versions that are kept: a worker may still load the one before the current."""


@dataclass(frozen=True)
class HostWeights:
    """Parameters gathered on the host of the main process by `Fleet.copy_weights`; `seconds` it took."""

    tree: Any
    seconds: float


class FleetTicket(NamedTuple):
    """Prompts that were submitted together: the numbers of their groups."""

    groups: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    n: int


class Fleet(Rollouts):
    """Samples completions on workers, which `factories` start.

    A worker that dies, or gives no answer for `timeout_s` (three times as long while it starts), is started
    anew, and its groups are given to others, each at most `retries` times. `sampling` are the parameters of
    training. `dtype` is the dtype of published matrices.

    With several processes, the main process alone talks to workers; all must call the same methods in the
    same order, and get the same batches.

    `prepare` makes of the parameters what is published, e.g. with adapters merged.

    `wait` and `generate` raise `WorkerRefused` if a worker cannot serve this run, `GroupFailed` if a group
    failed too often, and `WorkersLost` if there was no worker for `timeout_s`.
    """

    def __init__(
        self,
        factories: Sequence[WorkerFactory],
        publisher: Publisher,
        *,
        sampling: Sampling,
        tokenizer: Any,
        dtype: DTypeLike,
        timeout_s: float,
        greedy_baseline: bool = False,
        prepare: Callable[[Any], Any] | None = None,
        retries: int = 3,
        on_progress: Callable[[RolloutProgress], None] | None = None,
    ):
        self.sampling = sampling
        self._publisher, self._tokenizer, self._dtype = publisher, tokenizer, dtype
        self.greedy_baseline, self._on_progress, self._prepare = greedy_baseline, on_progress, prepare
        self._numbers = count()
        self._table = GroupTable(retries)
        self._published: deque[Any] = deque()
        self.version: int | None = None
        """Of the weights that were published last; None before the first."""
        self._sync_s = 0.0
        self._closed = False
        self._supervisor = WorkerSupervisor(
            factories if is_main_process() else (), self._table, timeout_s=timeout_s
        )
        self._reported = self._supervisor.counts()

    @property
    def workers(self) -> list[Worker]:
        """The workers that are alive; none in other processes than the main one."""
        return self._supervisor.workers

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
        """`params` gathered on the main process's host (`publish.gathered`), for `sync_weights`."""
        began = time.perf_counter()
        tree = gathered(params if self._prepare is None else self._prepare(params), self._dtype)
        return HostWeights(tree, time.perf_counter() - began)

    def sync_weights(self, params: Any, version: int) -> None:
        """Sample from `params` from now on; workers load them before they get further groups.

        Nothing is done for the version that was published last: its parameters are these. Raises ValueError
        while groups are in flight: a group is sampled from one version.
        """
        if version == self.version:
            self._sync_s = 0.0
            return
        weights = params if isinstance(params, HostWeights) else self.copy_weights(params)
        if is_main_process():
            self._publish(weights, version)
        self.version = version

    def _publish(self, weights: HostWeights, version: int) -> None:
        with self._supervisor.changed:
            if self._table.num_unfinished:
                raise ValueError(
                    "a fleet's workers sample each group from one version of the weights; "
                    f"{self._table.num_unfinished} groups are in flight; wait for them before sync_weights"
                )
        began = time.perf_counter()
        handle = self._publisher.publish(weights.tree, version)
        self._published.append(handle)
        self._supervisor.set_weights(Weights(handle, version))
        while len(self._published) > KEPT_VERSIONS:
            self._publisher.discard(self._published.popleft())
        self._sync_s = weights.seconds + time.perf_counter() - began

    def generate_each(
        self, batches: Sequence[Sequence[Prompt]], *, sampling: Sampling, at_once: int
    ) -> Iterator[RolloutBatch]:
        """What `generate` returns for each of `batches`, in order; at most `at_once` samples are in flight.

        A batch of more samples than that is in flight alone.
        """
        tickets: deque[FleetTicket] = deque()
        for prompts in batches:
            while (
                tickets
                and sum(len(ticket.groups) for ticket in tickets) + len(prompts) > at_once // sampling.n
            ):
                yield self.wait(tickets.popleft())
            tickets.append(self.submit(prompts, sampling=sampling))
        while tickets:
            yield self.wait(tickets.popleft())

    def submit(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int = 0,
        sampling: Sampling | None = None,
        worker: int | None = None,
    ) -> FleetTicket:
        """Queue `prompts`; `wait` returns their completions for the ticket that this returns.

        With `worker`, the number of a factory, that worker samples them all, also if it has to be started
        again.
        """
        used = sampling or self.sampling
        numbers = tuple(next(self._numbers) for _ in prompts)
        with self._supervisor.changed:
            if is_main_process():
                pairs = zip(numbers, prompts, strict=True)
                specs = [GroupSpec(number, prompt, step, used) for number, prompt in pairs]
                self._table.add(specs, only=None if worker is None else slot_name(worker))
            self._supervisor.changed.notify_all()
        return FleetTicket(numbers, tuple(prompts), used.n)

    def wait(self, ticket: FleetTicket) -> RolloutBatch:
        """The batch of the prompts that were submitted for `ticket`, once all are finished.

        Raises ValueError for a ticket that was waited for before, and RuntimeError if the fleet is closed.
        """
        began = time.perf_counter()
        shared = decided_by_main(lambda: self._results(ticket))
        generated = time.perf_counter()
        samples = [
            _sample(ticket.prompts[number // ticket.n], each) for number, each in enumerate(shared["samples"])
        ]
        tokens = sum(completion.num_sampled for _, completion in samples)
        parts = [{name: Metric(*each) for name, each in part.items()} for part in shared["metrics"]]
        metrics = {**combine(*parts), "rollout/tokens_per_s": Metric(tokens, generated - began)}
        timings = {
            "time/rollout_generate_s": Metric(generated - began, reduction="sum"),
        }
        return rollout_batch(samples, self._tokenizer, {**metrics, **timings})

    def submit_own(self, prompts: Sequence[Prompt], owners: Sequence[PerRequestSampling]) -> list[int]:
        """Queue a sample of each prompt, each with a sampling of its own; their numbers, for `take_own`."""
        numbers = [next(self._numbers) for _ in prompts]
        if is_main_process():
            specs = [
                GroupSpec(number, replace(prompt, group_id=own.sequence_id), own.step, own.sampling, own)
                for number, prompt, own in zip(numbers, prompts, owners, strict=True)
            ]
            with self._supervisor.changed:
                self._table.add(specs)
                self._supervisor.changed.notify_all()
        return numbers

    def take_own(self, numbers: Sequence[int], timeout_s: float) -> list[tuple[int, FinishedGroup]]:
        """Those of these samples of `submit_own` that have finished; waits up to `timeout_s` for one.

        Called in the main process. Raises as `wait` does.
        """
        with self._supervisor.changed:
            self._supervisor.check()
            if self._closed:
                raise RuntimeError("the fleet was closed while turns were in flight")
            held = [number for number in numbers if self._table.holds((number,))]  # not withdrawn meanwhile
            finished = [number for number in held if self._table.finished((number,))]
            if not finished:
                self._supervisor.changed.wait(timeout_s)
            return list(zip(finished, self._table.take(finished), strict=True))

    def cancel_own(self, numbers: Sequence[int]) -> None:
        """Forget samples of `submit_own`; a worker that has one samples it to its end."""
        with self._supervisor.changed:
            self._table.withdraw(numbers)

    def wait_until_idle(self) -> None:
        """Returns when no group is unfinished; raises as `wait` does."""

        def idle() -> bool:
            with self._supervisor.changed:
                while self._table.num_unfinished:
                    if self._closed:
                        raise RuntimeError("the fleet was closed while turns were in flight")
                    self._supervisor.check()
                    self._supervisor.changed.wait(LOOK_S)
            return True

        decided_by_main(idle)

    def work_metrics(self) -> dict[str, Metric]:
        """Metrics of the workers since this was last called, which `wait` does."""
        supervisor, before = self._supervisor, self._reported
        self._reported = supervisor.counts()
        since = self._reported - before
        return {
            "fleet/alive": Metric(len(supervisor.workers)),
            "fleet/restarts": Metric(since.restarts, reduction="sum"),
            "fleet/retried_groups": Metric(since.retried, reduction="sum"),
            "fleet/stale_groups": Metric(since.stale, reduction="sum"),
            "fleet/busy_fraction": Metric(since.busy_s, since.seconds * supervisor.num_workers),
            "time/rollout_sync_s": Metric(self._sync_s),
            "time/weights_gather_s": Metric(self._sync_s),
            "time/weights_load_s": Metric(supervisor.load_s, reduction="max"),
        }

    def release(self) -> None:
        """Nothing to free: the workers' memory is their own."""

    def close(self) -> None:
        """Ends the workers, discards groups in flight and published weights. May be called again."""
        self._closed = True
        self._supervisor.close()
        self._published.clear()
        self._publisher.close()

    def _results(self, ticket: FleetTicket) -> dict[str, Any]:
        """The samples of a ticket, once they have come, and metrics, as values that JSON has."""
        began = time.perf_counter()
        supervisor, table = self._supervisor, self._table
        with supervisor.changed:
            if not table.holds(ticket.groups):
                raise ValueError("a ticket can be waited for once; this one was; submit its prompts again")
            while not table.finished(ticket.groups):
                if self._closed:
                    raise RuntimeError("the fleet was closed while groups were in flight")
                supervisor.check()
                if self._on_progress is not None:
                    done = [each for group in table.results(ticket.groups) for _, each in group.samples]
                    tokens = sum(completion.num_sampled for completion in done)
                    rate = tokens / max(time.perf_counter() - began, 1e-9)
                    total, in_use = len(ticket.prompts) * ticket.n, table.num_given * ticket.n
                    self._on_progress(RolloutProgress(len(done), total, rate, in_use))
                supervisor.changed.wait(LOOK_S)
            groups = table.take(ticket.groups)
        metrics = self.work_metrics()
        return {
            "samples": [
                _plain(ticket.prompts[number], *each)
                for number, group in enumerate(groups)
                for each in group.samples
            ],
            "metrics": [
                {name: [each.value, each.count, each.reduction] for name, each in part.items()}
                for part in (*(group.metrics for group in groups), metrics)
            ],
        }


def _plain(prompt: Prompt, returned: Prompt, completion: Completion) -> dict[str, Any]:
    """A sample as values that JSON has; of its prompt, what an episode changed."""
    before = prompt.columns
    columns = {
        name: value
        for name, value in returned.columns.items()
        if name not in before or (name in EPISODE_COLUMNS and value != before[name])
    }
    return {"ids": returned.input_ids.tolist(), "columns": columns, "completion": vars(completion)}


def _sample(prompt: Prompt, plain: dict[str, Any]) -> tuple[Prompt, Completion]:
    """The inverse of `_plain`."""
    ids, columns = np.array(plain["ids"], np.int32), {**prompt.columns, **plain["columns"]}
    return replace(prompt, input_ids=ids, columns=columns), Completion(**plain["completion"])
