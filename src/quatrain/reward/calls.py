"""Calls of one reward function on the samples of a batch, and what a sample costs on which it fails.

Data flow: `RolloutBatch` -> `Samples` -> `score_function`, for `scorer.py`. A function is called in a
worker process (`workers/pool.py`) or, if it is built in or `reward.workers` is 0, in this process.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import numpy as np

from quatrain.config.errors import shown
from quatrain.data.messages import MESSAGES, pictures_of, with_picture_parts
from quatrain.data.pictures import IMAGE, IMAGES, Lent
from quatrain.reward.forms import TRAINER_STATE, Log, plain_rewards
from quatrain.reward.functions import RewardFunction
from quatrain.types.batches import DATA_SOURCE, ENVIRONMENTS, FAULTS, PromptText, RolloutBatch
from quatrain.types.pictures import Picture
from quatrain.workers.pool import Failure, Kind, Pool
from quatrain.workers.worker_process import pickled
from quatrain.workers.worker_script import failure

logger = logging.getLogger(__name__)

ERROR_REWARD = -1.0
"""Raw reward of a sample for which a reward function fails."""
TIMEOUTS_PER_WORKER = 3
"""Calls in a row that may take too long, for each worker, before a function is given up for a batch."""
SEARCH_S = 0.3
"""Time limit of the further calls on a batch of which calls took too long."""
_KEYS: Mapping[Kind, str] = {"timeout": "reward.timeout_s", "memory": "reward.memory_mb"}
READER = "reward functions"
"""Who gets copies of the columns, for messages."""
PerCall = Literal["batch", "group", "sample"]
Rows = Sequence[int]
Arguments = Mapping[str, list]
Submit = Callable[[Arguments, float], Future[Any]]
"""Calls a reward function, at once or as soon as a worker is free, for at most so many seconds.

