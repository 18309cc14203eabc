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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from quatrain.config.errors import shown
from quatrain.data.messages import unfit
from quatrain.serve.choice import Choice, finite_logprobs, usage_of
from quatrain.serve.protocols.fields import (
    check_callers,
    fault,
    list_at,
    object_at,
    one_of,
    only,
    text_at,
)
from quatrain.serve.protocols.openai import openai_error
from quatrain.serve.protocols.protocol import AnswerForm, ChatProtocol
from quatrain.serve.requests import IGNORED, BadRequest, ChatRequest, checked, fields_of
from quatrain.serve.sessions import Session
from quatrain.serve.text import TokenText, Vocabulary
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
IGNORED_HERE = IGNORED | {
    *("truncation", "max_tool_calls"),  # nothing is truncated, and no tool runs here
    *("stream_options", "image", "access_programs", "background_options"),
}
"""Fields that are accepted with any value and ignored."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": ("an answer comes with its request", False),
    "conversation": ("nothing is stored",),
    "prompt": ("no prompts are stored",),
    "context_management": ("the server shortens no dialogue", []),
    "moderation": ("there is no moderation",),
    "personality": ("the server has no instructions of its own",),
}
"""Fields that must be left out: why, and the values that are as good as that."""
OF_CHAT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
}
"""Fields of a chat that have another name here."""
ENCRYPTED, LOGPROBS = INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
"""What `include` may ask for."""
_ITEMS = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "function_call": {
        *("type", "call_id", "name", "arguments"),
        *("id", "status", "caller", "parsed_arguments"),
    },
    "function_call_output": {"type", "call_id", "output", "id", "status", "caller", "name"},
    "reasoning": {"type", "encrypted_content", "id", "status", "summary", "content"},
}
"""Types of items -> their fields. Thoughts are left out, as templates leave out those of past answers."""
_TEXT = {"type", "text", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint"}
_PARTS = {
    "input_text": _TEXT,
    "output_text": _TEXT,
    "input_image": {"type", "image_url", "detail", "prompt_cache_breakpoint"},
}
"""Types of the parts of a content -> their fields."""
_FALSE = {"defer_loading", "async"}
"""Fields of a tool that must be false."""
_TOOL = {
    *("type", "name", "description", "parameters", "strict", "allowed_callers", "output_schema"),
    *_FALSE,
}
_PART_OF = {"reasoning": "reasoning_text", "message": "output_text"}
"""Items that come in parts -> the type of their one part."""
CALL = "call_"
"""What ids of calls begin with, before those that a chat has."""


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
        return ENCRYPTED in self.given.get("include", ())


class Responses(ChatProtocol):
    """OpenAI's Responses. `reads_thinking`: whether the chat template has the variable `enable_thinking`."""

    splits_thoughts = names_events = True

    def __init__(self, *, reads_thinking: bool):
        self._reads_thinking = reads_thinking

    def request(self, body: bytes, changed: Counter[str] | None, session: Session | None) -> ResponsesRequest:
        """As in every protocol."""
        fields = fields_of(body)
        given = dict(fields)
        for name, (why, *harmless) in REFUSED.items():
            if fields.pop(name, None) not in (None, *harmless):
                raise BadRequest(f"{name} is not supported: {why}; leave it out", name)
        for name in _REPEATED.keys() & given.keys():
            if reason := unfit(given[name]):
                raise BadRequest(f"{name} {reason}, as the answer repeats it; correct it", name)
        only("", fields, AS_IN_CHAT | CONVERTED | IGNORED_HERE)
        messages, hints = _messages(fields.get("input", []), _answers_of_calls(session))
        before = _before(fields, session)
        if "input" not in fields and not before:
            raise BadRequest("input is missing", "input")
        if any(message["role"] == "assistant" for message in [*before, *messages][-1:]):
            raise BadRequest("input: the last item must not be the model's: nothing follows it", "input")
        instructions = text_at("instructions", fields.get("instructions", ""))
        own = [{"role": "system", "content": instructions}] if instructions else []
        chat = {"model": "", **{name: value for name, value in fields.items() if name in AS_IN_CHAT}}
        chat |= {"messages": [*own, *before, *messages], "given": given, "num_instructions": len(own)}
        chat |= _tools(fields) | _format(fields) | _include(fields)
        if "max_output_tokens" in fields:
            chat["max_tokens"] = fields["max_output_tokens"]
        if (
            object_at("reasoning", fields.get("reasoning", {})).get("effort") == "none"
            and self._reads_thinking
        ):
            variables = object_at("chat_template_kwargs", fields.get("chat_template_kwargs", {}))
            chat["chat_template_kwargs"] = {"enable_thinking": False} | variables
        asked = checked(ResponsesRequest, chat, changed, OF_CHAT)
        asked.with_hints(hints)
        return asked

    def counted(self, body: bytes, session: Session | None) -> ResponsesRequest:
        """As in every protocol of chats."""
        return self.request(body, None, session)

    def count(self, number: int) -> dict[str, Any]:
        """As in every protocol of chats."""
        return {"object": "response.input_tokens", "input_tokens": number}

    def answer(
        self,
        asked: ChatRequest,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
    ) -> AnswerForm:
        """As in every protocol."""
        assert isinstance(asked, ResponsesRequest)
        return ResponsesAnswer(asked, model, choices, prompts)

    def error(self, error: BadRequest) -> dict[str, Any]:
        """As in every protocol, in OpenAI's form."""
        field, is_own = error.field or "", str(error).startswith(f"{error.field} is not supported")
        field = field if is_own else OF_CHAT.get(field, field)
        return openai_error(BadRequest(str(error), field or None, error.status, error.code))


