"""The JSON of an answer, in OpenAI's form or vLLM's, whole or in parts.

Data flow: `Progress` of the sequences of a request -> their `Choice`s -> `Answer` -> JSON, for `api.py`.
"""

from __future__ import annotations

import json
import math
import secrets
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quatrain.data.tool_calls import CallStream
from quatrain.data.turns import CALL_ID
from quatrain.engine.scoring import Scores
from quatrain.serve.requests import AnyRequest, BadRequest, ChatRequest, CompletionRequest, GenerateRequest
from quatrain.serve.text import TextStream, TokenText, TokenTexts, Vocabulary
from quatrain.types.answer_text import Channels, Said
from quatrain.types.call_forms import ToolCall
from quatrain.types.piece import Piece
from quatrain.types.routes import ROUTES, routes_to_text
from quatrain.types.sampler import Progress


@dataclass
class Choice:
    """What has come of a completion."""

    text: TextStream
    token_texts: TokenTexts
    prompt_ids: Sequence[int]
    channels: Channels | None = None
    """What tells the thoughts in the answer of a chat from its text."""
    calls: CallStream | None = None
    """What finds the calls in the text, if there are tools."""
    echoed: str | None = None
    """The text of the prompt, if the answer begins with it."""
    content: str = ""
    """The text that was said so far, outside of calls."""
    thoughts: str = ""
    """The thoughts so far that are no part of the text."""
    called: list[dict[str, Any]] = field(default_factory=list)
    """The calls that were said, as the client gets them."""
    scores: Scores | None = None
    """Of the tokens of the prompt, and of the completion if there are alternatives to each."""
    sampled: Piece = field(default_factory=Piece)
    finish_reason: str | None = None
    cached: int = 0
    """Tokens of the prompt that were not computed, as a kept context had them."""
    unlisted: deque[tuple[TokenText, float]] = field(default_factory=deque)
    """Tokens of a chat whose text was not returned yet, each with its log-probability."""

    def add(self, progress: Progress) -> None:
        """Notes what a round added."""
        self.sampled.append(progress.piece)
        self.finish_reason, self.cached = progress.finish_reason, progress.cached

    @property
    def message(self) -> dict[str, Any]:
        """The answer of a chat, as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.called:
            message |= {"content": self.content or None, "tool_calls": self.called}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        return message

    def said(self, tokens: Sequence[int], *, finished: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """What is new of the text outside of calls and of the thoughts, and at the end the calls."""
        pieces = self.text.pieces(tokens, finished=finished)
        thoughts, new = "", "".join(pieces)
        if self.channels is not None:
            said, last = self.channels.push(pieces), self.channels.end() if finished else Said()
            thoughts, new = said.thoughts + last.thoughts, said.text + last.text
        if self.calls is not None:
            new = self.calls.push(new)
            rest, calls = self.calls.end() if finished else ("", [])
            new, self.called = new + rest, list(map(_call, calls))
        self.content += new
        self.thoughts += thoughts
        return new, thoughts, self.called


class Answer:
    """The JSON of an answer, in OpenAI's form, or vLLM's, whole or in parts."""

    def __init__(
        self,
        asked: AnyRequest,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
    ):
        self._asked, self.choices, self._vocabulary = asked, choices, vocabulary
        self._is_chat = isinstance(asked, ChatRequest)
        self._prompts = prompts
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, version: int) -> dict[str, Any]:
        """The answer to a request without a stream."""
        choices, is_generate = [], isinstance(self._asked, GenerateRequest)
        for index, choice in enumerate(self.choices):
            choice.echoed = self._echoed(index)
            said = self._said(choice)
            facts = self._facts(choice, choice.sampled, prompt=not is_generate)
            choices.append({"index": index, **said, **facts})
        numbers = {"usage": self._usage(), "weight_version": version}
        if isinstance(self._asked, GenerateRequest):
            head = {"request_id": self._asked.request_id, "model": self._head["model"]}
            return {**head, "choices": choices, **numbers}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, **self._chat_prompt(), **numbers}

    def _said(self, choice: Choice) -> dict[str, Any]:
        """What a whole choice says."""
        if isinstance(self._asked, GenerateRequest):
            return {}
        content, _, _ = choice.said(choice.sampled.tokens, finished=True)
        if self._is_chat:
            return {"message": choice.message}
        return {"text": (choice.echoed or "") + content}

    def _chat_prompt(self) -> dict[str, Any]:
        """In a chat, the ids of its prompt, if ids were asked for."""
        asked = self._asked.return_token_ids or self._asked.return_tokens_as_token_ids
        return {"prompt_token_ids": list(self._prompts[0])} if self._is_chat and asked else {}

    def _echoed(self, index: int) -> str | None:
        """The text of a choice's prompt: as it came, or that of its ids without special tokens."""
        if not (isinstance(self._asked, CompletionRequest) and self._asked.echo):
            return None
        prompt = self._asked.prompts[index // self._asked.n]
        return prompt if isinstance(prompt, str) else self._vocabulary.text(prompt)

    def first(self) -> Iterator[dict[str, Any]]:
        """The events before the first token: in a chat, who speaks."""
        if self._is_chat:
            for index in range(len(self.choices)):
                content = "" if self.choices[index].calls is None else None
                delta = {"role": "assistant", "content": content}
                yield {**self._delta(index, delta), **(self._chat_prompt() if index == 0 else {})}

    def parts(self, number: int, progress: Progress) -> Iterator[dict[str, Any]]:
        """The events of a sequence's progress: one, and at the end of a chat one of each call before it."""
        choice = self.choices[number]
        is_first = not choice.sampled.tokens
        choice.add(progress)
        ended = progress.finish_reason is not None
        new, thoughts, calls = choice.said(progress.piece.tokens, finished=ended)
        facts = self._facts(choice, progress.piece, prompt=is_first)
        said: dict[str, Any] = {"content": new} if new or ended or choice.calls is None else {}
        if thoughts and self._is_chat:
            yield self._delta(number, {"reasoning_content": thoughts})
        if calls:
            if new:
                yield self._delta(number, said)
            for index, call in enumerate(calls):
                yield self._delta(number, {"tool_calls": [{"index": index, **call}]})
            said = {}
        yield self._chunk(
            [{"index": number, **({"delta": said} if self._is_chat else {"text": new}), **facts}]
        )

    def _delta(self, number: int, delta: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}])

    def last(self, version: int) -> Iterator[dict[str, Any]]:
        """The event with the numbers of tokens, if it was asked for."""
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            yield {**self._chunk([]), "usage": self._usage(), "weight_version": version}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _facts(self, choice: Choice, piece: Piece, *, prompt: bool) -> dict[str, Any]:
        """What is said of tokens beside their text; a choice that was cut may lack further calls."""
        tokens, reason = piece.tokens, choice.finish_reason
        reason = "tool_calls" if choice.called and reason == "stop" else reason
        facts: dict[str, Any] = {"finish_reason": reason, "logprobs": None}
        if self._asked.wants_logprobs:
            values = piece.logprobs
            if not all(map(math.isfinite, values)):
                raise BadRequest("the model's logits are not finite; load other weights", status=500)
            texts = list(map(choice.token_texts.push, tokens))
            if self._asked.return_tokens_as_token_ids:
                texts = [
                    text._replace(name=_named_by_id(token)) for text, token in zip(texts, tokens, strict=True)
                ]
            if self._is_chat:
                choice.unlisted += zip(texts, values, strict=True)
                facts["logprobs"] = {"content": list(self._listed(choice))}
            elif isinstance(self._asked, GenerateRequest):
                pairs = zip(texts, values, strict=True)
                facts["logprobs"] = {
                    "content": [{"token": text.name, "logprob": value} for text, value in pairs]
                }
            else:
                facts["logprobs"] = self._named(choice, texts, values)
        if isinstance(self._asked, CompletionRequest) and self._asked.prompt_logprobs is not None:
            facts["prompt_logprobs"] = self._of_prompt(choice, self._asked.prompt_logprobs)
        if self._asked.return_token_ids:
            facts["token_ids"] = tokens
            facts["weight_versions"] = piece.versions
            if prompt:
                facts["prompt_token_ids"] = list(choice.prompt_ids)
        if self._asked.return_routed_experts:
            facts["routed_experts"] = _routed_experts(choice)
        return facts

    def _named(self, choice: Choice, texts: list[TokenText], values: list[float]) -> dict[str, Any]:
        """The log-probabilities of a completion, scored ones if each token has alternatives."""
        scores, num_prompt, num_likeliest = choice.scores, len(choice.prompt_ids), self._asked.num_likeliest
        known: list[float | None] = [*values]
        if scores is not None and not np.isfinite(scores.logprobs[1:]).all():
            raise BadRequest("the model's logits are not finite; load other weights", status=500)
        if scores is not None and num_likeliest:
            known = scores.logprobs[num_prompt:].tolist()
        names = [text.name for text in texts]
        offsets = [text.start + len(choice.echoed or "") for text in texts]
        if scores is not None and choice.echoed is not None:
            prompt = list(map(TokenTexts(self._vocabulary).push, choice.prompt_ids))
            if self._asked.return_tokens_as_token_ids:
                names = [*map(_named_by_id, choice.prompt_ids), *names]
            else:
                names = [*(text.name for text in prompt), *names]
            offsets = [*(text.start for text in prompt), *offsets]
            known = [None, *scores.logprobs[1:num_prompt].tolist(), *known]
        top = None
        if scores is not None and num_likeliest:
            pairs = [each[:num_likeliest] for each in scores.pairs()[len(scores.logprobs) - len(names) :]]
            first = [choice.echoed is None, *[False] * len(names)]
            top = list(map(self._alternatives, names, known, pairs, first))
        return {"tokens": names, "token_logprobs": known, "top_logprobs": top, "text_offset": offsets}

    def _of_prompt(self, choice: Choice, count: int) -> list[dict[str, Any] | None]:
        """In vLLM's form: of each token of the prompt, it and the `count` likeliest in its place, by ids.

        The first has nothing before it, and null; a token that is not among the likeliest has a null rank.
        """
        assert choice.scores is not None, "prompt_logprobs are scored"
        if not np.isfinite(choice.scores.logprobs[1:]).all():
            raise BadRequest("the model's logits are not finite; load other weights", status=500)
        places: list[dict[str, Any] | None] = [None]
        every = zip(choice.prompt_ids, choice.scores.logprobs.tolist(), choice.scores.pairs(), strict=False)
        for token, value, pairs in list(every)[1:]:
            place = {
                str(word): {"logprob": logprob, "rank": rank, "decoded_token": self._vocabulary.text([word])}
                for rank, (word, logprob) in enumerate(pairs[:count], 1)
            }
            own = {"logprob": value, "rank": None, "decoded_token": self._vocabulary.text([token])}
            place.setdefault(str(token), own)
            places.append(place)
        return places

    def _alternatives(
        self, name: str, value: float | None, likeliest: list[tuple[int, float]], first: bool
    ) -> dict[str, float] | None:
        """The likeliest tokens in the place of one, and that token; None where nothing stands before it.

        Of tokens with the same name, the likeliest counts. `first`: whether a text begins here.
        """
        if value is None:
            return None
        named: dict[str, float] = {}
        for token, logprob in likeliest:
            by_id = self._asked.return_tokens_as_token_ids
            named.setdefault(_named_by_id(token) if by_id else self._vocabulary.name(token, first), logprob)
        named.setdefault(name, value)
        return named

    def _listed(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The tokens of which the text sampled so far consists; if ids were asked for, every token."""
        text, ended = choice.text, choice.finish_reason is not None
        ids = self._asked.return_token_ids or self._asked.return_tokens_as_token_ids
        every = ids or (ended and not text.stopped)
        while choice.unlisted:
            token, value = choice.unlisted[0]
            if not (every or (token.start < text.length if ended else token.end <= text.length)):
                return
            choice.unlisted.popleft()
            if token.bytes or ids:
                yield {"token": token.name, "logprob": value, "bytes": list(token.bytes), "top_logprobs": []}

    def _usage(self) -> dict[str, Any]:
        asked = sum(map(len, self._prompts))
        sampled = sum(len(choice.sampled.tokens) for choice in self.choices)
        # Of each prompt, as it counts once: the other choices find what the first has computed.
        cached = sum(choice.cached for choice in self.choices[:: self._asked.n])
        usage = {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def _routed_experts(choice: Choice) -> str:
    """The experts of each token of prompt and completion but the last, in vLLM's form."""
    sampled = choice.sampled
    inputs = len(choice.prompt_ids) + len(sampled.tokens) - 1
    if not sampled.tokens or not (routes := sampled.rows(ROUTES, 0, inputs)):
        raise BadRequest(
            "routes are those of a model with experts, of which tokens are sampled, and there are none with "
            "rollout.record_routes false; leave this out",
            "return_routed_experts",
        )
    return routes_to_text(np.concatenate(routes))


def _named_by_id(token: int) -> str:
    """A token's name in log-probabilities with `return_tokens_as_token_ids`, in vLLM's form."""
    return f"token_id:{token}"


def _call(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form. Its id has the form of CALL_ID, and is new: models repeat their own."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    identity = secrets.token_hex(len(CALL_ID))[: len(CALL_ID)]
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}
