"""Finds the calls of tools in a completion, in the forms in which chat models write them.

Data flow: a completion -> `tool_calls` -> `ToolCall`s, for `tools.py`; a completion while it comes ->
`CallStream` -> the text outside of calls, and the calls, for `quatrain serve`. A completion is untrusted: it
is parsed, and never evaluated.

| form | models |
|---|---|
| `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere, any number | Qwen2.5, Qwen3, Hermes |
| `{"name": …, "parameters": {…}}`, with or without `<|python_tag|>`, several after each other | Llama 3 |
| `name.call(key="value", …)`, with or without `<|python_tag|>` | Llama 3, its built-in tools |
| an object or a list of objects in JSON, also in a ``` block or after `[TOOL_CALLS]` | Mistral and others |

All but the first must be the whole answer. A call is decoded as JSON from the markup on, so its arguments may
contain any text, that of the markup too. Calls in thoughts do not count: thoughts end at the first `</think>`
outside of a call, and begin at `<think>`, or with the completion if the template wrote `<think>`. Tokens such
as `<|python_tag|>` may be missing, because decoding leaves special tokens out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quatrain.config.errors import SHOWN_VALUE_LENGTH, shown
from quatrain.data.messages import unfit

_OPEN, _CLOSE, _THOUGHT, _THOUGHT_END = "<tool_call>", "</tool_call>", "<think>", "</think>"
_MARKUP = re.compile(r"<think>|</think>|<tool_call>")
_PYTHON_TAG, _FENCE = "<|python_tag|>", "```"
_OPENING = re.compile(r"\s*(<\|python_tag\|>\s*)?(```(json)?\s*)?(\[TOOL_CALLS\]\s*)?")
_METHOD = re.compile(r"([A-Za-z_]\w*)\.call\(\s*")
_BEGUN_METHOD = re.compile(r"[A-Za-z_]\w*(\.(c(a(l(l(\(.*)?)?)?)?)?)?", re.DOTALL)
_LOOKED_AT = 200
"""Characters that show whether an answer may begin with a call."""
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=\s*")
_BETWEEN, _SPACE = re.compile(r"[\s;,]*"), re.compile(r"\s*")
_FORM = '{"name": the tool\'s name, "arguments": {name: value}}'


@dataclass(frozen=True)
class ToolCall:
    """A call that a completion contains; `problem` says what is wrong with one that cannot be made."""

    name: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    problem: str | None = None


Found = tuple[list[ToolCall], int]
"""Calls, and the position where reading them ended."""


def tool_calls(completion: str) -> list[ToolCall]:
    """The calls in a completion, in order; empty if there is none."""
    return [call for _, _, calls in _blocks(completion) for call in calls]


def split_calls(completion: str) -> tuple[str, list[ToolCall]]:
    """The text outside of calls, and the calls that can be made; a malformed call stays text.

    So does one that no message can have, such as one with half a surrogate pair. If there are calls, the text
    does not end with white space.
    """
    found: list[ToolCall] = []
    text, at = "", 0
    for begin, end, calls in _blocks(completion):
        if all(map(_can_be_made, calls)):
            text, at = text + completion[at:begin], end
            found += calls
    return ((text + completion[at:]).rstrip(), found) if found else (completion, [])


def _can_be_made(call: ToolCall) -> bool:
    message = {"tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}}]}
    return call.problem is None and unfit(message) is None


class CallStream:
    """The text and the calls of a completion that begins with `begun`, while it comes."""

    def __init__(self, begun: str = ""):
        self._text, self._at, self._sent = begun, 0, 0
        self._no_close = 0
        """The thoughts that begin at `_at` do not end before it."""
        self._may_be_whole = True
        """Whether an answer that consists of calls may begin at `_at`."""

    def push(self, text: str) -> str:
        """The text that became certain: no call can reach it, whatever follows.

        White space is certain once other text follows it. From what may be the first call on, text waits for
        the end.
        """
        self._text += text
        certain = self._text[self._sent : self._end()].rstrip()
        self._sent += len(certain)
        return certain

    def end(self) -> tuple[str, list[ToolCall]]:
        """The rest of the text outside of calls, and the calls, as `split_calls` finds them."""
        text, calls = split_calls(self._text)
        return text[self._sent :], calls

    def _end(self) -> int:
        """Where the text ends that no call can reach."""
        while True:
            if self._may_be_whole and _may_begin(self._text, self._at):
                return self._at
            self._may_be_whole = False
            markup = _MARKUP.search(self._text, self._at)
            self._at = markup.start() if markup else _part_of_tag(self._text, self._at)
            if markup is None or markup[0] == _OPEN:
                return self._at
            close = self._text.find(_THOUGHT_END, max(self._at, self._no_close))
            if close < 0:
                self._no_close = len(self._text) - len(_THOUGHT_END)
                return len(self._text)
            self._at, self._may_be_whole = close + len(_THOUGHT_END), True


def _part_of_tag(text: str, at: int) -> int:
    """Where the beginning of a tag starts with which `text` ends, at or after `at`; else its length."""
    place = text.rfind("<", max(at, len(text) - len(_OPEN)))
    ends = place >= 0 and any(tag.startswith(text[place:]) for tag in (_OPEN, _THOUGHT, _THOUGHT_END))
    return place if ends else len(text)


def _may_begin(text: str, at: int) -> bool:
    """Whether an answer that consists of calls may begin at a position, if more text comes."""
    opening = _OPENING.match(text, at)
    assert opening  # it matches nothing, too
    rest = text[opening.end() : opening.end() + _LOOKED_AT]
    if not rest or rest[0] in "{[":
        return True
    markers = (_PYTHON_TAG, _FENCE, *(["json"] if opening[2] else []))
    return any(marker.startswith(rest) for marker in markers) or bool(_BEGUN_METHOD.fullmatch(rest))


def _blocks(completion: str) -> list[tuple[int, int, list[ToolCall]]]:
    """The blocks of calls, in order: where each begins and ends, and the calls in it."""
    text = completion.rstrip()
    tagged: list[tuple[int, int, list[ToolCall]]] = []
    begin, (whole, at) = 0, _whole(text, 0)
    while markup := _MARKUP.search(text, at):
        at = markup.end()
        if markup[0] == _OPEN:
            calls, at = _tagged(text, at)
            at += len(_CLOSE) if text.startswith(_CLOSE, at) else 0
            tagged.append((markup.start(), at, calls))
            continue
        if markup[0] == _THOUGHT_END:  # the template wrote the `<think>`
            tagged = []
        else:
            end = text.find(_THOUGHT_END, at)
            at = len(text) if end < 0 else end + len(_THOUGHT_END)
        begin, (whole, at) = at, _whole(text, at)
    return tagged or ([(begin, len(text), whole)] if whole else [])


def _tagged(text: str, at: int) -> Found:
    """The calls after a `<tool_call>`."""
    try:
        values, end = _json_values(text, at, len(text), (_OPEN, _CLOSE))
    except _NotJson as error:
        return [_malformed(f"it {error}")], error.end
    return [_call(value) for value in values] or [_malformed("there is nothing in it")], end


def _whole(text: str, at: int) -> Found:
    """The calls of an answer, which begins at `at`, if it consists of calls."""
    opening = _OPENING.match(text, at)
    assert opening  # it matches nothing, too
    at, is_closed = opening.end(), text.endswith(_FENCE) if opening[2] else True
    end = len(text) - len(_FENCE) if opening[2] and is_closed else len(text)
    method = None if opening[2] else _METHOD.match(text, at)
    if method and text.endswith(")"):
        return _method_call(text, method)
    if text.startswith(("{", "["), at):
        try:
            values, _ = _json_values(text, at, end)
        except _NotJson as error:
            after = _MARKUP.search(text, error.end)
            said = text[at : after.start() if after else end]
            may_be = is_closed or text.find(_FENCE, error.end) < 0  # text after a block: an example
            if may_be and '"name"' in said and ('"arguments"' in said or '"parameters"' in said):
                return [_malformed(f"it {error}")], error.end
        else:
            if values and _is_call(values[0]):
                return [_call(value) for value in values], len(text)
    return [_malformed(f"got {_start(text, at, end)}")] if opening[1] else [], at


def _method_call(text: str, method: re.Match[str]) -> Found:
    """The call `name.call(key="value", …)`, whose values are JSON."""
    arguments: dict[str, Any] = {}
    name, at, end = method[1], method.end(), len(text) - 1
    while at < end:
        key = _KEY.match(text, at)
        if key is None:
            return [_malformed(f"got {_start(text, at, end)} in place of key=value", name)], at
        try:
            arguments[key[1]], at = _decoded(text, key.end(), key.end())
        except _NotJson as error:
            return [_malformed(f"{key[1]} {error}", name)], error.end
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    return [ToolCall(name, arguments)], len(text)


def _start(text: str, at: int, end: int) -> str:
    """The text between two positions, shortened, for a message."""
    return shown(text[at : min(end, at + 2 * SHOWN_VALUE_LENGTH)])


def _json_values(text: str, at: int, end: int, tags: tuple[str, ...] = ()) -> tuple[list[Any], int]:
    """The JSON values up to `end` or one of `tags`; the items of a list are values of their own."""
    values: list[Any] = []
    begin = at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    while at < end and not text.startswith(tags, at):
        value, at = _decoded(text, at, begin)
        values += value if isinstance(value, list) else [value]
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
    return values, at


class _NotJson(ValueError):
    """A text that is no JSON, and where reading it ended."""

    def __init__(self, reason: str, end: int):
        super().__init__(f"is no valid JSON: {reason}")
        self.end = end


def _decoded(text: str, at: int, begin: int) -> tuple[Any, int]:
    """The JSON value at a position, and where it ends; messages count characters from `begin`."""
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        reason, end = f"{error.msg} at character {error.pos - begin}", error.pos
        in_string = error.msg.startswith(("Unterminated", "Invalid"))
    except RecursionError:
        reason, end, in_string = "it is nested too deep", at, True
    except ValueError as error:  # numbers that Python does not read
        reason, end, in_string = str(error), at, True
    close = text.find(_CLOSE, end) if in_string else end  # a `</think>` before it may be of the string
    raise _NotJson(reason, len(text) if close < 0 else close)


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
    name, given = inner.get("name"), (inner.get("arguments"), inner.get("parameters"))
    if not isinstance(name, str):
        return _malformed(f"its name is {shown(name)}")
    arguments = next((each for each in given if each not in (None, "")), None)
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments.strip() or "null")
        except (ValueError, RecursionError):
            return _malformed(f"the arguments are the text {shown(arguments)}", name)
    if not isinstance(arguments, dict | None):
        return _malformed(f"the arguments are {shown(arguments)}", name)
    return ToolCall(name, arguments or {}, identity if isinstance(identity, str) else None)


def _malformed(reason: str, name: str | None = None) -> ToolCall:
    return ToolCall(name, problem=f"a call must be {_FORM} in JSON; this one is not: {reason}")