# ------------------------------------------------------------------------------------------------ requests


def _before(fields: Mapping[str, Any], session: Session | None) -> Sequence[Mapping[str, Any]]:
    """The messages of the answer that the request names, without the instructions that it had."""
    name = fields.get("previous_response_id")
    if name is None:
        return ()
    found = None if session is None else session.named_answers.get(str(name))
    if found is None:
        where = "in this session" if session is not None else "here, where nothing is stored"
        raise BadRequest(
            f"previous_response_id must be the id of an answer; {shown(name)} is none {where}; give all of "
            "the items as `input`",
            "previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _answers_of_calls(session: Session | None) -> dict[str, int]:
    """Ids of the calls in a session's answers -> the number of the turn that said them."""
    return {
        call["id"]: number
        for number, turn in enumerate([] if session is None else list(session.tree.turns))
        for call in (turn.messages[-1].get("tool_calls", ()) if turn.messages else ())
    }


def _messages(given: Any, answers: Mapping[str, int]) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of `input`, and the signatures of answers in it.

    What the model said is one message, up to the next item that it did not say. Programs also write each
    result behind its call: a call that `answers` has in the same answer as the call before the results
    belongs to that message.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}], []
    if not isinstance(given, list):
        raise fault("input", "must be a text or a list of items", given)
    messages: list[dict[str, Any]] = []
    hints: list[str] = []
    goes_on = False
    for at, each in enumerate(given):
        path = f"input[{at}]"
        item = object_at(path, each)
        kind = one_of(f"{path}.type", item.get("type", "message"), _ITEMS, "leave the item out")
        only(path, item, _ITEMS[kind])
        check_callers(path, item)
        said = _said(item, kind, path)
        if said is None:
            messages.append(_of_others(item, kind, path))
        elif goes_on:
            messages[-1]["content"] += said["content"]
            messages[-1]["tool_calls"] += said["tool_calls"]
        elif (before := _of_same_answer(messages, said, answers)) is not None:
            # The ids decide, not the order: two answers with a call each are written alike.
            before["tool_calls"] += said["tool_calls"]
            continue
        else:
            messages.append(said)
        goes_on = said is not None
        if "encrypted_content" in item:
            hints.append(text_at(f"{path}.encrypted_content", item["encrypted_content"]))
    return messages, hints


