"""Worker processes, the thread that attends to them, and calls of functions in them.

Data flow: users' reward functions (`reward/calls.py`), comparisons of expressions (`reward/math/grader.py`)
and chat templates (`data/tokenizer.py`) -> `Pool.submit` -> a `WorkerProcess` -> the result, or a `Failure`.
Environments use `Processes` without a `Pool`, because each stays in its process.
"""

from __future__ import annotations

import math
import os
import pickle
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from quatrain.workers.entry import LOAD_TIMEOUT_S
from quatrain.workers.process import Failure as Failure
from quatrain.workers.process import Kind as Kind
from quatrain.workers.process import WorkerProcess, not_started
from quatrain.workers.threads import start_thread

MOST_WORKERS = 8


def default_workers() -> int:
    """The number of cores that this process may use, at most MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


class Processes:
    """Worker processes, and the thread that attends to them, because a process ends with what started it."""

    def __init__(self, closed: str = "its process was ended") -> None:
        self.lock = threading.RLock()
        self._is_asleep = False  # whether the thread waits until something comes
        self.is_closed = False
        self._closed = Failure("crash", closed)
        self._processes: list[WorkerProcess] = []
        self._new: set[WorkerProcess] = set()
        self._thread: threading.Thread | None = None

    def start(self, *args: Any, **options: Any) -> WorkerProcess:
        """A new process, with the arguments of `WorkerProcess`; it starts in the background."""
        process = WorkerProcess(*args, **options, lock=self.lock, wake=self._attend_soon)
        with self.lock:
            if self.is_closed:
                process.failure = self._closed
            else:
                self._processes.append(process)
        return process

    def _attend_soon(self, process: WorkerProcess, has_work: bool) -> None:
        """Has the thread attend to a process, at once if it has work."""
        if not (has_work or self._is_asleep):
            return None
        with self.lock:
            self._new.add(process)
            if self._thread is None:
                self._waked, self._wakes = socket.socketpair()
                try:
                    self._thread = start_thread(self._attend, name="quatrain-workers")
                except RuntimeError as error:  # the system has no more threads
                    self._waked.close()
                    self._wakes.close()
                    process.failure, process.is_over = not_started(error), True
                    return process.settle_all()
            return self._wake()

    def close(self) -> None:
        """Ends the processes and the thread; calls that have not ended are failures. May be called again."""
        with self.lock:
            self.is_closed, thread = True, self._thread
            if thread is not None:
                self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # the thread has ended, or was waked often enough
            self._wakes.send(b"x", socket.MSG_DONTWAIT)

    def _attend(self) -> None:
        with selectors.DefaultSelector() as selector, self._waked, self._wakes:
            selector.register(self._waked, selectors.EVENT_READ)
            try:
                while not self.is_closed:
                    self._attend_once(selector)
            finally:
                with self.lock:
                    self.is_closed = True
                    processes, self._processes = self._processes, []
                for process in processes:
                    process.kill(self._closed)
                for process in processes:
                    process.attend(selector)

    def _attend_once(self, selector: selectors.BaseSelector) -> None:
        with self.lock:
            due = 0.0 if self._new else min((each.due() for each in self._processes), default=math.inf)
            self._is_asleep = due == math.inf
        wait_s = None if due == math.inf else max(due - time.monotonic(), 0.0)
        ready = {key.data for key, _ in selector.select(wait_s)}
        now = time.monotonic()
        with self.lock:
            self._is_asleep = False
            if None in ready:
                self._waked.recv(4096)
            new, self._new = self._new, set()
            processes = [p for p in self._processes if p in ready or p in new or p.due() <= now]
        for process in processes:
            process.attend(selector)
        with self.lock:
            self._processes = [process for process in self._processes if not process.is_over]


class _Job(NamedTuple):
    future: Future[Any]
    request: tuple[Any, ...]
    limits: Mapping[str, Any]


class Pool:
    """Up to `num_workers` processes that call functions by their specs (`user_code.find_function`).

    A process starts when it is first needed. After a failure other than an exception, and after it has ended
    by itself, it is replaced. One call after the other always uses the first worker, so what a function keeps
    in global variables is there in its next call, unless the worker was replaced.

    Args:
        what: kind of the functions in error messages, such as "reward function".
        convert: spec of a function that turns a returned value into values that JSON has; it is called in
            the worker.
        prepare: spec of a function `(function, spec, args) -> function` that is called in the worker with
            each function that was imported; it raises ValueError for one that cannot be used.
        args: the arguments that `prepare` gets for a spec, by spec.
        memory_mb: MiB of private memory of one process; None: not limited.
        fork: spec of the one function that is called, by a process that was forked after the import: another
            is there at once when a signal ends it.
        on_output: called with the spec and what the function printed.
    """

    def __init__(
        self,
        what: str,
        num_workers: int,
        *,
        convert: str | None = None,
        prepare: str | None = None,
        args: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        memory_mb: int | None = None,
        fork: str | None = None,
        on_output: Callable[[str, str], None] = lambda spec, text: None,
    ):
        self._settings = {
            "what": what,
            "convert": convert,
            "prepare": prepare,
            "args": {spec: dict(arguments) for spec, arguments in args.items()},
            "memory_mb": memory_mb,
            "fork": fork,
        }
        self.num_workers = num_workers
        self._on_output = on_output
        self._processes = Processes()
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[_Job] = deque()
        self._finalizer = weakref.finalize(self, _close, self._processes, self._waiting)

    def load(self, spec: str) -> Any | Failure:
        """Imports the function `spec` in a worker: {"parameters": …} (`user_code.parameters_of`).

        {"refused": message} if there is no such function.
        """
        return self._submit(spec, ("load", spec), limit_s=LOAD_TIMEOUT_S).result()

    def submit(
        self, spec: str, arguments: bytes | Mapping[str, Any], timeout_s: float, cpu_s: float = 0.0
    ) -> Future[Any | Failure]:
        """Calls the function `spec`, which a worker imports first if it has not yet.

        `arguments` are its keyword arguments, or their pickle. The call may take `timeout_s` seconds, and
        `cpu_s` seconds of the processor (0: not limited), without the import.
        """
        arguments = arguments if isinstance(arguments, bytes) else pickle.dumps(arguments)
        request = ("call", timeout_s, cpu_s, spec, arguments)
        return self._submit(spec, request, limit_s=timeout_s, cpu_s=cpu_s, loads=True)

    def close(self) -> None:
        """Ends the processes; calls that have not ended are `crash` failures. May be called again."""
        self._finalizer()

    def _submit(self, spec: str, request: tuple[Any, ...], **limits: Any) -> Future[Any | Failure]:
        job = _Job(Future(), request, {"what": spec, **limits})
        with self._processes.lock:
            if self._processes.is_closed:
                raise RuntimeError("the pool is closed; make another")
            self._waiting.append(job)
        job.future.add_done_callback(lambda _: self._begin_waiting())
        self._begin_waiting()
        return job.future

    def _begin_waiting(self) -> None:
        """Begins the calls that wait, in their order, as long as a worker is idle."""
        with self._processes.lock:
            while self._waiting and not self._processes.is_closed and (worker := self._idle_worker()):
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    worker.call(*job.request, future=job.future, **job.limits)

    def _idle_worker(self) -> WorkerProcess | None:
        """The first worker without a call; it is replaced if it has ended, and added if it may be."""
        for index, worker in enumerate(self._workers):
            if worker.is_idle and worker.failure is None and worker.has_ended(or_stopped=True):
                worker.kill(Failure("crash", "its process ended by itself"))
            if worker.failure is not None:
                worker = self._workers[index] = self._new_worker()
            if worker.is_idle:
                return worker
        if len(self._workers) == self.num_workers:
            return None
        self._workers.append(self._new_worker())
        return self._workers[-1]

    def _new_worker(self) -> WorkerProcess:
        return self._processes.start(self._settings["what"], self._settings, self._on_output)


def _close(processes: Processes, waiting: deque[_Job]) -> None:
    with processes.lock:
        processes.is_closed = True
    while waiting:
        waiting.popleft().future.cancel()
    processes.close()
