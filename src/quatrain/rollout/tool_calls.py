"""Finds the calls of tools in a completion, in the forms in which chat models write them.

Data flow: a completion -> `tool_calls` -> `ToolCall`s, for `rollout/tools.py`. A completion is untrusted: it
is parsed, and never evaluated.

| form | models |
|---|---|
| `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere, any number | Qwen2.5, Qwen3, Hermes |
| `{"name": …, "parameters": {…}}`, with or without `<|python_tag|>`, several after each other | Llama 3 |
| `name.call(key="value", …)`, with or without `<|python_tag|>` | Llama 3, its built-in tools |
| an object or a list of objects in JSON, also in a ``` block or after `[TOOL_CALLS]` | Mistral and others |

All but the first must be the whole completion. What stands before `</think>` is no call. Tokens such as
`<|python_tag|>` may be missing, because decoding leaves special tokens out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quatrain.config.errors import shown

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PYTHON_TAG, _CALLS_TAG, _FENCE = "<|python_tag|>", "[TOOL_CALLS]", "```"
_METHOD = re.compile(r"([A-Za-z_]\w*)\.call\((.*)\)", re.DOTALL)
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=\s*")
_BETWEEN = re.compile(r"[\s;,]*")
_FORM = '{"name": the tool\'s name, "arguments": {name: value}}'


@dataclass(frozen=True)
class ToolCall:
    """A call that a completion contains; `problem` says what is wrong with one that cannot be made."""

    name: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    problem: str | None = None


def tool_calls(completion: str) -> list[ToolCall]:
    """The calls in a completion, in order; empty if there is none."""
    text = completion.rpartition("</think>")[2].strip()
    if "<think>" in text:  # a thought that has not ended
        return []
    tagged = _TAGGED.findall(text)
    if tagged:
        return [call for inner in tagged for call in _tagged(inner.strip())]
    return _python_tagged(text) if text.startswith(_PYTHON_TAG) else _untagged(text)


def _tagged(text: str) -> list[ToolCall]:
    try:
        values = _json_values(text)
    except ValueError as error:
        return [_malformed(f"it {error}")]
    return [_call(value) for value in values] or [_malformed("there is nothing in it")]


def _python_tagged(text: str) -> list[ToolCall]:
    text = text.removeprefix(_PYTHON_TAG).strip()
    return _untagged(text) or [_malformed(f"got {shown(text)}")]


def _untagged(text: str) -> list[ToolCall]:
    """The calls of a completion that consists of calls; empty if it does not."""
    method = _METHOD.fullmatch(text)
    if method:
        return [_method_call(*method.groups())]
    if text.startswith(_FENCE) and text.endswith(_FENCE):
        text = text.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json").strip()
    text = text.removeprefix(_CALLS_TAG).strip()
    if not text.startswith(("{", "[")):
        return []
    try:
        values = _json_values(text)
    except ValueError as error:
        looks_like_a_call = '"name"' in text and ('"arguments"' in text or '"parameters"' in text)
        return [_malformed(f"it {error}")] if looks_like_a_call else []
    return [_call(value) for value in values] if values and _is_call(values[0]) else []


def _method_call(name: str, text: str) -> ToolCall:
    """The call `name.call(key="value", …)`, whose values are JSON."""
    arguments: dict[str, Any] = {}
    text, at = text.strip(), 0
    while at < len(text):
        key = _KEY.match(text, at)
        if key is None:
            return _malformed(f"got {shown(text[at:])} in place of key=value", name)
        try:
            arguments[key[1]], at = _decoded(text, key.end())
        except ValueError as error:
            return _malformed(f"{key[1]} {error}", name)
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    return ToolCall(name, arguments)


def _json_values(text: str) -> list[Any]:
    """The JSON values that `text` consists of; the items of a list are values of their own."""
    values: list[Any] = []
    at = 0
    while at < len(text):
        value, at = _decoded(text, at)
        values += value if isinstance(value, list) else [value]
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    return values


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a position, and where it ends; raises ValueError, whatever is wrong."""
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no valid JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("is no valid JSON: it is nested too deep") from error
    except ValueError as error:  # numbers that Python does not read
        raise ValueError(f"is no valid JSON: {error}") from error


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    inner = value.get("function", value)
    return isinstance(inner, dict) and "name" in inner and ("arguments" in inner or "parameters" in inner)


def _call(value: Any) -> ToolCall:
    """The call that a JSON value describes, also in OpenAI's form, with `function` around it."""
    if not isinstance(value, dict):
        return _malformed(f"got {shown(value)}")
    identity = value.get("id")
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("parameters", {}))
    if not isinstance(name, str):
        return _malformed(f"its name is {shown(name)}")
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return _malformed(f"the arguments are the text {shown(arguments)}", name)
    if not isinstance(arguments, dict):
        return _malformed(f"the arguments are {shown(arguments)}", name)
    return ToolCall(name, arguments, identity if isinstance(identity, str) else None)


def _malformed(reason: str, name: str | None = None) -> ToolCall:
    return ToolCall(name, problem=f"a call must be {_FORM} in JSON; this one is not: {reason}")