The result is what `plain_rewards` returns, or a `Failure`.
"""


@dataclass(frozen=True)
class Samples:
    """The arguments of the reward functions, one item per sample, and the group of each sample."""

    arguments: Mapping[str, Sequence[Any]]
    group_ids: Sequence[int]

    @staticmethod
    def of(rollouts: RolloutBatch) -> Samples:
        """The samples of a batch, one for each episode: its first row, with the sampled tokens of all."""
        of_row, first_rows = rollouts.episodes
        lent = Lender()
        completion_ids: list[list[int]] = [[] for _ in first_rows]
        for episode, tokens, mask in zip(of_row, rollouts.input_ids, rollouts.completion_mask, strict=True):
            completion_ids[episode] += tokens[mask].tolist()
        arguments = {
            **{
                name: [lent(name, values[row]) for row in first_rows]
                for name, values in rollouts.columns.items()
            },
            "prompts": [lent(MESSAGES, plain_prompt(rollouts.prompts[row])) for row in first_rows],
            "completions": [rollouts.completions[row] for row in first_rows],
            "completion_ids": completion_ids,
            "finish_reasons": rollouts.finish_reason[first_rows].tolist(),
            TRAINER_STATE: [int(rollouts.policy_version.max(initial=0))] * len(first_rows),
        }
        return Samples(arguments, rollouts.compared_ids[first_rows].tolist())

    def __len__(self) -> int:
        return len(self.group_ids)

    def take(self, rows: Rows, function: Function) -> Arguments:
        """The arguments that `function` accepts of the samples `rows`."""
        accepts = self.arguments.keys() - function.hidden if function.accepts is None else function.accepts
        names = [name for name in self.arguments if name in accepts and name not in function.bound]
        return {name: [self.arguments[name][row] for row in rows] for name in names}

    def of_sources(self, sources: Collection[str] | None) -> list[int]:
        """The rows whose `data_source` is one of `sources` (None: all rows), but for FAULTS."""
        rows = [row for row, reason in enumerate(self.arguments["finish_reasons"]) if reason not in FAULTS]
        if sources is None:
            return rows
        values = self.arguments[DATA_SOURCE]
        return [row for row in rows if isinstance(values[row], str) and values[row] in sources]

    def pieces(self, rows: Rows, per_call: PerCall) -> list[Rows]:
        """The rows of each call."""
        if per_call == "sample" or not rows:
            return [[row] for row in rows]
        if per_call == "batch":
            return [rows]
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.group_ids[row], []).append(row)
        return list(groups.values())


@dataclass(frozen=True)
class Function:
    """A reward function, found by `scorer.py`."""

    spec: str
    name: str
    submit: Submit
    accepts: frozenset[str] | None = None
    """Names of the arguments that it accepts; None: any."""
    hidden: frozenset[str] = frozenset()
    """Arguments that it gets only if it names them, and does not name."""
    required_columns: tuple[str, ...] = ()
    bound: frozenset[str] = frozenset()
    """Names of the arguments that the configuration gives it."""
    sources: frozenset[str] | None = None
    """Values of the column DATA_SOURCE whose samples it scores; None: all."""
    most_timeouts: int = 1
    """Calls in a row that may take too long before it is given up for a batch; none can in this process."""


class Lender:
    """What gives reward functions the pictures of columns and messages, each once."""

    def __init__(self) -> None:
        self._lent: dict[Picture, Lent] = {}

    def __call__(self, column: str, value: Any) -> Any:
        if column == MESSAGES:
            has_some = isinstance(value, list | tuple) and pictures_of(value)
            return with_picture_parts(value, self._part) if has_some else value
        if column not in (IMAGES, IMAGE):
            return value
        return [self._of(each) for each in value] if isinstance(value, list) else self._of(value)

    def _of(self, value: Any) -> Any:
        return self._lent.setdefault(value, Lent(value)) if isinstance(value, Picture) else value

    def _part(self, picture: Picture) -> dict[str, Any]:
        return {"type": "image", "image": self._of(picture)}


def plain_prompt(prompt: PromptText) -> Any:
    """A prompt as reward functions get it: a text, or a list of messages."""
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def call_reward(function: RewardFunction, arguments: Arguments) -> Any:
    """Calls a reward function in this process; nothing else does."""
    return function(**arguments)


def call_in_process(
    function: RewardFunction, copies: bool, arguments: Arguments, limit_s: float
) -> Future[Any]:
    """Calls a function in this process, where it can hang, or end the process.

    `copies`: it is a user's function, which may change its arguments and return anything.
    """
    if copies:
        arguments = pickle.loads(pickled(arguments, READER))
    future: Future[Any] = Future()
    try:
        returned = call_reward(function, arguments)
        future.set_result(plain_rewards(returned) if copies else returned)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes SystemExit, which would end the run with exit status 0
        future.set_result(Failure(*failure(error)))
    return future


def call_with_environments(function: RewardFunction, arguments: Arguments, limit_s: float) -> Future[Any]:
    """Calls a user's function in this process with the environments that were kept, which are no copies."""
    environments = [kept.environment for kept in arguments[ENVIRONMENTS]]
    others = {name: values for name, values in arguments.items() if name != ENVIRONMENTS}
    return call_in_process(partial(function, environments=environments), True, others, limit_s)


def call_in_workers(
    pool: Pool, spec: str, timeout_s: float, arguments: Arguments, limit_s: float
) -> Future[Any]:
    """Calls a function in the workers of a pool, several calls at a time."""
    return pool.submit(spec, pickled(arguments, READER), min(limit_s, timeout_s))


def score_function(
    function: Function, samples: Samples, per_call: PerCall
) -> tuple[np.ndarray, Counter[Kind], list[int], Log]:
    """[B] float32 raw rewards, NaN for abstentions and ERROR_REWARD for failures; failures by their kind.

    The places of the samples that failed come third, and then what the function logged in calls that did not
    fail, with columns [B].

    Samples of other sources than the function's are abstentions. The first calls get the samples that
    `per_call` says. An episode that a fault of its environment ended is no sample of any call and has NaN.
    The samples of a failing call are called again, the groups of a batch one by one, then the samples of a
    failing group. After a call that took too long, these further calls have little time, so that a function
    that hangs does not hold the step. Raises ValueError for a wrong number of values, or no numbers.
    """
    rows = samples.of_sources(function.sources)
    scoring = _FunctionOnBatch(function, samples, rows)
    try:
        return *scoring.run(samples.pieces(rows, per_call)), scoring.failed, scoring.log
    finally:  # also if the run is interrupted
        scoring.cancel()


