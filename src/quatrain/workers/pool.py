"""Worker processes that call users' functions, with limits on time and memory.

`reward/calls.py` calls users' reward functions through it. Each worker is a process of `worker.py`. It
shares a socket and a pipe with this process, and nothing with other workers, so that it can be killed at any
moment. Libraries for process pools are not used, because their workers share a queue and its locks, which a
worker that is killed may hold.
"""

from __future__ import annotations

import heapq
import json
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from quatrain.workers.process import LOAD_TIMEOUT_S, WorkerProcess

Kind = Literal["timeout", "crash", "memory", "exit", "error"]
KINDS: tuple[Kind, ...] = ("timeout", "crash", "memory", "exit", "error")
MOST_WORKERS = 8


@dataclass(frozen=True)
class Failure:
    """Why a call has no result.

    `timeout`: it took too long. `crash`: a signal ended its process. `exit`: it left with `sys.exit` or
    `os._exit`. `memory`: it exceeded the memory limit. `error`: it raised another exception.
    """

    kind: Kind
    detail: str


def default_workers() -> int:
    """The number of cores that this process may use, at most MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


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
        each
            function that was imported; it raises ValueError for one that cannot be used.
        args: the arguments that `prepare` gets for a spec, by spec.
        memory_mb: MiB of private memory of one process; None: not limited.
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
        on_output: Callable[[str, str], None] = lambda spec, text: None,
    ):
        settings = {
            "what": what,
            "convert": convert,
            "prepare": prepare,
            "args": {spec: dict(given) for spec, given in args.items()},
            "memory_bytes": memory_mb and memory_mb << 20,
        }
        self.num_workers = num_workers
        self._workers = [_Worker(settings, on_output) for _ in range(num_workers)]
        self._idle = list(range(num_workers))
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="quatrain-pool")
        self._finalizer = weakref.finalize(self, _end, self._threads, self._workers)

    def load(self, spec: str) -> Any | Failure:
        """Imports the function `spec` in a worker: {"parameters": …} (`user_code.parameters_of`).

        {"refused": message} if there is no such function.
        """
        return self._submit(lambda worker: worker.load(spec)).result()

    def submit(self, spec: str, arguments: bytes, timeout_s: float) -> Future[Any | Failure]:
        """Calls the function `spec`, which a worker imports first if it has not yet.

        `arguments` is the pickle of its keyword arguments. `timeout_s` is the time limit of the call, without
        the import.
        """
        return self._submit(lambda worker: worker.call(spec, arguments, timeout_s))

    def _submit(self, job: Callable[[_Worker], Any | Failure]) -> Future[Any | Failure]:
        return self._threads.submit(copy_context().run, self._on_worker, job)  # the context has the run's log

    def close(self) -> None:
        """Ends the processes; calls that have not ended are `crash` failures. May be called again."""
        self._finalizer()

    def _on_worker(self, job: Callable[[_Worker], Any | Failure]) -> Any | Failure:
        with self._lock:
            first = heapq.heappop(self._idle)  # there are as many threads as workers
        try:
            return job(self._workers[first])
        finally:
            with self._lock:
                heapq.heappush(self._idle, first)


def _end(threads: ThreadPoolExecutor, workers: Sequence[_Worker]) -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.close()
    threads.shutdown()
    for worker in workers:
        worker.stop()


class _Worker:
    """One process, started when it is needed. Used by one thread at a time; any thread may close it."""

    def __init__(self, settings: Mapping[str, Any], on_output: Callable[[str, str], None]):
        self._settings, self._on_output = settings, on_output
        self._process: _Process | None = None
        self._loaded: set[str] = set()
        self._closed = False

    def load(self, spec: str) -> Any | Failure:
        request = pickle.dumps(("load", LOAD_TIMEOUT_S, spec))
        reply = self._exchange(spec, request, LOAD_TIMEOUT_S)
        if isinstance(reply, dict) and "parameters" in reply:
            self._loaded.add(spec)
        return reply

    def call(self, spec: str, arguments: bytes, timeout_s: float) -> Any | Failure:
        process = self._process
        if process is not None and process.ended(or_stopped=True):
            self.stop()
        if spec not in self._loaded:
            reply = self.load(spec)
            if isinstance(reply, Failure):
                return reply
            if "refused" in reply:  # it was there when it was loaded first
                return Failure("error", reply["refused"])
        request = pickle.dumps(("call", timeout_s, spec, arguments))
        return self._exchange(spec, request, timeout_s)

    def _exchange(self, spec: str, request: bytes, timeout_s: float) -> Any | Failure:
        """The reply to a request, or the failure; after most failures the process has been ended."""
        if self._closed:
            raise RuntimeError("the pool is closed; make another")
        if self._process is None:
            self._process = _Process(self._settings)
        process = self._process
        reply = process.exchange(request, timeout_s)
        if isinstance(reply, Failure) and reply.kind != "error":
            self.stop()
        output = process.taken_output()
        if output:
            self._on_output(spec, output)
        return reply

    def stop(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        self._loaded = set()
        if process is not None:
            process.end()

    def close(self) -> None:
        """Kills the process, so that a thread that waits for it goes on."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()


class _Process(WorkerProcess):
    """A process of `worker.py`, which answers one request after the other."""

    def __init__(self, settings: Mapping[str, Any]):
        super().__init__(Path(__file__).with_name("worker.py"), settings)

    def exchange(self, request: bytes, timeout_s: float) -> Any | Failure:
        """The reply to a request; a `Failure` other than an exception leaves the process unusable."""
        deadline = time.monotonic() + timeout_s
        try:
            self.send(request, timeout_s)
            line = self.line(deadline)
        except TimeoutError:
            return Failure("timeout", f"it took longer than {timeout_s:g} s")
        except OSError:  # the process has ended or closed its socket
            line = b""
        finally:
            self.read_output()
        if not line:
            return Failure(*self.death())
        try:
            reply = json.loads(line + self.received)  # nothing may follow a reply
            return Failure(reply["kind"], reply["detail"]) if "kind" in reply else reply["value"]
        except (ValueError, LookupError, TypeError):  # a function wrote into the socket
            return Failure("crash", "its process sent a reply that is none")
