"""Single sequences sampled by the workers of a fleet, for the requests of agents.

Data flow: `FleetService.submit` -> a group of one sample for each sequence -> `Fleet` -> `Progress`, to the
listener, once the sequence is finished. Its methods are those of `EngineService` that a server of agents'
sessions and `AgentRollouts` call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from quatrain.cluster.threads import start_thread
from quatrain.engine.groups import PerRequestSampling
from quatrain.engine.service import CLOSED, Listener, Progress, ServiceFailed
from quatrain.rollout.fleet import LOOK_S, Fleet
from quatrain.rollout.worker import FinishedGroup
from quatrain.types.batches import Prompt
from quatrain.types.metrics import Metric, Metrics, combine
from quatrain.types.piece import NOTHING


class FleetService:
    """Samples on `fleet`, which belongs to this from here on; its methods may be called from any thread."""

    paused = False
    """A fleet does not pause."""
    can_score = False
    """Workers sample, and score no tokens that they are given."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet
        self.error: str | None = None
        """Why nothing can be answered any more; None as long as all is well."""
        self._changed = threading.Condition()
        self._listeners: dict[int, tuple[int, Listener]] = {}  # by the numbers of groups
        self._closed, self._num_sampled = False, 0
        self._engines_did: list[Metrics] = []  # of the engines of workers, with each sequence that has ended
        self._thread = start_thread(self._work, name="turns on the fleet")

    @property
    def version(self) -> int:
        """The version of the weights that the next sequence is sampled from."""
        return self.fleet.version or 0

    @property
    def num_running(self) -> int:
        """Sequences that are not finished."""
        return len(self._listeners)

    def submit(
        self, prompts: Sequence[Prompt], owners: Sequence[PerRequestSampling], listener: Listener
    ) -> Future[list[int]]:
        """As `EngineService.submit`; `listener` gets the whole of a sequence at its end."""
        result: Future[list[int]] = Future()
        with self._changed:
            if self.error is not None:
                result.set_exception(ServiceFailed(self.error))
                return result
            keys = self.fleet.submit_own(prompts, owners)
            self._listeners |= {key: (number, listener) for number, key in enumerate(keys)}
            self._changed.notify_all()
        result.set_result(keys)
        return result

    def cancel(self, keys: Sequence[int]) -> None:
        """Forget sequences; a worker that has one samples it to its end."""
        with self._changed:
            cancelled = [key for key in keys if self._listeners.pop(key, None) is not None]
        self.fleet.cancel_own(cancelled)

    def forget(self, session: str) -> None:
        """Nothing to say: what workers keep of a session goes when they have other weights."""

    def copy_weights(self, params: Any) -> Any:
        """As `Fleet.copy_weights`."""
        return self.fleet.copy_weights(params)

    def load(self, weights: Any, version: int) -> int:
        """Sample from `weights` from now on, once what was cancelled has ended; their version."""
        self.fleet.wait_until_idle()
        self.fleet.sync_weights(weights, version)
        return version

    def counts(self) -> int:
        """Tokens sampled so far, for `work_since`."""
        return self._num_sampled

    def work_since(self, before: int, seconds: float) -> Metrics:
        """Metrics of the tokens since `counts` was `before`, `seconds` ago, and of the workers and their
        engines since this was last called."""
        with self._changed:
            engines, self._engines_did = combine(*self._engines_did), []
        sampled = Metric(self._num_sampled - before, seconds)
        return {**engines, **self.fleet.work_metrics(), "rollout/tokens_per_s": sampled}

    def release(self) -> None:
        """Nothing to free: the workers' memory is their own."""

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the workers, and waits for the thread so long; what is in flight gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.fleet.close()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        error = CLOSED
        try:
            while keys := self._in_flight():
                for key, group in self.fleet.take_own(keys, LOOK_S):
                    with self._changed:
                        number, listener = self._listeners.pop(key, (0, _ignore))
                    listener(number, self._progress(group))
        except Exception as failure:
            if not self._closed:
                error = f"the fleet failed: {type(failure).__name__}: {failure}"
        with self._changed:
            self.error = error
            left, self._listeners = list(self._listeners.values()), {}
        for number, listener in left:
            listener(number, Progress(error=error))

    def _progress(self, group: FinishedGroup) -> Progress:
        if group.error is not None:
            return Progress(error=f"the turn was not sampled: {group.error}")
        [(_, done)] = group.samples
        self._num_sampled += len(done.tokens)
        with self._changed:
            self._engines_did.append(group.metrics)
        return Progress(done.since(NOTHING), done.finish_reason, cached=done.cached)

    def _in_flight(self) -> list[int]:
        """Waits until sequences are in flight: their keys; none once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._listeners)
            return [] if self._closed else list(self._listeners)


def _ignore(number: int, progress: Progress) -> None:
    """The listener of a sequence that was cancelled."""
