"""Environments in threads, with a time limit for each call.

Data flow: an episode, or a worker process (`environment_worker.py`) -> `InThreads` -> `CheckedEnvironment`.
Python cannot end a thread: one whose call takes too long is left behind, and another takes its place.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from quatrain.environments.environment import (
    SHOWN_FRAMES,
    CheckedEnvironment,
    Ended,
    EnvironmentFault,
    FaultKind,
    Opening,
    Turn,
    faultless,
)
from quatrain.environments.load_environment import Environments
from quatrain.workers.process import running_future
from quatrain.workers.threads import Threads, start_thread

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 32
"""Calls that run at the same time, besides those that took too long.

Enough for calls that wait for a program or a server to overlap. Those that compute share the interpreter's
lock with the thread that samples: it can wait 5 ms for each of them.
"""
_CLOSED = ": the run has ended its environments"
_MANY_LEFT = (
    "calls hang in threads, which Python cannot end; with rollout.environment_workers they would run in "
    "processes, which are ended"
)


class InThreads:
    """`EnvironmentCalls` in daemon threads of this process; each call may take `timeout_s` seconds.

    A call that takes longer goes on in its thread, which Python cannot end, and its result is ignored;
    `on_left` is called for each thread that is left behind, before the future of its call is set.
    """

    def __init__(
        self, environments: Environments, timeout_s: float, on_left: Callable[[], None] = lambda: None
    ):
        self._environments, self._timeout_s, self._on_left = environments, timeout_s, on_left
        self._threads = Threads("quatrain-environment")
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[_Call] = deque()
        self._running: dict[_Call, float] = {}  # until when; the first is the first to be late
        self._num_left = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())
        self._asleep = False  # whether the watching thread waits for the first call
        start_thread(self._watch, name="quatrain-environment-limits")

    def begin(self, episode: int, columns: Mapping[str, Any]) -> Future[Opening]:
        new = self._episodes[episode] = _Episode()

        def work(call: _Call) -> Opening:
            new.environment = self._environments()
            return new.environment.reset(columns)

        return self._submit(new, "reset", work)

    def step(self, episode: int, completion: str) -> Future[Turn | None]:
        known = self._episodes[episode]
        return self._submit(known, "step", lambda call: known.begun().step(completion))

    def end(self, episode: int) -> Future[Ended]:
        known = self._episodes.pop(episode)

        def work(call: _Call) -> Ended:
            environment = known.begun()
            try:
                call.so_far = Ended(environment.final_reward(), environment.counts)
            finally:
                known.close()
            return call.so_far

        return self._submit(known, "end", work)

    def abandon(self, episode: int) -> None:
        known = self._episodes.pop(episode, None)
        if known is None:
            return
        with self._changed:
            known.abandoned = True
            call = known.call
            is_dropped = call in self._waiting
            if call is not None and is_dropped:
                self._waiting.remove(call)
                known.call = None
        if call is not None and is_dropped:
            call.settle(self._fault(call, ": the run has discarded the episode"))
        if call is None or is_dropped:  # else it is closed when the call returns
            self._close(known)

    def drain(self) -> None:
        """Returns when no call is waiting or in time."""
        while self._waiting or self._running:
            time.sleep(0.01)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            unfinished = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
            self._changed.notify()
        for call in unfinished:
            call.settle(self._fault(call, _CLOSED, "crash"))
        self._threads.close()

    def _close(self, episode: _Episode) -> None:
        """Closes an abandoned environment in the background."""
        if episode.environment is not None:
            self._submit(episode, "close", lambda call: episode.close())

    def _fault(self, call: _Call, how: str, kind: FaultKind = "error", detail: str = "") -> EnvironmentFault:
        return EnvironmentFault(f"{self._environments.name}: {call.method}{how}", kind, detail)

    def _submit(self, episode: _Episode, method: str, work: Callable[[_Call], Any]) -> Future[Any]:
        call = _Call(episode, method, work)
        with self._changed:
            assert episode.call is None, "an episode has one call at a time"
            closed = self._closed
            if not closed:
                episode.call = call
                self._waiting.append(call)
        if closed:
            call.settle(self._fault(call, _CLOSED, "crash"))
        self._begin_next()
        return call.future

    def _begin_next(self) -> None:
        """Begins the call that has waited longest, if there is one and room for it: its time begins."""
        while True:
            with self._changed:
                if not self._waiting or len(self._running) >= MOST_AT_ONCE:
                    return
                call = self._waiting.popleft()
                self._running[call] = time.monotonic() + self._timeout_s
                if self._asleep:
                    self._asleep = False
                    self._changed.notify()
            try:
                return self._threads.submit(partial(self._run, call))
            except RuntimeError as error:  # the system has no more threads
                with self._changed:
                    self._running.pop(call, None)
                    call.episode.call = None
                call.settle(self._fault(call, f" could not be called: {error}"))

    def _run(self, call: _Call) -> None:
        """Makes a call; its outcome is ignored if it took too long."""
        call.thread = threading.get_ident()
        try:
            outcome = faultless(f"{self._environments.name}: {call.method}", partial(call.work, call))
        except EnvironmentFault as fault:
            outcome = fault.with_traceback(None)  # whose frames would keep the environment
        with self._changed:
            in_time = self._running.pop(call, None) is not None
            self._num_left -= call.is_late
            call.episode.call = None
            abandoned = call.episode.abandoned
        if abandoned and call.method != "close":
            self._close(call.episode)
        self._begin_next()
        if in_time:
            call.settle(outcome)

    def _watch(self) -> None:
        """Ends calls that take too long."""
        while (call := self._next_late()) is not None:
            self._leave(call)

    def _next_late(self) -> _Call | None:
        """Waits for the next call that takes too long; None: the environments are closed."""
        with self._changed:
            while not self._closed:
                call, until = next(iter(self._running.items()), (None, math.inf))
                left_s = until - time.monotonic()
                if call is not None and left_s <= 0:
                    del self._running[call]
                    call.is_late = True
                    self._num_left += 1
                    return call
                # Calls that begin meanwhile are late after this one would be, and need not wake this thread.
                self._asleep = call is None
                self._changed.wait(None if call is None else left_s)
        return None

    def _leave(self, call: _Call) -> None:
        """Ends a call that takes too long; its thread is left behind."""
        self._on_left()
        limit = f"longer than {self._timeout_s:g} s; rollout.environment_timeout_s sets the limit"
        if call.method == "close" or call.so_far is not None:
            logger.warning("%s: close took %s", self._environments.name, limit)
        if self._num_left == MOST_AT_ONCE:
            logger.warning("%s: %d %s", self._environments.name, self._num_left, _MANY_LEFT)
        self._begin_next()
        call.settle(call.so_far or self._fault(call, f" took {limit}", "timeout", _where(call.thread)))


class _Episode:
    """The environment of an episode; one call at a time uses it, and lets it go when it is closed."""

    def __init__(self) -> None:
        self.environment: CheckedEnvironment | None = None
        self.call: _Call | None = None
        """The call that waits or runs, also if it takes too long."""
        self.abandoned = False

    def begun(self) -> CheckedEnvironment:
        """The environment."""
        assert self.environment is not None, "an episode begins before its other calls"
        return self.environment

    def close(self) -> None:
        """Closes the environment, once."""
        environment, self.environment = self.environment, None
        if environment is not None:
            environment.close()


class _Call:
    """A call of a method of an environment."""

    def __init__(self, episode: _Episode, method: str, work: Callable[[_Call], Any]):
        self.episode, self.method, self.work = episode, method, work
        self.future: Future[Any] = running_future()
        self.so_far: Ended | None = None
        """The result of a call that has only to close the environment."""
        self.thread: int | None = None
        self.is_late = False

    def settle(self, outcome: Any) -> None:
        """Sets the future, to a result or a fault."""
        if isinstance(outcome, EnvironmentFault):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def _where(thread: int | None) -> str:
    """The lines of code at which a thread is."""
    frame = None if thread is None else sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame, limit=SHOWN_FRAMES))
