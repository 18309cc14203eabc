"""The HTTP interface: OpenAI's completions and chat, vLLM's `generate`, and verbs for weights.

Data flow: a request -> checked (`requests.py`) -> token ids -> `EngineService` -> `Progress` -> JSON, whole
or as a stream of events. The event loop only passes these on: text is encoded, decoded and written as JSON in
threads.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import hmac
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from quatrain import __version__
from quatrain.config.secrets import SERVE_TOKEN
from quatrain.data.chat_template import check_variables
from quatrain.data.messages import MAX_TEXT_CHARS, checked_messages
from quatrain.data.pictures import PictureReader, is_picture_part
from quatrain.data.tokenizer import encode_further, render
from quatrain.data.tool_calls import CallStream, begun_call, tool_calls, warn_of_unread
from quatrain.data.turns import TurnTemplate
from quatrain.engine.service import EngineService
from quatrain.serve.answers import Answer, Choice
from quatrain.serve.requests import (
    NO_ROOM,
    AnyRequest,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    WeightsRequest,
    parsed,
)
from quatrain.serve.sessions import Reply, Session, Sessions
from quatrain.serve.text import TextStream, TokenTexts, Vocabulary
from quatrain.serve.turn_tree import Found, TurnTree
from quatrain.types.answer_text import AnswerTokens, Channels
from quatrain.types.batches import Prompt
from quatrain.types.call_forms import schemas_of
from quatrain.types.pictures import Picture, Pictures, Tokens, joined
from quatrain.types.sampler import PerRequestSampling, Progress, Sampler, ServiceFailed
from quatrain.types.sampler import Request as Turns

MOST_BYTES = 32 * 2**20
"""Bytes of the body of a request."""
MOST_TEMPLATES = 64
"""Lists of tools whose templates are kept."""
MOST_OTHERS = 512
"""Requests after which nobody is expected to go on with a dialogue that a client has named."""
LOOK_S = 0.5
"""Seconds between two looks whether a client that waits for an answer is still there."""

_Asked = TypeVar("_Asked", CompletionRequest, ChatRequest, GenerateRequest)
Handler = Callable[[Request], Awaitable[Response]]
Events = AsyncIterator[tuple[int, Progress]]


class Api:
    """Answers requests for the model named `model`, whose weights `service` samples from.

    `token`: what requests must bring, all but `GET /health`; None: no request needs one, and weights and
    pauses are refused. Positions of prompt and completion together are at most `max_positions`. Requests with
    the key of one of `sessions` are turns of its episode; `stop_ids` end a completion.
    """

    def __init__(
        self,
        service: Sampler,
        tokenizer: Any,
        *,
        model: str,
        vocab_size: int,
        max_positions: int,
        token: str | None,
        stop_ids: Sequence[int] = (),
        sessions: Sessions | None = None,
    ):
        self._service, self._model, self._token = service, model, token
        self._stop_ids, self._sessions = stop_ids, sessions
        self._templates: dict[str, TurnTemplate] = {}
        self._num_asked, self._named_at = 0, dict[str, int]()
        self._vocab_size, self._max_positions = vocab_size, max_positions
        self._tokenizer = copy.deepcopy(tokenizer)  # the engine's thread uses the other
        self._vocabulary = Vocabulary(self._tokenizer)
        self._answers = AnswerTokens(self._tokenizer)
        self._of_chat = Vocabulary(self._tokenizer, self._answers.markers)
        self._described = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "quatrain",
            "max_model_len": max_positions,
        }
        self._encoding = asyncio.Lock()
        warn_of_unread(self._tokenizer, has_tools=False)

    def app(self, hosts: Sequence[str], further: Sequence[BaseRoute] = ()) -> Starlette:
        """The application, with `further` routes; it answers requests that name one of `hosts`, or any with
        "*"."""
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
        places = ("", "/s/{session}", "/s/{session}/untrained", "/s/{session}/role/{role}")
        return Starlette(
            routes=[
                Route(place + path, self._answered(path, handler), methods=[method])
                for path, (method, handler) in routes.items()
                for place in (places if _is_of_sessions(path) else places[:1])
            ]
            + list(further),
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
            exception_handlers={HTTPException: _unknown, Exception: _failed},
        )

    def _answered(self, path: str, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                session = self._session_of(request) if _is_of_sessions(path) else None
                if session is None:
                    self._authorise(request, path)
                    return await handler(request)
                request.state.session = session
                if request.method == "POST" and not _is_untrained(request):
                    return await self._once(request, session, handler)
                with session.work():
                    return await handler(request)
            except BadRequest as error:
                return _error(error.status, str(error), error.field, code=error.code)
            except ServiceFailed as error:
                return _error(503, str(error))
            except ClientDisconnect:
                return Response(status_code=499)

        return answer

    def _session_of(self, request: Request) -> Session | None:
        """The session that a request names by its path, or by its key alone."""
        name, key = request.path_params.get("session"), _bearer(request)
        if self._sessions is None or name is None:
            return None if self._sessions is None else self._sessions.of_key(key)
        session = self._sessions.named(name)
        if session is None or not hmac.compare_digest(session.key.encode(), key.encode()):
            raise BadRequest(
                "the path of a session needs its key, as long as its episode lasts; send `Authorization: "
                "Bearer` with it (an OpenAI client: api_key)",
                status=401,
            )
        role = request.path_params.get("role")
        return session if role is None else session.of_role(role)

    async def _once(self, request: Request, session: Session, handler: Handler) -> Response:
        """The answer to a request of a session; to one that is asked again, the one that it had.

        A client asks again if its connection broke, and says so. Without that, an equal request is another
        sample. An answer is sampled to its end also if the client leaves.
        """
        digest = hashlib.blake2b(request.url.path.encode() + b"\0" + await _body(request)).digest()
        key = request.headers.get("idempotency-key")
        again = request.headers.get("x-stainless-retry-count", "0") != "0" or key in session.idempotency_keys
        if key is not None:
            session.idempotency_keys.add(key)
        known = session.replies.setdefault(digest, [])
        left = [each for each in known if not each.waiting] or known
        if again and left:
            reply = left[-1]
            session.counts["replayed"] += 1
        else:
            reply = request.state.reply = Reply()
            known.append(reply)
            reply.task = asyncio.create_task(self._worked(request, session, handler))
        task = reply.task
        assert task is not None
        reply.waiting += 1
        reply.update()
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
            failed = task.exception() is not None or isinstance(task.result(), StreamingResponse)
            if failed and reply in known:
                known.remove(reply)  # nothing to give again
            reply.is_given = True
            return task.result()
        finally:
            reply.waiting -= 1
            reply.update()

    async def _worked(self, request: Request, session: Session, handler: Handler) -> Response:
        """The answer of `handler`; the session ends after it, also if the client has left."""
        with session.work():
            try:
                response = await handler(request)
            except BaseException:
                request.state.reply.release()
                raise
            if not isinstance(response, StreamingResponse):
                request.state.reply.release()
            return response

    def _authorise(self, request: Request, path: str) -> None:
        if path == "/health":
            return
        if self._token is None:
            if path in ("/weights", "/pause", "/resume"):
                raise BadRequest(
                    f"{path} needs a token, which this server does not have; start it with {SERVE_TOKEN} "
                    "set, and send `Authorization: Bearer` with its value",
                    status=403,
                )
            return
        if not hmac.compare_digest(_bearer(request).encode(), self._token.encode()):
            raise BadRequest(
                f"{path} needs the server's token; send `Authorization: Bearer` with the value of "
                f"{SERVE_TOKEN}",
                status=401,
            )

    @property
    def _engine(self) -> EngineService:
        """What samples, for requests that agents do not make: none of them is told the server's token."""
        assert isinstance(self._service, EngineService)
        return self._service

    async def _health(self, request: Request) -> Response:
        error = self._service.error
        if error is not None:
            return JSONResponse({"status": error}, status_code=503)
        return JSONResponse({"status": "paused" if self._service.paused else "ok"})

    async def _version(self, request: Request) -> Response:
        facts = {"engine": "quatrain", "version": __version__}
        return JSONResponse({**facts, "weight_version": self._service.version})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description(request)]})

    async def _named_model(self, request: Request) -> Response:
        name, session = request.path_params["name"], self._session_of(request)
        if name != self._model and session is None:
            raise BadRequest(
                f"this server has the model {self._model}; got {name[:100]!r}; see /v1/models",
                "model",
                status=404,
            )
        return JSONResponse(self._description(request))

    def _description(self, request: Request) -> dict[str, Any]:
        """The model; of a session, with the length of its sequences."""
        session = self._session_of(request)
        return self._described | ({} if session is None else {"max_model_len": session.rules.max_tokens})

    async def _metrics(self, request: Request) -> Response:
        service = self._engine
        numbers = {
            "sequences_running": ("gauge", service.num_running),
            "weight_version": ("gauge", service.version),
            "paused": ("gauge", int(service.paused)),
            "prefix_blocks_used": ("gauge", service.num_kept_blocks),
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
        await asyncio.to_thread(self._engine.pause)
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        await asyncio.to_thread(self._engine.resume)
        return JSONResponse({"status": "ok"})

    async def _completions(self, request: Request) -> Response:
        asked = await self._parsed(CompletionRequest, request)
        prompts = [await self._tokens(prompt) for prompt in asked.prompts]
        if asked.pictures:
            prompts = [await asyncio.to_thread(self._pictured, asked, _trained_session(request) is None)]
        prompts, recorded = _in_session(request, asked, prompts)
        return await self._sampled(request, asked, prompts, recorded=recorded)

    async def _generate(self, request: Request) -> Response:
        asked = await self._parsed(GenerateRequest, request)
        prompts = [await self._tokens(asked.token_ids, asked.prompt_field)]
        prompts, recorded = _in_session(request, asked, prompts)
        return await self._sampled(request, asked, prompts, recorded=recorded)

    async def _chat(self, request: Request) -> Response:
        asked, session = await self._parsed(ChatRequest, request), _trained_session(request)
        async with self._encoding:
            if session is None:
                prompt, begun = await asyncio.to_thread(self._rendered, asked)
                recorded = None
            else:
                messages, found, begun = await asyncio.to_thread(self._continued, asked, session.tree)
                prompt = Tokens(found.ids, found.pictures)
                recorded = _Recorded.of(request, asked, found, messages)
        return await self._sampled(request, asked, [prompt], begun, recorded)

    async def _parsed(self, kind: type[_Asked], request: Request) -> _Asked:
        """The request, checked, also for what one of a session must not ask for."""
        session, body = _trained_session(request), await _body(request)
        asked = await asyncio.to_thread(parsed, kind, body, None if session is None else session.counts)
        if session is not None:
            session.check(asked)
        elif _is_untrained(request):
            asked = request.state.session.outside(asked, body)
        return asked

    def _continued(self, asked: ChatRequest, tree: TurnTree) -> tuple[Sequence[Any], Found, str]:
        """(the messages of a chat, what they continue in a session, the text that begins the answer)."""
        with _at_fault(asked.prompt_field):
            seen = self._seen(asked.messages)
            messages = checked_messages(seen)
        if messages[-1]["role"] == "assistant":
            raise BadRequest("the last message must not be the assistant's: nothing follows it", "messages")
        begun = self._begun(asked)

        def suffix(opening: Sequence[Any], sampled: Sequence[int], new: Sequence[Any]) -> Tokens:
            written = self._template(*_key_of(asked)).suffix(tuple(opening), sampled, new)
            further = encode_further(self._tokenizer, begun)
            pictures = joined((written.pictures, len(written.ids)), (None, len(further)))
            return Tokens(written.ids + further, pictures)

        with _at_fault(asked.prompt_field):
            found = tree.find(messages, _key_of(asked), lambda: self._rendered(asked, seen)[0], suffix)
        return messages, found, begun

    def _template(self, *key: Any) -> TurnTemplate:
        """What renders the turns of episodes with these tools and variables, as `_key_of` has them."""
        text = json.dumps(key, sort_keys=True)
        if text not in self._templates:
            if len(self._templates) >= MOST_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            *tools, variables = key
            self._templates[text] = TurnTemplate(self._tokenizer, self._stop_ids, tools, variables)
        return self._templates[text]

    def _begun(self, asked: ChatRequest) -> str:
        """The text with which the answer must begin."""
        if not asked.must_call:
            return ""
        with _at_fault("tool_choice"):
            return begun_call(self._tokenizer, asked.offered_tools, asked.called)

    def _seen(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Messages with the pictures of their data URLs read; raises ValueError where they are not seen."""
        contents = [each["content"] for each in messages if isinstance(each.get("content"), list)]
        if not any(map(is_picture_part, itertools.chain(*contents))):
            return messages
        if self._service.cannot_see is not None:
            raise ValueError(f"messages have pictures: {self._service.cannot_see}")
        return PictureReader().placed(messages)

    def _rendered(
        self, asked: ChatRequest, seen: Sequence[dict[str, Any]] | None = None
    ) -> tuple[Tokens, str]:
        """The tokens of a chat's prompt, and the text of those at its end that begin the answer.

        `seen` are its messages, if their pictures are read already.
        """
        tools, variables, begun = asked.offered_tools, asked.chat_template_kwargs, self._begun(asked)
        if variables:
            with _at_fault("chat_template_kwargs"):
                check_variables(variables, self._tokenizer.chat_template, "chat_template_kwargs")
        with _at_fault(asked.prompt_field):
            messages = self._seen(asked.messages) if seen is None else seen
            return render(self._tokenizer, messages, tools, variables=variables, begun=begun), begun

    async def _tokens(self, prompt: str | list[int], name: str = "prompt") -> Tokens:
        """The tokens of a text, or of a list that has their ids already, which stand for no picture."""
        if isinstance(prompt, list):
            outside = [token for token in prompt if token >= self._vocab_size]
            if outside or not prompt:
                what = f"{outside[0]}" if outside else "none"
                raise BadRequest(
                    f"a prompt has at least one token id, each below {self._vocab_size}; got {what}", name
                )
            return Tokens(prompt)
        async with self._encoding:
            with _at_fault(name):
                return await asyncio.to_thread(render, self._tokenizer, prompt)

    def _pictured(self, asked: CompletionRequest, alone: bool) -> Tokens:
        """The ids of a request with pictures, in their places; `alone`: it is no turn of a session."""
        with _at_fault("pictures"):
            if self._service.cannot_see is not None:
                raise ValueError(f"a prompt has pictures: {self._service.cannot_see}")
            [ids, *more] = asked.prompts
            if more or isinstance(ids, str) or not alone:
                raise ValueError(
                    "they stand in one prompt of token ids, which continues no session; give messages with "
                    "`image_url` instead"
                )
            tokens: list[Picture | None] = [None] * len(ids)
            for given in asked.pictures:
                picture = PictureReader().read(given.url)
                size = self._tokenizer.expansion.vision.num_placeholders(picture.size)
                for start, count in given.places:
                    room = tokens[start : start + count] if min(start, count) >= 0 else []
                    if not count or room != [None] * count:
                        raise ValueError(
                            f"places must lie within the {len(ids)} tokens of the prompt, and apart from one "
                            f"another; got {start} and the {count} from there"
                        )
                    tokens[start : start + count] = [picture] * count
                if (total := sum(count for _, count in given.places)) % size:
                    raise ValueError(
                        f"a picture of {picture.size[0]}x{picture.size[1]} pixels stands for {size} tokens "
                        f"here; got {total}; serve the model that the ids were made for, with its "
                        "data.image_max_pixels"
                    )
        return Tokens(ids, Pictures.of(tokens))

    async def _sampled(
        self,
        request: Request,
        asked: AnyRequest,
        prompts: list[Tokens],
        begun: str = "",
        recorded: _Recorded | None = None,
    ) -> Response:
        """The answer to a request with these prompts; that of a chat begins with the text `begun`.

        In a session, `recorded` are the turns that it is recorded in.
        """
        if not prompts:
            raise BadRequest("a request has at least one prompt; got an empty list", "prompt")
        if asked.num_scored is not None and not self._service.can_score:
            raise BadRequest(
                "the workers that sample here score no given tokens; leave out echo, logprobs above 0, and "
                "prompt_logprobs",
                "logprobs",
            )
        if recorded is None:
            owners = asked.sequences([len(prompt.ids) for prompt in prompts], self._max_positions)
            name = self._client_session(request, asked)
            owners = [replace(own, session=name) for own in owners]
        else:
            owners = recorded.owners
        repeated = [prompt for prompt in prompts for _ in range(asked.n)]
        queued = await self._queued(repeated[: len(owners)], owners)
        choices = [self._choice(asked, prompt.ids, begun) for prompt in repeated]
        ids = [prompt.ids for prompt in prompts]
        answer = Answer(asked, self._model, choices, ids, self._vocabulary)
        session = getattr(request.state, "session", None)
        if asked.stream:
            parts = self._stream(answer, queued, recorded, session)
            return StreamingResponse(parts, media_type="text/event-stream", headers=_NO_CACHE)
        ends = frozenset(asked.stop_token_ids if isinstance(asked, GenerateRequest) else ())

        async def gone() -> bool:
            if session is not None and not session.is_open:
                return True
            return recorded is None and await request.is_disconnected()

        async with self._events(queued, gone, ends) as events:
            async for number, progress in events:
                choices[number].add(progress)
        if not owners:
            for choice in choices:
                choice.add(Progress(finish_reason="length"))
        if asked.num_scored is not None:
            await self._score(request, choices, asked, [prompt.pictures for prompt in repeated])
        response = await asyncio.to_thread(lambda: JSONResponse(answer.whole(self._service.version)))
        if recorded is not None:
            recorded.end(choices)
        return response

    def _client_session(self, request: Request, asked: AnyRequest) -> str:
        """Whose contexts a request goes on with: those of its session, or of what the client names; "": none.

        What a client has named ends after MOST_OTHERS other requests: no client says when it has ended.
        """
        if (session := getattr(request.state, "session", None)) is not None:
            return session.id
        name = request.headers.get("x-session-id") or asked.prompt_cache_key
        self._num_asked += 1
        if name:
            self._named_at.pop(name, None)
            self._named_at[name] = self._num_asked
        oldest = next(iter(self._named_at), None)
        if oldest is not None and self._named_at[oldest] < self._num_asked - MOST_OTHERS:
            del self._named_at[oldest]
            self._service.forget(oldest)
        return name

    def _choice(self, asked: AnyRequest, prompt: Sequence[int], begun: str) -> Choice:
        """What will come of a completion; markers of calls and thoughts are read in a chat alone."""
        if not isinstance(asked, ChatRequest):
            return Choice(
                TextStream(self._tokenizer, asked.stop_strings), TokenTexts(self._vocabulary), prompt
            )
        # Of Harmony, the prompt's last message has what is begun.
        begun = "" if self._answers.is_harmony else begun
        return Choice(
            TextStream(self._tokenizer, asked.stop_strings, self._answers.markers),
            TokenTexts(self._of_chat),
            prompt,
            Channels(self._answers, prompt),
            CallStream(begun, schemas_of(asked.offered_tools)) if asked.offered_tools else None,
        )

    async def _score(
        self,
        request: Request,
        choices: Sequence[Choice],
        asked: AnyRequest,
        pictures: Sequence[Pictures | None],
    ) -> None:
        """Gives each choice the scores of its tokens; without alternatives, those of its prompt suffice."""
        ids = [
            [*choice.prompt_ids, *(choice.sampled.tokens if asked.num_likeliest else ())]
            for choice in choices
        ]
        scoring = asyncio.wrap_future(self._service.score(ids, asked.num_scored or 0, pictures))
        try:
            while not (await asyncio.wait({scoring}, timeout=LOOK_S))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
            for choice, scores in zip(choices, scoring.result(), strict=True):
                choice.scores = scores
        finally:
            scoring.cancel()

    async def _stream(
        self, answer: Answer, queued: _Queued, recorded: _Recorded | None, session: Session | None
    ) -> AsyncIterator[str]:
        """The events of a stream, the last of which is `[DONE]`, or an error."""

        async def has_ended() -> bool:
            return session is not None and not session.is_open

        try:
            async with self._events(queued, has_ended) as events:
                with nullcontext() if session is None else session.work():
                    for part in answer.first():
                        yield _event(part)
                    async for number, progress in events:
                        text = await asyncio.to_thread(
                            lambda n, p: "".join(map(_event, answer.parts(n, p))), number, progress
                        )
                        if recorded is not None and progress.finish_reason is not None:
                            recorded.end(answer.choices)
                        yield text
            for part in answer.last(self._service.version):
                yield _event(part)
            yield "data: [DONE]\n\n"
        except (BadRequest, ServiceFailed) as error:
            yield _event(_error_body(503, str(error), None))
        except ClientDisconnect:  # the session has ended
            return
        finally:
            if recorded is not None:
                recorded.reply.release()

    async def _queued(self, prompts: Sequence[Tokens], owners: Sequence[Any]) -> _Queued:
        """Queues the sequences of a request; raises BadRequest if there is no room for one of them."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Progress]]()

        def listen(number: int, progress: Progress) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server ends
                loop.call_soon_threadsafe(queue.put_nowait, (number, progress))

        arrays = [Prompt(0, np.array(ids, np.int32), "", pictures=pictures) for ids, pictures in prompts]
        turns = list(map(Turns.alone, arrays, owners))
        submitted = self._service.start(turns, listen)
        try:
            return _Queued(await asyncio.shield(asyncio.wrap_future(submitted)), queue)
        except ValueError as error:
            raise BadRequest(str(error), "max_tokens") from error
        except asyncio.CancelledError:
            submitted.add_done_callback(
                lambda done: None if done.exception() else self._service.drop(done.result())
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
                if not ends.isdisjoint(progress.piece.tokens):
                    progress = _until(progress, ends)
                    self._service.drop([queued.keys[number]])
                if progress.finish_reason is not None:
                    left.remove(number)
                yield number, progress

        try:
            yield events()
        finally:
            self._service.drop(queued.keys)


@dataclass(frozen=True)
class _Queued:
    """The keys of a request's sequences, and the queue of their progress."""

    keys: list[int]
    queue: asyncio.Queue[tuple[int, Progress]]


@dataclass(frozen=True)
class _Recorded:
    """The turns of a session that answer a request, how each is sampled, and what a chat said and had."""

    session: Session
    reply: Reply
    owners: list[PerRequestSampling]
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    """As `_key_of` has them."""

    @classmethod
    def of(
        cls, request: Request, asked: AnyRequest, found: Found, messages: Sequence[Mapping[str, Any]] = ()
    ) -> _Recorded:
        """Begins the turns of a request; raises BadRequest where the episode has no room for them."""
        session, reply = request.state.session, request.state.reply
        reply.turns, owners = session.begin(found, asked)
        reply.update()
        return cls(session, reply, owners, messages, _key_of(asked))

    def end(self, choices: Sequence[Choice]) -> None:
        """Records the choices that have ended; the next request may continue them."""
        for turn, choice in zip(self.reply.turns, choices, strict=True):
            if turn.tokens or choice.finish_reason is None:
                continue
            turn.answer(choice.sampled)
            turn.finish_reason, turn.cached = choice.finish_reason, choice.cached
            self.session.counts["tool_calls"] += len(choice.called)
            if self.messages:
                if len(self.tools) > 1:
                    left = tool_calls(choice.content, schemas_of(self.tools[:-1]))
                    self.session.counts["malformed_calls"] += sum(call.problem is not None for call in left)
                answer = checked_messages([choice.message])
                self.session.tree.end(turn, [*self.messages, *answer], self.tools)


def _in_session(
    request: Request, asked: AnyRequest, prompts: list[Tokens]
) -> tuple[list[Tokens], _Recorded | None]:
    """The prompts of a request with ids; if it is one of a session, as its turns have them, and these."""
    session = _trained_session(request)
    if session is None:
        return prompts, None
    found = session.tree.find_ids(prompts[0].ids)
    return [Tokens(found.ids, found.pictures)], _Recorded.of(request, asked, found)


def _key_of(asked: AnyRequest) -> list[Mapping[str, Any]]:
    """The tools of a chat, then the variables of its template: what the dialogues of one sequence share."""
    return [*asked.offered_tools, asked.chat_template_kwargs] if isinstance(asked, ChatRequest) else [{}]


def _is_untrained(request: Request) -> bool:
    """Whether a request of a session is no turn of its episode."""
    return request.path_params.get("session") is not None and "/untrained/" in request.url.path


def _trained_session(request: Request) -> Session | None:
    """The session in which the answer is a turn."""
    return None if _is_untrained(request) else getattr(request.state, "session", None)


def _is_of_sessions(path: str) -> bool:
    """Whether a session has the path too."""
    return path.startswith(("/v1/", "/inference/"))


def _bearer(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _until(progress: Progress, ends: frozenset[int]) -> Progress:
    """Progress up to and with the first token of `ends`, which is one of its tokens."""
    size = 1 + next(at for at, token in enumerate(progress.piece.tokens) if token in ends)
    progress.piece.cut(size)
    return replace(progress, finish_reason="stop")


@contextmanager
def _at_fault(field: str) -> Iterator[None]:
    """Raises BadRequest, which names `field`, for a ValueError."""
    try:
        yield
    except ValueError as error:
        if f"at most {MAX_TEXT_CHARS} characters" in str(error):  # longer than any model's positions
            raise BadRequest(f"maximum context length: {error}; shorten it", field, code=NO_ROOM) from error
        raise BadRequest(str(error), field) from error


_NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _body(request: Request) -> bytes:
    """The body of a request; raises BadRequest if it is not said to be JSON, or too long.

    A page in a browser cannot send JSON to another site without asking first.
    """
    if (known := getattr(request.state, "body", None)) is not None:
        return known
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
    request.state.body = bytes(body)
    return request.state.body


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def _error_body(status: int, message: str, field: str | None, code: str | None = None) -> dict[str, Any]:
    other = "server_error" if status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(status, other)
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _error(
    status: int,
    message: str,
    field: str | None = None,
    headers: Mapping[str, str] | None = None,
    code: str | None = None,
) -> Response:
    """An error in OpenAI's form."""
    return JSONResponse(_error_body(status, message, field, code), status_code=status, headers=headers)


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
