"""The HTTP client of an inference server: its connections and time limits, and one text for each failure.

Data flow: path and JSON of `kinds.py` -> `ServerClient.ask` -> the JSON of the answer, or an error: another
try may help (`ServerLost`), this question was refused (`Refusal`), or the server is of no use (`Unfit`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar

import httpx2 as httpx

from quatrain.cluster.start_thread import start_thread
from quatrain.config.secrets import SERVE_TOKEN

CONNECT_S = 10.0
"""Seconds in which a server must accept a connection."""
CONTROL_S = 60.0
"""Longest wait for the answer to a question that costs a server nothing."""
PAUSE_S = 1.0
"""Seconds between two attempts of `ServerClient.ask_patiently`."""
BYTES = "application/octet-stream"
"""The type of a body that is no JSON."""
TRY_AGAIN = (408, 429)
"""Statuses below 500 of a server that may answer later: it timed out, or has too many requests."""

Found = TypeVar("Found")


class ServerLost(Exception):
    """A server did not answer, or not as it may later: with a status of 500 or more, or of TRY_AGAIN."""

    timed_out = False
    """Whether an answer did not come in time."""
    retry_after_s: float | None = None
    """Seconds after which the server wants to be asked again, if it said so (`Retry-After`)."""


class ServerError(ServerLost):
    """A server answered with status 500: it failed at what it was asked, or does not know it."""


class Refusal(Exception):
    """A server answered a question with a `status` of 300 to 499 that asking again will not change."""

    def __init__(self, status: int, message: str):
        super().__init__(f"status {status}, {message}")
        self.status = status


class Unfit(ValueError):
    """A server cannot serve this run, or its answer cannot be used."""


class ServerClient:
    """Asks the server at `address`. `room` lets `at_once` samples through at a time (None: any number).

    Other questions do not wait for `room`, so that a server whose queue is full is still asked for its
    version. `timeout_s`: longest wait for an answer. `token`: what the server is sent as its key; None:
    SERVE_TOKEN, if that is set. `by_proxy`: a proxy of the environment is used. Raises Unfit for an address
    that is none.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        at_once: int | None = None,
        token: str | None = None,
        by_proxy: bool = False,
    ):
        self.address, self.timeout_s = address, timeout_s
        self.name = address
        """What messages call the server; its probe puts the kind of server before the address."""
        self.room = asyncio.Semaphore(at_once or sys.maxsize)
        token = token or os.environ.get(SERVE_TOKEN)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # `room` is the limit of connections. Usually no proxy of the environment: it would cut long requests
        # off.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        given: dict[str, Any] = {"headers": headers, "limits": limits, "trust_env": by_proxy}
        try:
            self._http = httpx.AsyncClient(base_url=address, **given)
        except httpx.InvalidURL as error:
            raise Unfit(f"its address must be one such as http://host:8000; {error}; correct it") from error
        self._loop = _loop()
        self._works = dict[Any, bool]()  # tasks, and whether `close` cancels them

    def run(self, work: Coroutine[Any, Any, Found]) -> Found:
        """The result of `work`, which goes on to its end also if the client is closed meanwhile.

        Blocks; work in the event loop awaits other work instead.
        """
        return self.start(work, cancel=False).result()

    def start(self, work: Coroutine[Any, Any, Found], *, cancel: bool = True) -> Future[Found]:
        """The future result of `work`, which `close` cancels, or else waits for."""

        async def counted() -> Found:
            task = asyncio.current_task()
            self._works[task] = cancel
            try:
                return await work
            finally:
                del self._works[task]

        return asyncio.run_coroutine_threadsafe(counted(), self._loop)

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        timeout_s: float | None = None,
        session: str = "",
        on_sent: Callable[[], None] | None = None,
    ) -> Any:
        """The JSON of an answer, or its text if it is none; without `body`, nothing is sent, and bytes as
        they are.

        `timeout_s`: seconds in which it must come, math.inf for a sample, which may wait in the server's
        queue. A proxy may send all requests of a `session` to the same server. `on_sent` is called when there
        is a connection and the request goes out on it. Raises ServerLost, Refusal, and Unfit for a host that
        has no address.
        """
        method = "GET" if body is None else "POST"
        # Short for questions that cost nothing: a server that hangs is found out before a step is lost.
        limit = min(CONTROL_S, self.timeout_s) if timeout_s is None else timeout_s
        # No limit for `pool`: to wait for a connection here is no sign that the server is lost.
        wait = httpx.Timeout(None if limit == math.inf else limit, connect=min(CONNECT_S, limit), pool=None)
        headers = {"X-Session-ID": session} if session else {}
        sent: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            headers["Content-Type"], sent = BYTES, {"content": body}
        told = {} if on_sent is None else {"trace": _when_sent(on_sent)}
        try:
            response = await self._http.request(
                method, path, **sent, headers=headers, timeout=wait, extensions=told
            )
        except (httpx.HTTPError, OSError) as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if _is_unknown_host(error):  # a misspelt name would be asked for until rollout.timeout_s is over
                raise Unfit(f"its host has no address ({reason}); correct its name") from error
            lost = ServerLost(f"{method} {path} failed: {reason}")
            lost.timed_out = isinstance(error, httpx.TimeoutException)
            raise lost from error
        return _value(response)

    async def ask_patiently(self, path: str, body: Any = None) -> Any:
        """As `ask`, again and again while the server is lost, for `timeout_s` seconds."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return await self.ask(path, body, timeout_s=self.timeout_s)
            except ServerLost as error:
                if time.monotonic() > deadline:
                    limit = f"{self.timeout_s:g} s (rollout.timeout_s)"
                    raise ServerLost(f"it did not answer for {limit}: {error}") from error
            await asyncio.sleep(PAUSE_S)

    def close(self) -> None:
        """Cancels what was started; connections are closed when what runs has ended. May be called again."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        for task, cancel in self._works.items():
            if cancel:
                task.cancel()
        # What `run` does is waited for: a server that loads weights must be told to go on afterwards.
        await asyncio.gather(*self._works, return_exceptions=True)
        await self._http.aclose()


