"""Scores completions with the configured reward functions and sums them by weight.

Line 2 of a training step: `RolloutBatch` -> `RewardScorer.score` -> `RewardedBatch`.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from quatrain.config.schema import RewardConfig
from quatrain.metrics import Metric, describe
from quatrain.reward.functions import BUILTIN_FUNCTIONS, RewardFunction
from quatrain.types import REWARD_ARGUMENTS, RewardedBatch, RolloutBatch
from quatrain.user_code import VARIADIC, find_function

logger = logging.getLogger(__name__)

ERROR_REWARD = -1.0
"""Raw reward of a sample on which a function fails."""
_STATS = ("mean", "std", "min", "max")


class RewardScorer:
    """The reward functions of `config`, each with its weight.

    `decide` calls what it is given and returns its result; of several processes in one alone, which tells the
    others (`cluster.processes.decided_by_main`), as a user's functions need not come out the same in each.
    Raises ValueError when a function cannot be imported or called.
    """

    def __init__(self, config: RewardConfig, *, decide: Callable[[Callable[[], Any]], Any] = lambda f: f()):
        self._decide = decide
        names = _short_names(list(config.functions))
        self._functions = [_load(spec, names[spec], weight) for spec, weight in config.functions.items()]
        needs = {column: f"the reward `{f.name}`" for f in self._functions for column in f.required_columns}
        self.required_by: Mapping[str, str] = MappingProxyType(needs)
        """Data column -> the reward function that needs it, in words."""
        self.required_columns = frozenset(needs)
        """Data columns some function cannot do without."""

    def score(self, rollouts: RolloutBatch) -> RewardedBatch:
        """The rollouts with raw rewards per function and their weighted sum; one call per function.

        A function that abstains (None) leaves NaN and no term in the sum, counted in
        `reward/<name>/abstained`. A function that raises, or returns
        a value that is not finite, costs each sample at fault `ERROR_REWARD`, counted in
        `reward/<name>/errors`. Raises ValueError when a function returns the wrong number of values or
        something else than numbers, or needs a column that the rollouts lack, and when a column has the name
        of an argument of every reward function (`REWARD_ARGUMENTS`).
        """
        for name in REWARD_ARGUMENTS:
            if name in rollouts.columns:
                raise ValueError(
                    f"a reward function receives `{name}` as an argument of its own; the data has a column "
                    f"`{name}`; rename the column"
                )
        missing = sorted(self.required_columns - set(rollouts.columns))
        if missing:
            raise ValueError(
                f"{self.required_by[missing[0]]} needs the column `{missing[0]}`; the data has "
                f"{', '.join(rollouts.columns) or 'none'}"
            )
        scores = self._decide(lambda: self._scores(rollouts))
        raw = np.array([values for values, _ in scores], np.float32).reshape(len(scores), len(rollouts))
        metrics: dict[str, Metric] = {}
        for row, (_, errors), function in zip(raw, scores, self._functions, strict=True):
            metrics |= describe(f"reward/{function.name}", row, _STATS)
            metrics[f"reward/{function.name}/errors"] = Metric(errors, reduction="sum")
            metrics[f"reward/{function.name}/abstained"] = Metric(int(np.isnan(row).sum()), reduction="sum")
        rewards = _weighted_sum(raw, [function.weight for function in self._functions])
        names = tuple(function.name for function in self._functions)
        return RewardedBatch(rollouts, rewards, raw, names, describe("reward", rewards, _STATS) | metrics)

    def _scores(self, rollouts: RolloutBatch) -> list[tuple[list[float], int]]:
        """Raw rewards, and how many errors there were, of each function."""
        samples = _Samples.of(rollouts)
        scores = (_score_function(function, samples) for function in self._functions)
        return [(values.tolist(), errors) for values, errors in scores]


def call_reward(function: RewardFunction, arguments: Mapping[str, list]) -> Sequence[float | None]:
    """One call of a reward function on a batch: the one place where a user's code runs."""
    return function(**arguments)


@dataclass(frozen=True)
class _Function:
    spec: str
    name: str
    function: RewardFunction
    weight: float
    accepts: frozenset[str] | None  # argument names; None: any
    required_columns: tuple[str, ...]


