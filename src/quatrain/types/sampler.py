"""The interface of what samples: contexts in, sampled tokens out; nobody above it knows what computes them.

Data flow: players of episodes (`Rollouts`), and requests of a server -> `Request`s -> `Sampler.start` ->
`Progress` of each turn. Samplers are the engine on this run's devices (`engine/service.py`), the workers and
inference servers of a fleet (`rollout/fleet.py`), and a user's class (`rollout.sampler`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from quatrain.types.batches import Prompt
from quatrain.types.metrics import Metrics
from quatrain.types.pictures import Pictures, pictures_of_plain, plain_pictures
from quatrain.types.piece import Piece
from quatrain.types.rollouts import Completion, Sampling

LOOK_S = 0.2
"""Seconds between two looks of one who waits for turns that another thread samples."""


@dataclass(frozen=True)
class PerRequestSampling:
    """The sampling of one sequence, of which `sampling.n` is 1, and what its randomness derives from."""

    sampling: Sampling
    seed: int
    step: int
    sequence_id: int
    offset: int = 0
    """The position of its first token among those that derive from `sequence_id`."""
    session: str = ""
    """Who asks again with a context that grows, for whom it is kept; "": nobody."""
    salt: str = ""
    """Kept contexts are shared with requests of the same salt alone."""
    stop_ids: tuple[int, ...] | None = None
    """The tokens that end it, of an engine that has none of its own; None: the engine's."""
    grammar: str | None = None
    """The grammar that its text follows (`data/grammars.py`); None: any text."""


@dataclass(frozen=True)
class Request:
    """The turns to sample after one context: `sampling.n` of them, numbered from 0.

    `prompt.input_ids` [P] int32 is the context. The randomness of a token derives from the seed of the run,
    `step`, `prompt.group_id`, the number of the turn and the token's position alone; or, of a single turn,
    from what `own` says. So it is the same whoever samples it, and when.
    """

    prompt: Prompt
    step: int
    sampling: Sampling
    own: PerRequestSampling | None = None

    @classmethod
    def alone(cls, prompt: Prompt, own: PerRequestSampling) -> Request:
        """A turn with a sampling of its own."""
        return cls(prompt, own.step, own.sampling, own)

    def singly(self, seed: int) -> list[Request]:
        """The same turns as requests of one each; `seed` is that of the run."""
        if self.own is not None:
            return [self]
        one, first = replace(self.sampling, n=1), self.prompt.group_id * self.sampling.n
        ids = [(first + number) % 2**32 for number in range(self.sampling.n)]
        return [Request.alone(self.prompt, PerRequestSampling(one, seed, self.step, each)) for each in ids]


@dataclass(frozen=True)
class Progress:
    """What was added to a turn.

    `finish_reason` is None while the turn goes on; `error` says in one line why it will not. At its end,
    `metrics` are those of the sampler's work since another turn has ended, if it has any.
    """

    piece: Piece = field(default_factory=Piece)
    finish_reason: str | None = None
    error: str | None = None
    metrics: Metrics = field(default_factory=dict)
    cached: int = 0
    """Tokens of its context that a kept context had."""


Listener = Callable[[int, Progress], None]
"""Called, in any thread, with the number of a turn among those that were asked for together."""


class Work(NamedTuple):
    """What a sampler has done so far: for the progress that is shown, and `Sampler.work_since`."""

    completions: int = 0
    tokens: int = 0
    running: int = 0
    """Turns that are being sampled."""
    of_sampler: Any = None
    """What else the sampler counts."""


class Pause:
    """Waits before a round for the answers of those who play episodes, so that rounds are repeatable.

    Together they have `left_s` seconds; once these are used up, requests are taken as they come: the same
    tokens for the same seed, up to rounding. Any thread may call it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owed = 0
        self.left_s = 0.0
        self.waited_s = 0.0
        """Seconds so far."""

    def owe(self, count: int = 1) -> None:
        """So many more players are to ask for a turn, or to end."""
        with self._changed:
            self._owed += count

    def pay(self) -> None:
        """One of them has."""
        with self._changed:
            self._owed -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Returns once all have, or no time is left."""
        if self._owed and self.left_s > 0:
            began = time.perf_counter()
            with self._changed:
                self._changed.wait_for(lambda: not self._owed, self.left_s)
            seconds = time.perf_counter() - began
            self.left_s, self.waited_s = self.left_s - seconds, self.waited_s + seconds


class ServiceFailed(RuntimeError):
    """The sampler failed, or it was closed; nothing can be answered any more."""


class TurnFailed(RuntimeError):
    """A turn was not sampled, though the sampler goes on."""


