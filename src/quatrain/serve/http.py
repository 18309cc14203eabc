"""What every path of the server needs of HTTP: bodies, keys, sessions by path, and answers given twice.

Data flow: a request of starlette -> `Access` -> a handler of `api.py`, once or again. What a body says is a
protocol's matter (`protocols/`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from quatrain.config.secrets import SERVE_TOKEN
from quatrain.serve.requests import BadRequest
from quatrain.serve.sessions import Reply, Session, Sessions

CHANGING = ("/weights", "/weights/begin", "/weights/put", "/pause", "/resume")
"""What only who has the server's token may ask."""
MOST_BYTES = 32 * 2**20
"""Bytes of the body of a request."""
LOOK_S = 0.5
"""Seconds between two looks whether a client that waits for an answer is still there."""
PLACES = ("", "/s/{session}", "/s/{session}/untrained", "/s/{session}/role/{role}")
"""Where a session has a path that is of sessions too; the first: by its key alone."""
UNTRAINED = ":untrained"
"""What ends the name of a model that answers a session's request without being trained on it.

Agents have one name for the model that does the work, and one for a helper that writes titles and summaries.
"""

Handler = Callable[[Request], Awaitable[Response]]


def is_of_sessions(path: str) -> bool:
    """Whether a session has the path too."""
    return path.startswith(("/v1/", "/inference/"))


def is_untrained(request: Request) -> bool:
    """Whether a request of a session is no turn of its episode: by its path, or by the model it names."""
    by_path = request.path_params.get("session") is not None and "/untrained/" in request.url.path
    return by_path or getattr(request.state, "names_untrained", False)


def trained_session(request: Request) -> Session | None:
    """The session in which the answer is a turn."""
    return None if is_untrained(request) else getattr(request.state, "session", None)


async def body_of(request: Request, kind: str = "application/json", most: int = MOST_BYTES) -> bytes:
    """The body of a request; raises BadRequest if it is not said to be of this kind, or too long.

    A page in a browser cannot send JSON or bytes to another site without asking first.
    """
    if (known := getattr(request.state, "body", None)) is not None:
        return known
    said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if said != kind:
        raise BadRequest(
            f"a request must have the header `Content-Type: {kind}`; got {said or 'none'}",
            status=415,
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise BadRequest(f"the body of a request has at most {most} bytes; split it", status=413)
    request.state.body = bytes(body)
    return request.state.body


class Access:
    """Who may ask: whoever brings `token`, or the key of one of `sessions`.

    `token` None: no request needs one, and weights and pauses are refused.
    """

    def __init__(self, token: str | None, sessions: Sessions | None):
        self._token, self._sessions = token, sessions

    async def answer(self, request: Request, path: str, handler: Handler, *, is_turn: bool) -> Response:
        """The handler's answer to a request that may ask for `path`; raises BadRequest for another.

        `is_turn`: in a session, what the handler does is a turn of its episode.
        """
        session = self.session_of(request) if is_of_sessions(path) else None
        if session is None:
            self._authorise(request, path)
            return await handler(request)
        request.state.session = session
        if request.method == "POST":
            request.state.names_untrained = _names_untrained(await body_of(request))
        if is_turn and not is_untrained(request):
            return await _once(request, session, handler)
        with session.work():
            response = await handler(request)
        session.counts["untrained_requests"] += is_turn
        return response

    def session_of(self, request: Request) -> Session | None:
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

    def _authorise(self, request: Request, path: str) -> None:
        if path == "/health":
            return
        if self._token is None:
            if path in CHANGING:
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


def _names_untrained(body: bytes) -> bool:
    """Whether the model that a body names ends in UNTRAINED."""
    if UNTRAINED.encode() not in body:  # which spares most bodies a second reading
        return False
    with suppress(ValueError, RecursionError):
        asked = json.loads(body)
        return isinstance(asked, dict) and str(asked.get("model")).endswith(UNTRAINED)
    return False


def _bearer(request: Request) -> str:
    """The key of a request: OpenAI's clients send it as a bearer's, Anthropic's as `x-api-key`."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    return bearer or request.headers.get("x-api-key", "")


async def _once(request: Request, session: Session, handler: Handler) -> Response:
    """The answer to a request of a session; to one that is asked again, the one that it had.

    A client asks again if its connection broke, and says so. Without that, an equal request is another
    sample. An answer is sampled to its end also if the client leaves.
    """
    digest = hashlib.blake2b(request.url.path.encode() + b"\0" + await body_of(request)).digest()
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
        reply.task = asyncio.create_task(_worked(request, session, handler))
    task = reply.task
    assert task is not None
    reply.waiting += 1
    reply.update()
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
        # A stream is read once, so not by a client whose repetition waits for it too.
        if _is_stream(task) and (reply.is_given or await request.is_disconnected()):
            raise ClientDisconnect
        if task.exception() is not None or _is_stream(task):
            _forget(reply, known)  # nothing to give again
        reply.is_given = True
        return task.result()
    finally:
        reply.waiting -= 1
        reply.update()
        if not (reply.waiting or reply.is_given):
            task.add_done_callback(lambda _: _end_unread(reply, known))


def _is_stream(task: asyncio.Task[Response]) -> bool:
    """Whether a task that is done made a stream."""
    return task.exception() is None and isinstance(task.result(), StreamingResponse)


def _forget(reply: Reply, known: list[Reply]) -> None:
    if reply in known:
        known.remove(reply)


def _end_unread(reply: Reply, known: list[Reply]) -> None:
    """Ends a stream that nobody waits for any more before it has begun, as one that breaks later is ended.

    Else it would be sampled for nobody, and its turns would hold room of the episode for ever.
    """
    assert reply.task is not None
    if not (reply.waiting or reply.is_given or reply.task.cancelled()) and _is_stream(reply.task):
        _forget(reply, known)
        reply.stop()
        reply.release()


async def _worked(request: Request, session: Session, handler: Handler) -> Response:
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
