"""Environments of the package openenv as an agent: the policy calls their tools, over their websocket.

Runs in the interpreter `rollout.agent_python`, which has openenv: this file imports nothing else. The tools
are those that the environment lists over MCP, or one tool `step`, whose arguments are the environment's
action. The reward of the episode is the sum of those of its steps.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

FULL = ("CAPACITY_REACHED", "at capacity")
"""What a server says that has as many sessions as it may."""
PAUSE_S = 0.2
"""Seconds before such a server is asked again, until the time of the episode is over."""
STEP = "step"
LONGEST_S = 7 * 24 * 3600.0
"""Seconds that an answer of a server may take: rollout.agent_timeout_s limits the episode."""


async def agent(
    client: Any,
    row: Mapping[str, Any],
    url: str,
    reset: Sequence[str] = ("seed",),
    max_concurrent: int | None = None,
) -> dict[str, Any]:
    """Plays an episode at the server `url`: the row's prompt with the first observation, then calls of tools.

    The columns `reset` that the row has are the arguments of the environment's reset. At most
    `max_concurrent` episodes of this process are played at a time. An answer without a call ends the episode.
    """
    limit = max_concurrent and _limits.setdefault(url, asyncio.Semaphore(max_concurrent))
    async with limit or nullcontext():
        return await _played(client, row, url, reset)


_limits: dict[str, asyncio.Semaphore] = {}


async def _played(client: Any, row: Mapping[str, Any], url: str, reset: Sequence[str]) -> dict[str, Any]:
    action = (await asyncio.to_thread(_schema, url))["action"]
    is_mcp = {"tool_name", "arguments"} <= set(action.get("properties", ()))
    environment = _client(url)
    first = await _begun(environment, {name: row[name] for name in reset if row.get(name) is not None})
    try:
        tools = await _tools_of(environment, action, is_mcp)
        messages = [dict(message) for message in row["prompt"]]
        if (seen := _text(first.observation)) and messages[-1]["role"] == "user":
            content, more = messages[-1]["content"], f"\n\n{seen}"
            has_parts = isinstance(content, list)  # as with pictures
            messages[-1]["content"] = content + ([{"type": "text", "text": more}] if has_parts else more)
        elif seen:
            messages.append({"role": "user", "content": seen})
        reward, steps, result = 0.0, 0, first
        while not result.done:
            answer = await client.chat(messages, tools=tools)
            messages.append(answer)
            calls = answer.get("tool_calls") or []
            for call in calls:
                try:
                    result = await _step(environment, call["function"], is_mcp)
                    said = _text(result.observation)
                except _Refused as refusal:
                    said = f"Error: {refusal}"
                else:
                    reward, steps = reward + float(result.reward or 0.0), steps + 1
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
                if result.done:
                    break
            if not calls:
                break
        return {"reward": reward, "metrics": {"steps": steps}}
    finally:
        await environment.close()


class _Refused(Exception):
    """The environment does not take an action; the policy reads why."""


def _client(url: str) -> Any:
    """What talks to the environment, in dictionaries."""
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise ValueError(
            f"openenv:{url} needs the package openenv ({error}): make an environment for it with "
            "`python -m venv hub && hub/bin/pip install openenv==0.10.0`, and set rollout.agent_python to "
            "hub/bin/python"
        ) from None
    return GenericEnvClient(base_url=url, message_timeout_s=LONGEST_S)


async def _begun(environment: Any, arguments: Mapping[str, Any]) -> Any:
    """The result of the environment's reset, once its server has a session to give."""
    while True:
        try:
            await environment.connect()
            return await environment.reset(**arguments)
        except Exception as error:
            await environment.close()
            if not any(text in str(error) for text in FULL):
                raise
        await asyncio.sleep(PAUSE_S)


def _schema(url: str) -> dict[str, Any]:
    """The JSON schemas of the environment's actions and observations."""
    if url not in _schemas:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=60) as answer:
            _schemas[url] = json.load(answer)
    return _schemas[url]


_schemas: dict[str, dict[str, Any]] = {}


async def _tools_of(environment: Any, action: Mapping[str, Any], is_mcp: bool) -> list[dict[str, Any]]:
    """The tools that the policy may call, as a chat request has them."""
    if is_mcp:
        found = (await environment.step({"type": "list_tools"})).observation["tools"]
        listed = [(tool["name"], tool.get("description"), tool["input_schema"]) for tool in found]
    else:
        properties = {name: each for name, each in action.get("properties", {}).items() if name != "metadata"}
        schema = {**action, "properties": properties}
        listed = [(STEP, action.get("description") or "Acts in the environment.", schema)]
    return [
        {"type": "function", "function": {"name": name, "description": text or "", "parameters": schema}}
        for name, text, schema in listed
    ]


async def _step(environment: Any, call: Mapping[str, Any], is_mcp: bool) -> Any:
    """The result of a call of the policy; raises _Refused if it is none that the environment takes."""
    try:
        arguments = json.loads(call["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise TypeError("the arguments of a call must be an object")
        if is_mcp:
            action = {"type": "call_tool", "tool_name": call["name"], "arguments": arguments}
            return await environment.step(action)
        if call["name"] != STEP:
            raise ValueError(f"there is no tool {call['name']}; call {STEP}")
        return await environment.step(arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise _Refused(str(error)) from None


def _text(observation: Mapping[str, Any]) -> str:
    """An observation as the policy reads it: its only text, or its fields as JSON."""
    other = ("done", "reward", "metadata", "tool_name")
    left = {
        name: each for name, each in observation.items() if name not in other and each not in (None, {}, [])
    }
    if error := observation.get("error"):
        said = error.get("message") if isinstance(error, Mapping) else None
        return f"Error: {said or error}"
    if set(left) == {"result"}:  # of an MCP tool
        content = left["result"]
        data = content.get("data", content) if isinstance(content, Mapping) else content
        return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    if len(left) == 1 and isinstance(value := next(iter(left.values())), str):
        return value
    return json.dumps(left, ensure_ascii=False) if left else ""
