"""Calls of environments' methods, each with a time limit, in threads of this process or in worker processes.

Data flow: an episode -> `EnvironmentCalls` -> `CheckedEnvironment`; the results come back in futures, so that
an environment that is slow holds up no other episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from quatrain.environments.environment import Ended, Opening, Turn


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
