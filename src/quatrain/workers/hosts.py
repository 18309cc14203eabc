"""Worker processes that each host many things of a user's: environments, or agents.

Data flow: `environments/environment_workers.py` or `agents/workers.py` -> `Hosts.chosen` -> the calls of a
`Host`'s process. A process in which a call hangs gets nothing new, and is ended after the last that it hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from quatrain.workers.pool import kill_all
from quatrain.workers.process import WorkerProcess, log_output
from quatrain.workers.threads import LoopThread
from quatrain.workers.worker import LOAD_TIMEOUT_S

logger = logging.getLogger(__name__)


class Host:
    """A process, and the numbers of what lives in it; used in the thread of its loop alone."""

    def __init__(self, process: WorkerProcess, end_s: float):
        self.process = process
        late = f"its process did not load it in {LOAD_TIMEOUT_S:g} s, and was ended"
        self.loaded: Future[Any] = process.call("load", limit_s=LOAD_TIMEOUT_S, late=late)
        """What came of loading the user's code: a `Failure`, or anything else."""
        self.live: set[int] = set()
        self.is_retired = False
        """Whether a call hangs in the process."""
        self._end_s = end_s

    def leave(self, number: int | None) -> None:
        """Forgets what lived in it; None: a call hangs. What is being closed may still end."""
        self.is_retired |= number is None
        self.live -= {number}
        if self.is_retired and not self.live:
            self.process.let_end(self._end_s)


class Hosts:
    """Up to `most` processes, which start when they are needed, in the loop of `thread`.

    Args:
        what: what `ps` shows of them.
        name: what is hosted, for the log.
        settings: those of `worker.py`.
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
        answer_s: float | None,
    ):
        self._thread, self._what, self._name, self._settings = thread, what, name, settings
        self._most, self._end_s, self._answer_s = most, end_s, answer_s
        self._hosts: list[Host] = []

    def chosen(self, number: int) -> Host:
        """Where `number` lives from now on: the process with the fewest, or a new one."""
        self._hosts = [host for host in self._hosts if host.process.failure is None]
        open_to_all = [host for host in self._hosts if not host.is_retired and not host.process.has_ended()]
        best = min(open_to_all, key=lambda host: len(host.live), default=None)
        if best is None or (best.live and len(open_to_all) < self._most):
            best = self._started()
            self._hosts.append(best)
        best.live.add(number)
        return best

    def alone(self, number: int) -> Host:
        """A new process, in which nothing else will live than `number`."""
        host = self._started()
        host.is_retired = True
        host.live.add(number)
        self._hosts.append(host)
        return host

    def kill_all(self, why: str) -> None:
        """Ends the processes; their calls get a failure that says why."""
        kill_all((host.process for host in self._hosts), why)

    def _started(self) -> Host:
        process = WorkerProcess(
            self._thread.loop,
            self._what,
            self._settings,
            on_output=lambda _, text: log_output(logger, self._name, text),
            on_news=lambda _: host.leave(None),
            answer_s=self._answer_s,
        )
        host = Host(process, self._end_s)
        return host
