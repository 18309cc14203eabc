"""The HTTP interface: OpenAI's completions and chat, vLLM's `generate`, and verbs for weights.

Data flow: a request -> checked (`requests.py`) -> token ids -> `EngineService` -> `Progress` -> JSON, whole
or as a stream of events. The event loop only passes these on: text is encoded, decoded and written as JSON in
threads.
"""

from __future__ import annotations

import asyncio
import copy
import hmac
import json
import math
import secrets
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from quatrain import __version__
from quatrain.data.chat_template import check_variables
from quatrain.data.tokenizer import render
from quatrain.data.turns import CALL_ID, begun_call, warn_of_unwritten
from quatrain.engine.scoring import Scores
from quatrain.engine.service import EngineService, Progress, ServiceFailed
from quatrain.environments.tool_calls import CallStream, ToolCall
from quatrain.rollout.server_kinds import TOKEN
from quatrain.serve.requests import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    WeightsRequest,
    parsed,
)
from quatrain.serve.text import TextStream, TokenText, TokenTexts, Vocabulary
from quatrain.types.batches import Prompt

MOST_BYTES = 32 * 2**20
"""Bytes of the body of a request."""
LOOK_S = 0.5
"""Seconds between two looks whether a client that waits for an answer is still there."""

AnyRequest = CompletionRequest | ChatRequest | GenerateRequest
Handler = Callable[[Request], Awaitable[Response]]
Events = AsyncIterator[tuple[int, Progress]]


@dataclass
class _Choice:
    """What has come of a completion."""

    text: TextStream
    token_texts: TokenTexts
    prompt_ids: Sequence[int]
    calls: CallStream | None = None
    """What finds the calls in the text, if there are tools."""
    echoed: str | None = None
    """The text of the prompt, if the answer begins with it."""
    scores: Scores | None = None
    """Of the tokens of the prompt, and of the completion if there are alternatives to each."""
    progress: list[Progress] = field(default_factory=list)
    unlisted: deque[tuple[TokenText, float]] = field(default_factory=deque)
    """Tokens of a chat whose text was not returned yet, each with its log-probability."""

    @property
    def tokens(self) -> list[int]:
        return [token for progress in self.progress for token in progress.tokens]

    def said(self, tokens: Sequence[int], *, finished: bool) -> tuple[str, list[ToolCall]]:
        """The text outside of calls that is certain since the last call of this, and at the end the calls."""
        new = self.text.push(tokens, finished=finished)
        if self.calls is None:
            return new, []
        certain = self.calls.push(new)
        rest, calls = self.calls.end() if finished else ("", [])
        return certain + rest, calls


