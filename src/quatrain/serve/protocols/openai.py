"""OpenAI's chat and completions: their requests, and their answers whole and in parts.

Data flow: a body -> `Chat` or `Completions` -> a request of `requests.py`; the `Choice`s of its answer ->
`OpenAiAnswer` -> JSON, for `answering.py`.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quatrain.serve.choice import NOT_FINITE, Choice, finite_logprobs, named_by_id, usage_of
from quatrain.serve.protocols.protocol import AnswerForm, Asked, Protocol
from quatrain.serve.requests import BadRequest, ChatRequest, CompletionRequest, GenerateRequest, parsed
from quatrain.serve.sessions import Session
from quatrain.serve.text import TokenText, TokenTexts, Vocabulary
from quatrain.types.piece import Piece
from quatrain.types.sampler import Progress

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
"""Status of an error -> its type, where it is not that of all below or from 500 on."""


class OpenAi(Protocol[Asked]):
    """A protocol of OpenAI's, for requests of the class `kind`."""

    ending = "data: [DONE]\n\n"

    def __init__(self, kind: type[Asked]):
        self._kind = kind

    def request(self, body: bytes, changed: Counter[str] | None, session: Session | None) -> Asked:
        """As in every protocol."""
        return parsed(self._kind, body, changed)

    def answer(
        self,
        asked: Asked,
        model: str,
        choices: Sequence[Choice],
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
    ) -> AnswerForm:
        """As in every protocol."""
        assert not isinstance(asked, GenerateRequest)
        return OpenAiAnswer(asked, model, choices, prompts, vocabulary)

    def error(self, error: BadRequest) -> dict[str, Any]:
        """As in every protocol."""
        return openai_error(error)


def openai_error(error: BadRequest) -> dict[str, Any]:
    """An error in OpenAI's form."""
    other = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, other)
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.code}}


class OpenAiAnswer(AnswerForm):
    """The JSON of an answer to a completion or a chat, whole or in parts."""

    def __init__(
        self,
        asked: CompletionRequest | ChatRequest,
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
        choices = []
        for index, choice in enumerate(self.choices):
            choice.echoed = self._echoed(index)
            said = self._said(choice)
            facts = self._facts(choice, choice.sampled, prompt=True)
            choices.append({"index": index, **said, **facts})
        numbers = {"usage": self._usage(), "weight_version": version}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, **self._chat_prompt(), **numbers}

    def _said(self, choice: Choice) -> dict[str, Any]:
        """What a whole choice says."""
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

    def failed(self, error: BadRequest) -> Iterator[dict[str, Any]]:
        """The error itself, and no `[DONE]`."""
        yield openai_error(error)

    def _usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self._prompts, self._asked.n)

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
            values = finite_logprobs(piece)
            texts = list(map(choice.token_texts.push, tokens))
            if self._asked.return_tokens_as_token_ids:
                texts = [
                    text._replace(name=named_by_id(token)) for text, token in zip(texts, tokens, strict=True)
                ]
            if self._is_chat:
                choice.unlisted += zip(texts, values, strict=True)
                ids = self._asked.return_token_ids or self._asked.return_tokens_as_token_ids
                facts["logprobs"] = {"content": list(choice.listed(every=ids))}
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
            facts["routed_experts"] = choice.routed_experts()
        if self._asked.return_sampling_mask:
            facts["sampling_mask"] = choice.sampling_mask()
        return facts

    def _named(self, choice: Choice, texts: list[TokenText], values: list[float]) -> dict[str, Any]:
        """The log-probabilities of a completion, scored ones if each token has alternatives."""
        scores, num_prompt, num_likeliest = choice.scores, len(choice.prompt_ids), self._asked.num_likeliest
        known: list[float | None] = [*values]
        if scores is not None and not np.isfinite(scores.logprobs[1:]).all():
            raise BadRequest(NOT_FINITE, status=500)
        if scores is not None and num_likeliest:
            known = scores.logprobs[num_prompt:].tolist()
        names = [text.name for text in texts]
        offsets = [text.start + len(choice.echoed or "") for text in texts]
        if scores is not None and choice.echoed is not None:
            prompt = list(map(TokenTexts(self._vocabulary).push, choice.prompt_ids))
            if self._asked.return_tokens_as_token_ids:
                names = [*map(named_by_id, choice.prompt_ids), *names]
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
            raise BadRequest(NOT_FINITE, status=500)
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
            named.setdefault(named_by_id(token) if by_id else self._vocabulary.name(token, first), logprob)
        named.setdefault(name, value)
        return named


CHAT, COMPLETIONS = OpenAi(ChatRequest), OpenAi(CompletionRequest)