def _of_same_answer(
    messages: Sequence[dict[str, Any]], said: Mapping[str, Any], answers: Mapping[str, int]
) -> dict[str, Any] | None:
    """The last message of the assistant, if only results follow it and `said` is a call of its answer."""
    before = next((each for each in reversed(messages) if each["role"] != "tool"), None)
    if before is None or before["role"] != "assistant":
        return None
    one, other = ({answers.get(call["id"]) for call in each["tool_calls"]} for each in (before, said))
    return before if one == other and len(one - {None}) == 1 else None


def _said(item: Mapping[str, Any], kind: str, path: str) -> dict[str, Any] | None:
    """The message of the assistant that an item is a part of; None: others said it."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    if kind == "message" and item.get("role") == "assistant":
        content = _content(f"{path}.content", item.get("content"), ("input_text", "output_text"))
        return message | {"content": content}
    if kind == "function_call":
        name, arguments = (text_at(f"{path}.{name}", item.get(name)) for name in ("name", "arguments"))
        function = {"name": name, "arguments": arguments}
        call = {"id": _call_id(path, item), "type": "function", "function": function}
        return message | {"tool_calls": [call]}
    return message if kind == "reasoning" else None


def _of_others(item: Mapping[str, Any], kind: str, path: str) -> dict[str, Any]:
    """The message that an item is which the model did not say."""
    parts = ("input_text", "input_image")
    if kind == "function_call_output":
        content = _content(f"{path}.output", item.get("output"), parts)
        return {"role": "tool", "tool_call_id": _call_id(path, item), "content": content}
    role = one_of(f"{path}.role", item.get("role"), ("user", "assistant", "system", "developer"))
    return {"role": role, "content": _content(f"{path}.content", item.get("content"), parts)}


def _call_id(path: str, item: Mapping[str, Any]) -> str:
    """The id of a call, as it was made here."""
    return text_at(f"{path}.call_id", item.get("call_id")).removeprefix(CALL)


def _content(path: str, given: Any, kinds: Sequence[str]) -> str | list[dict[str, Any]]:
    """A text, or with pictures the parts of a chat; parts may be of these kinds."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise fault(path, "must be a text or a list of parts", given)
    parts: list[dict[str, Any]] = []
    for at, each in enumerate(given):
        place = f"{path}[{at}]"
        part = object_at(place, each)
        kind = one_of(f"{place}.type", part.get("type"), kinds, "leave the part out")
        only(place, part, _PARTS[kind])
        if kind == "input_image":
            url = text_at(f"{place}.image_url", part.get("image_url"))
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": text_at(f"{place}.text", part.get("text"))})
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tools of a chat, and its choice of them."""
    tools = []
    for at, each in enumerate(list_at("tools", fields.get("tools", []))):
        path = f"tools[{at}]"
        tool = object_at(path, each)
        one_of(f"{path}.type", tool.get("type"), ("function",), "leave the tool out")
        only(path, tool, _TOOL)
        check_callers(path, tool)
        for name in _FALSE & tool.keys():
            if tool[name] is not False:
                raise fault(f"{path}.{name}", "must be false, as the server has no such tools", tool[name])
        # Without `strict`, as a template would write it into the prompt.
        function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
        tools.append({"type": "function", "function": function})
    choice = fields.get("tool_choice", "auto")
    if isinstance(choice, Mapping):
        one_of("tool_choice.type", choice.get("type"), ("function",), "give the tools that may be called")
        only("tool_choice", choice, ("type", "name"))
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tools": tools, "tool_choice": choice}


def _format(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `response_format` of a chat, unless any text is one."""
    text = object_at("text", fields.get("text", {}))
    only("text", text, ("format", "verbosity"))
    form = object_at("text.format", text.get("format", {"type": "text"}))
    kind = one_of("text.format.type", form.get("type"), ("text", "json_object", "json_schema"))
    if kind == "text":
        return {}
    only(
        "text.format",
        form,
        ("type", *(("name", "schema", "strict", "description") if kind == "json_schema" else ())),
    )
    inner = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": kind, **({kind: inner} if kind == "json_schema" else {})}}