class Api:
    """Answers requests for the model named `model`, whose weights `service` samples from.

    `token`: what requests must bring, all but `GET /health`; None: no request needs one, and weights and
    pauses are refused. Positions of prompt and completion together are at most `max_positions`.
    """

    def __init__(
        self,
        service: EngineService,
        tokenizer: Any,
        *,
        model: str,
        vocab_size: int,
        max_positions: int,
        token: str | None,
    ):
        self._service, self._model, self._token = service, model, token
        self._vocab_size, self._max_positions = vocab_size, max_positions
        self._tokenizer = copy.deepcopy(tokenizer)  # the engine's thread uses the other
        self._vocabulary = Vocabulary(self._tokenizer)
        self._described = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "quatrain",
            "max_model_len": max_positions,
        }
        self._encoding = asyncio.Lock()
        self._had_tools = False

    def app(self, hosts: Sequence[str]) -> Starlette:
        """The application; it answers requests that name one of `hosts`, or any with "*"."""
        routes: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._named_model),
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/inference/v1/generate": ("POST", self._generate),
            "/weights": ("POST", self._weights),
            "/pause": ("POST", self._pause),
            "/resume": ("POST", self._resume),
        }
        return Starlette(
            routes=[
                Route(path, self._answered(path, handler), methods=[method])
                for path, (method, handler) in routes.items()
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
            exception_handlers={HTTPException: _unknown, Exception: _failed},
        )

    def _answered(self, path: str, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                self._authorise(request, path)
                return await handler(request)
            except BadRequest as error:
                return _error(error.status, str(error), error.field)
            except ServiceFailed as error:
                return _error(503, str(error))
            except ClientDisconnect:
                return Response(status_code=499)

        return answer

    def _authorise(self, request: Request, path: str) -> None:
        if path == "/health":
            return
        if self._token is None:
            if path in ("/weights", "/pause", "/resume"):
                raise BadRequest(
                    f"{path} needs a token, which this server does not have; start it with {TOKEN} set, and "
                    "send `Authorization: Bearer` with its value",
                    status=403,
                )
            return
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), self._token.encode()):
            raise BadRequest(
                f"{path} needs the server's token; send `Authorization: Bearer` with the value of {TOKEN}",
                status=401,
            )

    async def _health(self, request: Request) -> Response:
        error = self._service.error
        if error is not None:
            return JSONResponse({"status": error}, status_code=503)
        return JSONResponse({"status": "paused" if self._service.paused else "ok"})

    async def _version(self, request: Request) -> Response:
        facts = {"engine": "quatrain", "version": __version__}
        return JSONResponse({**facts, "weight_version": self._service.version})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described]})

    async def _named_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model:
            raise BadRequest(
                f"this server has the model {self._model}; got {name[:100]!r}; see /v1/models",
                "model",
                status=404,
            )
        return JSONResponse(self._described)

    async def _metrics(self, request: Request) -> Response:
        service = self._service
        numbers = {
            "sequences_running": ("gauge", service.num_running),
            "weight_version": ("gauge", service.version),
            "paused": ("gauge", int(service.paused)),
            **{f"{name}_total": ("counter", number) for name, number in vars(service.totals).items()},
        }
        text = "".join(
            f"# TYPE quatrain_{name} {kind}\nquatrain_{name} {value}\n"
            for name, (kind, value) in numbers.items()
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _weights(self, request: Request) -> Response:
        asked = parsed(WeightsRequest, await _body(request))
        try:
            version = await asyncio.to_thread(self._service.load, asked.path, asked.version)
        except (ValueError, OSError) as error:
            raise BadRequest(str(error), "path") from error
        return JSONResponse({"weight_version": version})

    async def _pause(self, request: Request) -> Response:
        await asyncio.to_thread(self._service.pause)
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        await asyncio.to_thread(self._service.resume)
        return JSONResponse({"status": "ok"})

    async def _completions(self, request: Request) -> Response:
        asked = await asyncio.to_thread(parsed, CompletionRequest, await _body(request))
        return await self._sampled(request, asked, [await self._ids(prompt) for prompt in asked.prompts])

    async def _generate(self, request: Request) -> Response:
        asked = await asyncio.to_thread(parsed, GenerateRequest, await _body(request))
        return await self._sampled(request, asked, [await self._ids(asked.token_ids, asked.prompt_field)])

    async def _chat(self, request: Request) -> Response:
        asked = await asyncio.to_thread(parsed, ChatRequest, await _body(request))
        async with self._encoding:
            ids, begun = await asyncio.to_thread(self._rendered, asked)
        return await self._sampled(request, asked, [ids], begun)

    def _rendered(self, asked: ChatRequest) -> tuple[list[int], str]:
        """The token ids of a chat's prompt, and the text of those at its end that begin the answer."""
        tools, variables, begun = asked.offered_tools, asked.chat_template_kwargs, ""
        if variables:
            with _at_fault("chat_template_kwargs"):
                check_variables(variables, self._tokenizer.chat_template, "chat_template_kwargs")
        if asked.must_call:
            with _at_fault("tool_choice"):
                begun = begun_call(self._tokenizer, tools, asked.called)
        with _at_fault(asked.prompt_field):
            ids = render(self._tokenizer, asked.messages, tools, variables=variables, begun=begun)
        if tools and not self._had_tools:
            self._had_tools = True
            with suppress(ValueError):  # a template that takes these messages, and not a question alone
                warn_of_unwritten(self._tokenizer, tools)
        return ids, begun

    async def _ids(self, prompt: str | list[int], name: str = "prompt") -> list[int]:
        """The token ids of a text, or of a list that has them already."""
        if isinstance(prompt, list):
            outside = [token for token in prompt if token >= self._vocab_size]
            if outside or not prompt:
                what = f"{outside[0]}" if outside else "none"
                raise BadRequest(
                    f"a prompt has at least one token id, each below {self._vocab_size}; got {what}", name
                )
            return prompt
        async with self._encoding:
            with _at_fault(name):
                return await asyncio.to_thread(render, self._tokenizer, prompt)

    async def _sampled(
        self, request: Request, asked: AnyRequest, prompts: list[list[int]], begun: str = ""
    ) -> Response:
        """The answer to a request with these prompts; that of a chat begins with the text `begun`."""
        if not prompts:
            raise BadRequest("a request has at least one prompt; got an empty list", "prompt")
        owners = asked.sequences(list(map(len, prompts)), self._max_positions)
        repeated = [prompt for prompt in prompts for _ in range(asked.n)]
        queued = await self._queued(repeated[: len(owners)], owners)
        choices = [
            _Choice(
                TextStream(self._tokenizer, asked.stop_strings),
                TokenTexts(self._vocabulary),
                prompt,
                CallStream(begun) if isinstance(asked, ChatRequest) and asked.offered_tools else None,
            )
            for prompt in repeated
        ]
        answer = _Answer(asked, self._model, choices, prompts, self._vocabulary)
        if asked.stream:
            return StreamingResponse(
                self._stream(answer, queued), media_type="text/event-stream", headers=_NO_CACHE
            )
        ends = frozenset(asked.stop_token_ids if isinstance(asked, GenerateRequest) else ())
        async with self._events(queued, request.is_disconnected, ends) as events:
            async for number, progress in events:
                choices[number].progress.append(progress)
        if not owners:
            for choice in choices:
                choice.progress.append(Progress(finish_reason="length"))
        if asked.num_likeliest is not None:
            await self._score(request, choices, asked.num_likeliest)
        return await asyncio.to_thread(lambda: JSONResponse(answer.whole(self._service.version)))

    async def _score(self, request: Request, choices: Sequence[_Choice], num_likeliest: int) -> None:
        """Gives each choice the scores of its tokens; without alternatives, those of its prompt suffice."""
        ids = [[*choice.prompt_ids, *(choice.tokens if num_likeliest else ())] for choice in choices]
        scoring = asyncio.wrap_future(self._service.score(ids, num_likeliest))
        try:
            while not (await asyncio.wait({scoring}, timeout=LOOK_S))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
            for choice, scores in zip(choices, scoring.result(), strict=True):
                choice.scores = scores
        finally:
            scoring.cancel()

    async def _stream(self, answer: _Answer, queued: _Queued) -> AsyncIterator[str]:
        """The events of a stream, the last of which is `[DONE]`, or an error."""
        try:
            async with self._events(queued) as events:
                for part in answer.first():
                    yield _event(part)
                async for number, progress in events:
                    yield await asyncio.to_thread(
                        lambda n, p: "".join(map(_event, answer.parts(n, p))), number, progress
                    )
            for part in answer.last(self._service.version):
                yield _event(part)
            yield "data: [DONE]\n\n"
        except (BadRequest, ServiceFailed) as error:
            yield _event(_error_body(503, str(error), None))

    async def _queued(self, prompts: Sequence[Sequence[int]], owners: Sequence[Any]) -> _Queued:
        """Queues the sequences of a request; raises BadRequest if there is no room for one of them."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Progress]]()

        def listen(number: int, progress: Progress) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(queue.put_nowait, (number, progress))

        arrays = [Prompt(0, np.array(prompt, np.int32), "") for prompt in prompts]
        submitted = self._service.submit(arrays, owners, listen)
        try:
            return _Queued(await asyncio.shield(asyncio.wrap_future(submitted)), queue)
        except ValueError as error:
            raise BadRequest(str(error), "max_tokens") from error
        except asyncio.CancelledError:
            submitted.add_done_callback(
                lambda done: None if done.exception() else self._service.cancel(done.result())
            )
            raise

    @asynccontextmanager
    async def _events(
        self,
        queued: _Queued,
        gone: Callable[[], Awaitable[bool]] | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> AsyncIterator[Events]:
        """The progress of queued sequences until all have ended; those left at the end are cancelled.

        A sequence also ends with the first token of `ends`. Every LOOK_S, `gone` is asked whether the client
        has left; then ClientDisconnect is raised.
        """

        async def events() -> Events:
            left, looked = set(range(len(queued.keys))), time.monotonic()
            while left:
                if gone is not None and time.monotonic() - looked >= LOOK_S:
                    if await gone():
                        raise ClientDisconnect
                    looked = time.monotonic()
                try:
                    number, progress = await asyncio.wait_for(queued.queue.get(), LOOK_S)
                except TimeoutError:
                    continue
                if progress.error is not None:
                    raise ServiceFailed(progress.error)
                if number not in left:  # sampled after one of `ends`
                    continue
                if not ends.isdisjoint(progress.tokens):
                    progress = _until(progress, ends)
                    self._service.cancel([queued.keys[number]])
                if progress.finish_reason is not None:
                    left.remove(number)
                yield number, progress

        try:
            yield events()
        finally:
            self._service.cancel(queued.keys)


@dataclass(frozen=True)
class _Queued:
    """The keys of a request's sequences, and the queue of their progress."""

    keys: list[int]
    queue: asyncio.Queue[tuple[int, Progress]]


def _until(progress: Progress, ends: frozenset[int]) -> Progress:
    """Progress up to and with the first token of `ends`, which is one of its tokens."""
    size = 1 + next(at for at, token in enumerate(progress.tokens) if token in ends)
    return Progress(progress.tokens[:size], progress.logprobs[:size], progress.versions[:size], "stop")


class _Answer:
    """The JSON of an answer, in OpenAI's form, or vLLM's, whole or in parts."""

    def __init__(
        self,
        asked: AnyRequest,
        model: str,
        choices: Sequence[_Choice],
        prompts: Sequence[Sequence[int]],
        vocabulary: Vocabulary,
    ):
        self._asked, self._choices, self._vocabulary = asked, choices, vocabulary
        self._is_chat = isinstance(asked, ChatRequest)
        self._prompts = prompts
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, version: int) -> dict[str, Any]:
        """The answer to a request without a stream."""
        choices, is_generate = [], isinstance(self._asked, GenerateRequest)
        for index, choice in enumerate(self._choices):
            choice.echoed = self._echoed(index)
            said, calls = self._said(choice)
            facts = self._facts(choice, choice.progress, calls=calls, prompt=not is_generate)
            choices.append({"index": index, **said, **facts})
        numbers = {"usage": self._usage(), "weight_version": version}
        if isinstance(self._asked, GenerateRequest):
            head = {"request_id": self._asked.request_id, "model": self._head["model"]}
            return {**head, "choices": choices, **numbers}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, **self._chat_prompt(), **numbers}

    def _said(self, choice: _Choice) -> tuple[dict[str, Any], Sequence[ToolCall]]:
        """What a whole choice says, and its calls."""
        if isinstance(self._asked, GenerateRequest):
            return {}, ()
        content, calls = choice.said(choice.tokens, finished=True)
        if not self._is_chat:
            return {"text": (choice.echoed or "") + content}, ()
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": list(map(_call, calls))}
        return {"message": message}, calls

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
            for index in range(len(self._choices)):
                content = "" if self._choices[index].calls is None else None
                delta = {"role": "assistant", "content": content}
                yield {**self._delta(index, delta), **(self._chat_prompt() if index == 0 else {})}

    def parts(self, number: int, progress: Progress) -> Iterator[dict[str, Any]]:
        """The events of a sequence's progress: one, and at the end of a chat one of each call before it."""
        choice = self._choices[number]
        choice.progress.append(progress)
        ended = progress.finish_reason is not None
        new, calls = choice.said(progress.tokens, finished=ended)
        facts = self._facts(choice, [progress], calls=calls, prompt=len(choice.progress) == 1)
        said: dict[str, Any] = {"content": new} if new or ended or choice.calls is None else {}
        if calls:
            if new:
                yield self._delta(number, said)
            for index, call in enumerate(calls):
                yield self._delta(number, {"tool_calls": [{"index": index, **_call(call)}]})
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

    def _facts(
        self, choice: _Choice, progress: Sequence[Progress], *, calls: Sequence[ToolCall], prompt: bool
    ) -> dict[str, Any]:
        """What is said of tokens beside their text; a choice that was cut may lack further calls."""
        tokens = [token for part in progress for token in part.tokens]
        reason = progress[-1].finish_reason
        reason = "tool_calls" if calls and reason == "stop" else reason
        facts: dict[str, Any] = {"finish_reason": reason, "logprobs": None}
        if self._asked.wants_logprobs:
            values = [value for part in progress for value in part.logprobs]
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
        if self._asked.return_token_ids:
            facts["token_ids"] = tokens
            facts["weight_versions"] = [version for part in progress for version in part.versions]
            if prompt:
                facts["prompt_token_ids"] = list(choice.prompt_ids)
        return facts

    def _named(self, choice: _Choice, texts: list[TokenText], values: list[float]) -> dict[str, Any]:
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
            pairs = scores.pairs()[len(scores.logprobs) - len(names) :]
            first = [choice.echoed is None, *[False] * len(names)]
            top = list(map(self._alternatives, names, known, pairs, first))
        return {"tokens": names, "token_logprobs": known, "top_logprobs": top, "text_offset": offsets}

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

    def _listed(self, choice: _Choice) -> Iterator[dict[str, Any]]:
        """The tokens of which the text sampled so far consists; if ids were asked for, every token."""
        text, ended = choice.text, choice.progress[-1].finish_reason is not None
        ids = self._asked.return_token_ids or self._asked.return_tokens_as_token_ids
        every = ids or (ended and not text.stopped)
        while choice.unlisted:
            token, value = choice.unlisted[0]
            if not (every or (token.start < text.length if ended else token.end <= text.length)):
                return
            choice.unlisted.popleft()
            if token.bytes or ids:
                yield {"token": token.name, "logprob": value, "bytes": list(token.bytes), "top_logprobs": []}

    def _usage(self) -> dict[str, int]:
        asked, sampled = (sum(map(len, each)) for each in (self._prompts, [c.tokens for c in self._choices]))
        return {"prompt_tokens": asked, "completion_tokens": sampled, "total_tokens": asked + sampled}


