"""The owner of an engine: what samples on this run's devices, in rounds, whoever asks and when.

Data flow: any thread -> `EngineService.start` -> before the next round, `RolloutEngine.submit` -> after each
round, the progress of every turn. The order in which turns are admitted depends on rounds alone, never on a
clock, or a run and its repetition would differ by rounding: what came since the last round is submitted
together, in the order of steps and sequences. With several processes, the main one says what came.

The rounds run in a thread of the service's own, or in that of whoever waits for the turns (`advance_until`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from quatrain.cluster.processes import decided_by_main, is_main_process
from quatrain.cluster.start_thread import start_thread
from quatrain.data.expansion import BLIND
from quatrain.engine.engine import RolloutEngine, Ticket, work_metrics
from quatrain.engine.scoring import Scores
from quatrain.models.architecture import Architecture
from quatrain.parallel.compilations import compiling_for_s, num_compilations
from quatrain.types.metrics import Metric, Metrics
from quatrain.types.pictures import Pictures
from quatrain.types.piece import NOTHING, Mark
from quatrain.types.sampler import (
    Listener,
    Pause,
    Progress,
    Request,
    Sampler,
    ServiceFailed,
    Work,
    numbered,
    plain,
    request_of,
)
from quatrain.workers.loop_thread import carry_out

T = TypeVar("T")
CLOSED = "the engine was closed while turns were in flight"
IDLE_S = 0.02
"""Seconds that a round waits for requests if there is nothing to sample."""


def blind(arch: Architecture) -> str | None:
    """Why an engine with this model sees no pictures (`Sampler.cannot_see`); None: it does."""
    return BLIND if arch.vision is None else None


@dataclass
class Totals:
    """What the service has done so far."""

    requests: int = 0
    sequences_cancelled: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    scored_tokens: int = 0
    weight_loads: int = 0
    prefix_cached_tokens: int = 0
    prefix_evicted_tokens: int = 0


@dataclass
class _Running:
    """A request in the engine: the number of its first turn, and how much of that was reported."""

    ticket: Ticket
    number: int
    listener: Listener | None
    """None once it was dropped."""
    reported: Mark = NOTHING


class _Asked(NamedTuple):
    """Requests that wait for the next round."""

    keys: Future[list[int]]
    requests: Sequence[Request]
    listener: Listener

    @property
    def order(self) -> tuple[int, ...]:
        first = self.requests[0]
        own = first.own
        return (first.step, 0, 0) if own is None else (own.step, own.sequence_id, own.offset)


class _Come(NamedTuple):
    """What has come since the last round."""

    asked: Sequence[_Asked]
    dropped: Sequence[int | str]
    ended: bool
    """Whether the one who waits has what he waits for."""


class _Scoring(NamedTuple):
    """Sequences to score, some of them between any two rounds."""

    result: Future[list[Scores]]
    parts: Iterator[list[Scores]]
    scores: list[Scores]


class EngineService(Sampler):
    """Owns `engine`, which has weights of `version`; its methods may be called from any thread.

    `read` makes parameters of what `load` gets. With `thread`, the service has a thread of that name, which
    keeps the context variables of the caller. It is a daemon, so that a job that hangs does not keep the
    process alive. Without, rounds run in `advance_until`, and only one thread may call that and the other
    methods, but for `start` and `drop`.

    In a run of several processes there is no thread. `led`: the main process alone is asked, and says to the
    others what it was; otherwise each process asks for the same.
    """

    can_score = True
    is_everywhere = True

    def __init__(
        self,
        engine: RolloutEngine,
        read: Callable[[Any], Any] = lambda weights: weights,
        *,
        version: int = 0,
        thread: str | None = "engine",
        led: bool = False,
    ):
        self.totals = Totals()
        self.version = version
        self.paused = False
        self.error: str | None = None
        self.engine = engine
        """Nobody else may use it, but to look."""
        self._read, self._led = read, led
        self._players = Pause()
        self._changed = threading.Condition()
        self._loading = threading.Lock()
        self._closed = False
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._asked: list[_Asked] = []
        self._dropped: list[int | str] = []  # keys of requests, and sessions, in their order
        self._waiting: deque[_Asked] = deque()  # as the engine samples with another sampling
        self._running: dict[int, _Running] = {}
        self._num_keys = 0
        self._scoring: deque[_Scoring] = deque()
        self._since, self._stats = time.perf_counter(), engine.stats
        self._round: tuple[float, int] | None = None
        """When the round that runs began, and how many programs had been compiled then."""
        self._thread = None if thread is None else start_thread(self._work, name=thread)

    @property
    def cannot_see(self) -> str | None:  # type: ignore[override]
        """The model must have a tower, which is read with it."""
        return None if self.engine.sees else BLIND

    @property
    def cannot_constrain(self) -> str | None:  # type: ignore[override]
        """The engine must take a sampling for each turn, and llguidance be installed."""
        return self.engine.cannot_constrain

    def check_grammar(self, grammar: str) -> None:
        """It must be one that llguidance takes, for the tokens of the model."""
        super().check_grammar(grammar)
        self.engine.guide.check(grammar)

    @property
    def exchanges_in_flight(self) -> bool:
        """It may: between two rounds."""
        return True

    @property
    def num_running(self) -> int:
        """Requests that are not finished."""
        return len(self._running) + sum(len(asked.requests) for asked in (*self._asked, *self._waiting))

    @property
    def round_s(self) -> float:
        """Seconds since the round that runs began; 0 if none does."""
        began = self._round
        return 0.0 if began is None else time.monotonic() - began[0]

    @property
    def compiles(self) -> bool:
        """Whether a program was compiled in the round that runs, or is being compiled."""
        began = self._round
        return began is not None and (num_compilations() > began[1] or compiling_for_s() is not None)

    def run(self, job: Callable[[], T]) -> Future[T]:
        """What `job` returns or raises, run between two rounds, in the order of these calls.

        Without a thread of the service at once, as no round runs then; it raises here what `job` raises.
        """
        if self._thread is None:
            result: Future[T] = Future()
            result.set_result(job())
            return result
        return self._queue(lambda result: self._commands.append((result, job)))

    def start(self, requests: Sequence[Request], listener: Listener) -> Future[list[int]]:
        """Queue the turns of `requests`.

        Those with another sampling than those in flight wait until these have finished, unless the engine
        takes one for each. The future has a ValueError if the KV cache has no room for one of them.
        """
        if self.engine.per_request_sampling:
            requests = [each for request in requests for each in request.singly(self.engine.seed)]
        if not requests:
            nothing: Future[list[int]] = Future()
            nothing.set_result([])
            return nothing
        return self._queue(lambda keys: self._asked.append(_Asked(keys, requests, listener)))

    @contextmanager
    def one_round(self) -> Iterator[None]:
        """Requests that are started within are taken by the same round.

        The shapes of its programs, and so the rounding, then do not depend on when the thread looked.
        """
        with self._changed:
            yield

    def drop(self, keys: Sequence[int]) -> None:
        """Forget requests; those that have finished are ignored."""
        with self._changed:
            self._dropped += keys
            self._changed.notify_all()

    def forget(self, session: str) -> None:
        """No request of this session comes any more: what is kept of its contexts goes first."""
        with self._changed:
            self._dropped.append(session)
            self._changed.notify_all()

    @property
    def num_kept_blocks(self) -> int:
        """Blocks of contexts that are kept for further requests."""
        return self.engine.num_kept_blocks

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        num_likeliest: int,
        pictures: Sequence[Pictures | None] | None = None,
    ) -> Future[list[Scores]]:
        """Log-probabilities of given tokens and the likeliest in their place, of each sequence.

        `pictures` are those of each, or of its beginning. Others decode meanwhile; a future that is cancelled
        ends the work.
        """
        parts = self.engine.score(sequences, num_likeliest, pictures=pictures)
        return self._queue(lambda result: self._scoring.append(_Scoring(result, parts, [])))

    def load(self, weights: Any, version: int, *, free_first: bool = False) -> int:
        """Sample from `weights`, as `read` makes them, from the next round on; the version of the weights.

        Turns in flight go on with them. Blocks until they are in use; `read` runs in the caller's thread.
        `free_first`: without anything in flight, the device has room for one version while it is read. Raises
        what `read` raises, and ServiceFailed if the engine has failed.
        """
        with self._loading:
            if free_first and not self.num_running:
                self.run(self.engine.release).result()
            params = self._read(weights)

            def use() -> int:
                self.engine.sync_weights(params, version)
                self.version = version
                self.totals.weight_loads += 1
                return version

            return self.run(use).result()

    def copy_weights(self, params: Any) -> Any:
        """As `RolloutEngine.copy_weights`."""
        return self.engine.copy_weights(params)

    def work(self) -> Work:
        """What the engine has done so far."""
        stats = self.engine.stats
        return Work(stats.completions, stats.decoded_tokens, self.engine.num_live, stats)

    def work_since(self, before: Work, seconds: float) -> Metrics:
        """Metrics of the engine's work since `work` was `before`, `seconds` ago."""
        synced = Metric(self.engine.sync_s)
        return {
            **work_metrics(self.engine.stats - before.of_sampler, seconds),
            "time/rollout_sync_s": synced,
        }

    def release(self) -> None:
        """Free the weights until the next `load`."""
        self.run(self.engine.release).result()

    def pause(self) -> None:
        """Returns when no round runs; the next runs after `resume`. What is asked for waits."""
        self.run(lambda: setattr(self, "paused", True)).result()

    def resume(self) -> None:
        """Continue after `pause`."""
        self.run(lambda: setattr(self, "paused", False)).result()

    def wait_before_rounds(self, pause: Pause) -> None:
        """Before each round, `pause` waits for the answers of players."""
        self._players = pause

    def advance_until(self, futures: Sequence[Future[Any]], on_look: Callable[[], None]) -> None:
        """Returns when `futures` are done; without a thread of the service, runs its rounds here.

        In a run of several processes, those of the main one. Raises the error by which the engine failed.
        """
        if self._thread is not None:
            return super().advance_until(futures, on_look)
        while not (come := self._come(futures)).ended:
            try:
                self._one_round(come)
            except BaseException as error:
                self._fail(f"the engine failed: {type(error).__name__}: {error}")
                raise
            on_look()
        # What began as these ended is sampled by the next call; nobody would ask for it again.
        self._waiting.extend(come.asked)
        self._forget(come.dropped)  # what players left behind is not in flight any more
        return None

    def close(self, timeout_s: float | None = None) -> bool:
        """Close the engine and end the thread; what is in flight gets an error.

        Whether the thread has ended within `timeout_s`; a job that it runs may take longer.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            self._fail(CLOSED)
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _queue(self, put: Callable[[Future[Any]], None]) -> Future[Any]:
        result: Future[Any] = Future()
        with self._changed:
            if self._closed or self.error is not None:
                result.set_exception(ServiceFailed(self.error or CLOSED))
            else:
                put(result)
                self._changed.notify_all()
        return result

    def _work(self) -> None:
        error = CLOSED
        try:
            while self._wait():
                self._carry_out()
                if not self.paused:
                    self._players.wait()
                self._one_round(self._taken())
        except Exception as failure:
            if not self._closed:
                error = f"the engine failed: {type(failure).__name__}: {failure}"
        finally:
            self._fail(error)

    def _wait(self) -> bool:
        """Waits until there is something to do; False if the service was closed."""

        def asked() -> bool:
            if self._asked or self._dropped:  # which are answered also while nothing is sampled
                return True
            return bool(self._running or self._waiting or self._scoring) and not self.paused

        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._commands or asked())
            return not self._closed

    def _taken(self, ended: bool = False) -> _Come:
        """What was asked for, and what was dropped, since this was last called."""
        with self._changed:
            asked, dropped = sorted(self._asked, key=lambda each: each.order), self._dropped
            self._asked, self._dropped = [], []
        return _Come(asked, dropped, ended)

    def _come(self, futures: Sequence[Future[Any]]) -> _Come:
        """`_taken`, of the main process if the service is led; it has ended once `futures` are done."""
        if not self._led:
            return self._taken(self._answered(futures))
        here = _Come([], [], False)

        def came() -> dict[str, Any]:
            nonlocal here
            here = self._taken(self._answered(futures))
            asked = [[plain(request) for request in each.requests] for each in here.asked]
            return {"asked": asked, "dropped": here.dropped, "ended": here.ended}

        told = decided_by_main(came)
        if is_main_process():
            return here
        # Nobody listens in this process, but the engine does the same.
        requests = ([request_of(each) for each in several] for several in told["asked"])
        asked = [_Asked(Future(), each, lambda number, progress: None) for each in requests]
        return _Come(asked, told["dropped"], told["ended"])

    def _answered(self, futures: Sequence[Future[Any]]) -> bool:
        """Whether `futures` are done, after players had time to answer; waits a little if nothing runs."""
        self._players.wait()
        if not (self._running or self._waiting):
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._dropped, IDLE_S)
        return all(future.done() for future in futures)

    def _carry_out(self) -> None:
        while self._commands and not self._closed:
            done, job = self._commands.popleft()
            carry_out(job, done)

    def _one_round(self, come: _Come) -> None:
        """A round of the engine with what came for it, and some of the sequences that are to be scored."""
        if self._scoring and not self.paused:
            self._score_some()
        self._round = time.monotonic(), num_compilations()
        self._forget(come.dropped)
        self._waiting.extend(come.asked)
        if not self._running:
            self._since, self._stats = time.perf_counter(), self.engine.stats
        while self._waiting and not self._waits(self._waiting[0]):
            self._submit(self._waiting.popleft())
        if self._running and not self.paused:
            self.engine.advance()
            self._report()
        self._round = None

    def _waits(self, asked: _Asked) -> bool:
        """Whether turns in flight must end first, which have another sampling."""
        if self.engine.per_request_sampling or not self._running:
            return False
        return not self.engine.fits(asked.requests[0])

    def _submit(self, asked: _Asked) -> None:
        if not asked.keys.set_running_or_notify_cancel():
            return
        try:
            tickets = self.engine.submit(asked.requests)
        except Exception as error:  # of these requests alone, e.g. if there is no room
            asked.keys.set_exception(error)
            return
        keys = list(range(self._num_keys, self._num_keys + len(tickets)))
        self._num_keys += len(keys)
        for key, ticket, (_, number) in zip(keys, tickets, numbered(asked.requests), strict=True):
            self._running[key] = _Running(ticket, number, asked.listener)
        self.totals.requests += 1
        self.totals.prompt_tokens += sum(len(request.prompt.input_ids) for request in asked.requests)
        asked.keys.set_result(keys)

    def _forget(self, dropped: Sequence[int | str]) -> None:
        for key in dropped:
            if isinstance(key, str):
                self.engine.forget(key)
                continue
            if (running := self._running.get(key)) is None:
                continue
            self.totals.sequences_cancelled += 1
            if self.engine.per_request_sampling:
                self.engine.cancel(running.ticket)
                del self._running[key]
            else:  # the others of its batch go on, and it with them
                running.listener = None

    def _score_some(self) -> None:
        """Scores the next sequences of the request that waits the longest, in one call of the device."""
        scoring = self._scoring[0]
        part = None if scoring.result.cancelled() else next(scoring.parts, None)
        if part is not None:
            scoring.scores.extend(part)
            self.totals.scored_tokens += sum(len(scores.logprobs) for scores in part)
            return
        self._scoring.popleft()
        if scoring.result.set_running_or_notify_cancel():
            scoring.result.set_result(scoring.scores)

    def _report(self) -> None:
        """Tells the listeners what the last round added, and forgets finished requests.

        Of a request of several turns, each is told at the end of all.
        """
        for key, running in list(self._running.items()):
            finished = self.engine.finished(running.ticket)
            failure = self.engine.failure(running.ticket) if finished else None
            metrics: Metrics = {}
            turns = self.engine.completions(running.ticket)
            if not finished and len(turns) > 1:
                continue
            if finished:
                self.engine.take(running.ticket)
                del self._running[key]
                metrics = self._work_done()
            for number, turn in enumerate(turns, running.number):
                piece = turn.since(running.reported)
                if not piece.tokens and not finished:
                    continue
                self.totals.sampled_tokens += len(piece.tokens)
                reason = turn.finish_reason if finished else None
                if running.listener is not None:
                    last = number + 1 == running.number + len(turns)
                    done = Progress(piece, reason, failure, metrics if last else {}, turn.cached)
                    running.listener(number, done)
            if len(turns) == 1:
                running.reported = turns[0].mark

        self.totals.prefix_cached_tokens = self.engine.stats.cached_tokens
        self.totals.prefix_evicted_tokens = self.engine.stats.evicted_tokens

    def _work_done(self) -> Metrics:
        """Metrics of the engine's work since this was last called."""
        now, stats = time.perf_counter(), self.engine.stats
        metrics = work_metrics(stats - self._stats, now - self._since)
        self._stats, self._since = stats, now
        return metrics

    def _fail(self, error: str) -> None:
        with self._changed:
            self.error, self._round = error, None
            every = self._commands, self._asked, self._waiting, self._scoring
            futures: list[Future[Any]] = [each[0] for items in every for each in items]
            running = list(self._running.values())
            for items in (*every, self._running):
                items.clear()
        for result in futures:
            with suppress(InvalidStateError):
                result.set_exception(ServiceFailed(error))
        for each in running:
            if each.listener is not None:
                for number in range(each.number, each.number + len(self.engine.completions(each.ticket))):
                    each.listener(number, Progress(error=error))
        self.engine.close()
