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
from quatrain.environments.environment import Ended, EnvironmentFault, Opening, Turn
from quatrain.workers.entry import LOAD_TIMEOUT_S
from quatrain.workers.pool import Failure, Processes
from quatrain.workers.process import GRACE_S, log_output, pickled, running_future

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

    def __init__(
        self, specs: str | Sequence[str], num_workers: int, timeout_s: float, memory_mb: int | None = None
    ):
        what = "environment" if isinstance(specs, str) else "tools"
        paths = [specs] if isinstance(specs, str) else list(specs)
        _check(what, paths)
        names = [specs] if isinstance(specs, str) else [path.rpartition(":")[2] for path in paths]
        self._name = f"{what} {listed(names)}"  # as `load_environment.py` calls them
        self._settings = {
            "serve": "quatrain.environments.environment_worker:serve",
            "specs": specs if isinstance(specs, str) else paths,
            "timeout_s": timeout_s,
            "memory_mb": memory_mb,
        }
        self._num_workers, self._limit_s = num_workers, timeout_s + GRACE_S
        self._processes = Processes("the run has ended its environments")
        self._hosts: list[_Host] = []
        self._homes: dict[int, _Host] = {}  # of the episodes

    def begin(self, episode: int, columns: Mapping[str, Any]) -> Future[Opening]:
        request = pickled(columns, "environments in worker processes")
        with self._processes.lock:
            host = self._homes[episode] = self._chosen()
            host.live.add(episode)
        return host.call("begin", episode, request)

    def step(self, episode: int, completion: str) -> Future[Turn | None]:
        return self._homes[episode].call("step", episode, completion)

    def end(self, episode: int) -> Future[Ended]:
        return self._homes.pop(episode).call("end", episode)

    def abandon(self, episode: int) -> None:
        host = self._homes.pop(episode, None)
        if host is not None:
            host.process.call("abandon", episode)
            host.leave(episode)

    def close(self) -> None:
        self._processes.close()

    def _chosen(self) -> _Host:
        """The process with the fewest live episodes, or a new one."""
        self._hosts = [host for host in self._hosts if host.process.failure is None]
        open_to_all = [host for host in self._hosts if not host.is_retired and not host.process.has_ended()]
        best = min(open_to_all, key=lambda host: len(host.live), default=None)
        if best is None or (best.live and len(open_to_all) < self._num_workers):
            best = _Host(self._processes, self._name, self._settings, self._limit_s)
            self._hosts.append(best)
        return best


class _Host:
    """A worker process and the episodes that live in it."""

    def __init__(self, processes: Processes, name: str, settings: Mapping[str, Any], limit_s: float):
        self.live: set[int] = set()
        self.is_retired = False
        """Whether a call hangs in the process: it takes no new episodes, and ends after its last one."""
        self._name, self._lock, self._limit_s = name, processes.lock, limit_s
        self.process = processes.start(
            "environments",
            settings,
            on_output=lambda _, text: log_output(logger, name, text),
            on_news=lambda _: self.leave(None),
            answer_s=limit_s,
        )
        late = f"its process did not load it in {LOAD_TIMEOUT_S:g} s, and was ended"
        self.process.call("load", limit_s=LOAD_TIMEOUT_S, late=late).add_done_callback(self._loaded)

    def call(self, operation: str, episode: int, argument: Any = None) -> Future[Any]:
        """Asks the process for something."""
        future = running_future()
        reply = self.process.call(operation, episode, argument)
        reply.add_done_callback(partial(self._settle, future, operation, episode))
        return future

    def leave(self, episode: int | None) -> None:
        """Forgets an episode; None: a call hangs. Environments that are being closed may still end."""
        with self._lock:
            self.is_retired |= episode is None
            self.live -= {episode}
            if self.is_retired and not self.live:
                self.process.let_end(self._limit_s)

    def _loaded(self, reply: Future[Any]) -> None:
        if isinstance(reply.result(), dict) and "refused" in reply.result():
            self.process.kill(Failure("error", reply.result()["refused"]))

    def _settle(self, future: Future[Any], operation: str, episode: int, reply: Future[Any]) -> None:
        if operation == "end":
            self.leave(episode)
        match reply.result():
            case Failure(kind, detail):
                text = f"{self._name}: {'reset' if operation == 'begin' else operation}: {detail}"
                kind = kind if kind in ("timeout", "error") else "crash"
                future.set_exception(EnvironmentFault(text, kind))
            case {"fault": fault}:
                future.set_exception(EnvironmentFault(*fault))
            case {"value": value}:
                future.set_result(_VALUES[operation](value))


def _check(what: str, specs: Sequence[str]) -> None:
    for spec in specs:
        if not isinstance(spec, str) or spec.startswith("__main__:"):
            raise ValueError(
                f"{what} in worker processes must be named as `path/file.py:name`, which they import; got "
                f"{spec!r}, of the running program; put it into a file, or set rollout.environment_workers "
                "to 0"
            )


def _turn(value: Any) -> Turn | None:
    return None if value is None else Turn(tuple(value[0]), value[1], value[2])


_VALUES = {
    "begin": lambda value: tuple(value) if isinstance(value, list) else value,
    "step": _turn,
    "end": lambda value: Ended(*value),
}
