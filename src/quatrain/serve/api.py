"""The paths of the server: answers in the protocols of `protocols/`, and verbs for weights.

Data flow: a request -> `Access` -> its `Protocol` -> a checked request -> `Prompts` -> token ids ->
`Answering` -> JSON, whole or as a stream of events.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from quatrain import __version__
from quatrain.data.chat_template import reads_variable
from quatrain.data.tool_calls import warn_of_unread
from quatrain.engine.service import EngineService
from quatrain.serve.answering import Answering, Recorded
from quatrain.serve.http import (
    PLACES,
    Access,
    Handler,
    body_of,
    is_of_sessions,
    is_untrained,
    trained_session,
)
from quatrain.serve.prompts import Prompts
from quatrain.serve.protocols.messages import Messages
from quatrain.serve.protocols.openai import CHAT, COMPLETIONS
from quatrain.serve.protocols.protocol import Asked, ChatProtocol, Protocol
from quatrain.serve.protocols.responses import Responses
from quatrain.serve.protocols.vllm import GENERATE
from quatrain.serve.requests import (
    AnyRequest,
    BadRequest,
    ChatRequest,
    FilesRequest,
    WeightsRequest,
    parsed,
)
from quatrain.serve.sessions import Sessions
from quatrain.servers.client import BYTES
from quatrain.servers.pieces import LONGEST_MESSAGE, NotWhole, Receiver, Superseded
from quatrain.types.pictures import Tokens
from quatrain.types.sampler import Sampler, ServiceFailed


class _Path(NamedTuple):
    """A path: its method, what answers it, the protocol of its errors, and whether it is a session's turn."""

    method: str
    handler: Handler
    protocol: Protocol[Any] = CHAT
    is_turn: bool = False


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
        now = int(time.time())
        tokenizer = copy.deepcopy(tokenizer)  # the engine's thread uses the other
        self._service, self._model = service, model
        self._receiver = Receiver()
        self._access = Access(token, sessions)
        self._prompts = Prompts(service, tokenizer, vocab_size, stop_ids)
        self._answering = Answering(service, tokenizer, model, max_positions)
        thinks = reads_variable(tokenizer.chat_template, "enable_thinking")
        self._messages = Messages(reads_thinking=thinks)
        self._responses = Responses(reads_thinking=thinks)
        self._described = {
            "id": model,
            "object": "model",
            "created": now,
            "owned_by": "quatrain",
            "max_model_len": max_positions,
            # What Anthropic's clients look at.
            "type": "model",
            "display_name": model,
            "created_at": datetime.fromtimestamp(now, UTC).isoformat(),
        }
        warn_of_unread(tokenizer, has_tools=False)

    def app(self, hosts: Sequence[str], further: Sequence[BaseRoute] = ()) -> Starlette:
        """The application, with `further` routes; it answers requests that name one of `hosts`, or any with
        "*"."""
        messages, responses = self._messages, self._responses
        paths = {
            "/health": _Path("GET", self._health),
            "/version": _Path("GET", self._version),
            "/metrics": _Path("GET", self._metrics),
            "/v1/models": _Path("GET", self._models),
            "/v1/models/{name:path}": _Path("GET", self._named_model),
            "/v1/completions": _Path("POST", self._completions, COMPLETIONS, is_turn=True),
            "/v1/chat/completions": _Path("POST", partial(self._chat, CHAT), CHAT, is_turn=True),
            "/v1/messages": _Path("POST", partial(self._chat, messages), messages, is_turn=True),
            "/v1/messages/count_tokens": _Path("POST", partial(self._count, messages), messages),
            "/v1/responses": _Path("POST", partial(self._chat, responses), responses, is_turn=True),
            "/v1/responses/input_tokens": _Path("POST", partial(self._count, responses), responses),
            "/inference/v1/generate": _Path("POST", self._generate, GENERATE, is_turn=True),
            "/weights": _Path("POST", self._weights),
            "/weights/begin": _Path("POST", self._begin_weights),
            "/weights/put": _Path("POST", self._put_weights),
            "/pause": _Path("POST", self._pause),
            "/resume": _Path("POST", self._resume),
        }
        return Starlette(
            routes=[
                Route(place + path, self._answered(path, of), methods=[of.method])
                for path, of in paths.items()
                for place in (PLACES if is_of_sessions(path) else PLACES[:1])
            ]
            + list(further),
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
            exception_handlers={HTTPException: self._unknown, Exception: self._failed},
        )

    def _answered(self, path: str, of: _Path) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                return await self._access.answer(request, path, of.handler, is_turn=of.is_turn)
            except BadRequest as error:
                return _error(of.protocol, error)
            except ServiceFailed as error:
                return _error(of.protocol, BadRequest(str(error), status=503))
            except ClientDisconnect:
                return Response(status_code=499)

        return answer

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
        page = {"has_more": False, "first_id": self._model, "last_id": self._model}
        return JSONResponse({"object": "list", "data": [self._description(request)], **page})

    async def _named_model(self, request: Request) -> Response:
        name, session = request.path_params["name"], self._access.session_of(request)
        if name != self._model and session is None:
            raise BadRequest(
                f"this server has the model {self._model}; got {name[:100]!r}; see /v1/models",
                "model",
                status=404,
            )
        return JSONResponse(self._description(request))

    def _description(self, request: Request) -> dict[str, Any]:
        """The model; of a session, with the length of its sequences."""
        session = self._access.session_of(request)
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
        asked = parsed(WeightsRequest, await body_of(request))
        try:
            await asyncio.to_thread(self._receiver.check_whole, asked.path)
            version = await asyncio.to_thread(self._service.load, asked.path, asked.version)
        except NotWhole as error:
            raise BadRequest(str(error), "path", status=409) from error
        except (ValueError, OSError) as error:
            raise BadRequest(str(error), "path") from error
        return JSONResponse({"weight_version": version})

    async def _begin_weights(self, request: Request) -> Response:
        asked = parsed(FilesRequest, await body_of(request))
        return await self._received(self._receiver.begin, asked.files, asked.piece_bytes)

    async def _put_weights(self, request: Request) -> Response:
        message = await body_of(request, BYTES, LONGEST_MESSAGE)
        return await self._received(self._receiver.put, message)

    async def _received(self, take: Callable[..., Any], *arguments: Any) -> Response:
        try:
            return JSONResponse(await asyncio.to_thread(take, *arguments))
        except Superseded as error:  # no fault of the request: the sender begins again, or gives way
            raise BadRequest(str(error), status=503) from error
        except (ValueError, OSError) as error:
            raise BadRequest(str(error)) from error

    async def _pause(self, request: Request) -> Response:
        await asyncio.to_thread(self._engine.pause)
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        await asyncio.to_thread(self._engine.resume)
        return JSONResponse({"status": "ok"})

    async def _completions(self, request: Request) -> Response:
        asked = await self._asked(COMPLETIONS, request)
        prompts = [await self._prompts.of_text(prompt) for prompt in asked.prompts]
        if asked.pictures:
            alone = trained_session(request) is None
            prompts = [await asyncio.to_thread(self._prompts.with_pictures, asked, alone)]
        prompts, recorded = _in_session(request, asked, prompts)
        return await self._answering.answer(COMPLETIONS, request, asked, prompts, recorded=recorded)

    async def _generate(self, request: Request) -> Response:
        asked = await self._asked(GENERATE, request)
        prompts = [await self._prompts.of_text(asked.token_ids, asked.prompt_field)]
        prompts, recorded = _in_session(request, asked, prompts)
        return await self._answering.answer(GENERATE, request, asked, prompts, recorded=recorded)

    async def _chat(self, protocol: Protocol[ChatRequest], request: Request) -> Response:
        """The answer of a chat, however it was asked for."""
        asked, session = await self._asked(protocol, request), trained_session(request)
        # Between what is found and the turn that begins with it, no other request may begin one.
        async with self._prompts.lock:
            prompt = await self._prompts.of_chat(asked, None if session is None else session.tree)
            recorded = None
            if prompt.found is not None:
                recorded = Recorded.of(request, asked, prompt.found, prompt.messages)
        # Trained tokens follow a grammar only where its words are recorded; the call of a tool is then any.
        free = session is not None and not session.rules.sampling.replays
        begins = prompt.begun, None if free else prompt.grammar
        return await self._answering.answer(protocol, request, asked, [prompt.tokens], *begins, recorded)

    async def _count(self, protocol: ChatProtocol, request: Request) -> Response:
        """How many tokens the prompt of a request has, which begins no turn."""
        session, body = trained_session(request), await body_of(request)
        asked = await asyncio.to_thread(protocol.counted, body, session)
        async with self._prompts.lock:
            prompt = await self._prompts.of_chat(asked, None if session is None else session.tree)
        return JSONResponse(protocol.count(len(prompt.tokens.ids)))

    async def _asked(self, protocol: Protocol[Asked], request: Request) -> Asked:
        """The request, checked, also for what one of a session must not ask for."""
        session, body = trained_session(request), await body_of(request)
        changed = None if session is None else session.counts
        asked = await asyncio.to_thread(protocol.request, body, changed, session)
        if session is not None:
            session.check(asked)
        elif is_untrained(request):
            asked = request.state.session.outside(asked, body)
        return asked

    def _protocol_of(self, request: Request) -> Protocol[Any]:
        """The protocol of the errors of a path that the server may not have."""
        return self._messages if "/v1/messages" in request.url.path else CHAT

    async def _unknown(self, request: Request, error: Exception) -> Response:
        """The answer to a path or a method that the server does not have."""
        assert isinstance(error, HTTPException)
        path, paths = request.url.path[:100], "the paths are listed in docs/serve.md"
        message = f"this server does not have the path {path!r}; {paths}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow")
            message = f"{path!r} takes the methods {allowed}; got {request.method}; {paths}"
        return _error(
            self._protocol_of(request), BadRequest(message, status=error.status_code), error.headers
        )

    async def _failed(self, request: Request, error: Exception) -> Response:
        """The answer if a request failed by a fault of the server, which is logged."""
        message = f"the request failed: {type(error).__name__}: {error}"
        return _error(self._protocol_of(request), BadRequest(message, status=500))


def _in_session(
    request: Request, asked: AnyRequest, prompts: list[Tokens]
) -> tuple[list[Tokens], Recorded | None]:
    """The prompts of a request with ids; if it is one of a session, as its turns have them, and these."""
    session = trained_session(request)
    if session is None:
        return prompts, None
    found = session.tree.find_ids(prompts[0].ids)
    return [Tokens(found.ids, found.pictures)], Recorded.of(request, asked, found)


def _error(protocol: Protocol[Any], error: BadRequest, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(protocol.error(error), status_code=error.status, headers=headers)