class Sampler(ABC):
    """What samples turns from the weights that were loaded last. Any thread may call its methods.

    A class of one's own needs `start` and `load` alone.
    """

    version: int = 0
    """The version of the weights that the next turn is sampled from."""
    error: str | None = None
    """Why nothing can be answered any more; None as long as all is well."""
    failure: Exception | None = None
    """The error behind `error`, where it says what to do."""
    paused: bool = False
    """Whether sampling waits, with all that is asked for."""
    can_score: bool = False
    """Whether given tokens can be scored."""
    is_everywhere: bool = False
    """Whether every process of a run takes part in the work; otherwise the main process alone samples."""
    cannot_see: str | None = (
        "rollout.sampler must see the pictures of prompts; a class that reads `prompt.pictures` says so with "
        "`cannot_see = None`"
    )
    """Why it samples after no prompt with pictures, and what to do about it; None: it does."""
    cannot_constrain: str | None = (
        "rollout.sampler must follow the grammar of a request; a class that reads `own.grammar` says so with "
        "`cannot_constrain = None`"
    )
    """Why it follows no grammar (`PerRequestSampling.grammar`), and what to do about it; None: it does."""

    @property
    def exchanges_in_flight(self) -> bool:
        """Whether weights may be loaded while turns are sampled, whose tokens then say which sampled them."""
        return False

    @abstractmethod
    def start(self, requests: Sequence[Request], listener: Listener) -> Future[list[int]]:
        """Queue the turns of `requests`, which share the sampling unless each has its own.

        `listener` gets the progress of each, with its number among all of them in order. The future has a
        key for each request, for `drop`; or a ValueError if there is no room for one of them, and
        ServiceFailed if the sampler has failed.
        """

    @abstractmethod
    def load(self, weights: Any, version: int) -> Any:
        """Sample from `weights` from now on, the parameters or what `copy_weights` made of them.

        Their tokens are recorded with `version`. Returns when they are in use.
        """

    def check_grammar(self, grammar: str) -> None:
        """Raises ValueError, with the reason, if it does not follow this grammar.

        Without this, `start` refuses it. A grammar that was checked begins sooner.
        """
        if self.cannot_constrain is not None:
            raise ValueError(f"the answer would be any text: {self.cannot_constrain}")

    def drop(self, keys: Sequence[int]) -> None:  # noqa: B027 - may stay as it is
        """Forget requests, whose listeners are called no more; those that have finished are ignored."""

    def forget(self, session: str) -> None:  # noqa: B027 - may stay as it is
        """No request of this session comes any more: what is kept of its contexts goes first."""

    def copy_weights(self, params: Any) -> Any:
        """`params` for `load`, as a copy that training does not overwrite."""
        return params

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        num_likeliest: int,
        pictures: Sequence[Pictures | None] | None = None,
    ) -> Future[Any]:
        """Log-probabilities of given tokens and the likeliest in their place, where `can_score`.

        `pictures` are those of each sequence, or of its beginning.
        """
        raise NotImplementedError("this sampler scores no given tokens")

    def work(self) -> Work:
        """What it has done so far."""
        return Work()

    def work_since(self, before: Work, seconds: float) -> Metrics:
        """Metrics of the work since `work` was `before`, `seconds` ago."""
        return {}

    def wait_before_rounds(self, pause: Pause) -> None:  # noqa: B027 - may stay as it is
        """Before each round of the sampler, if it has rounds, `pause` waits for the answers of players."""

    def advance_until(self, futures: Sequence[Future[Any]], on_look: Callable[[], None]) -> None:
        """Returns when `futures` are done; `on_look` is called now and then meanwhile."""
        while wait(futures, LOOK_S).not_done:
            on_look()

    def release(self) -> None:  # noqa: B027 - may stay as it is
        """Free the memory of the weights until the next `load`, where they are this run's."""

    def close(self, timeout_s: float | None = None) -> Any:  # noqa: B027 - may stay as it is
        """End it; turns in flight get an error."""


