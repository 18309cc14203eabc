"""Tools: an environment over Python functions, which the model calls by name.

Data flow: functions -> `Tool`, whose schema the chat template writes into the prompt (`data/turns.py`); a
completion -> `tool_calls.py` -> calls -> results as messages of the role `tool`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from quatrain.config.errors import listed, rule, shown
from quatrain.data.pictures import is_picture_part, is_pil
from quatrain.data.tool_calls import tool_calls
from quatrain.data.turns import CALL_ID
from quatrain.episodes.environment import COUNTS, StepResult
from quatrain.types.call_forms import ToolCall, schemas_of
from quatrain.workers.faults import format_error, is_interrupt
from quatrain.workers.user_code import VARIADIC

_UNNAMED = (*VARIADIC, inspect.Parameter.POSITIONAL_ONLY)


@dataclass(frozen=True)
class Tool:
    """What is known of a function before it is called."""

    name: str
    schema: Mapping[str, Any]
    """Its JSON schema in OpenAI's form, for the chat template."""
    types: Mapping[str, Any]
    """A pydantic `TypeAdapter` for each argument."""
    required: frozenset[str]

    @staticmethod
    def of(function: Callable[..., Any]) -> Tool:
        """The description of a function, from its type hints and its docstring.

        Raises ValueError for a function without a name, one with parameters that cannot be given by name, and
        one whose arguments are not all described by a type hint and in the docstring.
        """
        # Imported here, because a run without tools must start quickly.
        from pydantic import TypeAdapter
        from transformers.utils import get_json_schema

        name = getattr(function, "__name__", "")
        if not name.isidentifier():
            raise ValueError(
                f"a tool must be a function with a name; got {shown(function)}; define it with def"
            )
        parameters = inspect.signature(function).parameters.values()
        unnamed = [p.name for p in parameters if p.kind in _UNNAMED]
        if unnamed:
            raise ValueError(
                f"a tool's arguments must be given by name; {name} takes {listed(unnamed)} in another way; "
                "give it named parameters"
            )
        try:
            schema = get_json_schema(function)
            hints = get_type_hints(function)
            types = {
                name: TypeAdapter(hints[name]) for name in schema["function"]["parameters"]["properties"]
            }
        except Exception as error:  # the hints are code of the user's
            raise ValueError(
                "a tool must have a type hint for each argument, and a docstring that describes the function "
                f"and, under `Args:`, each argument, because the model reads them; {name} has not: {error}; "
                "add what is missing"
            ) from error
        required = frozenset(p.name for p in parameters if p.name in types and p.default is p.empty)
        return Tool(name, schema, types, required)

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as their types; raises ValueError, with words for the model, for others."""
        from pydantic import ValidationError

        unknown, missing = sorted(arguments.keys() - self.types), sorted(self.required - arguments.keys())
        if unknown or missing:
            wrong = f"{listed(missing)} is missing" if missing else f"got {listed(unknown)}"
            raise ValueError(f"{self.name} takes the arguments {listed(self.types)}; {wrong}")
        checked = {}
        for name, value in arguments.items():
            try:
                checked[name] = self.types[name].validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                raise ValueError(
                    f"the argument {name} of {self.name} {rule(error.errors()[0])}; got {shown(value)}"
                ) from None
        return checked


class Tools:
    """An environment in which a completion calls functions; one without a call ends the episode.

    `functions` have type hints and docstrings in Google's form, and return text, or values that are written
    as JSON; where the model sees, also a PIL picture, or a list of the parts of a message, as TRL's tools do.
    Functions that are called in several episodes at a time run in several threads. A call that is malformed
    and an exception of a function become the text of the call's message, for the model to read.
    `known` are the functions' descriptions, if they are known; `counts` counts `tool_calls`, and of them
    `malformed_calls` and `tool_errors`.

    Raises ValueError for functions that `Tool.of` refuses, for two of the same name, and for none.
    """

    def __init__(self, *functions: Callable[..., Any], known: Sequence[Tool] | None = None):
        self.tools = tuple(Tool.of(function) for function in functions) if known is None else tuple(known)
        names = [tool.name for tool in self.tools]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice or not names:
            raise ValueError(
                "tools must be functions, at least one, each with a name of its own; "
                f"got {f'{listed(twice)} twice' if twice else 'none'}; correct the list of tools"
            )
        self._functions = dict(zip(names, functions, strict=True))
        self._schemas = schemas_of([tool.schema for tool in self.tools])
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))

    def reset(self, **columns: Any) -> None:
        """Begins an episode; the prompt is as it is in the data."""

    def step(self, completion: str) -> StepResult | None:
        """The results of the calls in a completion, as messages; None if there is no call."""
        calls = tool_calls(completion, self._schemas)
        return StepResult([self._message(call) for call in calls]) if calls else None

    def close(self) -> None:
        """Ends the episode."""

    def _message(self, call: ToolCall) -> dict[str, Any]:
        self.counts["tool_calls"] += 1
        name, call_id = call.name if call.name in self._functions else "unknown", call.id or ""
        if not (len(call_id) == len(CALL_ID) and call_id.isascii() and call_id.isalnum()):
            call_id = (
                f"{CALL_ID[:-5]}{self.counts['tool_calls']:05}"  # in the only form that all templates take
            )
        return {"role": "tool", "name": name, "tool_call_id": call_id, "content": self._result(call)}

    def _result(self, call: ToolCall) -> str | list[Any]:
        try:
            if call.problem is not None:
                raise ValueError(call.problem)
            tool = next((tool for tool in self.tools if tool.name == call.name), None)
            if tool is None:
                names = listed(tool.name for tool in self.tools)
                raise ValueError(f"there is no tool {shown(call.name)}; the tools are {names}")
            arguments = tool.checked(call.arguments)
        except ValueError as error:
            self.counts["malformed_calls"] += 1
            return f"Error: {error}"
        try:
            result = self._functions[tool.name](**arguments)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            return _content(result)
        except BaseException as error:  # includes SystemExit, which would end the run
            if is_interrupt(error):
                raise
            self.counts["tool_errors"] += 1
            return f"Error: {format_error(error)}"


def _content(result: Any) -> str | list[Any]:
    """A tool's result as the content of a message: parts if it has pictures, else a text."""
    parts = [{"type": "image", "image": result}] if is_pil(result) else result
    return parts if isinstance(parts, list) and any(map(is_picture_part, parts)) else _text(result)


def _text(result: Any) -> str:
    """A tool's result as text that can be tokenised: as it is, or as JSON.

    Of values that JSON does not have, numpy's are lists and numbers, others their text.
    """

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)

    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=plain)
    return text.encode(errors="backslashreplace").decode()  # a model can write half a surrogate pair
