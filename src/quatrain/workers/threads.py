"""Threads of this process: where the library starts one, it does so here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


def start_thread(target: Callable[..., Any], *args: Any, name: str) -> threading.Thread:
    """Calls `target(*args)` in a new daemon thread, with the caller's context, which has the run's log.

    Raises RuntimeError if the system has no more threads.
    """
    run = copy_context().run
    thread = threading.Thread(target=run, args=(target, *args), name=name, daemon=True)
    thread.start()
    return thread


def map_in_threads(function: Callable[[T], U], items: Iterable[T], num_threads: int) -> list[U]:
    """`function` of each item, in order; if one raises or the run is interrupted, no further one begins."""
    threads = ThreadPoolExecutor(num_threads)
    try:
        return list(threads.map(function, items))
    finally:
        threads.shutdown(cancel_futures=True)


class Threads:
    """Daemon threads, as many as there is work at a time; they are kept for more work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_idle = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None]) -> None:
        """Has a thread do the work at once; raises RuntimeError if the system has no more threads."""
        with self._lock:
            idle = self._num_idle > 0
            self._num_idle -= idle
        if idle:
            self._work.put(work)
        else:
            start_thread(self._run, work, name=self._name)

    def close(self) -> None:
        """Ends the threads, each when it has no work."""
        with self._lock:
            self._closed = True
            num_idle, self._num_idle = self._num_idle, 0
        for _ in range(num_idle):
            self._work.put(None)

    def _run(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            work = None  # keeps nothing of it while it waits
            with self._lock:
                if self._closed:
                    return
                self._num_idle += 1
            work = self._work.get()
