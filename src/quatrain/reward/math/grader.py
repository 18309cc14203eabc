"""Asks math-verify, in child processes with limits on time and memory, whether expressions are equal.

Used by `expressions.py`. math-verify may take unlimited time on short inputs, and its own time limit
works only in the main thread of a process. Verdicts are remembered, failures of a process are not: the next
call asks again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

from quatrain.workers.pool import Failure, Pool, default_workers
from quatrain.workers.worker_process import log_output

logger = logging.getLogger(__name__)

CPU_LIMIT_S = 2.0
"""CPU seconds of one comparison."""
SHORT_LIMIT_S = 0.3
"""The same after slow comparisons of the same call have taken a quarter of its time; quick ones take less."""
NUM_PROCESSES = default_workers()
MEMORY_LIMIT_MB = 2048
WALL_TO_CPU = 5
"""A comparison may wait for a core this many times longer than it may compute."""
_COMPARE = "quatrain.reward.math.math_worker:compare"


class Unjudged(Exception):
    """math-verify gave no verdict, for the reason `failure`."""

    def __init__(self, failure: Failure):
        super().__init__(failure.detail)
        self.failure = failure


class Budget:
    """The time that slow comparisons may take in one call of a reward function, and what failed in it.

    Each of NUM_PROCESSES processes may spend `timeout_s` seconds on them. What has failed is not asked again
    in the same call.
    """

    def __init__(self, timeout_s: float):
        self._limit_s = min(CPU_LIMIT_S, timeout_s)
        self._whole_s = self._left_s = timeout_s * NUM_PROCESSES
        self._lock = threading.Lock()
        self._failed: dict[tuple[str, ...], Failure] = {}

    def reserve(self, question: tuple[str, ...]) -> float:
        """The CPU seconds for the next comparison; raises Unjudged if it is not to be made."""
        with self._lock:
            if question in self._failed:
                raise Unjudged(self._failed[question])
            if self._left_s <= 0:
                detail = "it was not compared, because comparisons of this call took too long or failed"
                raise Unjudged(Failure("timeout", detail))
            early = 4 * self._left_s > 3 * self._whole_s
            limit_s = self._limit_s if early else min(self._limit_s, SHORT_LIMIT_S)
            self._left_s -= limit_s
            return limit_s

    def settle(
        self, question: tuple[str, ...], reserved_s: float, spent_s: float, failure: Failure | None = None
    ) -> None:
        """Counts the seconds that a comparison took; quick ones do not count."""
        with self._lock:
            self._left_s += reserved_s - (spent_s if failure or spent_s > SHORT_LIMIT_S / 2 else 0.0)
            if failure:
                self._failed[question] = failure


# Not an argument of what compares answers, so that verdicts can be remembered by their texts alone.
_BUDGET: ContextVar[Budget | None] = ContextVar("budget", default=None)
_POOL = Pool(
    "math-verify",
    NUM_PROCESSES,
    memory_mb=MEMORY_LIMIT_MB,
    fork=_COMPARE,
    on_output=lambda _, text: log_output(logger, "math-verify", text),
)
_FREE = threading.BoundedSemaphore(NUM_PROCESSES)
"""Held during a comparison: its time begins when a process is free."""
_LOCKS = [threading.Lock() for _ in range(64)]


@contextlib.contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Comparisons of this thread and context use `budget`."""
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)


def ask(*question: str) -> bool:
    """Whether math-verify finds the expressions `gold, said` equal; of `gold` alone, whether it parses it.

    Raises Unjudged if the comparison takes too long, or if its process fails or cannot be started.
    """
    with _LOCKS[hash(question) % len(_LOCKS)]:  # threads with the same question wait for one answer
        return _answer(*question)


@functools.lru_cache(maxsize=4096)
def _answer(*question: str) -> bool:
    budget = _BUDGET.get() or Budget(CPU_LIMIT_S)
    limit_s = budget.reserve(question)
    with _FREE:
        began, wall_s = time.monotonic(), limit_s * WALL_TO_CPU
        outcome = _POOL.submit(_COMPARE, {"question": question}, wall_s, cpu_s=limit_s).result()
    if isinstance(outcome, Failure):
        failure = Failure("crash", f"math-verify failed over {question[-1]!r}: {outcome.detail}")
        if outcome.kind == "timeout":
            failure = Failure("timeout", f"math-verify took longer than {limit_s:g} s over {question[-1]!r}")
        budget.settle(question, limit_s, max(limit_s, time.monotonic() - began), failure)
        raise Unjudged(failure)
    verdict, spent_s = outcome
    budget.settle(question, limit_s, spent_s)
    return bool(verdict)
