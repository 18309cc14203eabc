"""The processes of agents, seen from the run: an episode in, its reward or its fault out.

Data flow: `play.py` -> `AgentProcesses.play` -> a process of `child.py` -> `Played`, or `AgentFault`. An
episode whose process dies is not played again here: its session must begin anew.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from quatrain.agents.child import CANCEL_S, Client
from quatrain.agents.hubs import check_python, hub_agent
from quatrain.workers.hosts import Hosts
from quatrain.workers.pool import Failure
from quatrain.workers.process import GRACE_S, pickled
from quatrain.workers.threads import LoopThread

CLOSED = "the agents were closed"
FaultKind = Literal["error", "invalid", "timeout", "crash"]


@dataclass(frozen=True)
class Played:
    """What an agent returned: its reward, None if reward functions judge, or those by role; its metrics."""

    reward: float | Mapping[str, float | None] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AgentFault(Exception):
    """What an agent did wrong; it costs one episode. `kind` `crash`: its process died."""

    def __init__(self, message: str, kind: FaultKind, detail: str = ""):
        super().__init__(message, kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return str(self.args[0])


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
            "serve": "quatrain.agents.child:serve",
            "spec": path,
            "args": dict(arguments),
            "python": python,
            "timeout_s": timeout_s,
            "memory_mb": None,
        }
        self._hosts = Hosts(
            thread, "agents", f"agent {spec}", settings, most=num_workers, end_s=self._limit_s, answer_s=None
        )

    async def play(self, client: Client, row: Mapping[str, Any], *, alone: bool = False) -> Played:
        """Plays an episode; raises AgentFault. `alone`: in a process of its own, that none else can end."""
        if not alone:
            return await self._play(client, row, alone)
        async with self._alone:
            return await self._play(client, row, alone)

    async def _play(self, client: Client, row: Mapping[str, Any], alone: bool) -> Played:
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        host = self._hosts.alone(number) if alone else self._hosts.chosen(number)
        began = math.inf
        episode = pickled({"client": asdict(client), "row": dict(row)}, "agents")
        try:
            outcome = await asyncio.wrap_future(host.loaded)
            if not isinstance(outcome, Failure):
                began = loop.time()
                played = host.process.call("play", episode, limit_s=self._limit_s, what="an episode")
                outcome = await asyncio.wrap_future(played)
        finally:
            host.leave(number)
        match outcome:
            case {"value": {"reward": reward, "metrics": metrics}}:
                return Played(reward, metrics)
            case {"fault": [str() as text, str() as kind, str() as detail]}:
                raise AgentFault(text, kind, detail)  # type: ignore[arg-type]
            case Failure("refused", detail):
                raise ValueError(f"rollout.agent cannot be used: {detail}")
            # Of several in a process that hangs, this does not say which made it hang.
            case Failure(_, detail) if alone and loop.time() - began >= self._timeout_s:
                raise AgentFault(f"the agent took longer than {self._timeout_s:g} s: {detail}", "timeout")
            case Failure(_, detail):
                raise AgentFault(f"the agent's process died: {detail}", "crash")
            case _:
                host.process.kill(Failure("crash", "its process sent a reply that is none"))
                raise AgentFault("the agent's process sent a reply that is none", "crash")

    def end(self) -> None:
        """Ends the processes."""
        self._hosts.kill_all(CLOSED)


def check_agent(spec: str, args: Mapping[str, Any], python: str | None) -> None:
    """Raises ValueError for an agent that processes of `python` cannot load, as far as its name says so."""
    if spec.startswith("__main__:"):
        raise ValueError(
            "rollout.agent must be named as `path/file.py:function`, which processes import; got "
            f"{spec!r}, of the running program; put it into a file"
        )
    hub_agent(spec, args)
    if python is not None:
        check_python(python)