def try_function(function: Function, samples: Samples) -> str | None:
    """Calls a function once on `samples`: why it failed, as words for a warning; None if it did not.

    Raises ValueError if it returns the wrong number of values or values that are no numbers.
    """
    arguments = samples.take(range(len(samples)), function)
    outcome = _outcome(function.submit(arguments, math.inf))
    outcome = outcome["values"] if isinstance(outcome, dict) else outcome
    if isinstance(outcome, Failure):
        return f"{outcome.kind}: {outcome.detail.strip().splitlines()[-1]}"
    _checked(function, outcome, len(samples))
    return None


class _Asked(NamedTuple):
    rows: Rows
    future: Future[Any | Failure]


class _FunctionOnBatch:
    """The calls of one function on one batch."""

    def __init__(self, function: Function, samples: Samples, rows: Rows):
        self._function, self._samples, self._num_samples = function, samples, len(rows)
        self._values = np.full(len(samples), np.nan, np.float32)
        self._values[rows] = ERROR_REWARD
        self._kinds: dict[int, Kind] = {}  # of the samples that failed
        self.log = Log()
        self._failures: list[Failure] = []
        self._failed_on: Rows = []
        """The samples of the first failure."""
        self._calls: list[_Asked] = []
        self._limit_s = math.inf
        self._in_a_row = 0

    def run(self, pieces: Sequence[Rows]) -> tuple[np.ndarray, Counter[Kind]]:
        """The values and the failures; `pieces` are the rows of the first calls."""
        while pieces:
            self._calls = [
                _Asked(rows, self._function.submit(self._samples.take(rows, self._function), self._limit_s))
                for rows in pieces
            ]
            too_long = self._wait()
            pieces = [rows for call in self._calls for rows in self._settled(call)]
            # Whatever hangs once hangs again: the search for the sample gets little time, and the step goes
            # on.
            if too_long and self._limit_s > SEARCH_S:
                self._limit_s, self._in_a_row = SEARCH_S, 0
        errors = Counter(self._kinds.values())
        completions = [self._samples.arguments["completions"][row] for row in self._failed_on]
        _report(self._function, self._failures, errors, self._num_samples, completions)
        if self._failures and not errors:  # it failed on several samples, and on none of them alone
            errors[self._failures[0].kind] = 1
        return self._values, errors

    @property
    def failed(self) -> list[int]:
        """The samples that failed."""
        return sorted(self._kinds)

    def cancel(self) -> None:
        """Cancels the calls that have not begun."""
        for call in self._calls:
            call.future.cancel()

    def _wait(self) -> bool:
        """Waits for the calls, and cancels those that have not begun once too many in a row took too long.

        Whether any took too long.
        """
        finished: SimpleQueue[Future[Any | Failure]] = SimpleQueue()
        for call in self._calls:
            call.future.add_done_callback(finished.put)
        too_long = False
        for _ in self._calls:
            outcome = _outcome(finished.get())
            late = isinstance(outcome, Failure) and outcome.kind == "timeout"
            too_long |= late
            self._in_a_row = self._in_a_row + 1 if late else 0
            # In a row, because a server that is slow at times recovers, and one that is down does not.
            if self._in_a_row >= self._function.most_timeouts:
                self.cancel()
        return too_long

    def _settled(self, call: _Asked) -> list[Rows]:
        """Takes the values of a call; what to call again if it failed."""
        outcome = _outcome(call.future)
        if isinstance(outcome, dict):
            self._keep(call.rows, **outcome["log"])
            outcome = outcome["values"]
        if not isinstance(outcome, Failure):  # a built-in function may return one in the place of a value
            self._failures += [value for value in outcome if isinstance(value, Failure)]
            self._values[call.rows], kinds = _checked(self._function, outcome, len(call.rows))
            self._kinds |= {call.rows[index]: kind for index, kind in kinds.items()}
            return []
        self._failures.append(outcome)
        # The last call of those that failed first is on one sample, and shows what it fails on.
        if not self._kinds:
            self._failed_on = call.rows
        # It has not been called at all: once more, in the search, before its samples are failures.
        if call.future.cancelled() and self._limit_s > SEARCH_S:
            return [call.rows]
        if len(call.rows) > 1:
            groups = self._samples.pieces(call.rows, "group")
            return groups if len(groups) > 1 else self._samples.pieces(call.rows, "sample")
        self._kinds[call.rows[0]] = outcome.kind
        return []

    def _keep(
        self, rows: Rows, metrics: Mapping[str, list[float]], columns: Mapping[str, list], unlogged: list[str]
    ) -> None:
        """Keeps what a call on the samples `rows` logged."""
        for name, (total, count) in metrics.items():
            known = self.log.metrics.setdefault(name, [0.0, 0])
            known[:] = known[0] + total, known[1] + count
        for name, values in columns.items():
            if len(values) != len(rows):
                unlogged = [
                    *unlogged,
                    f"log_extra({name!r}, …) with {len(values)} values for {len(rows)} samples",
                ]
                continue
            column = self.log.columns.setdefault(name, [None] * len(self._samples))
            for row, value in zip(rows, values, strict=True):
                column[row] = value
        self.log.unlogged += unlogged


