"""The processes of agents, seen from the run: an episode in, its reward or its fault out.

Data flow: `agent_episodes.py` -> `AgentProcesses.play` -> a process of `child.py` -> `Played`, or a `Fault`.
An episode whose process dies is not played again here: its session must begin anew.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from quatrain.episodes.child import CANCEL_S, Client
from quatrain.episodes.hubs import check_python, hub_agent
from quatrain.workers.faults import Fault
from quatrain.workers.loop_thread import LoopThread
from quatrain.workers.pool import Failure, Hosts
from quatrain.workers.user_code import check_importable
from quatrain.workers.worker_process import GRACE_S, NO_REPLY, pickled

CLOSED = "the agents were closed"


@dataclass(frozen=True)
class Played:
    """What an agent returned: its reward, None if reward functions judge, or those by role; its metrics."""

    reward: float | Mapping[str, float | None] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AgentProcesses:
    """Up to `num_workers` processes that play the agent `spec`; used in the loop of `thread` alone.

    An episode may take `timeout_s` seconds. `python` is the interpreter of the processes, None: this one.
    Raises ValueError for a function of the running program, which other processes cannot import, and for an
    interpreter that cannot run them.
    """

    def __init__(
        self,
        spec: str,
        args: Mapping[str, Any],
        *,
        num_workers: int,
        timeout_s: float,
        thread: LoopThread,
        python: str | None = None,
    ):
        check_agent(spec, args, python)
        path, arguments = hub_agent(spec, args)
        self._limit_s = timeout_s + CANCEL_S + GRACE_S
        self._timeout_s = timeout_s
        self._numbers, self._alone = itertools.count(), asyncio.Semaphore(num_workers)
        settings = {
            "host": "quatrain.episodes.child:host",
            "spec": path,
            "args": dict(arguments),
            "python": python,
            "timeout_s": timeout_s,
            "memory_mb": None,
        }
        self._hosts = Hosts(
            thread, "agents", f"agent {spec}", settings, most=num_workers, end_s=self._limit_s
        )

    async def play(self, client: Client, row: Mapping[str, Any], *, alone: bool = False) -> Played:
        """Plays an episode; raises Fault. `alone`: in a process of its own, that none else can end."""
        # As many as there are other processes at most, however many episodes are played at a time.
        async with self._alone if alone else nullcontext():
            return await self._play(client, row, alone)

    async def _play(self, client: Client, row: Mapping[str, Any], alone: bool) -> Played:
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        host = self._hosts.chosen(number, alone=alone)
        began = math.inf
        episode = pickled({"client": asdict(client), "row": dict(row)}, "agents")
        try:
            # Its time begins when the agent is loaded: a first import may take as long as an episode.
            outcome = await asyncio.wrap_future(host.loaded)
            if not isinstance(outcome, Failure):
                began = loop.time()
                played = host.call("play", episode, limit_s=self._limit_s, what="an episode")
                outcome = await asyncio.wrap_future(played)
        finally:
            host.leave(number)
        match outcome:
            case {"reward": reward, "metrics": metrics}:
                return Played(reward, metrics)
            case Fault():
                raise outcome
            case Failure("refused", detail):  # as it will be of every episode: the run ends
                raise ValueError(f"rollout.agent cannot be used: {detail}")
            # Of several in a process that hangs, this does not say which made it hang.
            case Failure(_, detail) if alone and loop.time() - began >= self._timeout_s:
                raise Fault(f"the agent took longer than {self._timeout_s:g} s: {detail}", "timeout")
            case _:
                host.kill(NO_REPLY)  # does nothing where it is dead
                failure = outcome if isinstance(outcome, Failure) else NO_REPLY
                raise Fault(f"the agent's process died: {failure.detail}", "crash")

    def end(self) -> None:
        """Ends the processes."""
        self._hosts.kill_all(CLOSED)


def check_agent(spec: str, args: Mapping[str, Any], python: str | None) -> None:
    """Raises ValueError for an agent that processes of `python` cannot load, as far as its name says so."""
    check_importable(spec, "rollout.agent")
    hub_agent(spec, args)
    if python is not None:
        check_python(python)
