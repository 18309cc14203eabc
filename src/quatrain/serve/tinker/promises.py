"""Promises of results, named so that a repeated request gets the first one's, and the order of a model.

Data flow: a checked request (`api.py`) -> `Promises.begin` -> in its model's `Lane`, or at once -> the
device's thread (`worker.py`) -> its future -> the result, kept until some time after it was fetched.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from quatrain.serve.tinker.calls import Refused
from quatrain.types.sampler import ServiceFailed
from quatrain.workers.loop_thread import carry_out, running_future

T = TypeVar("T")
U = TypeVar("U")
Result = bytes | dict[str, Any]
"""Bytes are protobuf, a dict is JSON; a failure is a dict `{"error", "category"}`."""
KEPT_S = 600.0
"""Seconds that a result can be fetched again: the answer that had it may have been lost."""
LOST_S = 60.0
"""The same where room is needed: by then a client has asked again for an answer that was lost."""
MOST_BYTES = 2**30
"""Bytes of results that are kept."""
JSON_BYTES = 1024
"""What a result that is a dict counts: these are paths and a few numbers."""

logger = logging.getLogger(__name__)


class UnknownPromise(LookupError):
    """There is no promise of this id, or it is another key's: HTTP 410."""


def then(future: Future[T], write: Callable[[T], U]) -> Future[U]:
    """The future of `write(result)`, called in the thread that sets `future`.

    Cancelling it cancels `future`.
    """
    written: Future[U] = Future()
    future.add_done_callback(lambda done: carry_out(lambda: write(done.result()), written))
    written.add_done_callback(lambda done: future.cancel() if done.cancelled() else None)
    return written