def check_seen(sampler: Sampler, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError if one of `prompts` has pictures, and `sampler` would not see them."""
    if sampler.cannot_see is not None and any(prompt.pictures is not None for prompt in prompts):
        raise ValueError(f"pictures would be lost: {sampler.cannot_see}")


def check_followed(sampler: Sampler, requests: Iterable[Request]) -> None:
    """Raises ValueError if one of `requests` has a grammar that `sampler` does not follow."""
    grammars = {each.own.grammar for each in requests if each.own is not None}
    for grammar in grammars:
        if grammar is not None:
            sampler.check_grammar(grammar)


def sampled(sampler: Sampler, requests: Sequence[Request]) -> list[Future[Completion]]:
    """The completion of each turn of `requests`, once it is whole.

    The futures have ValueError if there is no room for a request, or it has pictures and the sampler cannot
    see, or a grammar that it does not follow; TurnFailed, or ServiceFailed.
    """
    turns = [Completion() for request in requests for _ in range(request.sampling.n)]
    futures: list[Future[Completion]] = [Future() for _ in turns]
    for future in futures:  # none is cancelled: the sampler sets it, also if nobody waits any more
        future.set_running_or_notify_cancel()

    def listen(number: int, progress: Progress) -> None:
        turn, future = turns[number], futures[number]
        if future.done():  # refused before its end
            return
        turn.append(progress.piece)
        if progress.error is not None:
            failed = ServiceFailed if sampler.error is not None else TurnFailed
            future.set_exception(failed(progress.error))
        elif progress.finish_reason is not None:
            turn.finish_reason, turn.cached = progress.finish_reason, progress.cached
            future.set_result(turn)

    def queued(keys: Future[list[int]]) -> None:
        if (error := keys.exception()) is not None:
            fail(error)

    def fail(error: BaseException) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(error)

    try:
        check_seen(sampler, [request.prompt for request in requests])
        check_followed(sampler, requests)
        sampler.start(requests, listen).add_done_callback(queued)
    except Exception as error:  # of a sampler of one's own: whoever waits for the turns is told
        fail(error)
    return futures


class AtOnce:
    """Gives requests to `sampler` so that at most `most` of their turns are sampled at the same time.

    A request of more turns is sampled alone. The others follow in order, as turns end.
    """

    def __init__(self, sampler: Sampler, most: int):
        self._sampler, self._most = sampler, most
        self._waiting: deque[Request] = deque()
        self._futures: deque[Future[Completion]] = deque()
        self._running, self._lock = 0, threading.RLock()
        self._begins = False

    def sampled(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """As the function of this name."""
        futures: list[Future[Completion]] = [Future() for each in requests for _ in range(each.sampling.n)]
        with self._lock:
            self._waiting.extend(requests)
            self._futures.extend(futures)
            self._begin()
        return futures

    def _begin(self) -> None:
        """Begins requests as long as there is room for the next."""
        # Turns may end within `start`: the loop that runs begins the next. A call for each would go deeper
        # with every request, until Python refuses it.
        if self._begins:
            return
        self._begins = True
        try:
            while now := self._next():
                awaited = [self._futures.popleft() for each in now for _ in range(each.sampling.n)]
                for outer, future in zip(awaited, sampled(self._sampler, now), strict=True):
                    future.add_done_callback(partial(self._end, outer))
        finally:
            self._begins = False

    def _next(self) -> list[Request]:
        """The requests for which there is room now, which count as running."""
        now: list[Request] = []
        while self._waiting and (
            not self._running or self._running + self._waiting[0].sampling.n <= self._most
        ):
            now.append(self._waiting.popleft())
            self._running += now[-1].sampling.n
        return now

    def _end(self, awaited: Future[Completion], done: Future[Completion]) -> None:
        with self._lock:
            self._running -= 1
            self._begin()
        if (error := done.exception()) is not None:
            awaited.set_exception(error)
        else:
            awaited.set_result(done.result())


def numbered(requests: Sequence[Request]) -> Iterator[tuple[Request, int]]:
    """(request, number of its first turn) of requests that were asked for together."""
    first = 0
    for request in requests:
        yield request, first
        first += request.sampling.n


def plain(request: Request) -> dict[str, Any]:
    """A request as values of which others are told (`decided_by_main`), without what no sampler reads."""
    own = None if request.own is None else {**vars(request.own), "sampling": vars(request.own.sampling)}
    prompt = request.prompt
    return {
        "ids": prompt.input_ids.tolist(),
        "group": prompt.group_id,
        "step": request.step,
        "sampling": vars(request.sampling),
        "own": own,
        "pictures": plain_pictures(prompt.pictures),
    }


def request_of(values: dict[str, Any]) -> Request:
    """The inverse of `plain`."""
    ids, pictures = np.array(values["ids"], np.int32), pictures_of_plain(values["pictures"])
    prompt = Prompt(values["group"], ids, "", pictures=pictures)
    own = values["own"]
    if own is not None:
        stop_ids = None if own["stop_ids"] is None else tuple(own["stop_ids"])
        changes = {"sampling": _sampling_of(own["sampling"]), "stop_ids": stop_ids}
        own = PerRequestSampling(**{**own, **changes})
    return Request(prompt, values["step"], _sampling_of(values["sampling"]), own)


def _sampling_of(values: dict[str, Any]) -> Sampling:
    return Sampling(**{**values, "stop": tuple(values["stop"])})
