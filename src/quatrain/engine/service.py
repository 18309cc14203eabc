"""Runs an engine for requests that come at any time: one thread uses the engine, others ask it.

Data flow: `Service.submit` -> `RolloutEngine.submit_own` -> rounds, in the service's thread -> `Progress`, to
the listener of each sequence. Weights are read in the thread that asks, and set between two rounds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quatrain.engine.engine import RolloutEngine, Ticket
from quatrain.engine.groups import OwnSampling
from quatrain.engine.scoring import Scores
from quatrain.types.batches import Prompt

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """What a round added to a sequence: tokens, each with its log-probability and the version of its weights.

    `finish_reason` is None while the sequence goes on; `error` says in one line why it will not.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    finish_reason: str | None = None
    error: str | None = None


Listener = Callable[[int, Progress], None]
"""Called in the service's thread with the number of a sequence in its request, and its progress."""


@dataclass
class Totals:
    """What the service has done so far."""

    requests: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    scored_tokens: int = 0
    weight_loads: int = 0


@dataclass
class _Running:
    """A sequence in the engine: its ticket, its number in the request, and how many tokens were reported."""

    ticket: Ticket
    number: int
    listener: Listener
    reported: int = 0


@dataclass(frozen=True)
class _Command:
    """Something to do between two rounds, and where its result goes."""

    do: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class _Scoring:
    """Sequences to score, some of them between any two rounds, and where their scores go."""

    parts: Iterator[list[Scores]]
    scores: list[Scores] = field(default_factory=list)
    result: Future[list[Scores]] = field(default_factory=Future)


class ServiceFailed(RuntimeError):
    """The engine failed, or the service was closed; no request can be answered any more."""


class Service:
    """Sequences share the slots of `engine`, which has `own_sampling` and weights of `version`.

    `read` makes parameters of the path of a folder. Every method may be called from any thread.
    """

    def __init__(self, engine: RolloutEngine, read: Callable[[str], Any], *, version: int = 0):
        self.totals = Totals()
        self._engine, self._read, self._version = engine, read, version
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._running: dict[int, _Running] = {}
        self._scoring: deque[_Scoring] = deque()
        self._next = 0
        self._paused = self._closed = False
        self._error: str | None = None
        self._loading = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The version of the weights that the next token is sampled from."""
        return self._version

    @property
    def num_running(self) -> int:
        """Sequences that are not finished."""
        return len(self._running)

    @property
    def paused(self) -> bool:
        """Whether sampling waits for `resume`."""
        return self._paused

    @property
    def error(self) -> str | None:
        """Why no request can be answered any more; None as long as all is well."""
        return self._error

    def submit(
        self, prompts: Sequence[Prompt], owners: Sequence[OwnSampling], listener: Listener
    ) -> Future[list[int]]:
        """Queue a sequence for each prompt; the keys by which `cancel` knows them.

        The future has a ValueError if the KV cache has no room for one of them, and ServiceFailed if the
        engine has failed.
        """
        return self._between_rounds(lambda: self._submit(prompts, owners, listener))

    def cancel(self, keys: Iterable[int]) -> None:
        """Forget sequences; those that have finished are ignored."""
        self._between_rounds(lambda: self._cancel(tuple(keys)))

    def score(self, sequences: Sequence[Sequence[int]], num_likeliest: int) -> Future[list[Scores]]:
        """Log-probabilities of given tokens and the likeliest in their place, of each sequence.

        Others decode meanwhile; a future that is cancelled ends the work.
        """
        return self._queue(self._scoring, _Scoring(self._engine.score(sequences, num_likeliest)))

    def load(self, path: str, version: int) -> int:
        """Sample from the weights in the folder `path` from the next round on; the version of the weights.

        Sequences in flight go on with them. Blocks until they are in use. Raises ValueError if the folder has
        no weights of the same architecture, and ServiceFailed if the engine has failed.
        """
        with self._loading:
            params = self._read(path)
            return self._between_rounds(lambda: self._set_weights(params, version)).result()

    def pause(self) -> None:
        """Returns when no round runs; the next runs after `resume`. Requests wait."""
        self._between_rounds(lambda: self._pause(True)).result()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._between_rounds(lambda: self._pause(False)).result()

    def close(self) -> None:
        """End the thread and free the engine; requests in flight get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _between_rounds(self, do: Callable[[], T]) -> Future[T]:
        return self._queue(self._commands, _Command(do))

    def _queue(self, queue: deque[Any], item: _Command | _Scoring) -> Future[Any]:
        with self._changed:
            if self._error is not None:
                item.result.set_exception(ServiceFailed(self._error))
            else:
                queue.append(item)
                self._changed.notify_all()
        return item.result

    def _work(self) -> None:
        error = "the server was closed"
        try:
            while self._wait():
                self._carry_out()
                if self._scoring and not self._paused:
                    self._score_some()
                if self._running and not self._paused:
                    self._engine.advance()
                    self._report()
        except Exception as failure:
            error = f"the engine failed: {type(failure).__name__}: {failure}"
        finally:
            self._fail(error)

    def _wait(self) -> bool:
        """Waits until there is something to do; False if the service was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed or self._commands or ((self._running or self._scoring) and not self._paused)
                )
            )
            return not self._closed

    def _carry_out(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if not command.result.set_running_or_notify_cancel():
                continue
            try:
                command.result.set_result(command.do())
            except Exception as error:
                command.result.set_exception(error)

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

    def _submit(
        self, prompts: Sequence[Prompt], owners: Sequence[OwnSampling], listener: Listener
    ) -> list[int]:
        tickets = self._engine.submit_own(prompts, owners)
        keys = list(range(self._next, self._next + len(tickets)))
        self._next += len(keys)
        for number, (key, ticket) in enumerate(zip(keys, tickets, strict=True)):
            self._running[key] = _Running(ticket, number, listener)
        self.totals.requests += 1
        self.totals.prompt_tokens += sum(len(prompt.input_ids) for prompt in prompts)
        return keys

    def _cancel(self, keys: Sequence[int]) -> None:
        for key in keys:
            running = self._running.pop(key, None)
            if running is not None:
                self._engine.cancel(running.ticket)
                self.totals.cancelled += 1

    def _set_weights(self, params: Any, version: int) -> int:
        self._engine.sync_weights(params, version)
        self._version = version
        self.totals.weight_loads += 1
        return version

    def _pause(self, paused: bool) -> None:
        self._paused = paused

    def _report(self) -> None:
        """Tells the listeners what the last round added, and forgets finished sequences."""
        for key, running in list(self._running.items()):
            completion = self._engine.completion(running.ticket)
            finished = self._engine.finished(running.ticket)
            new = slice(running.reported, None)
            tokens = completion.tokens[new]
            if finished:
                self._engine.take(running.ticket)
                del self._running[key]
            if tokens or finished:
                running.reported += len(tokens)
                self.totals.sampled_tokens += len(tokens)
                reason = completion.finish_reason if finished else None
                progress = Progress(tokens, completion.logprobs[new], completion.versions[new], reason)
                running.listener(running.number, progress)

    def _fail(self, error: str) -> None:
        with self._changed:
            self._error = error
        unanswered: list[_Command | _Scoring] = [*self._commands, *self._scoring]
        for waiting in unanswered:
            if waiting.result.set_running_or_notify_cancel():
                waiting.result.set_exception(ServiceFailed(error))
        for running in self._running.values():
            running.listener(running.number, Progress(error=error))
        for done in (self._running, self._commands, self._scoring):
            done.clear()
        self._engine.close()
