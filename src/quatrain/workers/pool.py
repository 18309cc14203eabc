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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import Context, copy_context
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from quatrain.workers.loop_thread import ClosedError, LoopThread
from quatrain.workers.worker_process import Failure as Failure
from quatrain.workers.worker_process import Kind as Kind
from quatrain.workers.worker_process import WorkerProcess, log_output, not_started
from quatrain.workers.worker_script import LOAD_TIMEOUT_S

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=WorkerProcess)
MOST_WORKERS = 8


def default_workers() -> int:
    """The number of cores that this process may use, at most MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


class Processes(Generic[P]):
    """Up to `most` worker processes, which `start` makes when they are needed."""

    def __init__(self, start: Callable[[], P], most: int):
        self._start, self._most = start, most
        self.all: list[P] = []

    def fewest(self, load: Callable[[P], int], *, alone: bool = False) -> P:
        """The first process of the least `load`, or a new one if all have any; `alone`: a retired new one.

        One that ended or was stopped between two calls is replaced here, so that it costs no call a failure.
        """
        for process in self.all:
            if process.is_idle and process.has_ended(or_stopped=True):
                process.kill()
        self.all[:] = [process for process in self.all if process.failure is None]
        # One that has ended with calls is left to hear its last words, and gets nothing new.
        open_to_all = [each for each in self.all if not each.is_retired and not each.has_ended()]
        best = min(open_to_all, key=load, default=None)
        if alone or best is None or (load(best) and len(open_to_all) < self._most):
            best = self._start()
            best.is_retired = alone
            self.all.append(best)
        return best

    def kill_all(self, why: str) -> None:
        """Ends the processes; their calls are `crash` failures that say why."""
        for process in [*self.all]:
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
        self.num_workers = num_workers
        self._settings = settings = {
            "what": what,
            "convert": convert,
            "prepare": prepare,
            "args": {spec: dict(arguments) for spec, arguments in args.items()},
            "memory_mb": memory_mb,
            "fork": fork,
            "python": python,
        }
        self._waiting: deque[_Job] = deque()
        thread = LoopThread(
            "quatrain-workers",
            "the pool is closed; make another",
            lambda: processes.kill_all("its process was ended"),
        )
        processes = Processes(lambda: WorkerProcess(thread.loop, what, settings, on_output), num_workers)
        self._thread, self._processes = thread, processes
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
        while self._waiting:
            worker = self._processes.fewest(lambda process: not process.is_idle)
            if not worker.is_idle:
                return
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                # Soon, and not at once: the future may be set in the middle of ending its worker.
                job.future.add_done_callback(lambda _: self._thread.loop.call_soon(self._begin_waiting))
                job.context.run(worker.call, *job.request, future=job.future, **job.limits)


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


class Hosts(Processes[Host]):
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

        super().__init__(start, most)

    def chosen(self, number: int, *, alone: bool = False) -> Host:
        """Where `number` lives from now on: the process with the fewest, or a new one.

        `alone`: a new one, in which nothing else will live.
        """
        # By what lives there, not by calls: what lives there will be called again.
        host = self.fewest(lambda host: len(host.live), alone=alone)
        host.live.add(number)
        return host
