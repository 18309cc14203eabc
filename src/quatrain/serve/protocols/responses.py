"""OpenAI's Responses: requests of items, and answers as items, whole and as events.

Data flow: a body -> `Responses.request` -> `ResponsesRequest`, a chat with the same messages; the `Choice` of
its answer -> `ResponsesAnswer` -> JSON, for `answering.py`. Nothing is stored: an answer can be gone on with
by its id only in the session of an agent, whose tree has it.
"""

from __future__ import annotations

import copy
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from quatrain.config.errors import listed, shown
from quatrain.serve.choice import Choice, finite_logprobs, usage_of
from quatrain.serve.protocols.openai import openai_error
from quatrain.serve.protocols.protocol import AnswerForm, Protocol, as_json
from quatrain.serve.requests import IGNORED, BadRequest, ChatRequest, checked, fields_of
from quatrain.serve.sessions import Session
from quatrain.serve.text import Vocabulary
from quatrain.types.piece import Piece
from quatrain.types.sampler import Progress

AS_IN_CHAT = frozenset(
    {
        *("model", "stream", "temperature", "top_p", "top_logprobs", "prompt_cache_key"),
        *("top_k", "min_p", "seed", "stop", "cache_salt", "chat_template_kwargs"),  # of no client of OpenAI's
    }
)
"""Fields that a chat has by the same name."""
CONVERTED = frozenset(
    {
        *("input", "instructions", "previous_response_id", "tools", "tool_choice", "max_output_tokens"),
        *("text", "reasoning", "include"),
    }
)
"""Fields that become others of a chat."""
WITHOUT_EFFECT = IGNORED | {
    *("truncation", "max_tool_calls"),  # nothing is truncated, and no tool runs here
    *("stream_options", "image", "access_programs", "background_options"),
}
"""Fields that are accepted with any value and ignored."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "personality": (),
}
"""Fields that are not supported: the values that change nothing, with which they are accepted."""
OF_CHAT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
}
"""Fields of the chat that a request becomes -> where the request has them, for errors."""
INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
"""What `include` may ask for."""
_ITEMS = {
    "message": ({"role", "content"}, {"id", "status", "phase"}),
    "function_call": ({"call_id", "name", "arguments"}, {"id", "status", "caller", "parsed_arguments"}),
    "function_call_output": ({"call_id", "output"}, {"id", "status", "caller", "name"}),
    "reasoning": ({"encrypted_content"}, {"id", "status", "summary", "content"}),
}
"""Types of items -> the fields that are read, and those that are ignored."""
_PARTS = {
    **dict.fromkeys(
        ("input_text", "output_text", "text"),
        ({"text"}, {"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"}),
    ),
    "input_image": ({"image_url"}, {"detail", "prompt_cache_breakpoint"}),
}
"""The same of parts of a content."""
_TOOLS = {
    "function": (
        {"name", "description", "parameters"},
        {"strict", "allowed_callers", "output_schema"},
    )
}
_ROLES = ("user", "assistant", "system", "developer")
_PART_OF = {"reasoning": "reasoning_text", "message": "output_text"}
"""Items that come in parts -> the type of their one part."""


class ResponsesRequest(ChatRequest):
    """`POST /v1/responses`: the chat that its items are, and what its answer repeats of it."""

    prompt_field: ClassVar[str] = "input"
    given: dict[str, Any] = Field(default_factory=dict, exclude=True)
    """The fields of the request as they came."""
    num_instructions: int = 0
    """Messages at the beginning that a request which goes on with the answer's id has of its own."""

    @property
    def wants_encrypted(self) -> bool:
        """Whether thoughts come with their `encrypted_content`."""
        return INCLUDED[0] in self.given.get("include", ())


class Responses(Protocol[ResponsesRequest]):
    """The protocol of OpenAI's Responses."""

    def request(self, body: bytes, changed: Counter[str] | None, session: Session | None) -> ResponsesRequest:
        """As in every protocol."""
        given = fields_of(body)
        _check_fields(given)
        return checked(ResponsesRequest, _as_chat(given, session), changed)

    def answer(
        self,
        asked: ResponsesRequest,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
    ) -> AnswerForm:
        """As in every protocol."""
        return ResponsesAnswer(asked, model, choices, prompts)

    def error(self, error: BadRequest) -> dict[str, Any]:
        """An error in OpenAI's form, which names the field of Responses."""
        field, text = error.field or "", str(error)
        known = OF_CHAT.get(field, field)
        text = known + text[len(field) :] if field and text.startswith(field) else text
        return openai_error(BadRequest(text, known or None, error.status, error.code))

    def event(self, value: dict[str, Any]) -> str:
        """The text of an event, whose name is its type."""
        return f"event: {value['type']}\ndata: {as_json(value)}\n\n"


