"""Environments in worker processes, each of which hosts many.

Data flow: `environment_calls.in_workers` -> `InWorkers` -> requests to `environment_worker.py`, which runs
the environments in threads with the time limit -> replies. An environment lives in one process. Replies are
JSON, not pickles, because a tool may run what the model wrote.
"""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from quatrain.config.errors import listed
from quatrain.environments.environment import Ended, EnvironmentFault, FaultKind, Opening, Turn
from quatrain.environments.environment_threads import ONE_CALL
from quatrain.workers.process import GRACE_S, LOAD_TIMEOUT_S, WorkerProcess, log_output, pickled

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Seconds without a reply after which a process with calls is asked whether it still answers."""
_PING = pickle.dumps(("ping", 0, None))


class InWorkers:
    """`EnvironmentCalls` in up to `num_workers` processes, which start when they are needed.

    The arguments are those of `environment_calls.in_workers`.
    """

    def __init__(
        self, specs: str | Sequence[str], num_workers: int, timeout_s: float, memory_mb: int | None = None
    ):
        what = "environment" if isinstance(specs, str) else "tools"
        paths = [specs] if isinstance(specs, str) else list(specs)
        _check(what, paths)
        names = [specs] if isinstance(specs, str) else [path.rpartition(":")[2] for path in paths]
        self._name = f"{what} {listed(names)}"  # as `load_environment.py` calls them
        self._opening = {
            "specs": specs if isinstance(specs, str) else paths,
            "timeout_s": timeout_s,
            "memory_bytes": memory_mb and memory_mb << 20,
        }
        self._num_workers, self._timeout_s = num_workers, timeout_s
        self._lock = threading.Lock()
        self._hosts: list[_Host] = []
        self._homes: dict[int, _Host] = {}  # of the episodes
        self._closed = False

    def begin(self, episode: int, columns: Mapping[str, Any]) -> Future[Opening]:
        request = pickled(columns, "environments in worker processes")
        with self._lock:
            if self._closed:
                return _failed(_fault(self._name, "begin", "crash", "the run has ended its environments"))
            try:
                host = self._homes[episode] = self._chosen()
            except RuntimeError as error:  # the system has no more threads
                how = f"its process could not be started: {error}"
                return _failed(_fault(self._name, "begin", "crash", how))
            host.live.add(episode)
        return host.call("begin", episode, request)

    def step(self, episode: int, completion: str) -> Future[Turn | None]:
        return self._homes[episode].call("step", episode, completion)

    def end(self, episode: int) -> Future[Ended]:
        return self._homes.pop(episode).call("end", episode)

    def abandon(self, episode: int) -> None:
        host = self._homes.pop(episode, None)
        if host is not None:
            host.abandon(episode)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.kill("crash", "the run has ended its environments")
        for host in hosts:
            host.join()

    def _chosen(self) -> _Host:
        """The process with the fewest live episodes, or a new one."""
        self._hosts = [host for host in self._hosts if not host.over]
        open_to_all = [host for host in self._hosts if host.is_open()]
        best = min(open_to_all, key=lambda host: len(host.live), default=None)
        if best is None or (best.live and len(open_to_all) < self._num_workers):
            best = _Host(self._name, self._opening, self._timeout_s, self._lock)
            self._hosts.append(best)
        return best


class _Host:
    """A worker process, the episodes that live in it, and its calls without a reply.

    A thread starts the process and reads from it until it has ended, as the process ends with the thread that
    started it; another thread writes, because a process that hangs does not read. `lock` guards the fields.
    """

    def __init__(self, name: str, opening: Mapping[str, Any], timeout_s: float, lock: threading.Lock):
        self._name, self._opening, self._lock = name, opening, lock
        self.live: set[int] = set()
        self.over = False
        self._limit_s = timeout_s + GRACE_S
        self._process: WorkerProcess | None = None
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._calls: dict[int, tuple[str, Future[Any]]] = {}  # by episode
        self._loaded = self._retired = False
        self._end: tuple[FaultKind, str] | None = None  # why it was killed, or how it ended
        self._answer_by: float | None = None  # when it is killed if it has not answered
        self._leave_by: float | None = None  # when it is killed if it has not ended by itself
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run,), name="quatrain-environment-worker", daemon=True
        )
        self._thread.start()

    def is_open(self) -> bool:
        """Whether new episodes may live here."""
        return not self._retired and (self._process is None or not self._process.ended())

    def call(self, operation: str, episode: int, argument: Any = None) -> Future[Any]:
        """Asks the process for something."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            assert episode not in self._calls, ONE_CALL
            over = self.over
            if not over:
                self._calls[episode] = operation, future
                self._requests.put(pickle.dumps((operation, episode, argument)))
        if over:
            assert self._end is not None, "a process that has ended has ended somehow"
            return _failed(_fault(self._name, operation, "crash", self._end[1]))
        return future

    def abandon(self, episode: int) -> None:
        """Has the process close an environment, if it still can."""
        self._requests.put(pickle.dumps(("abandon", episode, None)))
        self._leave(episode)

    def kill(self, kind: FaultKind, why: str) -> None:
        """Kills the process; its calls are faults of this kind."""
        with self._lock:
            self._retired = True
            self._end = self._end or (kind, why)
            process = self._process
        if process is not None:
            process.kill()

    def join(self) -> None:
        """Waits for the end of the process after it was killed."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _leave(self, episode: int) -> None:
        """Forgets an episode; a process that is retired ends after its last one."""
        with self._lock:
            self.live.discard(episode)
            self._end_if_empty()

    def _retire(self) -> None:
        """Takes no new episodes, because a call hangs in the process."""
        with self._lock:
            self._retired = True
            self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._retired and not self.live and self._leave_by is None:
            self._leave_by = time.monotonic() + self._limit_s
            self._requests.put(None)  # environments that are being closed may still end

    def _run(self) -> None:
        process = None
        writer = threading.Thread(target=self._write, name="quatrain-environment-requests", daemon=True)
        try:
            process = WorkerProcess(Path(__file__).with_name("environment_worker.py"), self._opening)
            with self._lock:
                self._process = process
                killed = self._end is not None
            writer.start()
        except (OSError, RuntimeError) as error:  # the system has no more processes or threads
            if process is not None:
                process.end()
            return self._ended("crash", f"its process could not be started: {error}")
        if killed:
            process.kill()
        self._answer_by = time.monotonic() + LOAD_TIMEOUT_S
        try:
            self._read(process)
        finally:
            _, how = process.death()
            process.send_no_more()
            self._requests.put(None)
            writer.join()
            process.end()
            self._ended("crash", how)
            self._log_output(process)
        return None

    def _write(self) -> None:
        process = self._process
        assert process is not None, "a process is written to after it was started"
        with suppress(OSError):  # the process has ended
            while (request := self._requests.get()) is not None:
                process.send(request, None)
            process.send_no_more()

    def _read(self, process: WorkerProcess) -> None:
        """Takes replies until the process ends."""
        while True:
            try:
                line = process.line(time.monotonic() + TICK_S)
            except TimeoutError:
                self._look(process)
                continue
            except OSError:
                return
            finally:
                process.read_output()
                self._log_output(process)
            if not line:
                return
            self._answer_by = None
            try:
                self._take(json.loads(line))
            except (ValueError, LookupError, TypeError):  # an environment wrote into the socket
                self.kill("crash", "its process sent a reply that is none")
                return

    def _look(self, process: WorkerProcess) -> None:
        """Asks a process that has calls and has sent nothing for a while; kills it if it does not answer."""
        now = time.monotonic()
        if self._answer_by is None and self._calls:
            self._answer_by = now + self._limit_s
            self._requests.put(_PING)
        elif self._answer_by is not None and now > self._answer_by:
            waited = f"answer for {self._limit_s:g} s" if self._loaded else f"load it in {LOAD_TIMEOUT_S:g} s"
            self.kill("timeout", f"its process did not {waited}, and was ended")
        elif self._leave_by is not None and now > self._leave_by:
            process.kill()

    def _take(self, reply: Mapping[str, Any]) -> None:
        if "refused" in reply:
            return self.kill("error", reply["refused"])
        self._loaded = True
        if "hangs" in reply:
            self._retire()
        elif "episode" in reply:
            self._settle(reply["episode"], reply)
        return None

    def _settle(self, episode: int, reply: Mapping[str, Any]) -> None:
        operation, future = self._calls[episode]
        fault = EnvironmentFault(*reply["fault"]) if "fault" in reply else None
        value = None if fault is not None else _VALUES[operation](reply["value"])
        with self._lock:
            del self._calls[episode]
        if operation == "end":
            self._leave(episode)
        if fault is not None:
            future.set_exception(fault)
        else:
            future.set_result(value)

    def _ended(self, kind: FaultKind, how: str) -> None:
        """Ends the calls that have no reply."""
        with self._lock:
            self.over = True
            self._end = kind, how = self._end or (kind, how)
            calls, self._calls = self._calls, {}
        for operation, future in calls.values():
            future.set_exception(_fault(self._name, operation, kind, how))

    def _log_output(self, process: WorkerProcess) -> None:
        output = process.taken_output()
        if output:
            log_output(logger, self._name, output)


def _check(what: str, specs: Sequence[str]) -> None:
    for spec in specs:
        if not isinstance(spec, str) or spec.startswith("__main__:"):
            raise ValueError(
                f"{what} in worker processes must be named as `path/file.py:name`, which they import; got "
                f"{spec!r}, of the running program; put it into a file, or set rollout.environment_workers "
                "to 0"
            )


def _fault(name: str, operation: str, kind: FaultKind, how: str) -> EnvironmentFault:
    return EnvironmentFault(f"{name}: {'reset' if operation == 'begin' else operation}: {how}", kind)


def _failed(fault: EnvironmentFault) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(fault)
    return future


def _opening(value: Any) -> Opening:
    return tuple(value) if isinstance(value, list) else value


def _turn(value: Any) -> Turn | None:
    return None if value is None else Turn(tuple(value[0]), value[1], value[2])


_VALUES = {"begin": _opening, "step": _turn, "end": lambda value: Ended(*value)}
