"""What has come of a completion so far: its tokens, its text, thoughts and calls.

Data flow: `Progress` of the sequences of a request -> their `Choice`s -> an answer in the form of a protocol.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import numpy as np

from quatrain.data.tool_calls import CallStream
from quatrain.data.turns import CALL_ID
from quatrain.engine.scoring import Scores
from quatrain.serve.requests import BadRequest
from quatrain.serve.text import TextStream, ThoughtStream, TokenText, TokenTexts
from quatrain.types.answer_text import Channels, Said
from quatrain.types.call_forms import ToolCall
from quatrain.types.kept import KEPT
from quatrain.types.piece import Piece
from quatrain.types.routes import ROUTES, routes_to_text
from quatrain.types.sampler import Progress

NOT_FINITE = "the model's logits are not finite; load other weights"


@dataclass
class Choice:
    """What has come of a completion."""

    text: TextStream
    token_texts: TokenTexts
    prompt_ids: Sequence[int]
    channels: Channels | None = None
    """What tells the thoughts in the answer of a chat from its text."""
    thinking: ThoughtStream | None = None
    """What tells thoughts up to `</think>` from the text, in a protocol that has a place for them."""
    calls: CallStream | None = None
    """What finds the calls in the text, if there are tools."""
    signature: str = ""
    """Names the answer to clients that give signatures back."""
    echoed: str | None = None
    """The text of the prompt, if the answer begins with it."""
    content: str = ""
    """The text that was said so far, outside of calls."""
    thoughts: str = ""
    """The thoughts so far that are no part of the text."""
    called: list[dict[str, Any]] = field(default_factory=list)
    """The calls that were said, as OpenAI's clients get them."""
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

    @property
    def is_thinking(self) -> bool:
        """Whether further tokens are those of a thought."""
        return any(each is not None and each.is_thinking for each in (self.channels, self.thinking))

    @property
    def may_think(self) -> bool:
        """Whether further tokens may be those of a thought."""
        return any(each is not None and each.may_think for each in (self.channels, self.thinking))

    @property
    def is_undecided(self) -> bool:
        """Whether it is not known yet what the last tokens are."""
        return self.thinking is not None and self.thinking.may_think and not self.thinking.is_thinking

    def said(self, tokens: Sequence[int], *, finished: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """What is new of the text outside of calls and of the thoughts, and at the end the calls."""
        pieces = self.text.pieces(tokens, finished=finished)
        thoughts, new = "", "".join(pieces)
        if self.channels is not None:
            said, last = self.channels.push(pieces), self.channels.end() if finished else Said()
            thoughts, new = said.thoughts + last.thoughts, said.text + last.text
        if self.thinking is not None:
            said, last = self.thinking.push(new), self.thinking.end() if finished else Said()
            thoughts, new = thoughts + said.thoughts + last.thoughts, said.text + last.text
        if self.calls is not None:
            if finished and self.thinking is not None and self.thinking.never_closed:
                self.calls.skip(self.thoughts + thoughts)
            new = self.calls.push(new)
            rest, calls = self.calls.end() if finished else ("", [])
            new, self.called = new + rest, list(map(_call, calls))
        self.content += new
        self.thoughts += thoughts
        return new, thoughts, self.called

    def in_order(self, tokens: Sequence[int], *, finished: bool) -> Iterator[tuple[str, str]]:
        """(`thinking` or `text`, what is new of it) in the order in which the tokens say it."""
        parts, at = list[tuple[str, str]](), 0
        while at < len(tokens) or (finished and at == len(tokens)):
            # One by one where thoughts may begin or end: `said` tells no order.
            end = at + 1 if self.may_think else max(len(tokens), at + 1)
            text, thoughts, _ = self.said(tokens[at:end], finished=finished and end >= len(tokens))
            parts += [(kind, new) for kind, new in (("thinking", thoughts), ("text", text)) if new]
            at = end if end < len(tokens) else len(tokens) + 1
        for kind, same in groupby(parts, key=lambda part: part[0]):
            yield kind, "".join(new for _, new in same)

    def listed(self, *, every: bool = False, ended: bool | None = None) -> Iterator[dict[str, Any]]:
        """The tokens not listed before of which the text sampled so far consists, or `every` token.

        `ended`: whether all tokens were said; None: they were if the answer has ended.
        """
        ended = self.finish_reason is not None if ended is None else ended
        certain = every or (ended and not self.text.stopped)
        while self.unlisted:
            token, value = self.unlisted[0]
            # Bytes of a character that is not whole end where they begin; it may be that of a stop string.
            is_said = token.start < self.text.length or not token.bytes
            if not (certain or (is_said and (ended or token.end <= self.text.length))):
                return
            self.unlisted.popleft()
            if token.bytes or every:
                yield {"token": token.name, "logprob": value, "bytes": list(token.bytes), "top_logprobs": []}

    def routed_experts(self) -> str:
        """The experts of each token of prompt and completion but the last, in vLLM's form."""
        inputs = len(self.prompt_ids) + len(self.sampled.tokens) - 1
        if not self.sampled.tokens or not (routes := self.sampled.rows(ROUTES, 0, inputs)):
            raise BadRequest(
                "routes are those of a model with experts, of which tokens are sampled, and there are none "
                "with rollout.record_routes false; leave this out",
                "return_routed_experts",
            )
        return routes_to_text(np.concatenate(routes))

    def sampling_mask(self) -> list[list[int]]:
        """The words that each token of the completion was drawn from, in vLLM's form."""
        first = len(self.prompt_ids)
        sets = self.sampled.rows(KEPT, first, first + len(self.sampled.tokens))
        return [words.tolist() for words in chain.from_iterable(sets)]


def finite_logprobs(piece: Piece) -> list[float]:
    """The log-probabilities of sampled tokens; raises BadRequest for those of broken weights."""
    if not all(map(math.isfinite, piece.logprobs)):
        raise BadRequest(NOT_FINITE, status=500)
    return piece.logprobs


def named_by_id(token: int) -> str:
    """A token's name in log-probabilities with `return_tokens_as_token_ids`, in vLLM's form."""
    return f"token_id:{token}"


def usage_of(choices: Sequence[Choice], prompts: Sequence[Sequence[int]], n: int) -> dict[str, Any]:
    """The numbers of tokens of an answer, `n` choices a prompt, in OpenAI's form."""
    asked, sampled = sum(map(len, prompts)), sum(len(choice.sampled.tokens) for choice in choices)
    # Of each prompt, as it counts once: the other choices find what the first has computed.
    cached = sum(choice.cached for choice in choices[::n])
    usage = {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}
    return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def _call(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form. Its id has the form of CALL_ID, and is new: models repeat their own."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    identity = secrets.token_hex(len(CALL_ID))[: len(CALL_ID)]
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}
