"""The messages of prompts: checked, and brought into one form.

Data flow: a row's prompt, what environments return and requests to `quatrain serve` -> `checked_messages`
-> `forms_for` a template -> `tokenizer.fill_template`; the tools of a request or a row -> `checked_tools`,
`tools_of` -> the same.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quatrain.config.errors import listed, shown
from quatrain.config.files import MAX_DEPTH
from quatrain.types.pictures import Picture

MAX_TEXT_CHARS = 4_000_000
"""Length of the longest text that is tokenised: about a million tokens."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields with the thought of an assistant's message, as templates and servers name them."""
INSTRUCTIONS = ("system", "developer")
"""Roles of the instructions of an application."""
_IMAGE_PART = re.compile(r"""\btype['"]?\]?\s*==\s*['"]image['"]""")
"""Where a template asks whether a part of a message is a picture."""
MESSAGES = "messages"
TOOLS = "tools"
"""The column with the descriptions of functions that the model may call in a row."""


def checked_messages(prompt: Any) -> list[dict[str, Any]]:
    """The messages as dictionaries in one form; raises ValueError for what no chat template can take.

    Content that is a list of parts, `{"type": "text", "text": …}`, becomes one text, and null beside tool
    calls an empty one. With pictures, `{"type": "image", "image": Picture}`, it stays a list, in which texts
    that follow one another are joined. The arguments of past tool calls become objects; they may come as JSON
    text. An empty list of calls, null or false is left out, because some templates ask only whether there is
    a list.
    The result of a tool without a `name` gets that of the last call with its `tool_call_id`: Hermes' template
    asks for it.
    """
    if not isinstance(prompt, Sequence) or not prompt:
        raise ValueError(f"a prompt must be a string or a non-empty list of messages; got {shown(prompt)}")
    messages = [_checked_message(message) for message in prompt]
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if call.get("id") is not None:
                names[str(call["id"])] = call_of(call)["name"]
        name = names.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and message.get("name") is None and name is not None:
            message["name"] = name
    return messages


def _checked_message(message: Any) -> dict[str, Any]:
    fields = dict(message) if isinstance(message, Mapping) else {}
    content, calls = _checked_content(fields.get("content")), fields.get("tool_calls")
    fields["content"] = "" if content is None and calls else content
    if not isinstance(fields.get("role"), str) or fields["content"] is None:
        raise ValueError(
            f"a message must have a `role` and a `content`, both strings; got {shown(message)}; the content "
            'may also be a list of parts that are texts, {"type": "text", "text": …}, and pictures where the '
            'model sees them (model.vision), {"type": "image", "image": …}'
        )
    if calls:
        fields["tool_calls"] = _checked_calls(calls)
    else:
        fields.pop("tool_calls", None)
    reason = unfit(fields)
    if reason:
        raise ValueError(f"a message {reason}; correct the message {shown(message)}")
    return fields


def _checked_content(content: Any) -> str | list[dict[str, Any]] | None:
    """A text, or parts with at least one picture; None for other content."""
    if not isinstance(content, list) or not any(map(is_picture, content)):
        return joined_text(content)
    parts: list[dict[str, Any]] = []
    for part in content:
        if is_picture(part):
            parts.append({"type": "image", "image": part["image"]})
        elif (text := joined_text([part])) is None:
            return None
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    return parts


def is_picture(part: Any) -> bool:
    """Whether a part of a message's content is a picture that was read (`pictures.PictureReader`)."""
    return isinstance(part, Mapping) and isinstance(part.get("image"), Picture)


def pictures_of(messages: str | Sequence[Mapping[str, Any]]) -> list[Picture]:
    """The pictures of messages, in their order; a text has none."""
    contents = [] if isinstance(messages, str) else [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if is_picture(part)]