def _when_sent(call: Callable[[], None]) -> Callable[[str, Mapping[str, Any]], Coroutine[Any, Any, None]]:
    """An httpx extension `trace` that calls `call` when a request is sent, not one to a proxy before it."""

    async def trace(event: str, info: Mapping[str, Any]) -> None:
        if event.endswith(".send_request_headers.started") and info["request"].method != b"CONNECT":
            call()

    return trace


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all clients, in a thread of its own.

    A loop, because hundreds of samples wait at the same time, and because tasks can be cancelled, which
    closes their connections and so tells a server to stop decoding; threads cannot.
    """
    loop = asyncio.new_event_loop()
    start_thread(loop.run_forever, name="requests to servers")
    return loop


async def all_of(works: Iterable[Coroutine[Any, Any, Found]]) -> list[Found]:
    """The results of `works`, which are done at the same time; if one fails, the others are cancelled.

    That closes their connections, by which the server knows that it need not go on decoding.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def shortened(value: Any) -> str:
    """The beginning of an answer, for a message."""
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 200 else f"{text[:200]}…"


def _value(response: httpx.Response) -> Any:
    """The JSON of a response, or its text; raises ServerLost or Refusal by its status."""
    status = response.status_code
    if status >= 500 or status in TRY_AGAIN:
        # As a server that is gone: its groups are given to others meanwhile, and it is asked again later.
        kind = ServerError if status == 500 else ServerLost
        lost = kind(f"status {status}, {shortened(response.text)}")
        lost.retry_after_s = _retry_after_s(response.headers.get("Retry-After", ""))
        raise lost
    if status >= 400:
        try:  # the message of an error in OpenAI's form
            message = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = response.text
        raise Refusal(status, shortened(message))
    if status >= 300:
        # Not followed: a server that moved, or a login page, is not what the configuration names.
        raise Refusal(status, f"to {response.headers.get('Location', 'nowhere')}")
    try:
        return response.json()
    except ValueError:
        return response.text


def _retry_after_s(header: str) -> float | None:
    """The seconds of a header `Retry-After`, which has a number or a date; None for none of them."""
    try:
        seconds = float(header) if header else math.nan
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _is_unknown_host(error: BaseException | None) -> bool:
    """Whether `error` comes from a name that no host has; a name server that fails may answer later."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False
