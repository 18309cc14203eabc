"""The one thread that owns an engine: it runs rounds, and between two rounds what other threads ask for.

Data flow: `EngineService.submit` or `sample` -> `RolloutEngine` -> rounds, in the service's thread ->
`Progress`, to the listener of each sequence; or the samples of a batch, to the future that `sample` returned.
`quatrain serve`, the workers of a fleet and training that samples ahead are its clients; with batches in
flight, training also calls the engine's `submit` and `sync_weights` itself, which the engine allows.
Synchronous training has no service: the main thread calls the engine, with the same calls in all processes of
a run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from quatrain.cluster.threads import start_thread
from quatrain.engine.engine import Ticket, work_metrics
from quatrain.engine.groups import PerRequestSampling
from quatrain.engine.scoring import Scores
from quatrain.engine.session import EngineStats
from quatrain.parallel.compilations import compiling_for_s, num_compilations
from quatrain.types.batches import Prompt
from quatrain.types.metrics import Metrics
from quatrain.types.piece import NOTHING, Mark, Piece
from quatrain.types.rollouts import Completion, Rollouts, Sampling

T = TypeVar("T")
CLOSED = "the engine's thread has ended: it was closed"
Samples = tuple[list[tuple[Prompt, Completion]], Metrics]
"""The samples of a batch of prompts, in order, and metrics of the work since the batch before."""


@dataclass(frozen=True)
class Progress:
    """What a round added to a sequence.

    `finish_reason` is None while the sequence goes on; `error` says in one line why it will not. At its end,
    `metrics` are those of the engine's work since another sequence or batch has ended.
    """

    piece: Piece = field(default_factory=Piece)
    finish_reason: str | None = None
    error: str | None = None
    metrics: Metrics = field(default_factory=dict)
    cached: int = 0
    """Tokens of its context that a kept context had."""


Listener = Callable[[int, Progress], None]
"""Called in the service's thread with the number of a sequence in its request, and its progress."""


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
class _Sequence:
    """A sequence in the engine: its ticket, its number in the request, and how much of it was reported."""

    ticket: Ticket
    number: int
    listener: Listener
    reported: Mark = NOTHING


class _Batch(NamedTuple):
    """Prompts whose samples are asked for."""

    result: Future[Samples]
    prompts: Sequence[Prompt]
    step: int
    sampling: Sampling


class _Scoring(NamedTuple):
    """Sequences to score, some of them between any two rounds."""

    result: Future[list[Scores]]
    parts: Iterator[list[Scores]]
    scores: list[Scores]


class ServiceFailed(RuntimeError):
    """The engine failed, or the service was closed; nothing can be answered any more."""