def _named_by_id(token: int) -> str:
    """A token's name in log-probabilities with `return_tokens_as_token_ids`, in vLLM's form."""
    return f"token_id:{token}"


def _call(call: ToolCall) -> dict[str, Any]:
    """A call in OpenAI's form. Its id has the form of CALL_ID, and is new: models repeat their own."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    identity = secrets.token_hex(len(CALL_ID))[: len(CALL_ID)]
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}


@contextmanager
def _at_fault(field: str) -> Iterator[None]:
    """Raises BadRequest, which names `field`, for a ValueError."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(str(error), field) from error


_NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _body(request: Request) -> bytes:
    """The body of a request; raises BadRequest if it is not said to be JSON, or too long.

    A page in a browser cannot send JSON to another site without asking first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(
            f"a request must have the header `Content-Type: application/json`; got {kind or 'none'}",
            status=415,
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise BadRequest(f"the body of a request has at most {MOST_BYTES} bytes; split it", status=413)
    return bytes(body)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def _error_body(status: int, message: str, field: str | None) -> dict[str, Any]:
    other = "server_error" if status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(status, other)
    return {"error": {"message": message, "type": kind, "param": field, "code": status}}


def _error(
    status: int, message: str, field: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error in OpenAI's form."""
    return JSONResponse(_error_body(status, message, field), status_code=status, headers=headers)


async def _unknown(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that the server does not have."""
    assert isinstance(error, HTTPException)
    path, paths = request.url.path[:100], "the paths are listed in docs/serve.md"
    message = f"this server does not have the path {path!r}; {paths}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow")
        message = f"{path!r} takes the methods {allowed}; got {request.method}; {paths}"
    return _error(error.status_code, message, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """The answer if a request failed by a fault of the server, which is logged."""
    return _error(500, f"the request failed: {type(error).__name__}: {error}")
