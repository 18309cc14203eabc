"""Work in threads of this process: a thread with an event loop, and a function of many items."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from quatrain.cluster.start_thread import start_thread

T = TypeVar("T")
U = TypeVar("U")


def map_in_threads(function: Callable[[T], U], items: Iterable[T], num_threads: int) -> list[U]:
    """`function` of each item, in order; if one raises or the run is interrupted, no further one begins."""
    threads = ThreadPoolExecutor(num_threads)
    try:
        return list(threads.map(function, items))
    finally:
        threads.shutdown(cancel_futures=True)


def running_future() -> Future[Any]:
    """A future that cannot be cancelled: it is always set by whoever does the work, and that once."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def carry_out(job: Callable[[], T], done: Future[T]) -> None:
    """Sets `done` to what `job` returns or raises, unless nobody waits for it any more."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(job())
    except BaseException as error:  # raised where the result is asked for
        done.set_exception(error)


def settle(done: Future[T], closed: str, task: asyncio.Task[T]) -> None:
    """Sets `done` to the outcome of a `task` that has ended; one that was cancelled says what was closed."""
    if task.cancelled():
        done.set_exception(RuntimeError(closed))
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


class ClosedError(RuntimeError):
    """The thread of a `LoopThread` has ended."""


class LoopThread:
    """A thread with an event loop, which starts with its first work.

    What only this thread changes needs no lock. `closed` says what has been closed, for messages; `at_end` is
    called last of all in the thread.
    """

    def __init__(self, name: str, closed: str, at_end: Callable[[], None]):
        self.loop: asyncio.AbstractEventLoop
        self._name, self._closed, self._at_end = name, closed, at_end
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[..., Any], *args: Any) -> None:
        """Has the thread call `work(*args)`, after what it was asked before, in the caller's context.

        Raises ClosedError after `close`, and RuntimeError if the system has no more threads.
        """
        # Held while the work is handed over: `close` between the two would leave it in a loop that has ended.
        with self._lock:
            if self._is_closed:
                raise ClosedError(self._closed)
            if self._thread is None:
                self.loop = asyncio.new_event_loop()
                try:
                    self._thread = start_thread(self._run, name=self._name)
                except RuntimeError:
                    self.loop.close()
                    raise
            self.loop.call_soon_threadsafe(work, *args)

    def close(self, timeout_s: float | None = None) -> bool:
        """Ends the thread after the work it was given, and waits for it so long. May be called again.

        Whether the thread has ended.
        """
        with self._lock:
            thread, was_closed, self._is_closed = self._thread, self._is_closed, True
            if thread is not None and not was_closed:
                self.loop.call_soon_threadsafe(self.loop.stop)
        # A callback in the thread itself may close it, and must not wait for itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self._at_end()
            self.loop.close()