@dataclass(frozen=True)
class _Samples:
    """What the reward functions see, one item per sample."""

    arguments: Mapping[str, Sequence[Any]]
    num_samples: int

    @staticmethod
    def of(rollouts: RolloutBatch) -> _Samples:
        prompts = [p if isinstance(p, str) else [dict(message) for message in p] for p in rollouts.prompts]
        tokens_and_masks = zip(rollouts.input_ids, rollouts.completion_mask, strict=True)
        arguments = {
            **rollouts.columns,
            "prompts": prompts,
            "completions": rollouts.completions,
            "completion_ids": [tokens[mask].tolist() for tokens, mask in tokens_and_masks],
            "finish_reasons": rollouts.finish_reason.tolist(),
        }
        return _Samples(arguments, len(rollouts))

    def for_function(self, function: _Function, rows: slice) -> dict[str, list]:
        """Fresh lists of the arguments `function` takes."""
        accepts = function.accepts
        return {
            name: [list(ids) for ids in values[rows]] if name == "completion_ids" else list(values[rows])
            for name, values in self.arguments.items()
            if accepts is None or name in accepts
        }


def _score_function(function: _Function, samples: _Samples) -> tuple[np.ndarray, int]:
    """[B] float32 raw rewards, and how many errors there were."""
    everything = slice(0, samples.num_samples)
    try:
        returned = call_reward(function.function, samples.for_function(function, everything))
    except KeyboardInterrupt:
        raise
    except BaseException:  # SystemExit too, which would end the run with exit status 0
        logger.warning("reward function `%s` raised; finding the sample", function.name, exc_info=True)
        return _score_one_by_one(function, samples)
    return _checked(function, returned, samples.num_samples)


def _score_one_by_one(function: _Function, samples: _Samples) -> tuple[np.ndarray, int]:
    values = np.full(samples.num_samples, ERROR_REWARD, np.float32)
    errors = 0
    for index in range(samples.num_samples):
        try:
            returned = call_reward(function.function, samples.for_function(function, slice(index, index + 1)))
        except KeyboardInterrupt:
            raise
        except BaseException:
            errors += 1
            continue
        values[index : index + 1], bad = _checked(function, returned, 1)
        errors += bad
    # A batch that fails while each of its samples passes is still one failed call.
    return values, max(errors, 1)


def _checked(function: _Function, returned: Any, num_samples: int) -> tuple[np.ndarray, int]:
    """The returned values as float32 with NaN for None; those not finite become errors."""
    if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__len__"):
        raise ValueError(
            f"reward function `{function.spec}` must return a list with one number per completion; it "
            f"returned {type(returned).__name__}"
        )
    if len(returned) != num_samples:
        raise ValueError(
            f"reward function `{function.spec}` must return one value per completion: expected "
            f"{num_samples}, got {len(returned)}"
        )
    values = np.full(num_samples, np.nan, np.float32)
    errors = 0
    for index, value in enumerate(returned):
        if value is not None:
            number = _number(function, value)
            finite = bool(np.isfinite(number))
            values[index] = number if finite else ERROR_REWARD
            errors += not finite
    if errors:
        logger.warning("reward function `%s` returned %d values that are not finite", function.name, errors)
    return values, errors


def _number(function: _Function, value: Any) -> np.float32:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        with np.errstate(over="ignore"):
            return np.float32(float(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"reward function `{function.spec}` must return numbers, or None to abstain; among its values is "
            f"{type(value).__name__} {value!r:.80}"
        ) from error


def _weighted_sum(raw: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """[B] float32: sum over functions of weight * raw[F, B], NaN entries left out; NaN where all are."""
    terms = np.asarray(weights, np.float64)[:, None] * raw
    total = np.where(np.isnan(raw), 0.0, terms).sum(axis=0)
    return np.where(np.isnan(raw).all(axis=0), np.nan, total).astype(np.float32)


def _short_names(specs: Sequence[str]) -> dict[str, str]:
    """Spec -> the name in metrics: the function's own, or the whole spec where two would be the same."""
    short = {spec: spec.rpartition(":")[2] for spec in specs}
    shared = Counter(short.values())
    return {spec: name if shared[name] == 1 else spec for spec, name in short.items()}


def _load(spec: str, name: str, weight: float) -> _Function:
    function = find_function(spec, BUILTIN_FUNCTIONS, "reward function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some callables written in C have no signature
        return _Function(spec, name, function, weight, None, ())
    if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        raise ValueError(f"reward function {spec!r} takes positional-only arguments; it is called by keyword")
    named = [p for p in parameters if p.kind not in VARIADIC]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    required = [p.name for p in named if p.default is p.empty and p.name not in REWARD_ARGUMENTS]
    accepts = None if takes_any else frozenset(p.name for p in named)
    return _Function(spec, name, function, weight, accepts, tuple(required))
