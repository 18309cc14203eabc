"""Calls of environments' methods, each with a time limit, in threads of this process or in worker processes.

Data flow: an episode -> `EnvironmentCalls` -> `CheckedEnvironment`; the results come back in futures, so that
an environment that is slow holds up no other episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from quatrain.environments.environment import Ended, Opening, Turn
from quatrain.environments.environment_threads import InThreads
from quatrain.environments.environment_workers import InWorkers
from quatrain.environments.load_environment import Environments

__all__ = ["Ended", "EnvironmentCalls", "in_threads", "in_workers"]


class EnvironmentCalls(Protocol):
    """Runs the environments of episodes; any thread may call it.

    An episode is a number that its caller chooses, and has at most one call at a time. Each future has the
    result or an `EnvironmentFault`, nothing else, and cannot be cancelled; it is set by a background thread,
    in which its callbacks run, and must not take long. After a fault the episode is abandoned.
    The time limit of a call begins when the environment is called, not while the call waits for a thread.
    """

    def begin(self, episode: int, columns: Mapping[str, Any]) -> Future[Opening]:
        """Makes the environment of a new episode and resets it with the columns of the prompt's row."""
        ...

    def step(self, episode: int, completion: str) -> Future[Turn | None]:
        """Answers a completion."""
        ...

    def end(self, episode: int) -> Future[Ended]:
        """Ends the episode: its reward and counts; then the environment is closed.

        A `close` that raises or takes too long is a warning.
        """
        ...

    def abandon(self, episode: int) -> None:
        """Forgets an episode that is not ended: it is closed in the background, if it can be.

        A call of it that has not begun is an "error" fault. May be called for episodes that are gone.
        """
        ...

    def close(self) -> None:
        """Ends everything: processes are killed, threads that hang are left behind as daemons.

        Calls that have not ended, and later ones, are "crash" faults. May be called again.
        """
        ...


def in_threads(environments: Environments, timeout_s: float) -> EnvironmentCalls:
    """Environments in daemon threads of this process; each call may take `timeout_s` seconds.

    A call that takes longer goes on in its thread, which Python cannot end, and its result is ignored.
    """
    return InThreads(environments, timeout_s)


def in_workers(
    specs: str | Sequence[str], num_workers: int, timeout_s: float, memory_mb: int | None = None
) -> EnvironmentCalls:
    """Environments in up to `num_workers` processes; each call may take `timeout_s` seconds.

    `specs` is the environment `path.py:Class`, or a list of tools `path.py:function`; the processes import
    it. A process in which a call takes too long gets no new episodes, and is ended after its others; all the
    episodes in a process that dies have "crash" faults. `memory_mb` are the MiB of private memory of a
    process, 8 of them for each thread; None: not limited. `begin` raises ValueError for columns that cannot
    be pickled.

    Raises ValueError for a class or function of the running program, which other processes cannot import.
    """
    return InWorkers(specs, num_workers, timeout_s, memory_mb)