def _begun(begin: Callable[[], Future[T]]) -> Future[T]:
    """What `begin` returns; what it raises is the future's error."""
    try:
        return begin()
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class Lane:
    """The requests of one model, begun in the order of `seq_id`, 1, 2, 3, …, in whatever order they come.

    What `begin` queues is then done in this order, as the worker does the jobs of an owner. Any thread may
    call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due = 1
        self._held: dict[int, Callable[[], Future[Any]]] = {}
        self._futures: dict[int, Future[Any]] = {}  # of all that are held or run
        self._closed: str | None = None

    def offer(self, seq_id: int, begin: Callable[[], Future[T]]) -> Future[T]:
        """What comes of `begin`, which is called once all requests before it were; it must not block.

        A repeated `seq_id` gets the first one's future, or, once that is done, a failed one: nothing is begun
        twice. What `begin` raises is the future's error, and the next is begun. The future can't be
        cancelled, as what comes after it was computed for a model that has had it.
        """
        begun: list[tuple[int, Future[Any]]] = []
        # Held while requests begin: of two threads, the one with the later request might be first otherwise.
        with self._lock:
            if (known := self._futures.get(seq_id)) is not None:
                return known
            if self._closed is not None:
                return _failed(Refused(self._closed))
            if seq_id < self._due:
                rule = "the requests of a model have the ids 1, 2, 3, …, each once"
                came = f"got {seq_id}, where {self._due} is next"
                return _failed(Refused(f"{rule}; {came}: if it was answered, its result is no longer kept"))
            future = self._futures[seq_id] = running_future()
            self._held[seq_id] = begin
            while (due := self._held.pop(self._due, None)) is not None:
                begun.append((self._due, _begun(due)))
                self._due += 1
        for each, outcome in begun:
            outcome.add_done_callback(partial(self._end, each))
        return future

    @property
    def num_held(self) -> int:
        """Requests that wait for one before them which has not come."""
        return len(self._held)

    def is_due(self, seq_id: int) -> bool:
        """Whether this request waits for no other: what is held may wait for it."""
        return seq_id <= self._due

    def close(self, why: str) -> None:
        """What is held, and all that comes, fails with Refused(why)."""
        with self._lock:
            self._closed = why
            held = [self._futures.pop(seq_id) for seq_id in self._held]
            self._held.clear()
        for future in held:
            future.set_exception(Refused(why))

    def _end(self, seq_id: int, outcome: Future[Any]) -> None:
        future = self._futures[seq_id]
        try:
            future.set_result(outcome.result())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)
        with self._lock:
            del self._futures[seq_id]


Bell = set["asyncio.Future[None]"]
"""Those who wait for something, each in the event loop of its own."""


@dataclass
class _Group:
    """What `retrieve_futures` asks for: the promises of a sampler that are done, numbered from 1."""

    completed: dict[int, Promise] = field(default_factory=dict)
    num_completed: int = 0
    bell: Bell = field(default_factory=set)


@dataclass
class _Session:
    """What an owner has."""

    promises: set[Promise] = field(default_factory=set)
    groups: dict[Hashable, _Group] = field(default_factory=dict)
    num_running: int = 0
    body_bytes: int = 0
    """Of the requests that run."""
    num_bytes: int = 0


@dataclass(eq=False)
class Promise:
    """A result that comes."""

    request_id: str
    name: tuple[str, Hashable]
    """The API key, and what the request is called."""
    session: _Session
    group: _Group | None
    body_bytes: int = 0
    """Of the request, which is kept as long as it runs."""
    future: Future[Any] | None = None
    """None: it has not begun yet, or is done."""
    is_cancelled: bool = False
    result: Result | None = None
    number: int = 0
    """In its group, of those that are done."""
    bell: Bell = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return JSON_BYTES if isinstance(self.result, dict) else len(self.result or b"")


class Promises:
    """All promises of the server. Any thread may call the methods; those that wait, in any event loop.

    A result that was fetched can be fetched again for `kept_s`; where room is needed, of one that the client
    says it has (`completed`), or that was fetched `LOST_S` ago, this ends. One that was never fetched is kept
    until `forget`.
    """

    def __init__(
        self,
        *,
        kept_s: float = KEPT_S,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._kept_s, self._most_bytes, self._clock = kept_s, most_bytes, clock
        self._lock = threading.Lock()
        self._named: dict[tuple[str, Hashable], Promise] = {}
        self._promises: dict[str, Promise] = {}
        self._sessions: dict[str, _Session] = {}
        self._fetched: dict[Promise, float] = {}  # when; the one whose time ends first comes first
        self._acknowledged: dict[Promise, None] = {}
        self.num_bytes = 0
        """Of all results that are kept."""

    def begin(
        self,
        name: Hashable,
        key: str,
        begin: Callable[[], Future[Any]],
        *,
        owner: str,
        group: Hashable = None,
        body_bytes: int = 0,
    ) -> Promise:
        """The promise of the request `name` of the API key `key`: a repeated name gets the same one.

        `begin` is called at the first time alone, and must not block; its future has a `Result` (see `then`).
        What it raises is the promise's error. `owner` is the session, `group` what `completed` asks for,
        `body_bytes` the memory of the request as long as it runs.
        """
        with self._lock:
            self._make_room()
            if (known := self._named.get((key, name))) is not None:
                return known
            session = self._session(owner)
            of_group = None if group is None else session.groups.setdefault(group, _Group())
            promise = Promise(uuid.uuid4().hex, (key, name), session, of_group, body_bytes)
            self._named[promise.name] = self._promises[promise.request_id] = promise
            session.promises.add(promise)
            session.num_running += 1
            session.body_bytes += body_bytes
        # Without the lock, which those who wait need, and which nobody may hold who takes a lane's.
        future = promise.future = _begun(begin)
        future.add_done_callback(partial(self._end, promise))
        if promise.is_cancelled:  # while it began
            future.cancel()
        return promise

    async def retrieve(self, request_id: str, key: str, timeout_s: float) -> Result | None:
        """The result, or the failure, as soon as it is there; None: it still runs after `timeout_s`.

        Raises UnknownPromise.
        """
        with self._lock:
            self._make_room()
            promise = self._find(request_id, key)
            woken = _listen(promise.bell) if promise.result is None else None
        await self._wait(promise.bell, woken, timeout_s)
        with self._lock:
            self._find(request_id, key)  # its session may have ended
            if promise.result is not None:
                self._fetch(promise)
            return promise.result

    async def completed(
        self,
        owner: str,
        group: Hashable,
        cursor: int,
        timeout_s: float,
        retrieved: Sequence[str] = (),
    ) -> tuple[list[dict[str, str]], int]:
        """What was completed in the group after `cursor`, and the next cursor, as soon as there is something.

        Each is `{"state": "finished" | "failed", "request_id"}`; there is none if nothing is after
        `timeout_s`. Those up to `cursor` were seen and are not told again. The results of `retrieved` go
        first where room is needed.
        """
        with self._lock:
            session = self._session(owner)
            of_group = session.groups.setdefault(group, _Group())
            if cursor > of_group.num_completed:  # of a server before this one
                cursor = 0
            for number in [each for each in of_group.completed if each <= cursor]:
                del of_group.completed[number]
            for request_id in retrieved:
                promise = self._promises.get(request_id)
                if promise in self._fetched and promise.session is session:
                    self._acknowledged[promise] = None
            woken = None if of_group.completed else _listen(of_group.bell)
        await self._wait(of_group.bell, woken, timeout_s)
        with self._lock:
            new = of_group.completed.values()
            states = [{"state": _state(each), "request_id": each.request_id} for each in new]
            return states, of_group.num_completed

    def cancel(self, request_id: str, key: str) -> None:
        """Cancel what runs, if it can be; its promise has failed then. Raises UnknownPromise."""
        with self._lock:
            promise = self._find(request_id, key)
        self._cancel(promise)

    def forget(self, owner: str) -> None:
        """Drop all promises of a session that has ended; what runs is cancelled."""
        with self._lock:
            session = self._sessions.pop(owner, _Session())
            dropped = list(session.promises)
            for promise in dropped:
                self._drop(promise)
            for group in session.groups.values():
                _ring(group.bell)
        for promise in dropped:
            self._cancel(promise)

    def is_full(self, owner: str) -> bool:
        """Whether the session must fetch results before it asks for more (HTTP 429).

        All results together have more than `most_bytes`, and the session's at least its share of these: one
        that fetches nothing must not keep the others from going on.
        """
        with self._lock:
            self._make_room()
            num_owners = sum(session.num_bytes > 0 for session in self._sessions.values())
            has = self._sessions.get(owner, _Session()).num_bytes
            return self.num_bytes > self._most_bytes and has * num_owners >= self._most_bytes

    def is_crowded(self, owner: str, most: int, most_bytes: int) -> bool:
        """Whether the session must wait for results before it asks for more (HTTP 429).

        All sessions have `most` requests that run, or `most_bytes` of their bodies, and this one at least its
        share: one with requests that never end must not keep the others from going on.
        """
        with self._lock:
            running = [each for each in self._sessions.values() if each.num_running]
            own = self._sessions.get(owner, _Session())
            return any(
                sum(all_of) >= limit and has * len(running) >= limit
                for all_of, has, limit in (
                    ([each.num_running for each in running], own.num_running, most),
                    ([each.body_bytes for each in running], own.body_bytes, most_bytes),
                )
            )

    @property
    def num_running(self) -> int:
        """Promises of all sessions that have no result yet."""
        with self._lock:
            return sum(session.num_running for session in self._sessions.values())

    def _session(self, owner: str) -> _Session:
        return self._sessions.setdefault(owner, _Session())

    def _find(self, request_id: str, key: str) -> Promise:
        promise = self._promises.get(request_id)
        if promise is None or promise.name[0] != key:
            rule = f"results are kept for {self._kept_s:.0f} s after they were fetched"
            raise UnknownPromise(f"this server has no request {request_id[:100]!r}; {rule}")
        return promise

    async def _wait(self, bell: Bell, woken: asyncio.Future[None] | None, timeout_s: float) -> None:
        """Returns once `bell` is rung, to which `woken` listens, or after `timeout_s`; None: at once."""
        if woken is None:
            return
        try:
            await asyncio.wait_for(woken, timeout_s)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                bell.discard(woken)

    def _end(self, promise: Promise, future: Future[Any]) -> None:
        try:
            result = future.result()
            assert isinstance(result, bytes | dict), f"a result is bytes or a dict; got {type(result)}"
        except BaseException as error:  # told to the client
            result = _failure(error)
        with self._lock:
            promise.future = None
            if promise.request_id not in self._promises:  # its session has ended
                return
            promise.result = result
            promise.session.num_running -= 1
            promise.session.body_bytes -= promise.body_bytes
            promise.session.num_bytes += promise.num_bytes
            self.num_bytes += promise.num_bytes
            if (group := promise.group) is not None:
                group.num_completed = promise.number = group.num_completed + 1
                group.completed[promise.number] = promise
                _ring(group.bell)
            _ring(promise.bell)
            self._make_room()

    def _cancel(self, promise: Promise) -> None:
        promise.is_cancelled = True
        if (future := promise.future) is not None:
            future.cancel()

    def _fetch(self, promise: Promise) -> None:
        """Its time begins, again if it was fetched before."""
        self._fetched.pop(promise, None)
        self._fetched[promise] = self._clock()

    def _make_room(self) -> None:
        """Drops results whose time has ended, and those that their clients have, where room is needed."""
        ended = self._clock() - self._kept_s
        while self._fetched and next(iter(self._fetched.values())) < ended:
            self._drop(next(iter(self._fetched)))
        while self.num_bytes > self._most_bytes and self._acknowledged:
            self._drop(next(iter(self._acknowledged)))
        lost = self._clock() - LOST_S
        while self.num_bytes > self._most_bytes and self._fetched:
            first, when = next(iter(self._fetched.items()))
            if when >= lost:
                break
            self._drop(first)

    def _drop(self, promise: Promise) -> None:
        del self._named[promise.name], self._promises[promise.request_id]
        promise.session.promises.discard(promise)
        promise.session.num_bytes -= promise.num_bytes
        self.num_bytes -= promise.num_bytes
        self._fetched.pop(promise, None)
        self._acknowledged.pop(promise, None)
        if promise.group is not None:
            promise.group.completed.pop(promise.number, None)
        _ring(promise.bell)


def _listen(bell: Bell) -> asyncio.Future[None]:
    """Done once the bell is rung; made with the lock, so that nothing comes between a look and this."""
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    bell.add(woken)
    return woken


def _ring(bell: Bell) -> None:
    """Wakes those who wait, at once and in their event loops."""

    def wake(woken: asyncio.Future[None]) -> None:
        if not woken.done():  # it may have timed out meanwhile
            woken.set_result(None)

    for woken in bell:
        with suppress(RuntimeError):  # its loop is closed: the server ends
            woken.get_loop().call_soon_threadsafe(wake, woken)
    bell.clear()


def _state(promise: Promise) -> str:
    is_failure = isinstance(promise.result, dict) and "error" in promise.result
    return "failed" if is_failure else "finished"


def _failure(error: BaseException) -> dict[str, Any]:
    """What a client is told; a fault of the server is logged too, with where it happened."""
    if isinstance(error, CancelledError):
        return {"error": "the request was cancelled", "category": "user"}
    if isinstance(error, ValueError):
        return {"error": str(error), "category": "user"}
    if not isinstance(error, ServiceFailed):  # which is told to all, and logged once
        logger.error("a request of a client failed", exc_info=error)
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}
