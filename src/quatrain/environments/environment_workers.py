"""Environments in worker processes, each of which hosts many.

Data flow: `InWorkers` -> requests to `environment_worker.py`, which runs the environments in threads with the
time limit -> replies. An environment lives in one process. Replies are JSON, not pickles, because a tool may
run what the model wrote.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from quatrain.config.errors import listed
from quatrain.environments.environment import (
    CLOSED,
    Ended,
    EnvironmentFault,
    FaultKind,
    InitialObservation,
    StepResult,
)
from quatrain.workers.pool import Failure, Kind, kill_all
from quatrain.workers.process import GRACE_S, WorkerProcess, log_output, not_started, pickled
from quatrain.workers.threads import ClosedError, LoopThread, running_future
from quatrain.workers.worker import LOAD_TIMEOUT_S

logger = logging.getLogger(__name__)


class InWorkers:
    """`EnvironmentCalls` in up to `num_workers` processes, which start when they are needed.

    `specs` is the environment `path.py:Class`, or a list of tools `path.py:function`; the processes import
    it. Each call may take `timeout_s` seconds. A process in which a call takes too long gets no new episodes,
    and is ended after its others; all the episodes in a process that dies have "crash" faults. `memory_mb`
    are the MiB of private memory of a process, 8 of them for each thread; None: not limited. `begin` raises
    ValueError for columns that cannot be pickled.

    Raises ValueError for a class or function of the running program, which other processes cannot import.
    """

    keeps = False

    def __init__(
        self, specs: str | Sequence[str], num_workers: int, timeout_s: float, memory_mb: int | None = None
    ):
        what = "environment" if isinstance(specs, str) else "tools"
        paths = [specs] if isinstance(specs, str) else list(specs)
        for path in paths:
            if not isinstance(path, str) or path.startswith("__main__:"):
                raise ValueError(
                    f"{what} in worker processes must be named as `path/file.py:name`, which they import; "
                    f"got {path!r}, of the running program; put it into a file, or set "
                    "rollout.environment_workers to 0"
                )
        names = [specs] if isinstance(specs, str) else [path.rpartition(":")[2] for path in paths]
        self._name = f"{what} {listed(names)}"  # as `load_environment.py` calls them
        self._settings = {
            "serve": "quatrain.environments.environment_worker:serve",
            "specs": specs if isinstance(specs, str) else paths,
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
        }
        self._num_workers, self._limit_s = num_workers, timeout_s + GRACE_S
        self._hosts: list[_Host] = []
        self._homes: dict[int, _Host] = {}  # of the episodes
        self._thread = LoopThread("quatrain-environments", CLOSED, self._end_hosts)

    def begin(self, episode: int, columns: Mapping[str, Any]) -> Future[InitialObservation]:
        return self._ask("begin", episode, pickled(columns, "environments in worker processes"))

    def step(self, episode: int, completion: str) -> Future[StepResult | None]:
        return self._ask("step", episode, completion)

    def end(self, episode: int) -> Future[Ended]:
        return self._ask("end", episode)

    def kept(self, episode: int) -> None:
        return None

    def abandon(self, episode: int) -> None:
        self._ask("abandon", episode)

    def close(self) -> None:
        self._thread.close()

    def _ask(self, operation: str, episode: int, argument: Any = None) -> Future[Any]:
        future = running_future()
        try:
            self._thread.do(self._pass_on, future, operation, episode, argument)
        except RuntimeError as error:
            closed = isinstance(error, ClosedError)
            self._settle(future, operation, Failure("crash", CLOSED) if closed else not_started(error))
        return future

    # In the thread:

    def _pass_on(self, future: Future[Any], operation: str, episode: int, argument: Any) -> None:
        if operation == "begin":
            self._homes[episode] = self._chosen()
            self._homes[episode].live.add(episode)
        host = self._homes.get(episode)
        if host is None:  # abandoned before
            return self._settle(future, operation, Failure("crash", "there is no such episode"))
        if operation in ("end", "abandon"):
            del self._homes[episode]
        reply = host.process.call(operation, episode, argument)
        if operation == "abandon":
            return host.leave(episode)
        return reply.add_done_callback(partial(self._answered, future, operation, episode, host))

    def _answered(
        self, future: Future[Any], operation: str, episode: int, host: _Host, reply: Future[Any]
    ) -> None:
        if operation == "end":
            host.leave(episode)
        try:
            self._settle(future, operation, reply.result())
        except (ValueError, LookupError, TypeError):  # users' code wrote into the socket
            failure = Failure("crash", "its process sent a reply that is none")
            self._settle(future, operation, failure)
            host.process.kill(failure)

    def _settle(self, future: Future[Any], operation: str, outcome: Any) -> None:
        match outcome:
            case Failure(kind, detail):
                text = f"{self._name}: {'reset' if operation == 'begin' else operation}: {detail}"
                future.set_exception(EnvironmentFault(text, _FAULTS.get(kind, "crash")))
            case {"fault": fault}:
                future.set_exception(EnvironmentFault(*fault))
            case {"value": value}:
                future.set_result(_VALUES[operation](value))
            case _:
                raise ValueError("no form of a reply")

    def _chosen(self) -> _Host:
        """The process with the fewest live episodes, or a new one."""
        self._hosts = [host for host in self._hosts if host.process.failure is None]
        open_to_all = [host for host in self._hosts if not host.is_retired and not host.process.has_ended()]
        best = min(open_to_all, key=lambda host: len(host.live), default=None)
        if best is None or (best.live and len(open_to_all) < self._num_workers):
            best = _Host(self._thread.loop, self._name, self._settings, self._limit_s)
            self._hosts.append(best)
        return best

    def _end_hosts(self) -> None:
        kill_all((host.process for host in self._hosts), CLOSED)


class _Host:
    """A worker process and the episodes that live in it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, name: str, settings: Mapping[str, Any], limit_s: float
    ):
        self.live: set[int] = set()
        self.is_retired = False
        """Whether a call hangs in the process: it takes no new episodes, and ends after its last one."""
        self._limit_s = limit_s
        self.process = WorkerProcess(
            loop,
            "environments",
            settings,
            on_output=lambda _, text: log_output(logger, name, text),
            on_news=lambda _: self.leave(None),
            answer_s=limit_s,
        )
        late = f"its process did not load it in {LOAD_TIMEOUT_S:g} s, and was ended"
        self.process.call("load", limit_s=LOAD_TIMEOUT_S, late=late)

    def leave(self, episode: int | None) -> None:
        """Forgets an episode; None: a call hangs. Environments that are being closed may still end."""
        self.is_retired |= episode is None
        self.live -= {episode}
        if self.is_retired and not self.live:
            self.process.let_end(self._limit_s)


_FAULTS: Mapping[Kind, FaultKind] = {"timeout": "timeout", "refused": "error"}
_VALUES = {
    "begin": lambda value: tuple(value) if isinstance(value, list) else value,
    "step": lambda value: None if value is None else StepResult(tuple(value[0]), value[1], value[2]),
    "end": lambda value: Ended(*value),
}