def _include(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer has beside its text, as a chat asks for it."""
    names = list_at("include", fields.get("include", []))
    for at, name in enumerate(names):
        one_of(f"include[{at}]", name, INCLUDED, "leave it out")
    return {"logprobs": True} if LOGPROBS in names else {}


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
        self._numbers = itertools.count()
        self._num_thoughts, self._undecided = 0, list[tuple[TokenText, float]]()
        """Tokens of thoughts, and those of which it is not known yet whether they begin one."""

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
        choice, ended = self._choice, self._choice.finish_reason is not None
        at, finished, said = 0, False, list[tuple[str, str, list[dict[str, Any]]]]()
        while at < len(piece.tokens) or (ended and not finished):
            was_thinking = choice.is_thinking
            # One by one where thoughts may begin or end: their tokens are counted.
            step = slice(at, at + 1 if choice.may_think else len(piece.tokens))
            at, finished = step.stop, ended and step.stop >= len(piece.tokens)
            text, thoughts, _ = choice.said(piece.tokens[step], finished=finished)
            self._undecided += self._known(piece, step)
            if was_thinking or choice.is_thinking:
                self._num_thoughts += len(self._undecided)
                self._undecided = []
            elif finished or not choice.is_undecided:
                choice.unlisted.extend(self._undecided if self._asked.wants_logprobs else ())
                self._undecided = []
            # Now, or those of a text behind further thoughts, another item, would be in this one.
            new = list(choice.listed(ended=finished)) if text else []
            said += [each for each in (("reasoning", thoughts, []), ("message", text, new)) if each[1]]
        for kind, same in itertools.groupby(said, key=lambda each: each[0]):
            _, texts, logprobs = zip(*same, strict=True)
            yield from self._more(kind, "".join(texts), itertools.chain.from_iterable(logprobs))
        if ended:
            yield from self._end()

    def _known(self, piece: Piece, step: slice) -> Iterator[tuple[TokenText, float]]:
        """The texts of tokens, and their log-probabilities."""
        values = finite_logprobs(piece) if self._asked.wants_logprobs else piece.logprobs
        texts = map(self._choice.token_texts.push, piece.tokens[step])
        return zip(texts, values[step], strict=True)

    def _more(
        self, kind: str, text: str, logprobs: Iterable[dict[str, Any]] = ()
    ) -> Iterator[dict[str, Any]]:
        """Further text of an item of this type, which is the last one or a new one."""
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        part, place = self._items[-1]["content"][0], self._place()
        part["text"] += text
        if kind == "message":
            place["logprobs"] = list(logprobs)
            part["logprobs"] += place["logprobs"]
        yield self._event(f"{part['type']}.delta", **place, delta=text)

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        """A new item, with its one part."""
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        self._items.append(_item(kind, status="in_progress", **own, content=[]))
        yield self._event("output_item.added", **self._at(), item=copy.deepcopy(self._items[-1]))
        part: dict[str, Any] = {"type": _PART_OF[kind], "text": ""}
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
        lacks_message = not calls and not any(item["type"] == "message" for item in self._items)
        # Tokens of calls are no text: they are listed in the message before them.
        lists_more = self._asked.wants_logprobs and self._is_open and self._items[-1]["type"] == "message"
        if lacks_message or lists_more:
            yield from self._more("message", "", self._choice.listed())
        yield from self._close("completed" if calls else self._status)
        for call in calls:
            item = _item("function_call", status="in_progress", call_id=CALL + call["id"], arguments="")
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
