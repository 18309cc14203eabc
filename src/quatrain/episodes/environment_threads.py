"""Environments in threads, with a time limit for each call.

Data flow: an episode, or a worker process (`environment_workers.py`) -> `InThreads` -> `CheckedEnvironment`.
Python cannot end a thread: one whose call takes too long is left behind, and another takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from quatrain.cluster.start_thread import start_thread
from quatrain.episodes.environment import (
    CLOSED,
    CheckedEnvironment,
    Ended,
    InitialObservation,
    KeptEnvironment,
    StepResult,
)
from quatrain.episodes.load_environment import AnyEnvironments
from quatrain.workers.faults import SHOWN_FRAMES, Fault, FaultKind, run_guarded
from quatrain.workers.loop_thread import ClosedError, LoopThread, running_future

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 32
"""Calls that run at the same time, besides those that took too long.

Enough for calls that wait for a program or a server to overlap. Those that compute share the interpreter's
lock with the thread that samples: it can wait 5 ms for each of them.
"""
_MANY_LEFT = (
    "calls hang in threads, which Python cannot end; with rollout.environment_workers they would run in "
    "processes, which are ended"
)


class InThreads:
    """Runs the environments of episodes in daemon threads of this process, each call for `timeout_s` seconds.

    A call that takes longer goes on in its thread, which Python cannot end, and its result is ignored;
    `on_left` is called for each thread that is left behind, before the future of its call is set.

    Any thread may call this. An episode is a number that its caller chooses, and has at most one call at a
    time. Each future has the result or a `Fault`, nothing else, and cannot be cancelled; it is set by a
    background thread, in which its callbacks run, and must not take long. After a fault the episode is
    abandoned. The time limit of a call begins when the environment is called, not while the call waits.
    """

    def __init__(
        self, environments: AnyEnvironments, timeout_s: float, on_left: Callable[[], None] = lambda: None
    ):
        self._environments, self._timeout_s, self._on_left = environments, timeout_s, on_left
        self.keeps = environments.kept
        """Whether the environments of episodes that have ended are kept, to be asked for with `kept`."""
        self._episodes: dict[int, _Episode] = {}
        self._thread = LoopThread("quatrain-environments", CLOSED, self._end_calls)
        # Only that thread uses what follows, but for `_to_make`.
        self._waiting: deque[_Call] = deque()
        self._running: dict[_Call, asyncio.TimerHandle] = {}  # without those that took too long
        self._to_make: SimpleQueue[_Call | None] = SimpleQueue()
        self._num_idle = self._num_left = 0  # threads

    def begin(self, episode: int, columns: Mapping[str, Any]) -> Future[InitialObservation]:
        """Makes the environment of a new episode and resets it with the columns of the prompt's row."""
        new = self._episodes[episode] = _Episode()

        def work(call: _Call) -> InitialObservation:
            new.environment = self._environments(columns)
            return new.environment.reset(columns)

        return self._submit(new, "reset", work)

    def step(self, episode: int, completion: str) -> Future[StepResult | None]:
        """Answers a completion."""
        known = self._episodes[episode]
        return self._submit(known, "step", lambda call: known.begun().step(completion))

    def end(self, episode: int) -> Future[Ended]:
        """Ends the episode: its reward and counts; then the environment is closed, unless it is kept.

        A `close` that raises or takes too long is a warning.
        """
        known = self._episodes[episode] if self.keeps else self._episodes.pop(episode)

        def work(call: _Call) -> Ended:
            environment = known.begun()
            try:
                ended = Ended(environment.final_reward(), environment.counts)
                call.so_far = None if self.keeps else ended
            finally:
                if not self.keeps:
                    known.close()
            return ended

        return self._submit(known, "end", work)

    def kept(self, episode: int) -> KeptEnvironment | None:
        """The environment of an episode that has ended, if it was to be kept; None after a fault."""
        known = self._episodes.get(episode)
        if known is None or known.environment is None:
            return None
        return KeptEnvironment(known.environment.users, partial(self.abandon, episode))

    def abandon(self, episode: int) -> None:
        """Forgets an episode that is not ended, or kept: it is closed in the background, if it can be.

        A call of it that has not begun is an "error" fault. May be called for episodes that are gone.
        """
        known = self._episodes.pop(episode, None)
        if known is not None:
            with suppress(ClosedError):
                self._thread.do(self._abandon, known)

    def drain(self) -> None:
        """Returns when no call is waiting or in time."""
        busy = True
        while busy:
            answer: Future[bool] = Future()
            self._thread.do(lambda answer=answer: answer.set_result(bool(self._waiting or self._running)))
            busy = answer.result()
            time.sleep(0.01)

    def close(self) -> None:
        """Ends everything; threads that hang are left behind as daemons. May be called again.

        Calls that have not ended, and later ones, are "crash" faults.
        """
        self._thread.close()

    def _fault(self, call: _Call, how: str, kind: FaultKind = "error", detail: str = "") -> Fault:
        return Fault(f"{self._environments.name}: {call.method}{how}", kind, detail)

    def _submit(self, episode: _Episode, method: str, work: Callable[[_Call], Any]) -> Future[Any]:
        call = _Call(episode, method, work)
        # Any failure is the future's: who calls has many episodes, and one that raised would end them all.
        try:
            self._thread.do(self._add, call)
        except ClosedError:
            call.settle(self._fault(call, f": {CLOSED}", "crash"))
        except RuntimeError as error:  # the system has no more threads
            call.settle(self._fault(call, f" could not be called: {error}"))
        return call.future

    # In the thread that attends to the calls:

    def _add(self, call: _Call) -> None:
        assert call.episode.call is None, "an episode has one call at a time"
        call.episode.call = call
        self._waiting.append(call)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begins the calls that have waited longest, as long as there is room: their time begins."""
        while self._waiting and len(self._running) < MOST_AT_ONCE:
            call = self._waiting.popleft()
            try:
                if self._num_idle:
                    self._num_idle -= 1
                else:
                    start_thread(self._make_calls, name="quatrain-environment")
            except RuntimeError as error:  # the system has no more threads
                call.episode.call = None
                call.settle(self._fault(call, f" could not be called: {error}"))
                continue
            # Its time begins here: that it waited for others is not the environment's fault.
            self._running[call] = self._thread.loop.call_later(self._timeout_s, self._leave, call)
            self._to_make.put(call)

    def _make_calls(self) -> None:
        """Makes calls, in a thread for that."""
        while (call := self._to_make.get()) is not None:
            call.thread = threading.get_ident()
            try:
                outcome = run_guarded(f"{self._environments.name}: {call.method}", partial(call.work, call))
            except Fault as fault:
                outcome = fault.with_traceback(None)  # whose frames would keep the environment
            try:
                self._thread.do(self._returned, call, outcome)
            except ClosedError:
                return
            del call, outcome  # keeps nothing of them while it waits

    def _returned(self, call: _Call, outcome: Any) -> None:
        """A call has returned; its outcome is ignored if it took too long."""
        self._num_idle += 1
        limit = self._running.pop(call, None)
        self._num_left -= limit is None
        # Only now, also if it took too long: an environment is used by one thread at a time, so it is closed
        # when its last call has returned.
        call.episode.call = None
        if call.episode.abandoned and call.method != "close":
            self._close(call.episode)
        self._begin_waiting()
        if limit is not None:
            limit.cancel()
            call.settle(outcome)

    def _leave(self, call: _Call) -> None:
        """Ends a call that takes too long; its thread is left behind."""
        del self._running[call]
        self._num_left += 1
        self._on_left()
        limit = f"longer than {self._timeout_s:g} s; rollout.environment_timeout_s sets the limit"
        # The episode has its reward already: that it cannot be closed costs memory, not the sample.
        if call.method == "close" or call.so_far is not None:
            logger.warning("%s: close took %s", self._environments.name, limit)
        if self._num_left == MOST_AT_ONCE:
            logger.warning("%s: %d %s", self._environments.name, self._num_left, _MANY_LEFT)
        self._begin_waiting()
        call.settle(call.so_far or self._fault(call, f" took {limit}", "timeout", _where(call.thread)))

    def _abandon(self, episode: _Episode) -> None:
        episode.abandoned = True
        call = episode.call
        if call is not None and call in self._waiting:
            self._waiting.remove(call)
            episode.call = None
            call.settle(self._fault(call, ": the run has discarded the episode"))
        if episode.call is None:  # else it is closed when the call returns
            self._close(episode)

    def _close(self, episode: _Episode) -> None:
        """Closes an abandoned environment in the background."""
        if episode.environment is not None:
            self._add(_Call(episode, "close", lambda call: episode.close()))

    def _end_calls(self) -> None:
        for call in [*self._running, *self._waiting]:
            call.settle(self._fault(call, f": {CLOSED}", "crash"))
        for _ in range(self._num_idle):
            self._to_make.put(None)


@dataclass(eq=False)
class _Episode:
    """The environment of an episode; one call at a time uses it, and lets it go when it is closed."""

    environment: CheckedEnvironment | None = None
    call: _Call | None = None
    """The call that waits or runs, also if it takes too long."""
    abandoned: bool = False

    def begun(self) -> CheckedEnvironment:
        """The environment."""
        assert self.environment is not None, "an episode begins before its other calls"
        return self.environment

    def close(self) -> None:
        """Closes the environment, once."""
        environment, self.environment = self.environment, None
        if environment is not None:
            environment.close()


@dataclass(eq=False)
class _Call:
    """A call of a method of an environment."""

    episode: _Episode
    method: str
    work: Callable[[_Call], Any]
    future: Future[Any] = field(default_factory=running_future)
    so_far: Ended | None = None
    """The result of a call that has only to close the environment."""
    thread: int | None = None

    def settle(self, outcome: Any) -> None:
        """Sets the future, to a result or a fault."""
        if isinstance(outcome, Fault):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def _where(thread: int | None) -> str:
    """The lines of code at which a thread is."""
    frame = None if thread is None else sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame, limit=SHOWN_FRAMES))