# ------------------------------------------------------------------------------------------------ requests


def _check_fields(given: Mapping[str, Any]) -> None:
    """Raises BadRequest for a field that is unknown or not supported."""
    for name, value in given.items():
        if name in AS_IN_CHAT | CONVERTED | WITHOUT_EFFECT or value in REFUSED.get(name, ()):
            continue
        raise BadRequest(f"{name} is not supported; got {shown(value)}; leave it out", name)


def _as_chat(given: Mapping[str, Any], session: Session | None) -> dict[str, Any]:
    """The fields of a chat."""
    chat = {"model": "", **{name: value for name, value in given.items() if name in AS_IN_CHAT}}
    instructions = _text_of(given.get("instructions", ""), "instructions")
    own = [{"role": "system", "content": instructions}] if instructions else []
    before = _before(given, session)
    if "input" not in given and not before:
        raise BadRequest("input is missing; give a text or a list of items", "input")
    chat |= {
        "messages": [*own, *before, *_messages(given.get("input", []))],
        "tools": [_tool(tool, f"tools[{at}]") for at, tool in enumerate(_list(given.get("tools"), "tools"))],
        "given": given,
        "num_instructions": len(own),
    }
    if (choice := given.get("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice)
    if (most := given.get("max_output_tokens")) is not None:
        chat["max_tokens"] = most
    if (form := _format(_object(given.get("text"), "text"))) is not None:
        chat["response_format"] = form
    for at, name in enumerate(_list(given.get("include"), "include")):
        if name not in INCLUDED:
            raise BadRequest(
                f"include[{at}] must be one of {listed(INCLUDED)}; got {shown(name)}; leave it out",
                f"include[{at}]",
            )
        chat["logprobs"] = chat.get("logprobs", False) or name == INCLUDED[1]
    reasoning = _object(given.get("reasoning"), "reasoning")
    if reasoning.get("effort") == "none":
        chat["thinks"] = False
    return chat


def _before(given: Mapping[str, Any], session: Session | None) -> Sequence[Mapping[str, Any]]:
    """The messages of the answer that the request names, without the instructions that it had."""
    name = given.get("previous_response_id")
    if name is None:
        return ()
    found = None if session is None else session.named_answers.get(str(name))
    if found is None:
        where = "in this session" if session is not None else "here, where nothing is stored"
        raise BadRequest(
            f"previous_response_id must be the id of an answer; {shown(name)} is none {where}; give all items "
            "as `input`",
            "previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _messages(given: Any) -> list[dict[str, Any]]:
    """The messages of `input`: what the model said without an item of others in between is one."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    goes_on = False
    for at, item in enumerate(_list(given, "input")):
        path = f"input[{at}]"
        item = _object(item, path)
        kind = item.get("type") or "message"
        _check_parts_of(item, kind, _ITEMS, path)
        said = _said(item, kind, path)
        if said is None:
            messages.append(_of_others(item, kind, path))
        elif goes_on:
            messages[-1]["content"] += said["content"]
            messages[-1]["tool_calls"] += said["tool_calls"]
        else:
            messages.append(said)
        goes_on = said is not None
    return messages


def _said(item: Mapping[str, Any], kind: str, path: str) -> dict[str, Any] | None:
    """The message of the assistant that an item is, or part of one; None: it is not the assistant's."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    if kind == "message" and item.get("role") == "assistant":
        return message | {"content": _text_of(_content(item.get("content"), f"{path}.content"), path)}
    if kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        identity = _text_of(item.get("call_id"), f"{path}.call_id")
        return message | {
            "tool_calls": [{"id": stripped_id(identity), "type": "function", "function": function}]
        }
    return message if kind == "reasoning" else None


def _of_others(item: Mapping[str, Any], kind: str, path: str) -> dict[str, Any]:
    """The message that an item is which the model did not say."""
    if kind == "function_call_output":
        identity = stripped_id(_text_of(item.get("call_id"), f"{path}.call_id"))
        content = _content(item.get("output"), f"{path}.output")
        return {"role": "tool", "tool_call_id": identity, "content": content}
    if item.get("role") not in _ROLES:
        raise BadRequest(
            f"{path}.role must be one of {listed(_ROLES)}; got {shown(item.get('role'))}; correct it",
            f"{path}.role",
        )
    return {"role": item["role"], "content": _content(item.get("content"), f"{path}.content")}


def _content(given: Any, path: str) -> str | list[dict[str, Any]]:
    """A text, or if there are pictures the parts of a chat."""
    if isinstance(given, str):
        return given
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(_list(given, path, or_text=True)):
        place = f"{path}[{at}]"
        part = _object(part, place)
        _check_parts_of(part, part.get("type"), _PARTS, place)
        if part["type"] == "input_image":
            url = _text_of(part.get("image_url"), f"{place}.image_url")
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": _text_of(part.get("text"), f"{place}.text")})
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _tool(given: Any, path: str) -> dict[str, Any]:
    """A tool in the form of a chat; what the template writes of it has no `strict`."""
    tool = _object(given, path)
    known = {name: value for name, value in tool.items() if (name, value) not in _OFF}
    _check_parts_of(known, tool.get("type"), _TOOLS, path)
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


_OFF = (("defer_loading", False), ("async", False))
"""Fields of tools that are accepted with the value that changes nothing."""


def _tool_choice(given: Any) -> Any:
    """A choice in the form of a chat."""
    if not isinstance(given, Mapping):
        return given
    if given.get("type") != "function":
        raise BadRequest(
            f"tool_choice.type must be function; got {shown(given.get('type'))}; name a function, or give as "
            "`tools` those that may be called",
            "tool_choice.type",
        )
    return {"type": "function", "function": {"name": given.get("name")}}


def _format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `response_format` of a chat; None: any text."""
    if unknown := sorted(text.keys() - {"format", "verbosity"}):
        raise BadRequest(f"text.{unknown[0]} is not supported; leave it out", f"text.{unknown[0]}")
    form = _object(text.get("format"), "text.format")
    if form.get("type", "text") != "json_schema":
        return None if form.get("type", "text") == "text" else dict(form)
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def _check_parts_of(
    given: Mapping[str, Any], kind: Any, known: Mapping[str, tuple[set[str], set[str]]], path: str
) -> None:
    """Raises BadRequest for a type that is not known, and for a field that one of this type does not have."""
    if kind not in known:
        raise BadRequest(
            f"{path}.type must be one of {listed(known)}; got {shown(kind)}; leave it out", f"{path}.type"
        )
    if unknown := sorted(given.keys() - {"type"} - set.union(*known[kind])):
        name = f"{path}.{unknown[0]}"
        raise BadRequest(f"{name} is not supported; got {shown(given[unknown[0]])}; leave it out", name)


def _object(given: Any, path: str) -> dict[str, Any]:
    """An object without its null fields; null counts as an empty one."""
    if not isinstance(given, Mapping | None):
        raise BadRequest(f"{path} must be an object; got {shown(given)}; correct it", path)
    return {name: value for name, value in (given or {}).items() if value is not None}


def _list(given: Any, path: str, *, or_text: bool = False) -> list[Any]:
    """A list; null counts as an empty one, but where a text could stand."""
    if not isinstance(given, list) and (or_text or given is not None):
        what = "a text or a list" if or_text or path == "input" else "a list"
        raise BadRequest(f"{path} must be {what}; got {shown(given)}; correct it", path)
    return given or []


def _text_of(given: Any, path: str) -> str:
    if not isinstance(given, str):
        raise BadRequest(f"{path} must be a text; got {shown(given)}; correct it", path)
    return given


# ------------------------------------------------------------------------------------------------- answers


class ResponsesAnswer(AnswerForm):
    """The JSON of an answer: its items grow with the events, and are the whole answer at the end."""

    def __init__(
        self,
        asked: ResponsesRequest,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
    ):
        self._asked, self._model, self.choices, self._prompts = asked, model, choices, prompts
        [self._choice] = choices
        self.id, self._created = f"resp_{uuid.uuid4().hex}", time.time()
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        """Whether the last item may get more text."""
        self._num_thoughts, self._numbers = 0, itertools.count()

    def whole(self, version: int) -> dict[str, Any]:
        """The answer to a request without a stream."""
        for _ in self._said(self._choice.sampled):
            pass
        return self._response(self._status, version)

    def first(self) -> Iterator[dict[str, Any]]:
        """That there is an answer, and that it is sampled."""
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def parts(self, number: int, progress: Progress) -> Iterator[dict[str, Any]]:
        """The events of the progress."""
        self._choice.add(progress)
        yield from self._said(progress.piece)

    def last(self, version: int) -> Iterator[dict[str, Any]]:
        """The whole answer."""
        yield self._event(self._status, response=self._response(self._status, version))

    def failed(self, error: BadRequest) -> Iterator[dict[str, Any]]:
        """The answer so far, with the error."""
        response = self._response("failed") | {"error": {"code": "server_error", "message": str(error)}}
        yield self._event("failed", response=response)

    def ended(self, session: Session, messages: Sequence[Mapping[str, Any]]) -> None:
        """Lets a request go on with the answer, the last of the dialogue's messages, by its id."""
        session.named_answers[self.id] = messages[self._asked.num_instructions :]

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}

    # ------------------------------------------------------------------------------------ items and events

    def _said(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events of further tokens, and at the end those that close the items."""
        choice, at, ended = self._choice, 0, self._choice.finish_reason is not None
        values = finite_logprobs(piece) if self._asked.wants_logprobs else None
        said: list[tuple[str, str]] = []
        while at < len(piece.tokens) or ended:
            was_thought = choice.is_thought
            # One by one where thoughts may begin or end: their tokens are counted.
            step = slice(at, at + 1 if choice.may_think else len(piece.tokens))
            at, finished = step.stop, ended and step.stop >= len(piece.tokens)
            text, thoughts, _ = choice.said(piece.tokens[step], finished=finished)
            said += [(kind, new) for kind, new in (("reasoning", thoughts), ("message", text)) if new]
            of_thought = was_thought or choice.is_thought
            self._num_thoughts += of_thought * len(piece.tokens[step])
            if values is not None:
                texts = map(choice.token_texts.push, piece.tokens[step])
                known = zip(texts, values[step], strict=True)
                choice.unlisted.extend([] if of_thought else known)
            if finished:
                break
        for kind, same in itertools.groupby(said, key=lambda each: each[0]):
            yield from self._more(kind, "".join(new for _, new in same))
        if ended:
            yield from self._end()

    def _more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Further text of an item of this type, which is the last one or a new one."""
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        part, place = self._items[-1]["content"][0], self._place()
        part["text"] += text
        if kind == "message":
            new = list(self._choice.listed()) if self._asked.wants_logprobs else []
            part["logprobs"] += new
            place["logprobs"] = new
        yield self._event(f"{part['type']}.delta", **place, delta=text)

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        """A new item, with its one part."""
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._items.append(_item(kind, status="in_progress", **own, content=[]))
        yield self._event("output_item.added", **self._at(), item=copy.deepcopy(self._items[-1]))
        part = {"type": _PART_OF[kind], "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        self._items[-1]["content"].append(part)
        self._is_open = True
        yield self._event("content_part.added", **self._place(), part=copy.deepcopy(part))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """The end of the last item, if it is open."""
        if not self._is_open:
            return
        self._is_open, item = False, self._items[-1]
        [part] = item["content"]
        facts = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield self._event(f"{part['type']}.done", **self._place(), text=part["text"], **facts)
        yield self._event("content_part.done", **self._place(), part=part)
        item["status"] = status
        if item["type"] == "reasoning" and self._asked.wants_encrypted:
            item["encrypted_content"] = self._choice.signature
        yield self._event("output_item.done", **self._at(), item=item)

    def _end(self) -> Iterator[dict[str, Any]]:
        """The end of the items: of the open one, and of each call; an answer has a message or a call."""
        calls = self._choice.called
        if not calls and not any(item["type"] == "message" for item in self._items):
            yield from self._more("message", "")
        yield from self._close("completed" if calls else self._status)
        for call in calls:
            item = _item("function_call", status="in_progress", call_id=f"call_{call['id']}", arguments="")
            item["name"] = call["function"]["name"]
            self._items.append(item)
            yield self._event("output_item.added", **self._at(), item=dict(item))
            text = item["arguments"] = call["function"]["arguments"]
            place = {"item_id": item["id"], **self._at()}
            yield self._event("function_call_arguments.delta", **place, delta=text)
            yield self._event("function_call_arguments.done", **place, arguments=text)
            item["status"] = "completed"
            yield self._event("output_item.done", **self._at(), item=item)

    def _at(self) -> dict[str, Any]:
        """Where the last item stands."""
        return {"output_index": len(self._items) - 1}

    def _place(self) -> dict[str, Any]:
        """Where the part of the last item stands."""
        return {"item_id": self._items[-1]["id"], **self._at(), "content_index": 0}

    def _response(self, status: str, version: int | None = None) -> dict[str, Any]:
        """The whole answer, as far as it has come."""
        given, asked = self._asked.given, self._asked
        done = version is not None
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self._model,
            "output": self._items,
            **{name: given.get(name, value) for name, value in _REPEATED.items()},
            "background": False,
            "store": False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "usage": self._usage() if done else None,
            **({"weight_version": version} if done else {}),
        }

    def _usage(self) -> dict[str, Any]:
        """The numbers of tokens."""
        usage = usage_of(self.choices, self._prompts, 1)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thoughts},
            "total_tokens": usage["total_tokens"],
        }


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its answer repeats, and what it has without them."""


def _item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, **fields}


RESPONSES = Responses()
