"""Environments of the package verifiers as an agent, and their tasks as rows of data.

Runs in the interpreter `rollout.agent_python`, which has verifiers: this file imports nothing else. Data
flow: `verifiers:TASKSET` -> `tasks` -> rows with the columns `task` and `taskset`; and such a row -> `agent`
-> an episode of the taskset's environment, whose model is the policy -> the reward of its trace.
"""

from __future__ import annotations

import asyncio
import copy
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

UNPLAYED = "Begin."
"""The prompt of a row whose task has none: the environment's user opens the dialogue."""
_environments: dict[str, asyncio.Future[Any]] = {}
_until_the_end = AsyncExitStack()
"""What environments serve to their agents, until this process ends."""


def tasks(taskset: str, config: Mapping[str, Any], skip: int, size: int | None) -> list[dict[str, Any]]:
    """The tasks of a taskset from number `skip` on, at most `size`: `prompt`, `task`, their number, and name.

    Raises ValueError for a taskset without an end and without `size`.
    """
    seen = _loaded(taskset, config).taskset.skip(skip)
    if size is not None:
        seen = seen.take(size)
    if not seen.bounded:
        raise ValueError(f"the taskset {taskset} has no end; give the number of tasks, as ?size=1000")
    return [
        {"prompt": _messages(task.data), "task": task.data.idx, "name": task.data.name or str(task.data.idx)}
        for task in seen
    ]


async def agent(
    client: Any, row: Mapping[str, Any], taskset: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Plays the task of a row; the reward and metrics of its trace, or of the traces of each trained role.

    Raises ValueError for a row that is no task of the taskset, and for an agent of several that runs more
    than once in an episode.
    """
    from verifiers.v1.clients import ModelContext

    own = row.get("taskset")
    if not isinstance(own, Mapping) or own.get("id") != taskset or "task" not in row:
        raise ValueError(
            f"an agent verifiers:{taskset} plays the tasks of this taskset; a row has "
            f"{own.get('id') if isinstance(own, Mapping) else 'no taskset'}; give data.train and data.eval "
            f"as verifiers:{taskset}?size=…"
        )
    environment, known = await _served(taskset, {**config, "taskset": {**config.get("taskset", {}), **own}})
    variable = f"QUATRAIN_KEY_{client.api_key[:16].upper()}"
    os.environ[variable] = client.api_key
    try:
        seated, roles = _seated(environment, client, variable)
        context = ModelContext(model=client.model, client=_asking(client, variable))
        episode = await seated.run_episode(known[row["task"]], context)
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
    trained = [trace for trace in episode.traces if trace.agent.trainable and trace.agent.name in roles]
    several = len(roles) > 1
    for name in (names := [trace.agent.name for trace in trained]):
        if names.count(name) > 1:
            raise ValueError(
                f"the agent {name} of {taskset} ran {names.count(name)} times in an episode; "
                "a sample of training is one run: take an environment in which it runs once, and rollout.n"
            )
    own = {f"{trace.agent.name}." if several else "": trace.metrics for trace in trained}
    return {
        "reward": {trace.agent.name: trace.reward for trace in trained} if several else trained[0].reward,
        "metrics": {prefix + name: value for prefix, of in own.items() for name, value in of.items()},
    }


def _seated(environment: Any, client: Any, variable: str) -> tuple[Any, list[str]]:
    """The environment with the policy as each of its agents, a role each, and the names of these roles.

    An agent whose configuration has a client of its own, such as a judge, asks that one and is no role.
    """
    from verifiers.v1.configs.agent import agent_config_fields

    agents = agent_config_fields(environment.config)
    roles = [name for name, agent in agents.items() if agent.client is None]
    if len(agents) == 1:
        return environment, roles
    asked = {name: {"client": _asking(client.role(name), variable)} for name in roles}
    seated = copy.copy(environment)  # what it serves to its agents is shared
    seats = {name: agents[name].model_copy(update=own) for name, own in asked.items()}
    seated.config = environment.config.model_copy(update=seats)
    return seated, roles


def _asking(client: Any, variable: str) -> Any:
    """What asks the policy as `client` does, with its key in an environment `variable`."""
    from verifiers.v1.clients import EvalClientConfig

    return EvalClientConfig(base_url=client.base_url, api_key_var=variable)


async def _served(taskset: str, config: Mapping[str, Any]) -> Any:
    """The environment of this process with what it serves, and its tasks by number; made once."""
    key = f"{taskset}\n{sorted(config.items())!r}"
    if key not in _environments:
        made = _environments[key] = asyncio.ensure_future(_begun(taskset, config))
        made.add_done_callback(lambda made: made.exception() and _environments.pop(key))  # made anew then
    return await asyncio.shield(_environments[key])


async def _begun(taskset: str, config: Mapping[str, Any]) -> tuple[Any, _Tasks]:
    # Programs that the package starts, such as uv, may stand beside its interpreter.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    environment = await asyncio.to_thread(_loaded, taskset, config)
    await _until_the_end.enter_async_context(environment.serving())
    return environment, _Tasks(taskset, environment.taskset)


class _Tasks(dict[int, Any]):
    """Tasks by number, read from the taskset as far as they are asked for."""

    def __init__(self, name: str, taskset: Any):
        super().__init__()
        self._name, self._rest = name, iter(taskset)

    def __missing__(self, number: int) -> Any:
        for task in self._rest:
            self[task.data.idx] = task
            if task.data.idx >= number:
                break
        if number not in self:
            raise ValueError(f"the taskset {self._name} has no task {number}; list its tasks anew")
        return self[number]


def _loaded(taskset: str, config: Mapping[str, Any]) -> Any:
    """The environment; each agent runs as a process here, unless its configuration says otherwise.

    Raises ValueError without the package.
    """
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise ValueError(
            f"verifiers:{taskset} needs the package verifiers ({error}): make an environment for it with "
            "`python -m venv hub && hub/bin/pip install verifiers==0.4.0 uv`, and set rollout.agent_python "
            "to hub/bin/python"
        ) from None
    given = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
    try:
        for agent in agent_config_fields(resolve_env_config(given)):
            given[agent] = {"runtime": {"type": "subprocess"}, **config.get(agent, {})}
        return load_environment(resolve_env_config(given))
    except ModuleNotFoundError as error:
        raise ValueError(f"verifiers has no {taskset}: {error}") from None


def _messages(data: Any) -> list[dict[str, Any]]:
    """The prompt of a task, for the reader of the data: the environment itself sends it to the policy."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str) or not data.prompt:
        return [*system, {"role": "user", "content": data.prompt or UNPLAYED}]
    return [*system, {"role": "user", "content": data.prompt_text or UNPLAYED}]
