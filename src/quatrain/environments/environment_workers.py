"""Environments in worker processes, each of which hosts many.

Data flow: `InWorkers` -> requests to `environment_worker.py`, which runs the environments in threads with the
time limit -> replies. An environment lives in one process. Replies are JSON, not pickles, because a tool may
run what the model wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from quatrain.config.errors import listed
from quatrain.config.sections.rollout import COLUMN
from quatrain.environments.environment import (
    CLOSED,
    Ended,
    EnvironmentFault,
    FaultKind,
    InitialObservation,
    StepResult,
)
from quatrain.workers.hosts import Host, Hosts
from quatrain.workers.pool import Failure, Kind
from quatrain.workers.process import GRACE_S, not_started, pickled
from quatrain.workers.threads import ClosedError, LoopThread, running_future

logger = logging.getLogger(__name__)


class InWorkers:
    """`EnvironmentCalls` in up to `num_workers` processes, which start when they are needed.

    `specs` is the environment `path.py:Class`, or several by a column, as `rollout.environment` has them, or
    a list of tools `path.py:function`; the processes import them. Each call may take `timeout_s` seconds. A
    process in which a call takes too long gets no new episodes, and is ended after its others; all the
    episodes in a process that dies have "crash" faults. `memory_mb` are the MiB of private memory of a
    process, 8 of them for each thread; None: not limited. `begin` raises ValueError for columns that cannot
    be pickled.

    Raises ValueError for a class or function of the running program, which other processes cannot import.
    """

    keeps = False

    def __init__(
        self,
        specs: str | Mapping[str, str] | Sequence[str],
        num_workers: int,
        timeout_s: float,
        memory_mb: int | None = None,
    ):
        # Named as `load_environment.py` names them.
        if isinstance(specs, str):
            paths, self._name = [specs], f"environment {specs}"
        elif isinstance(specs, Mapping):
            paths = [path for name, path in specs.items() if name != COLUMN]
            self._name = f"environments of the column `{specs[COLUMN]}`"
        else:
            paths = specs = list(specs)
            self._name = f"tools {listed(str(path).rpartition(':')[2] for path in paths)}"
        for path in paths:
            if not isinstance(path, str) or path.startswith("__main__:"):
                what = self._name.split()[0]
                raise ValueError(
                    f"{what} in worker processes must be named as `path/file.py:name`, which they import; "
                    f"got {path!r}, of the running program; put it into a file, or set "
                    "rollout.environment_workers to 0"
                )
        self._settings = {
            "serve": "quatrain.environments.environment_worker:serve",
            "specs": specs,
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
        }
        self._homes: dict[int, Host] = {}  # of the episodes
        self._thread = LoopThread("quatrain-environments", CLOSED, lambda: self._hosts.kill_all(CLOSED))
        limit_s = timeout_s + GRACE_S
        self._hosts = Hosts(
            self._thread,
            "environments",
            self._name,
            self._settings,
            most=num_workers,
            end_s=limit_s,
            answer_s=limit_s,
        )

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
            self._homes[episode] = self._hosts.chosen(episode)
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
        self, future: Future[Any], operation: str, episode: int, host: Host, reply: Future[Any]
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


_FAULTS: Mapping[Kind, FaultKind] = {"timeout": "timeout", "refused": "error"}
_VALUES = {
    "begin": lambda value: tuple(value) if isinstance(value, list) else value,
    "step": lambda value: None if value is None else StepResult(tuple(value[0]), value[1], value[2]),
    "end": lambda value: Ended(*value),
}
