"""A rollout worker around an engine in this process: a thread runs its rounds, and groups come at any time.

Data flow: `submit` -> queue -> `RolloutEngine.submit` -> rounds -> `take`. In a worker process of its own,
the process's main program passes the fleet's calls on to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

import jax
from jax.sharding import Mesh

from quatrain.engine.engine import RolloutEngine, Ticket, work_metrics
from quatrain.models.architecture import Architecture
from quatrain.models.lora import with_trained
from quatrain.models.params import partition
from quatrain.parallel.compilations import compiling_for_s, num_compilations
from quatrain.parallel.mesh import mesh_shape, place, shardings
from quatrain.rollout.worker import FinishedGroup, GroupSpec, State, WorkerLost
from quatrain.weights.hf import load_hf

COMPILING = 3
"""A round in which a program is compiled may take this many times `timeout_s`."""


class EngineWorker:
    """A `Worker` whose groups share the slots of `engine`, whichever comes when.

    `read` makes parameters of what the fleet published (`weights_reader`). Groups of another sampling than
    those in flight wait until these have finished. A round of the engine that raises an error, or takes
    longer than `timeout_s` (three times as long if it compiles), makes the worker lost.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        read: Callable[[Any], Any],
        *,
        name: str,
        num_slots: int | None,
        timeout_s: float,
    ):
        self.name, self.num_slots = name, num_slots
        self._engine, self._read, self._timeout_s = engine, read, timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[GroupSpec] = deque()
        self._running: dict[int, tuple[GroupSpec, Ticket]] = {}
        self._finished: list[FinishedGroup] = []
        self._error: str | None = None
        self._closed = False
        self._round_began: float | None = None
        self._compiled = 0
        self._tally, self._since = engine.tally, time.perf_counter()
        threading.Thread(
            target=copy_context().run, args=(self._work,), name=f"engine of {name}", daemon=True
        ).start()

    def load(self, weights: Any, version: int, timeout_s: float) -> int:
        """Reads what was published; takes effect between two rounds.

        Without groups, the worker frees the weights that it has first: the device needs room for one version.
        """
        if self.state() == "idle":
            self._engine.release()
        self._engine.sync_weights(self._read(weights), version)
        return version

    def submit(self, groups: Sequence[GroupSpec], version: int) -> None:
        """Queue groups; raises WorkerLost if the engine has failed."""
        with self._changed:
            self._check()
            self._waiting += groups
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[FinishedGroup]:
        """Groups that have finished; raises WorkerLost if the engine has failed or a round takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error, timeout_s)
            self._check()
            finished, self._finished = self._finished, []
            return finished

    def state(self) -> State:
        """What the engine does."""
        with self._changed:
            if not self._waiting and not self._running:
                return "idle"
            return "compiling" if self._compiles() else "busy"

    def close(self) -> None:
        """Forgets the groups and closes the engine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._engine.close()

    def _compiles(self) -> bool:
        """Whether a program was compiled in this round, or is being compiled."""
        compiled = num_compilations() > self._compiled or compiling_for_s() is not None
        return self._round_began is not None and compiled

    def _check(self) -> None:
        began, limit = self._round_began, self._timeout_s
        if began is not None and self._compiles():
            limit *= COMPILING
        if began is not None and time.monotonic() - began > limit:
            self._error = self._error or f"a decode call takes longer than {limit:g} s (rollout.timeout_s)"
        if self._error is not None:
            raise WorkerLost(self._error)

    def _work(self) -> None:
        try:
            while self._begin():
                self._round()
        except Exception as error:
            with self._changed:
                self._error = f"its engine failed: {type(error).__name__}: {error}"
                self._changed.notify_all()

    def _begin(self) -> bool:
        """Waits until there is work, and submits it to the engine; False if the worker is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
            if self._closed:
                return False
            if not self._running:
                self._since = time.perf_counter()
            while self._waiting and self._fits(self._waiting[0]):
                self._submit(self._waiting.popleft())
            self._round_began, self._compiled = time.monotonic(), num_compilations()
        return True

    def _fits(self, group: GroupSpec) -> bool:
        others = [running.sampling for running, _ in self._running.values()]
        return not others or others[0] == group.sampling

    def _submit(self, group: GroupSpec) -> None:
        first = not self._running
        try:
            ticket = self._engine.submit([group.prompt], step=group.step, sampling=group.sampling)
        except Exception as error:  # of this prompt alone, e.g. one for which there is no room
            failed = FinishedGroup(group.number, error=f"{type(error).__name__}: {error}")
            self._finished.append(failed)
            self._changed.notify_all()
            return
        self._running[group.number] = group, ticket
        if first:
            self._tally = self._engine.tally

    def _round(self) -> None:
        self._engine.advance()
        ended = [number for number, (_, ticket) in self._running.items() if self._engine.finished(ticket)]
        taken = [self._engine.take(self._running[number][1]) for number in ended]
        with self._changed:
            self._round_began = None
            for number, (samples, metrics) in zip(ended, taken, strict=True):
                del self._running[number]
                self._finished.append(
                    FinishedGroup(number, samples, metrics={**metrics, **self._work_metrics()})
                )
            if ended:
                self._changed.notify_all()

    def _work_metrics(self) -> dict[str, Any]:
        """Metrics of the engine's work since a group was last finished."""
        tally, now = self._engine.tally, time.perf_counter()
        metrics = work_metrics(tally - self._tally, now - self._since)
        self._tally, self._since = tally, now
        return metrics


def weights_reader(arch: Architecture, mesh: Mesh, base: Any = None) -> Callable[[Any], Any]:
    """What makes parameters on `mesh` of published weights: host arrays, or the path of a folder.

    Of a model with adapters, adapters are published, which are put onto `base`.
    """
    places = shardings(mesh, partition(arch, mesh_shape(mesh)))

    def read(weights: Any) -> Any:
        if isinstance(weights, str):
            return load_hf(weights, mesh=mesh)[1]
        if base is None:
            return jax.tree.map(place, weights, places)
        names = [
            {name: places["layers"][i][name] for name in layer} for i, layer in enumerate(weights["layers"])
        ]
        return with_trained(base, jax.tree.map(place, weights, {"layers": names}), arch)

    return read
