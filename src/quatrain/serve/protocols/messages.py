"""Anthropic's Messages: their requests, and their answers whole and as events.

Data flow: a body -> `Messages.request` -> `ChatRequest`, as if a chat had asked; the `Choice` of its answer
-> `MessagesAnswer` -> JSON, for `answering.py`. What comes back of an answer in the next request becomes the
message that the tree of turns has.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, ClassVar

from quatrain.config.errors import listed
from quatrain.serve.choice import Choice
from quatrain.serve.protocols.fields import (
    check_callers,
    fault,
    list_at,
    object_at,
    one_of,
    only,
    text_at,
)
from quatrain.serve.protocols.protocol import AnswerForm, ChatProtocol
from quatrain.serve.requests import NO_ROOM, BadRequest, ChatRequest, checked, fields_of
from quatrain.serve.sessions import Session
from quatrain.serve.text import Vocabulary
from quatrain.types.sampler import Progress

PREFIX = "toolu_"
"""What Anthropic's ids of calls begin with."""
BILLING = "x-anthropic-billing-header:"
"""What the line of the system prompt begins with that Claude Code writes anew into each request."""
SAME = {
    "model": "model",
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
    "stream": "stream",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
}
"""Fields that a chat has too, and their names there."""
READ = frozenset(
    {*SAME, "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"}
)
"""Fields that are followed."""
IGNORED = frozenset(
    {
        *("metadata", "user_profile_id", "workspace_id", "betas"),  # who asks, and for which version
        *("service_tier", "speed", "inference_geo", "cache_control"),  # where and how fast
        *(
            "diagnostics",
            "billing_policy",
            "fallbacks",
            "fallback_credit_token",
        ),  # one model, no price
    }
)
"""Fields that are accepted with any value and ignored."""
REFUSED = {
    "container": "there are no containers here",
    "mcp_servers": "the server calls no tools itself",
    "thread": "the server keeps no threads",
    "compaction": "the server shortens no dialogue",
}
"""Fields that must be left out, or empty, and why."""
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Fields of a chat that have another name here."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Status of an error -> its type, where it is not that of all below or from 500 on."""


class Messages(ChatProtocol):
    """Anthropic's Messages. `reads_thinking`: whether the chat template reads `enable_thinking`."""

    splits_thoughts = names_events = True
    idle: ClassVar[Mapping[str, Any] | None] = MappingProxyType({"type": "ping"})

    def __init__(self, *, reads_thinking: bool):
        self._reads_thinking = reads_thinking

    def request(self, body: bytes, changed: Counter[str] | None, session: Session | None) -> ChatRequest:
        """As in every protocol."""
        fields = fields_of(body)
        if "max_tokens" not in fields:
            raise BadRequest("max_tokens is missing", "max_tokens")
        return self._chat(fields, changed)

    def counted(self, body: bytes, session: Session | None) -> ChatRequest:
        """As in every protocol of chats."""
        return self._chat(fields_of(body), None)

    def count(self, number: int) -> dict[str, Any]:
        """As in every protocol of chats."""
        return {"input_tokens": number}

    def answer(
        self,
        asked: ChatRequest,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
    ) -> AnswerForm:
        """As in every protocol."""
        return MessagesAnswer(self, model, choices)

    def error(self, error: BadRequest) -> dict[str, Any]:
        """As in every protocol; a prompt that is too long is said as such clients look for it."""
        other = "api_error" if error.status >= 500 else "invalid_request_error"
        message = str(error)
        if error.code == NO_ROOM:
            numbers = ": {} tokens > {} maximum".format(*error.too_long) if error.too_long else ""
            message = f"prompt is too long{numbers} ({message})"
        inner = {"type": _TYPES.get(error.status, other), "message": message}
        return {"type": "error", "error": inner, "request_id": f"req_{secrets.token_hex(12)}"}

    def _chat(self, fields: dict[str, Any], changed: Counter[str] | None) -> ChatRequest:
        for name, why in REFUSED.items():
            if fields.pop(name, None):
                raise BadRequest(f"{name} is not supported: {why}; leave it out", name)
        _check_edits(fields.pop("context_management", {}))
        only("", fields, READ | IGNORED)
        if "stop_sequences" in fields:
            list_at("stop_sequences", fields["stop_sequences"])
        chat = {ours: fields[theirs] for theirs, ours in SAME.items() if theirs in fields}
        messages, hints = read_messages(fields)
        chat |= {"messages": messages, **_tools(fields)}
        if "thinking" in fields:
            thinking = object_at("thinking", fields["thinking"])
            only("thinking", thinking, ("type", "budget_tokens", "display", "block_binding"))
            thinks = one_of("thinking.type", thinking.get("type"), _THINKING) != "disabled"
            if self._reads_thinking:
                chat["chat_template_kwargs"] = {"enable_thinking": thinks}
        chat |= _format(fields)
        return checked(ChatRequest, chat, changed, _NAMES).with_hints(hints)