def _outcome(future: Future[Any | Failure]) -> Any | Failure:
    try:
        return future.result()
    except CancelledError:
        return Failure("timeout", "it was not called, because too many of its calls took too long")


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def _place(detail: str) -> str:
    """`file.py, line N: ` of a traceback's last frame that is neither ours nor a library's; else empty."""
    ours = str(Path(__file__).parents[1])
    others = (ours, sys.prefix, sys.base_prefix, "<")
    frames = [frame for frame in _FRAME.findall(detail) if not frame[0].startswith(others)]
    return f"{frames[-1][0]}, line {frames[-1][1]}: " if frames else ""


def _report(
    function: Function,
    failures: list[Failure],
    errors: Counter[Kind],
    num_samples: int,
    completions: Sequence[object],
) -> None:
    if not failures:
        return
    first, on = failures[0], "several samples at once, and on none of them alone"
    if errors:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in errors.items())
        on = f"{errors.total()} of {num_samples} samples ({kinds}), which get {ERROR_REWARD:g}"
    limit = f"; {_KEYS[first.kind]} sets the limit" if first.kind in _KEYS else ""
    text = "reward function `%s` failed on %s%s; its first failure: %s%s%s"
    # A failure on several samples at once has no completion of its own.
    said = f"\nthe completion: {shown(completions[0])}" if len(completions) == 1 else ""
    logger.warning(text, function.name, on, limit, _place(first.detail), first.detail, said)


def _checked(function: Function, returned: Any, num_samples: int) -> tuple[np.ndarray, dict[int, Kind]]:
    """float32, NaN for None and ERROR_REWARD for failures and non-finite values; the kinds of these two."""
    problem = returned if isinstance(returned, str) else None
    if problem is None and len(returned) != num_samples:
        problem = f"one value per completion: expected {num_samples}, got {len(returned)}"
    if problem is not None:
        raise ValueError(f"reward function `{function.spec}` must return {problem}")
    kinds: dict[int, Kind] = {i: value.kind for i, value in enumerate(returned) if isinstance(value, Failure)}
    abstains = [value is None or isinstance(value, Failure) for value in returned]
    with np.errstate(over="ignore"):
        values = np.array(np.where(abstains, np.nan, np.array(returned, object)), np.float32)
    bad: list[int] = np.flatnonzero(~np.array(abstains, np.bool_) & ~np.isfinite(values)).tolist()
    if bad:
        logger.warning("reward function `%s` returned %d values that are not finite", function.name, len(bad))
    kinds |= dict.fromkeys(bad, "error")
    values[list(kinds)] = ERROR_REWARD
    return values, kinds
