"""Promises of results, named so that a repeated request gets the first one's, and the order of a model's requests.

Data flow: a checked request (`api.py`) -> `Promises.begin` -> in its model's `Lane`, or at once -> the device's
thread (`worker.py`) -> its future -> the result, kept until some time after it was fetched by `retrieve`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")
Result = bytes | dict[str, Any]
"""Bytes are protobuf, a dict is JSON; a failure is a dict `{"error", "category"}`."""
KEPT_S = 600.0
"""Seconds that a result can be fetched again: the answer that had it may have been lost."""
MOST_BYTES = 2**30
"""Bytes of results that are kept."""


class UnknownPromise(LookupError):
    """There is no promise of this id, or it is another key's: HTTP 410."""


def then(future: Future[T], write: Callable[[T], U]) -> Future[U]:
    """The future of `write(result)`, called in the thread that sets `future`; cancelling it cancels `future`."""
    raise NotImplementedError


class Lane:
    """The requests of one model, begun in the order of their `seq_id`, 1, 2, 3, …, whatever order they come in.

    What `begin` queues is then done in this order, as the worker does the jobs of an owner. Any thread may call
    the methods.
    """

    def offer(self, seq_id: int, begin: Callable[[], Future[T]]) -> Future[T]:
        """What comes of `begin`, which is called once all requests before it were; it must not block.

        A repeated `seq_id` gets the first one's future, or, once that is done, a failed one: nothing is begun
        twice. What `begin` raises is the future's error, and the next is begun. The future can't be cancelled.
        """
        raise NotImplementedError

    @property
    def num_held(self) -> int:
        """Requests that wait for one before them which has not come."""
        raise NotImplementedError

    def close(self, why: str) -> None:
        """What is held, and all that comes, fails with Refused(why)."""
        raise NotImplementedError


@dataclass(eq=False)
class Promise:
    """A result that comes."""

    request_id: str
    key: str
    owner: str


class Promises:
    """All promises of the server. Any thread may call the methods; those that wait, in any event loop."""

    def __init__(self, *, kept_s: float = KEPT_S, most_bytes: int = MOST_BYTES):
        raise NotImplementedError

    def begin(
        self,
        name: Hashable,
        key: str,
        begin: Callable[[], Future[Any]],
        *,
        owner: str,
        group: Hashable = None,
    ) -> Promise:
        """The promise of the request `name` of the API key `key`: a repeated name gets the same one.

        `begin` is called at the first time alone, and must not block; its future has a `Result` (see `then`).
        What it raises is the promise's error. `owner` is the session, `group` what `completed` asks for.
        """
        raise NotImplementedError

    async def retrieve(self, request_id: str, key: str, timeout_s: float) -> Result | None:
        """The result, or the failure, as soon as it is there; None: it still runs after `timeout_s`.

        Raises UnknownPromise.
        """
        raise NotImplementedError

    async def completed(
        self,
        owner: str,
        group: Hashable,
        cursor: int,
        timeout_s: float,
        retrieved: Sequence[str] = (),
    ) -> tuple[list[dict[str, str]], int]:
        """What was completed in the group after `cursor`, and the next cursor, as soon as there is something.

        Each is `{"state": "finished" | "failed", "request_id"}`; none if nothing is after `timeout_s`. Those up
        to `cursor` were seen and are not told again. The results of `retrieved` go first where room is needed.
        """
        raise NotImplementedError

    def cancel(self, request_id: str, key: str) -> None:
        """Cancel what runs, if it can be; its promise has failed then. Raises UnknownPromise."""
        raise NotImplementedError

    def forget(self, owner: str) -> None:
        """Drop all promises of a session that has ended; what runs is cancelled."""
        raise NotImplementedError

    def is_full(self, owner: str) -> bool:
        """Whether the session must fetch results before it asks for more (HTTP 429).

        All results together have more than `most_bytes`, and the session has its share of them.
        """
        raise NotImplementedError

    def num_running(self, owner: str) -> int:
        """Promises of a session that have no result yet."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Of all results that are kept."""
        raise NotImplementedError
