"""What a chat template leaves out of the messages and tools that it gets.

Data flow: messages, tools and the text that the template made of them (`tokenizer.fill_template`) ->
`left_out` -> an error, or a warning. Templates write nothing for a role, a field or an argument that they do
not know, and transformers says nothing.

A text that is short may stand in the prompt by chance ("7", or a tool's name). So the template also renders
the same messages with a made-up word in the place of each text. What it leaves out depends on the shape of
the messages, so this is done once for each shape (roles, fields, number of calls).
"""

import functools
import html
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from quatrain.config.errors import shown
from quatrain.data.messages import THOUGHTS, call_of, reads

Kind = Literal["text", "call", "beside", "habit", "thought", "field", "tool", "changed"]
REFUSED: frozenset[Kind] = frozenset({"text", "call"})
"""Kinds that are errors wherever a template renders."""
REFUSED_OF_ROWS: frozenset[Kind] = REFUSED | {"tool"}
"""Those of a data set's rows, which describe tools in a column of their own."""
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Fill = Callable[[Messages, Tools], str | None]
"""Renders messages and tools; None: the template rejects them."""

_OTHERWISE = frozenset({"role", "content", "tool_calls", "tool_call_id", "id", "type"})
"""Fields of messages whose texts are looked for in another way, or only tell messages apart."""
_MOST_SHAPES = 4096
_WORD = "madeupword"


class TextPlace(NamedTuple):
    """Where a text stands: in a message, or in a tool (`number` is that of the tool)."""

    kind: Kind
    number: int
    role: str
    field: str


class LeftOut(NamedTuple):
    """A text that the template leaves out or, of the kind "changed", writes in other words."""

    kind: Kind
    number: int
    role: str
    field: str
    text: str

    def __str__(self) -> str:
        message = f"message {self.number + 1}, of the role {self.role!r} ({shown(self.text)})"
        return _SAID[self.kind].format(
            message=message, field=self.field, role=self.role, text=shown(self.text)
        )


_SAID: dict[Kind, str] = {
    "text": "the chat template must write every message; it leaves out the text of {message}; correct the "
    "role, put the text into a message that it writes, or set data.chat_template to one that writes it",
    "call": "it leaves out the call of {text}",
    "beside": "the chat template does not write the text beside tool calls, so the model does not see that "
    "of {message}",
    "habit": "the chat template writes the text of {message} only in dialogues that end with the user's "
    "message, so the model does not see it in others",
    "thought": "the chat template does not write thoughts (`{field}`), so the model does not see that of "
    "{message}; write thoughts into `content`, or set data.chat_template to one that writes them",
    "field": "the chat template does not write the field `{field}` of messages of the role {role!r} "
    "({text}), so the model does not see it; write what it is to see into `content`",
    "tool": "the chat template does not write the descriptions of tools, so the model does not see them, "
    "such as the {field} {text}; describe them in a system message (of a run: data.system_prompt; without "
    "the column `tools`, if they are in one), or use a model whose template writes them",
    "changed": "the chat template changes the text of {message}, which is not in the prompt as it is",
}


def left_out(
    messages: Messages,
    tools: Tools,
    text: str,
    fill: Fill,
    *,
    template: str,
    others: str = "",
    since: int = 0,
) -> list[LeftOut]:
    """What is not in `text`, which `fill` made of `messages` and `tools`.

    `template` is the template's text, and `others` names what else `fill` depends on. With `since`, messages
    before that number and tools are not looked for. Not counted are white space, and thoughts before the last
    user's message where the template writes others: Qwen3's and DeepSeek's leave them out on purpose.
    """
    texts: dict[TextPlace, str] = {}
    _visit(messages, tools, texts.setdefault)
    shape = (template, others, *(message["role"] for message in messages), *texts)
    if shape not in _UNWRITTEN:
        while len(_UNWRITTEN) >= _MOST_SHAPES:
            del _UNWRITTEN[next(iter(_UNWRITTEN))]
        _UNWRITTEN[shape] = _unwritten(messages, tools, fill, template)
    unwritten = _UNWRITTEN[shape]
    if unwritten is None:
        unwritten = {p: p.kind for p, value in texts.items() if p.kind != "text" and not _is_in(value, text)}
    found = []
    for place, value in texts.items():
        if since and (place.kind == "tool" or place.number < since):
            continue
        kind = unwritten.get(place)
        if kind is None and place.kind == "text" and not _is_in(_lasting(messages, place, value), text):
            kind = _altered(messages, tools, fill, place, value)
        if kind is not None:
            found.append(LeftOut(*place._replace(kind=kind), value))
    return found


_UNWRITTEN: dict[tuple[Any, ...], dict[TextPlace, Kind] | None] = {}
"""By template and shape of the messages: the places that are not written."""


