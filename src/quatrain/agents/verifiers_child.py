"""Environments of the package verifiers as an agent, and their tasks as rows of data.

Runs in the interpreter `rollout.agent_python`, which has verifiers: this file imports nothing else. Data
flow: `verifiers:TASKSET` -> `tasks` -> rows with the columns `task` and `taskset`; and such a row -> `agent`
-> an episode of the taskset's environment, whose model is the policy -> the reward of its trace.
"""

from __future__ import annotations

import asyncio
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
    """Plays the task of a row; the reward and metrics of its trace.

    Raises ValueError for a row that is no task of the taskset.
    """
    from verifiers.v1.clients import EvalClientConfig, ModelContext

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
        asked = EvalClientConfig(base_url=client.base_url, api_key_var=variable)
        context = ModelContext(model=client.model, client=asked)
        episode = await environment.run_episode(known[row["task"]], context)
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
    [trace] = episode.traces
    return {"reward": trace.reward, "metrics": dict(trace.metrics)}


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

    Raises ValueError without the package, and for an environment of several agents.
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
        roles = agent_config_fields(resolve_env_config(given))
        if len(roles) != 1:
            raise ValueError(
                f"the environment of {taskset} has the agents {', '.join(roles)}; a sample is played by one; "
                "take an environment of one agent"
            )
        [role] = roles
        given[role] = {"runtime": {"type": "subprocess"}, **config.get(role, {})}
        return load_environment(resolve_env_config(given))
    except ModuleNotFoundError as error:
        raise ValueError(f"verifiers has no {taskset}: {error}") from None


def _messages(data: Any) -> list[dict[str, Any]]:
    """The prompt of a task, for the reader of the data: the environment itself sends it to the policy."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str) or not data.prompt:
        return [*system, {"role": "user", "content": data.prompt or UNPLAYED}]
    return [*system, {"role": "user", "content": data.prompt_text or UNPLAYED}]
