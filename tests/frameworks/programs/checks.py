"""Runs what a program checks of a framework and prints, as one line of JSON, what each check found.

    python with_openai.py URL MODEL CHECK ...

A check is a function of the program; it returns what the test looks at, or raises.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

URL, MODEL, KEY = sys.argv[1], sys.argv[2], "none"
BASE = f"{URL}/v1"
QUESTION = "How much is 2 + 3?"
ENDLESS = "Please SING."
"""The model answers without an end."""
CITY = "Which city is it?"
CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "people": {"type": "integer"},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "size", "people", "rivers"],
    "additionalProperties": False,
}
ADD_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": QUESTION}]
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": ADD_SCHEMA}
ADD_TOOL = {"type": "function", "function": ADD}
"""In the form of a chat's."""
LONGEST_S = 60.0


def sum_of(arguments: dict[str, int]) -> str:
    """The result of the tool `add`."""
    return str(arguments["a"] + arguments["b"])


def chat_round_trip(create: Callable[..., Any]) -> dict[str, Any]:
    """The calls of `add` in a dialogue of chats, and the text that ends it; `create` asks for an answer."""
    messages, calls = list(ASK), []
    while True:
        said = create(messages=messages, tools=[ADD_TOOL]).choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return {"calls": calls, "text": said.content}
        for call in said.tool_calls:
            calls.append(json.loads(call.function.arguments))
            result = {"role": "tool", "tool_call_id": call.id, "content": sum_of(calls[-1])}
            messages.append(result)


def num_running() -> int:
    """Sequences that the server decodes."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        return int(re.search(r"quatrain_sequences_running (\d+)", answer.read().decode())[1])


def wait_until(running: bool) -> float:
    """Seconds until the server decodes something, or nothing."""
    began = time.monotonic()
    while (num_running() > 0) != running:
        if time.monotonic() - began > LONGEST_S:
            raise TimeoutError(f"after {LONGEST_S:g} s {num_running()} sequences are decoded")
        time.sleep(0.05)
    return time.monotonic() - began


async def cancelled(work: Any) -> float:
    """Starts a request that has no end, cancels it, and returns the seconds until its slot is free."""
    task = asyncio.ensure_future(work)
    await asyncio.to_thread(wait_until, True)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    else:
        raise AssertionError("an answer without an end came to an end")
    return await asyncio.to_thread(wait_until, False)


def left(events: Iterable[Any], close: Callable[[], Any]) -> float:
    """Seconds until the slot of a stream without an end is free, once an event was read and it was closed."""
    next(iter(events))
    wait_until(True)
    close()
    return wait_until(False)


def error_of(work: Callable[[], Any]) -> dict[str, str]:
    """The error of a call that must be refused."""
    try:
        returned = work()
        if inspect.isawaitable(returned):
            returned = asyncio.run(returned)
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    raise AssertionError(f"what the server lacks was answered: {returned!r}")


def main() -> None:
    """Runs the functions of the program that the command names."""
    found, program = {}, sys.modules["__main__"]
    for name in sys.argv[3:]:
        try:
            value = getattr(program, name)()
            found[name] = {"value": asyncio.run(value) if inspect.iscoroutine(value) else value}
        except BaseException as error:
            found[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    print(json.dumps(found))
