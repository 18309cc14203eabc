"""A rollout worker around an engine in this process, whose service runs it: groups come at any time.

Data flow: `submit` -> `EngineService.start` -> `take`. In a worker process of its own, the process's main
program passes the fleet's calls on to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.models.architecture import Architecture
from quatrain.models.lora import with_host_adapters
from quatrain.models.params import partition
from quatrain.parallel.mesh import device_put, mesh_shape, shardings
from quatrain.rollout.worker import FinishedGroup, GroupSpec, State, WorkerLost
from quatrain.types.rollouts import Completion
from quatrain.types.sampler import Progress, Request
from quatrain.weights.hf import load_hf

COMPILING = 3
"""A round in which a program is compiled may take this many times `timeout_s`."""


class EngineWorker:
    """A `Worker` whose groups share the slots of `engine`, whichever comes when.

    `read` makes parameters of what the fleet published (`weights_reader`). Groups of another sampling than
    those in flight wait until these have finished. A round of the engine that raises an error, or takes
    longer than `timeout_s` (three times as long if it compiles), makes the worker lost.
    """

    labels_versions = True

    def __init__(
        self,
        engine: RolloutEngine,
        read: Callable[[Any], Any],
        *,
        name: str,
        num_slots: int | None,
        timeout_s: float,
    ):
        self.name, self.num_slots, self._timeout_s = name, num_slots, timeout_s
        self._changed = threading.Condition()
        self._unfinished = 0
        self._finished: list[FinishedGroup] = []
        self._error: str | None = None
        self._service = EngineService(engine, read, thread=f"engine of {name}")

    def load(self, weights: Any, version: int, timeout_s: float) -> int:
        """Reads what was published; takes effect between two rounds.

        Without groups, the worker frees the weights that it has first: the device needs room for one version.
        """
        return self._service.load(weights, version, free_first=True)

    def submit(self, groups: Sequence[GroupSpec], version: int) -> None:
        """Queue groups, which begin together; raises WorkerLost if the engine has failed."""
        self._check()
        with self._changed:
            self._unfinished += len(groups)
        with self._service.one_round():
            queued = [self._begin(group) for group in groups]
        for group, future in zip(groups, queued, strict=True):
            future.add_done_callback(partial(self._refuse, group))

    def _begin(self, group: GroupSpec) -> Future[list[int]]:
        turns = [Completion() for _ in range(group.sampling.n)]
        request = Request(group.prompt, group.step, group.sampling, group.own)
        # A request each: one for which there is no room fails alone.
        return self._service.start([request], partial(self._add, group, turns, [len(turns)]))

    def _add(
        self, group: GroupSpec, turns: list[Completion], left: list[int], number: int, progress: Progress
    ) -> None:
        """Takes what was sampled for a group, of whose `turns` so many are `left`."""
        turns[number].append(progress.piece)
        if progress.error is not None and left[0] > 0:
            left[0] = 0
            self._finish(FinishedGroup(group.number, error=progress.error))
        elif progress.finish_reason is not None:
            turns[number].finish_reason, turns[number].cached = progress.finish_reason, progress.cached
            left[0] -= 1
            if not left[0]:
                samples = [(group.prompt, turn) for turn in turns]
                self._finish(FinishedGroup(group.number, samples, metrics=progress.metrics))

    def _refuse(self, group: GroupSpec, queued: Future[list[int]]) -> None:
        if (error := queued.exception()) is not None:
            self._finish(FinishedGroup(group.number, error=f"{type(error).__name__}: {error}"))

    def take(self, timeout_s: float) -> list[FinishedGroup]:
        """Groups that have finished; raises WorkerLost if the engine has failed or a round takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._service.error, timeout_s)
            self._check()
            finished, self._finished = self._finished, []
            return finished

    def state(self) -> State:
        """What the engine does."""
        if not self._unfinished:
            return "idle"
        return "compiling" if self._service.compiles else "busy"

    def close(self) -> None:
        """Forgets the groups and closes the engine; a round that hangs is left behind."""
        self._service.close(timeout_s=0)

    def _finish(self, group: FinishedGroup) -> None:
        with self._changed:
            self._unfinished -= 1
            self._finished.append(group)
            self._changed.notify_all()

    def _check(self) -> None:
        limit = self._timeout_s * (COMPILING if self._service.compiles else 1)
        if self._service.round_s > limit:
            self._error = self._error or f"a decode call takes longer than {limit:g} s (rollout.timeout_s)"
        error = self._service.error or self._error
        if error is not None:
            raise WorkerLost(error)


def weights_reader(arch: Architecture, mesh: Mesh, base: Any = None) -> Callable[[Any], Any]:
    """What makes parameters on `mesh` of published weights: host arrays, or the path of a folder.

    Of a model with adapters, adapters are published, which are put onto `base`.
    """
    places = shardings(mesh, partition(arch, mesh_shape(mesh)))

    def read(weights: Any) -> Any:
        if isinstance(weights, str):
            return load_hf(weights, mesh=mesh)[1]
        if base is None:
            return jax.tree.map(device_put, weights, places)
        return with_host_adapters(base, weights, arch, mesh)

    return read