class MessagesAnswer(AnswerForm):
    """The JSON of an answer: blocks of thoughts, text and calls."""

    def __init__(self, protocol: Messages, model: str, choices: Sequence[Choice]):
        self._protocol, self._model, self.choices = protocol, model, choices
        [self._choice] = choices
        self._id = f"msg_{secrets.token_hex(12)}"
        self._has_begun, self._open, self._num_blocks = False, "", 0

    def whole(self, version: int) -> dict[str, Any]:
        """As in every form."""
        content: list[dict[str, Any]] = []
        for kind, new in self._choice.in_order(self._choice.sampled.tokens, finished=True):
            if not content or content[-1]["type"] != kind:
                content.append(self._new_block(kind, self._choice.signature))
            content[-1][kind] += new
        content += [{**_tool_use(call), "input": _input(call)} for call in self._choice.called]
        return {**self._message(content), **self._ending(), "weight_version": version}

    def parts(self, number: int, progress: Progress) -> Iterator[dict[str, Any]]:
        """As in every form; the first says how many tokens of the prompt were kept, so none comes before."""
        choice, ended = self._choice, progress.finish_reason is not None
        choice.add(progress)
        if not self._has_begun:
            self._has_begun = True
            begun = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
            yield {"type": "message_start", "message": begun}
        for kind, new in choice.in_order(progress.piece.tokens, finished=ended):
            yield from self._block(self._new_block(kind))
            yield self._delta({"type": f"{kind}_delta", kind: new})
        for call in choice.called:
            yield from self._close()
            yield from self._block({**_tool_use(call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
        if ended:
            yield from self._close()

    def last(self, version: int) -> Iterator[dict[str, Any]]:
        """As in every form."""
        ending = self._ending()
        yield {"type": "message_delta", "delta": ending, "usage": ending.pop("usage")}
        yield {"type": "message_stop"}

    def failed(self, error: BadRequest) -> Iterator[dict[str, Any]]:
        """As in every form."""
        yield self._protocol.error(error)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content}

    def _ending(self) -> dict[str, Any]:
        """Why the answer ended, and its numbers of tokens."""
        choice, reason = self._choice, "end_turn"
        sequence = choice.text.ended_by
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif choice.called:
            reason = "tool_use"
        elif sequence is not None:
            reason = "stop_sequence"
        said = sequence if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": said, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        choice = self._choice
        return {
            "input_tokens": len(choice.prompt_ids) - choice.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached,
            "output_tokens": len(choice.sampled.tokens),
        }

    def _new_block(self, kind: str, signature: str = "") -> dict[str, Any]:
        """A block of thoughts or text without any yet."""
        return {"type": kind, kind: "", **({"signature": signature} if kind == "thinking" else {})}

    def _block(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begins a block, unless one of its type goes on."""
        if self._open == block["type"]:
            return
        yield from self._close()
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Ends the block that goes on, if one does."""
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._choice.signature})
        yield {"type": "content_block_stop", "index": self._num_blocks}
        self._open, self._num_blocks = "", self._num_blocks + 1


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    """A block of a call, but for its arguments."""
    return {"type": "tool_use", "id": PREFIX + call["id"], "name": call["function"]["name"]}


def _input(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(call["function"]["arguments"])
    return arguments


# ----------------------------------------------------------------------------------------- requests


def read_messages(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """(messages of a chat, signatures of answers in them) of a request with these fields.

    Neighbours of one role are one message, as in Anthropic's interface.
    """
    if "messages" not in fields:
        raise BadRequest("messages is missing", "messages")
    given = list_at("messages", fields["messages"])
    messages, hints = [*_system(fields)], list[str]()
    turns: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = []
    for number, each in enumerate(given):
        path = f"messages.{number}"
        message = object_at(path, each)
        only(path, message, ("role", "content"))
        role = one_of(f"{path}.role", message.get("role"), ("user", "assistant", "system"))
        turns.append((role, _blocks(f"{path}.content", message.get("content"))))
    if not turns or turns[-1][0] == "assistant":
        path = f"messages.{len(turns) - 1}" if turns else "messages"
        what = "an empty list" if not turns else "one of the assistant, whose text would go on"
        raise BadRequest(f"{path}: messages must end with one of the user; got {what}; add one", path)
    for role, group in groupby(turns, key=lambda turn: turn[0]):
        blocks = [block for _, each in group for block in each]
        if role == "assistant":
            messages.append(_assistant(blocks, hints))
        elif role == "user":
            messages += _user(blocks)
        else:
            messages.append({"role": "system", "content": _joined(blocks, "\n\n")})
    return messages, hints


def _system(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The first message, if there are instructions."""
    blocks = _blocks("system", fields["system"]) if "system" in fields else []
    texts = [_text(path, block) for path, block in blocks]
    # The line alone: where the prompt is one text, the instructions follow it there.
    kept = [t.lstrip().partition("\n")[2] if t.lstrip().startswith(BILLING) else t for t in texts]
    kept = [text for text, whole in zip(kept, texts, strict=True) if text.strip() or text == whole]
    if any(kept):  # an empty text says what none does, and templates would write it, or refuse it
        yield {"role": "system", "content": "\n\n".join(kept)}


def _blocks(path: str, content: Any) -> list[tuple[str, dict[str, Any]]]:
    """The blocks of a content with their paths; a text is one of them."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise fault(path, "must be a text or a list of blocks", content)
    return [
        (f"{path}.{number}", object_at(f"{path}.{number}", block)) for number, block in enumerate(content)
    ]


def _joined(blocks: Sequence[tuple[str, dict[str, Any]]], between: str) -> str:
    """The text of blocks that must all be texts."""
    return between.join(_text(path, block) for path, block in blocks)


def _text(path: str, block: Mapping[str, Any]) -> str:
    _kind(path, block, ("text",))
    only(path, block, ("type", "text", "cache_control", "citations"))
    if block.get("citations"):
        raise fault(f"{path}.citations", "must be empty, as documents are not supported", block["citations"])
    return text_at(f"{path}.text", block.get("text"))


def _kind(path: str, block: Mapping[str, Any], known: Sequence[str]) -> str:
    return one_of(f"{path}.type", block.get("type"), known, "leave the block out")


def _assistant(blocks: Sequence[tuple[str, dict[str, Any]]], hints: list[str]) -> dict[str, Any]:
    """An answer; the signatures of its thoughts, which are left out, go to `hints`."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, block in blocks:
        kind = _kind(path, block, ("text", "tool_use", "thinking"))
        if kind == "text":
            texts.append(_text(path, block))
        elif kind == "thinking":
            only(path, block, ("type", "thinking", "signature"))
            hints.append(text_at(f"{path}.signature", block.get("signature", "")))
        else:
            only(path, block, ("type", "id", "name", "input", "cache_control", "caller"))
            check_callers(path, block)
            arguments = block.get("input", {})
            if not isinstance(arguments, dict):
                raise fault(f"{path}.input", "must be an object", arguments)
            function = {"name": text_at(f"{path}.name", block.get("name")), "arguments": arguments}
            calls.append({"id": _id(f"{path}.id", block.get("id")), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return message | ({"tool_calls": calls} if calls else {})


def _id(path: str, value: Any) -> str:
    """The id of a call, as it was made here."""
    return text_at(path, value).removeprefix(PREFIX)


def _user(blocks: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The results of tools in blocks, a message each, then what the user says, if anything."""
    said = []
    for path, block in blocks:
        if _kind(path, block, ("text", "image", "tool_result")) != "tool_result":
            said.append((path, block))
            continue
        only(path, block, ("type", "tool_use_id", "content", "is_error", "cache_control"))
        content = _content(_blocks(f"{path}.content", block.get("content", "")))
        identity = _id(f"{path}.tool_use_id", block.get("tool_use_id"))
        yield {"role": "tool", "tool_call_id": identity, "content": content}
    if said or not blocks:
        yield {"role": "user", "content": _content(said)}


def _content(blocks: Sequence[tuple[str, dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """Texts, joined by line breaks, and pictures between them as data URLs."""
    parts: list[dict[str, Any]] = []
    for path, block in blocks:
        if _kind(path, block, ("text", "image")) == "image":
            parts.append({"type": "image_url", "image_url": {"url": _picture(path, block)}})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += "\n" + _text(path, block)
        else:
            parts.append({"type": "text", "text": _text(path, block)})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _picture(path: str, block: Mapping[str, Any]) -> str:
    """The picture of a block as a data URL; nothing is fetched."""
    only(path, block, ("type", "source", "cache_control"))
    source = object_at(f"{path}.source", block.get("source"))
    one_of(f"{path}.source.type", source.get("type"), ("base64",), "send the picture itself")
    kind = text_at(f"{path}.source.media_type", source.get("media_type"))
    return f"data:{kind};base64,{text_at(f'{path}.source.data', source.get('data'))}"


def _tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`tools` and `tool_choice` of a chat."""
    tools, names = list[dict[str, Any]](), list[str]()
    for number, each in enumerate(list_at("tools", fields.get("tools", []))):
        path = f"tools.{number}"
        tool = object_at(path, each)
        one_of(f"{path}.type", tool.get("type", "custom"), ("custom",), "the server calls no tools itself")
        known = ("type", "name", "description", "input_schema")
        ignored = ("strict", "cache_control", "input_examples", "eager_input_streaming")
        only(path, tool, (*known, *ignored, "defer_loading", "allowed_callers"))
        if tool.get("defer_loading"):
            raise fault(f"{path}.defer_loading", "must be false, as there is no search of tools", True)
        check_callers(path, tool)
        function: dict[str, Any] = {"name": text_at(f"{path}.name", tool.get("name"))}
        if "description" in tool:
            function["description"] = text_at(f"{path}.description", tool["description"])
        function["parameters"] = object_at(f"{path}.input_schema", tool.get("input_schema"))
        tools.append({"type": "function", "function": function})
        names.append(function["name"])
    choice = object_at("tool_choice", fields.get("tool_choice", {"type": "auto"}))
    only("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and name in names:
        return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": name}}}
    if kind not in ("auto", "none") and not (kind == "any" and names):
        raise fault(
            "tool_choice",
            'must be {"type": "auto"}, {"type": "none"} or, with tools, {"type": "any"} or {"type": "tool", '
            f'"name": one of the tools}}; the tools are {listed(names)}',
            choice,
        )
    return {"tools": tools, "tool_choice": "required" if kind == "any" else kind}


def _format(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`response_format` of a chat, if the answer must have a form; `output_format` is its older name."""
    config = object_at("output_config", fields.get("output_config", {}))
    only("output_config", config, ("format", "effort", "task_budget"))
    if "format" not in config and "output_format" not in fields:
        return {}
    path = "output_config.format" if "format" in config else "output_format"
    given = object_at(path, config["format"] if "format" in config else fields["output_format"])
    only(path, given, ("type", "schema", "name"))
    one_of(f"{path}.type", given.get("type"), ("json_schema",))
    schema = {"name": "answer", "schema": object_at(f"{path}.schema", given.get("schema"))}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _check_edits(management: Any) -> None:
    """Raises BadRequest for edits of the dialogue; to keep all thoughts is none."""
    config = object_at("context_management", management)
    only("context_management", config, ("edits",))
    for number, each in enumerate(list_at("context_management.edits", config.get("edits", []))):
        path = f"context_management.edits.{number}"
        edit = object_at(path, each)
        if not (
            str(edit.get("type")).startswith("clear_thinking_")
            and edit.get("keep") in ("all", {"type": "all"})
        ):
            raise fault(path, "the server edits no dialogue", edit, "leave it out")