class EngineService:
    """Owns `engine`, which has weights of `version`; its methods may be called from any thread.

    `read` makes parameters of what `load` gets. The thread keeps the context variables of the caller. It is a
    daemon, so that a job that hangs does not keep the process alive.
    """

    can_score = True
    """Whether given tokens can be scored."""

    def __init__(
        self,
        engine: Rollouts,
        read: Callable[[Any], Any] = lambda weights: weights,
        *,
        version: int = 0,
        name: str = "engine",
    ):
        self.totals = Totals()
        self.version = version
        """The version of the weights that the next token is sampled from."""
        self.paused = False
        """Whether sampling waits for `resume`."""
        self.error: str | None = None
        """Why nothing can be answered any more; None as long as all is well."""
        self._engine: Any = engine  # all but `run` and `close` need a RolloutEngine
        self._read = read
        self._changed = threading.Condition()
        self._loading = threading.Lock()
        self._closed = False
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._sequences: dict[int, _Sequence] = {}
        self._next_key = 0
        self._waiting: deque[_Batch] = deque()
        self._batches: dict[Ticket, _Batch] = {}
        self._since, self._stats = 0.0, EngineStats()
        self._scoring: deque[_Scoring] = deque()
        self._round: tuple[float, int] | None = None
        """When the round that runs began, and how many programs had been compiled then."""
        self._thread = start_thread(self._work, name=name)

    @property
    def num_running(self) -> int:
        """Sequences and batches that are not finished."""
        return len(self._sequences) + len(self._batches) + len(self._waiting)

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
        """What `job` returns or raises, run between two rounds, in the order of these calls."""
        return self._queue(lambda result: self._commands.append((result, job)))

    def submit(
        self, prompts: Sequence[Prompt], owners: Sequence[PerRequestSampling], listener: Listener
    ) -> Future[list[int]]:
        """Queue a sequence for each prompt, in an engine with `per_request_sampling`; the keys for `cancel`.

        The future has a ValueError if the KV cache has no room for one of them, and ServiceFailed if the
        engine has failed.
        """

        def submit() -> list[int]:
            tickets = self._engine.submit_own(prompts, owners)
            keys = list(range(self._next_key, self._next_key + len(tickets)))
            self._next_key += len(keys)
            for number, (key, ticket) in enumerate(zip(keys, tickets, strict=True)):
                self._sequences[key] = _Sequence(ticket, number, listener)
            self.totals.requests += 1
            self.totals.prompt_tokens += sum(len(prompt.input_ids) for prompt in prompts)
            return keys

        return self.run(submit)

    def cancel(self, keys: Sequence[int]) -> None:
        """Forget sequences; those that have finished are ignored."""

        def cancel() -> None:
            for sequence in [self._sequences.pop(key) for key in keys if key in self._sequences]:
                self._engine.cancel(sequence.ticket)
                self.totals.sequences_cancelled += 1

        self.run(cancel)

    def forget(self, session: str) -> None:
        """No sequence of this session comes any more: what is kept of its contexts goes first."""
        self.run(lambda: self._engine.forget(session))

    @property
    def num_kept_blocks(self) -> int:
        """Blocks of contexts that are kept for further requests."""
        return self._engine.num_kept_blocks

    def sample(self, prompts: Sequence[Prompt], *, step: int, sampling: Sampling) -> Future[Samples]:
        """The samples of `prompts`, whose groups share the slots with others of the same `sampling`.

        Groups of another sampling than those in flight wait until these have finished. The future has a
        ValueError if the KV cache has no room for them.
        """
        return self._queue(lambda result: self._waiting.append(_Batch(result, prompts, step, sampling)))

    def score(self, sequences: Sequence[Sequence[int]], num_likeliest: int) -> Future[list[Scores]]:
        """Log-probabilities of given tokens and the likeliest in their place, of each sequence.

        Others decode meanwhile; a future that is cancelled ends the work.
        """
        parts = self._engine.score(sequences, num_likeliest)
        return self._queue(lambda result: self._scoring.append(_Scoring(result, parts, [])))

    def load(self, weights: Any, version: int, *, free_first: bool = False) -> int:
        """Sample from `weights`, as `read` makes them, from the next round on; the version of the weights.

        Sequences in flight go on with them. Blocks until they are in use; `read` runs in the caller's thread.
        `free_first`: without anything in flight, the device has room for one version while it is read. Raises
        what `read` raises, and ServiceFailed if the engine has failed.
        """
        with self._loading:
            if free_first and not self.num_running:
                self.run(self._engine.release).result()
            params = self._read(weights)

            def use() -> int:
                self._engine.sync_weights(params, version)
                self.version = version
                self.totals.weight_loads += 1
                return version

            return self.run(use).result()

    def copy_weights(self, params: Any) -> Any:
        """As `RolloutEngine.copy_weights`."""
        return self._engine.copy_weights(params)

    def counts(self) -> EngineStats:
        """Totals of the engine so far, for `work_since`."""
        return self.run(lambda: self._engine.stats).result()

    def work_since(self, before: EngineStats, seconds: float) -> Metrics:
        """Metrics of the engine's work since `counts` was `before`, `seconds` ago."""
        return work_metrics(self.counts() - before, seconds)

    def release(self) -> None:
        """Free the weights until the next `load`."""
        self.run(self._engine.release).result()

    def pause(self) -> None:
        """Returns when no round runs; the next runs after `resume`. What is asked for waits."""
        self.run(lambda: setattr(self, "paused", True)).result()

    def resume(self) -> None:
        """Continue after `pause`."""
        self.run(lambda: setattr(self, "paused", False)).result()

    def close(self, timeout_s: float | None = None) -> bool:
        """Close the engine and end the thread; what is in flight gets an error.

        Whether the thread has ended within `timeout_s`; a job that it runs may take longer.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._engine.close()  # ends what waits for its completions
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
                    self._advance()
        except Exception as failure:
            if not self._closed:
                error = f"the engine failed: {type(failure).__name__}: {failure}"
        finally:
            self._fail(error)

    def _wait(self) -> bool:
        """Waits until there is something to do; False if the service was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or self._commands
                    or ((self.num_running or self._scoring) and not self.paused)
                )
            )
            return not self._closed

    def _carry_out(self) -> None:
        while self._commands and not self._closed:
            result, job = self._commands.popleft()
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(job())
            except BaseException as error:  # raised where the result is asked for
                result.set_exception(error)

    def _advance(self) -> None:
        """A round of the engine, and some of the sequences that are to be scored."""
        if self._scoring:
            self._score_some()
        self._round = time.monotonic(), num_compilations()
        self._begin_batches()
        if self._sequences or self._batches:
            self._engine.advance()
            self._report_sequences()
            self._report_batches()
        self._round = None

    def _begin_batches(self) -> None:
        """Submits the batches that wait, as long as they have the sampling of those in flight."""
        if not self._batches:
            self._since = time.perf_counter()
        while self._waiting:
            batch, others = self._waiting[0], next(iter(self._batches.values()), None)
            if others is not None and others.sampling != batch.sampling:
                return
            if batch.result.set_running_or_notify_cancel():
                try:
                    ticket = self._engine.submit(batch.prompts, step=batch.step, sampling=batch.sampling)
                except Exception as error:  # of these prompts alone, e.g. if there is no room
                    batch.result.set_exception(error)
                else:
                    self._batches[ticket] = batch
                    if others is None:
                        self._stats = self._engine.stats
            self._waiting.popleft()

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

    def _report_sequences(self) -> None:
        """Tells the listeners what the last round added, and forgets finished sequences."""
        for key, sequence in list(self._sequences.items()):
            completion = self._engine.completion(sequence.ticket)
            finished = self._engine.finished(sequence.ticket)
            piece = completion.since(sequence.reported)
            if finished:
                self._engine.take(sequence.ticket)
                del self._sequences[key]
            if piece.tokens or finished:
                sequence.reported = completion.mark
                self.totals.sampled_tokens += len(piece.tokens)
                reason = completion.finish_reason if finished else None
                metrics = self._work_done() if finished else {}
                done = Progress(piece, reason, metrics=metrics, cached=completion.cached)
                sequence.listener(sequence.number, done)
        self.totals.prefix_cached_tokens = self._engine.stats.cached_tokens
        self.totals.prefix_evicted_tokens = self._engine.stats.evicted_tokens

    def _report_batches(self) -> None:
        """Gives finished batches to those who wait for them, with metrics of the work since the last one."""
        for ticket in [ticket for ticket in self._batches if self._engine.finished(ticket)]:
            samples, metrics = self._engine.take(ticket)
            self._batches.pop(ticket).result.set_result((samples, {**metrics, **self._work_done()}))

    def _work_done(self) -> Metrics:
        """Metrics of the engine's work since this was last called."""
        now, stats = time.perf_counter(), self._engine.stats
        metrics = work_metrics(stats - self._stats, now - self._since)
        self._stats, self._since = stats, now
        return metrics

    def _fail(self, error: str) -> None:
        with self._changed:
            self.error, self._round = error, None
        asked: list[tuple[Any, ...]] = [*self._commands, *self._waiting, *self._scoring]
        for result, *_ in (*asked, *self._batches.values()):
            if result.running() or result.set_running_or_notify_cancel():
                result.set_exception(ServiceFailed(error))
        for sequence in self._sequences.values():
            sequence.listener(sequence.number, Progress(error=error))
        for items in (self._sequences, self._commands, self._waiting, self._batches, self._scoring):
            items.clear()
        if not self._closed:
            self._engine.close()