def with_picture_parts(
    messages: Sequence[Mapping[str, Any]], part_of: Callable[[Picture], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with what `part_of` makes of each picture in place of its part."""
    return [
        {
            **message,
            "content": [part_of(part["image"]) if is_picture(part) else part for part in message["content"]],
        }
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def named_picture(picture: Picture) -> dict[str, Any]:
    """A part that names a picture in what a run writes, such as its samples."""
    return {"type": "image", "picture": picture.name, "size": list(picture.size)}


def as_messages(prompt: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of a prompt; a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]


def checked_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The descriptions of functions that a model may call, in OpenAI's form; ValueError for others.

    Fields that are null are left out, as templates write descriptions whole; those of schemas stay.
    """
    names = []
    for tool in tools:
        described = isinstance(tool, Mapping) and tool.get("type") == "function"
        function = tool.get("function") if described else None
        function = function if isinstance(function, Mapping) else {}
        name, parameters = function.get("name"), function.get("parameters")
        if not (isinstance(name, str) and name and isinstance(parameters, Mapping | None)):
            raise ValueError(
                'a tool must be {"type": "function", "function": {"name": …, "description": …, "parameters": '
                f"a JSON schema}}}}; got {shown(tool)}"
            )
        reason = unfit(tool)
        if reason:
            raise ValueError(f"the tool {shown(name)} {reason}; correct its description")
        names.append(name)
    if len(set(names)) < len(names):
        raise ValueError(f"tools must each have a name of their own; got {listed(names)}; rename one")
    return [{**_given(tool), "function": _given(tool["function"])} for tool in tools]


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def tools_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions that the column `tools` of a row describes, in OpenAI's form; none if it has others.

    The column has a list of descriptions, or its JSON text; a description may also stand without
    `{"type": "function", "function": …}` around it. Raises ValueError for descriptions that are malformed.
    """
    given = columns.get(TOOLS)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return []
    if not isinstance(given, list | tuple):
        return []
    tools = [_described(without_nulls(tool)) for tool in given]
    if not all(isinstance(tool, Mapping) for tool in tools):
        return []
    try:
        return checked_tools(tools)
    except ValueError as error:
        raise ValueError(
            f"the column `{TOOLS}`, which the chat template gets: {error}; rename a column that is about "
            "something else"
        ) from error


def _described(tool: Any) -> Any:
    """A description in OpenAI's form, if it is one without its outer object, or JSON text."""
    if isinstance(tool, str) and tool.lstrip().startswith("{"):
        try:
            tool = json.loads(tool)
        except (ValueError, RecursionError):
            return tool
    if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
        return {"type": "function", **tool}
    is_inner = isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
    return {"type": "function", "function": tool} if is_inner else tool


def without_nulls(value: Any) -> Any:
    """`value` without fields that are null.

    A column-oriented file gives all messages, and the arguments of all tool calls, the same keys: a missing
    key is read as None.
    """
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {key: without_nulls(each) for key, each in value.items() if each is not None}


def thought_of(message: Mapping[str, Any]) -> str:
    """The thought in a field of its own; empty if there is none; ValueError for two that differ."""
    found = {field: message[field] for field in THOUGHTS if message.get(field)}
    texts = {value.strip() for value in found.values() if isinstance(value, str)}
    if len(texts) > 1 or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(
            f"a message must have one thought, a text; {listed(found)} have "
            f"{shown(list(found.values()))}; keep one of them"
        )
    return next(iter(found.values()), "")


def joined_text(content: Any) -> str | None:
    """The text of a message's content, a string or a list of parts that are texts; None for other content."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type", "text") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else None


def text_of(message: Any) -> str:
    """The text of a message, without its pictures and with nothing in their places."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _checked_calls(calls: Any) -> list[dict[str, Any]]:
    """Past tool calls with their arguments as objects."""
    listed = calls if isinstance(calls, list | tuple) else [None]
    inner = [call_of(call) if isinstance(call, Mapping) else None for call in listed]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in inner):
        raise ValueError(
            "past tool calls must be a list of objects with the `name` and the `arguments` of a `function`; "
            f"got {shown(calls)}"
        )
    return [_with_arguments(call, _arguments) for call in calls]


def _arguments(came: Any) -> dict[str, Any]:
    try:
        arguments = json.loads(came or "{}") if isinstance(came, str | None) else came
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"the arguments of a past tool call must be an object, or its JSON text; got {shown(came)}"
        )
    return dict(arguments)


def unfit(value: Any, depth: int = MAX_DEPTH) -> str | None:
    """Why `value` cannot be part of a message, which is written as JSON into `samples/`; None if it can."""
    if isinstance(value, str):
        return unfit_text(value)
    if value is None or isinstance(value, bool | int | Picture):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"must have finite numbers; it has {value}"
    if not isinstance(value, Mapping | list | tuple):
        return f"must consist of text, numbers, lists and objects; it has a {type(value).__name__}"
    if depth == 0:
        return f"must not be nested deeper than {MAX_DEPTH} levels"
    inner = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return next(filter(None, (unfit(each, depth - 1) for each in inner)), None)


def unfit_text(text: str) -> str | None:
    """Why `text` cannot be tokenised, as the end of a sentence; None if it can."""
    if len(text) > MAX_TEXT_CHARS:
        return f"must have at most {MAX_TEXT_CHARS} characters; it has {len(text)}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"must be valid Unicode; the character at position {error.start} is half a surrogate pair"
    return None


def forms_for(template: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages in the forms in which a template may take them, the likeliest first.

    Thoughts have the field that the template reads. `developer` is `system` for a template without a branch
    for it, and the second choice for others. Arguments of past calls are objects, then their JSON text.
    Templates that ask for pictures and never whether content is a text, as SmolVLM's, take lists of parts.
    """
    read = [_with_thought(template, message) for message in messages]
    if _IMAGE_PART.search(template) and "is string" not in template:
        read = [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message["content"], str)
            else message
            for message in read
        ]
    as_system = [m | {"role": "system"} if m["role"] == "developer" else m for m in read]
    has_calls = any(message.get("tool_calls") for message in read)
    variants = [read] if "developer" in template else []
    if read != as_system or not variants:
        variants.append(as_system)
    for each in variants:
        yield each
        if has_calls:
            yield [
                {
                    **message,
                    "tool_calls": [_with_arguments(call, json.dumps) for call in message["tool_calls"]],
                }
                if message.get("tool_calls")
                else message
                for message in each
            ]


def reads(template: str, field: str) -> bool:
    """Whether a template reads a field of messages, as far as its text shows: `m.field`, `m['field']`."""
    return re.search(rf"""[.'"]{field}\b""", template) is not None


def _with_thought(template: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose thought has the field that the template reads."""
    own = [field for field in THOUGHTS if isinstance(message.get(field), str) and message[field].strip()]
    # "thinking" in a template may also be a variable; the others that are read are read of messages.
    known = next((f for f in (THOUGHTS[0], *own, *THOUGHTS) if reads(template, f)), None)
    if message["role"] != "assistant" or not own or known is None:
        return dict(message)
    kept = message.get(known) or message[own[0]]
    same = {field for field in own if message[field].strip() == kept.strip()}
    return {**{field: value for field, value in message.items() if field not in same}, known: kept}


def call_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The name and arguments of a past tool call, in OpenAI's form or without its `function`."""
    return call.get("function", call)


def _with_arguments(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    inner = call_of(call)
    changed = {**inner, "arguments": change(inner.get("arguments"))}
    return {**call, "function": changed} if "function" in call else changed