def _unwritten(messages: Messages, tools: Tools, fill: Fill, template: str) -> dict[TextPlace, Kind] | None:
    """The places of the texts that the template leaves out, and how; None if it rejects made-up words."""
    words: dict[TextPlace, str] = {}

    def put(place: TextPlace, value: str) -> str:
        return words.setdefault(place, f"{_WORD}{len(words):06}")

    made_up = _visit(messages, tools, put)
    text = fill(*made_up)
    if text is None:
        return None
    written = text.lower()
    missing = {place: place.kind for place, word in words.items() if word not in written}
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    # Mistral's of 2024 write the system message before the user's last message, if that is the end.
    asked = "text" in missing.values() and 0 <= last < len(messages) - 1
    written = ((fill(made_up[0][: last + 1], made_up[1]) if asked else None) or "").lower()
    for place in list(missing):
        if place.kind == "text" and place.number <= last and words[place] in written:
            missing[place] = "habit"
        if place.kind == "thought" and place.number < last and reads(template, place.field):
            del missing[place]
    return missing


def _altered(messages: Messages, tools: Tools, fill: Fill, place: TextPlace, value: str) -> Kind | None:
    """Whether a text that is not in the prompt as it is was left out, because of what it says, or changed."""
    for marked in (f"{_WORD} {value}", f"{value} {_WORD}"):
        with_word = [*messages]
        message = messages[place.number]
        content: Any = marked
        if isinstance(message["content"], list):
            content = [
                {**part, "text": marked} if place.field == _part(at) else part
                for at, part in enumerate(message["content"])
            ]
        with_word[place.number] = {**message, "content": content}
        text = fill(with_word, tools)
        if text is not None and _WORD in text.lower():
            return "changed"
    return place.kind


def _visit(messages: Messages, tools: Tools, put: Callable[[TextPlace, str], str]) -> tuple[Messages, Tools]:
    """The same messages and tools with what `put` gives in place of each text that is to be written."""
    seen = [_visited(number, message, put) for number, message in enumerate(messages)]
    return seen, [_visited_tool(number, tool, put) for number, tool in enumerate(tools)]


def _visited(number: int, message: Mapping[str, Any], put: Callable[[TextPlace, str], str]) -> dict[str, Any]:
    role, calls = message["role"], message.get("tool_calls") or []
    new = dict(message)
    place, content = TextPlace("beside" if calls else "text", number, role, "content"), message["content"]
    if isinstance(content, list):
        new["content"] = [
            {**part, "text": put(place._replace(field=_part(at)), part["text"])}
            if part.get("text", "").strip()
            else part
            for at, part in enumerate(content)
        ]
    elif content.strip():
        new["content"] = put(place, content)
    if calls:
        new["tool_calls"] = []
        for n, call in enumerate(calls):
            of_call = functools.partial(_put_of_call, put, TextPlace("call", number, role, f"call {n}"))
            new["tool_calls"].append(_visited_call(call, of_call))
    for field, value in message.items():
        if field in _OTHERWISE or (field == "name" and role in ("tool", "function")):
            continue
        kind: Kind = "field"
        if field == "function_call":  # OpenAI's older form of calls
            kind = "call"
        elif field in THOUGHTS and role == "assistant":
            kind = "thought"
        new[field] = _leaves(value, functools.partial(put, TextPlace(kind, number, role, field)))
    return new


def _part(at: int) -> str:
    """The field of the place of a part's text."""
    return f"content, part {at}"


def _put_of_call(put: Callable[[TextPlace, str], str], call: TextPlace, field: str, value: str) -> str:
    return put(call._replace(field=f"{call.field}, {field}"), value)


def _visited_call(call: Mapping[str, Any], put: Callable[[str, str], str]) -> dict[str, Any]:
    inner = dict(call_of(call))
    arguments, name = inner.get("arguments"), inner["name"]
    inner["name"] = put("name", name)
    if isinstance(arguments, Mapping) and arguments:
        inner["arguments"] = {"argument": put("arguments", name)}
    elif isinstance(arguments, str) and arguments.strip() not in ("", "{}"):
        inner["arguments"] = json.dumps({"argument": put("arguments as text", name)})
    return {**call, "function": inner} if "function" in call else inner


def _visited_tool(
    number: int, tool: Mapping[str, Any], put: Callable[[TextPlace, str], str]
) -> dict[str, Any]:
    inner = dict(tool.get("function", tool))
    for field in ("name", "description"):
        if isinstance(inner.get(field), str) and inner[field].strip():
            inner[field] = put(TextPlace("tool", number, "", field), inner[field])
    return {**tool, "function": inner} if "function" in tool else inner


def _leaves(value: Any, put: Callable[[str], str]) -> Any:
    """A value with what `put` gives in place of each text."""
    if isinstance(value, str):
        return put(value) if value.strip() else value
    if isinstance(value, Mapping):
        return {name: _leaves(each, put) for name, each in value.items()}
    return [_leaves(each, put) for each in value] if isinstance(value, list | tuple) else value


def _lasting(messages: Messages, place: TextPlace, value: str) -> str:
    """What templates keep of a text: of an answer before the last question, what follows its thought."""
    later = any(message["role"] == "user" for message in messages[place.number + 1 :])
    return value.rpartition("</think>")[2] if place.role == "assistant" and later else value


def _is_in(value: str, text: str) -> bool:
    """Whether a text is in another, perhaps with other white space, or as JSON or HTML have it."""
    if value.strip() in text:
        return True
    written = _squeezed(text)
    forms = (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(_squeezed(form) in written for form in forms) or _squeezed(value) in html.unescape(written)


def _squeezed(text: str) -> str:
    return "".join(text.split())
