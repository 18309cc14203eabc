"""Worker processes for all rooms: for calls of functions, and for what lives in them.

Data flow: users' reward functions (`reward/calls.py`), comparisons of expressions (`reward/math/grader.py`)
and chat templates (`data/tokenizer.py`) -> `Pool.submit` -> a `WorkerProcess` -> the result, or a `Failure`.
Environments and agents live in a `Host`, many in each, because their state is there: `Hosts.chosen` -> calls
of that process.
"""

from __future__ import annotations

import logging
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextvars import Context, copy_context
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from quatrain.workers.loop_thread import ClosedError, LoopThread
from quatrain.workers.worker_process import Failure as Failure
from quatrain.workers.worker_process import Kind as Kind
from quatrain.workers.worker_process import WorkerProcess, log_output, not_started
from quatrain.workers.worker_script import LOAD_TIMEOUT_S

logger = logging.getLogger(__name__)

MOST_WORKERS = 8


def default_workers() -> int:
    """The number of cores that this process may use, at most MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def kill_all(processes: Iterable[WorkerProcess], why: str) -> None:
    """Ends the processes; their calls are `crash` failures."""
    for process in [*processes]:
        process.kill(Failure("crash", why))


class _Job(NamedTuple):
    future: Future[Any]
    request: tuple[Any, ...]
    limits: Mapping[str, Any]
    context: Context
    """That of the caller, whose run gets what is printed, also if the call has waited for a worker."""


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
        python: the interpreter; None: this one.
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
        python: str | None = None,
        on_output: Callable[[str, str], None] = lambda spec, text: None,
    ):
        self._what, self._on_output, self.num_workers = what, on_output, num_workers
        self._settings = {
            "what": what,
            "convert": convert,
            "prepare": prepare,
            "args": {spec: dict(arguments) for spec, arguments in args.items()},
            "memory_mb": memory_mb,
            "fork": fork,
            "python": python,
        }
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[_Job] = deque()
        at_end = partial(kill_all, self._workers, "its process was ended")
        self._thread = LoopThread("quatrain-workers", "the pool is closed; make another", at_end)
        # Nothing of it may refer to the pool, or the pool would never be freed and its processes stay.
        self._finalizer = weakref.finalize(self, _close, self._thread, self._waiting)

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
        `cpu_s` seconds of the processor (0: not limited), without the import. Raises RuntimeError after
        `close`.
        """
        arguments = arguments if isinstance(arguments, bytes) else pickle.dumps(arguments)
        request = ("call", timeout_s, cpu_s, spec, arguments)
        return self._submit(spec, request, limit_s=timeout_s, cpu_s=cpu_s, loads=True)

    def close(self) -> None:
        """Ends the processes; calls that have not ended are `crash` failures. May be called again."""
        self._finalizer()

    def _submit(self, spec: str, request: tuple[Any, ...], **limits: Any) -> Future[Any | Failure]:
        # The caller's context: runs of one process share pools, and each has a log of its own.
        job = _Job(Future(), request, {"what": spec, **limits}, copy_context())
        try:
            self._thread.do(self._add, job)
        except ClosedError:
            raise
        except RuntimeError as error:  # the system has no more threads
            job.future.set_result(not_started(error))
        return job.future

    # In the pool's thread:

    def _add(self, job: _Job) -> None:
        self._waiting.append(job)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begins the calls that wait, in their order, as long as a worker is idle."""
        while self._waiting and (worker := self._idle_worker()):
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                # Soon, and not at once: the future may be set in the middle of ending its worker.
                job.future.add_done_callback(lambda _: self._thread.loop.call_soon(self._begin_waiting))
                job.context.run(worker.call, *job.request, future=job.future, **job.limits)

    def _idle_worker(self) -> WorkerProcess | None:
        """The first worker without a call; it is replaced if it has ended, and added if it may be."""
        for index, worker in enumerate(self._workers):
            # Looked at before each call: what died between two calls costs no call a failure.
            if worker.is_idle and worker.has_ended(or_stopped=True):
                worker.kill()
            if worker.failure is not None:
                worker = self._workers[index] = self._new_worker()
            if worker.is_idle:
                return worker
        if len(self._workers) == self.num_workers:
            return None
        self._workers.append(self._new_worker())
        return self._workers[-1]

    def _new_worker(self) -> WorkerProcess:
        return WorkerProcess(self._thread.loop, self._what, self._settings, self._on_output)


def _close(thread: LoopThread, waiting: deque[_Job]) -> None:
    thread.close()
    while waiting:
        waiting.popleft().future.cancel()


class Host(WorkerProcess):
    """A process, and the numbers of what lives in it; used in the thread of its loop alone.

    One in which a call hangs gets nothing new, and is ended after the last that lives in it.
    """

    def __init__(self, *args: Any, end_s: float, **options: Any):
        super().__init__(*args, **options)
        late = f"its process did not load it in {LOAD_TIMEOUT_S:g} s, and was ended"
        self.loaded: Future[Any] = self.call("load", limit_s=LOAD_TIMEOUT_S, late=late)
        """What came of loading the user's code: a `Failure`, or anything else."""
        self.live: set[int] = set()
        self.is_retired = False
        """Whether a call hangs in the process."""
        self._end_s = end_s

    def hear(self, news: Mapping[str, Any]) -> None:
        """A call hangs: Python cannot end its thread, so the process must end, when it can be spared."""
        self.is_retired = True
        self._end_if_left()

    def leave(self, number: int) -> None:
        """Forgets what lived in it; what is being closed may still end."""
        self.live.discard(number)
        self._end_if_left()

    def _end_if_left(self) -> None:
        if self.is_retired and not self.live:
            self.let_end(self._end_s)


class Hosts:
    """Up to `most` processes, which start when they are needed, in the loop of `thread`.

    Args:
        what: what `ps` shows of them.
        name: what is hosted, for the log.
        settings: those of `worker_script.py`.
        end_s: seconds that a process gets to end.
        answer_s: seconds in which a process must answer at any time, or it is ended; None: no limit.
    """

    def __init__(
        self,
        thread: LoopThread,
        what: str,
        name: str,
        settings: Mapping[str, Any],
        *,
        most: int,
        end_s: float,
        answer_s: float | None = None,
    ):
        def start() -> Host:
            return Host(
                thread.loop,
                what,
                settings,
                lambda _, text: log_output(logger, name, text),
                answer_s=answer_s,
                end_s=end_s,
            )

        self._start, self._most = start, most
        self._hosts: list[Host] = []

    def chosen(self, number: int, *, alone: bool = False) -> Host:
        """Where `number` lives from now on: the process with the fewest, or a new one.

        `alone`: a new one, in which nothing else will live.
        """
        self._hosts = [host for host in self._hosts if host.failure is None]
        open_to_all = [host for host in self._hosts if not host.is_retired and not host.has_ended()]
        # By what lives there, not by calls: what lives there will be called again.
        best = min(open_to_all, key=lambda host: len(host.live), default=None)
        if alone or best is None or (best.live and len(open_to_all) < self._most):
            best = self._start()
            best.is_retired = alone
            self._hosts.append(best)
        best.live.add(number)
        return best

    def kill_all(self, why: str) -> None:
        """Ends the processes; their calls get a failure that says why."""
        kill_all(self._hosts, why)
