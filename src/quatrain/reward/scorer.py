"""Scores completions with reward functions and reward models, and computes the weighted sum of their rewards.

Stage 2 of a training step: `RolloutBatch` -> `RewardScorer.score` -> `RewardedBatch`.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quatrain.config.schema import RewardConfig
from quatrain.metrics import Metric, combine, describe
from quatrain.reward.functions import BUILTIN_FUNCTIONS, RewardFunction, overlong
from quatrain.types import REWARD_ARGUMENTS, PromptText, RewardedBatch, RolloutBatch
from quatrain.user_code import VARIADIC, find_function

if TYPE_CHECKING:
    from quatrain.reward.model import RewardModel

logger = logging.getLogger(__name__)

ERROR_REWARD = -1.0
"""Raw reward of a sample for which a reward function fails."""
_STATS = ("mean", "std", "min", "max")


class Scores(NamedTuple):
    """What one reward function or reward model says of B sequences."""

    values: Sequence[float] | np.ndarray
    """[B] raw rewards, NaN for an abstention."""
    counts: Mapping[str, int]
    """Numbers of sequences or tokens, by the last part of the metric `reward/<name>/…`."""
    seconds: float = 0.0
    """Seconds of computation on the devices."""


class RewardScorer:
    """The reward functions and reward models of `config` with their weights.

    `models` are the loaded reward models, one for each entry `model:PATH` (`reward.model`); scoring with them
    needs all processes of a run. `decide` calls its argument and returns the result. In a run of several
    processes it must do so in one process and broadcast the result (`cluster.processes.decided_by_main`),
    because users' functions may return different values in different processes. Raises ValueError if a
    function cannot be imported or called, and if `models` lacks a reward model.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        models: Mapping[str, RewardModel] = MappingProxyType({}),
        decide: Callable[[Callable[[], Any]], Any] = lambda f: f(),
    ):
        self._decide = decide
        missing = config.models.keys() - models.keys()
        if missing:
            raise ValueError(
                f"reward models must be loaded before the scorer is made; {', '.join(sorted(missing))} is "
                "not; pass models=quatrain.reward.model.load_reward_models(…), or use quatrain.build_stages"
            )
        names = short_names(config)
        self._weights = {names[spec]: weight for spec, weight in config.functions.items()}
        self._models = {names[spec]: models[spec] for spec in config.models}
        functions = (spec for spec in config.functions if spec not in config.models)
        self._functions = [_load(spec, names[spec], config) for spec in functions]
        needs = {column: f"the reward `{f.name}`" for f in self._functions for column in f.required_columns}
        self.required_by: Mapping[str, str] = MappingProxyType(needs)
        """Data column -> description of a reward function that needs it, for error messages."""
        self.required_columns = frozenset(needs)
        """Data columns that at least one reward function requires."""

    def check_prompt(self, prompt: PromptText) -> None:
        """Raises ValueError if a reward model cannot score the completions of `prompt`."""
        for model in self._models.values():
            model.check_prompt(prompt)

    def score(self, rollouts: RolloutBatch) -> RewardedBatch:
        """The rollouts with raw rewards per function and their weighted sum; one call per function.

        If the rollouts have greedy completions as a baseline, these are scored too; errors, abstentions and
        other counts include theirs.

        If a function abstains (returns None) on a sample, its raw reward is NaN and it is left out of the
        sum; `reward/<name>/abstained` counts these samples. A reward model abstains on a sample that it
        cannot score (`RewardModel.score`). If a function raises an error or returns a non-finite value, the
        raw reward of each failing sample is `ERROR_REWARD`, counted in `reward/<name>/errors`. Raises
        ValueError if a function returns the wrong number of values or values that are not numbers, if it
        needs a column that the rollouts lack, and if a column has the name of an argument passed to every
        reward function (`REWARD_ARGUMENTS`).
        """
        for name in REWARD_ARGUMENTS:
            if name in rollouts.columns:
                raise ValueError(
                    f"a column must not be called `{name}`, the name of an argument of reward functions; "
                    f"the data has a column `{name}`; rename the column"
                )
        missing = sorted(self.required_columns - set(rollouts.columns))
        if missing:
            raise ValueError(
                f"{self.required_by[missing[0]]} needs the column `{missing[0]}`; the data has "
                f"{', '.join(rollouts.columns) or 'none'}"
            )
        scores = {name: Scores(*each) for name, each in self._decide(lambda: self._called(rollouts)).items()}
        scores |= {name: model.score(rollouts) for name, model in self._models.items()}
        raw = np.array([scores[name].values for name in self._weights], np.float32)
        raw = raw.reshape(len(self._weights), len(rollouts))
        metrics: dict[str, Metric] = {}
        for row, name in zip(raw, self._weights, strict=True):
            metrics |= describe(f"reward/{name}", row, _STATS)
            counts = {**scores[name].counts, "abstained": int(np.isnan(row).sum())}
            metrics |= {f"reward/{name}/{what}": Metric(n, reduction="sum") for what, n in counts.items()}
        rewards = _weighted_sum(raw, list(self._weights.values()))
        metrics |= describe("reward", rewards, _STATS)
        if self._models:
            seconds = sum(scores[name].seconds for name in self._models)
            metrics["time/reward_models_s"] = Metric(seconds, reduction="sum")
        baseline_rewards = None
        if rollouts.baseline is not None:
            greedy = self.score(rollouts.baseline)
            metrics = combine(metrics, {k: m for k, m in greedy.metrics.items() if m.reduction == "sum"})
            metrics |= describe("reward/greedy", greedy.rewards, ("mean",))
            of_group = dict(zip(rollouts.baseline.group_ids.tolist(), greedy.rewards, strict=True))
            baseline_rewards = np.array(
                [of_group[group] for group in rollouts.group_ids.tolist()], np.float32
            )
        return RewardedBatch(
            rollouts, rewards, raw, tuple(self._weights), metrics, baseline_rewards=baseline_rewards
        )

    def _called(self, rollouts: RolloutBatch) -> dict[str, tuple[list[float], dict[str, int]]]:
        """The fields of the `Scores` of each reward function by its name, JSON-serialisable."""
        samples = _Samples.of(rollouts)
        scores = {function.name: _score_function(function, samples) for function in self._functions}
        return {name: (values.tolist(), {"errors": errors}) for name, (values, errors) in scores.items()}


def call_reward(function: RewardFunction, arguments: Mapping[str, list]) -> Sequence[float | None]:
    """Calls a reward function on a batch; users' reward functions are called only here."""
    return function(**arguments)


@dataclass(frozen=True)
class _Function:
    spec: str
    name: str
    function: RewardFunction
    accepts: frozenset[str] | None  # names of accepted arguments; None: any name
    required_columns: tuple[str, ...]


@dataclass(frozen=True)
class _Samples:
    """The arguments of the reward functions, one item per sample."""

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
        """New lists with the arguments that `function` accepts, for the samples `rows`."""
        accepts = function.accepts
        return {
            name: [list(ids) for ids in values[rows]] if name == "completion_ids" else list(values[rows])
            for name, values in self.arguments.items()
            if accepts is None or name in accepts
        }


def _score_function(function: _Function, samples: _Samples) -> tuple[np.ndarray, int]:
    """[B] float32 raw rewards, and the number of errors."""
    everything = slice(0, samples.num_samples)
    try:
        returned = call_reward(function.function, samples.for_function(function, everything))
    except KeyboardInterrupt:
        raise
    except BaseException:  # includes SystemExit, which would end the run with exit status 0
        logger.warning(
            "reward function `%s` raised an error; calling it on each sample alone",
            function.name,
            exc_info=True,
        )
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
    # If the call on the batch failed but the calls on its samples did not, one error is counted.
    return values, max(errors, 1)


def _checked(function: _Function, returned: Any, num_samples: int) -> tuple[np.ndarray, int]:
    """The returned values as float32, NaN for None and ERROR_REWARD for non-finite ones; number of errors."""
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
            f"reward function `{function.spec}` must return numbers, or None to abstain; it returned a value "
            f"{type(value).__name__} {value!r:.80}"
        ) from error


def _weighted_sum(raw: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """[B] float32: sum over functions of weight * raw[F, B] without NaN entries; NaN if all are NaN."""
    terms = np.asarray(weights, np.float64)[:, None] * raw
    total = np.where(np.isnan(raw), 0.0, terms).sum(axis=0)
    return np.where(np.isnan(raw).all(axis=0), np.nan, total).astype(np.float32)


def short_names(config: RewardConfig) -> dict[str, str]:
    """Spec -> name in metrics: the function's name, or the whole spec if two functions have the same name.

    The name of a reward model is the last part of its path.
    """
    short = {spec: spec.rpartition(":")[2] for spec in config.functions}
    short |= {spec: Path(path).name for spec, path in config.models.items()}
    shared = Counter(short.values())
    return {spec: name if shared[name] == 1 else spec for spec, name in short.items()}


def _load(spec: str, name: str, config: RewardConfig) -> _Function:
    function = find_function(spec, BUILTIN_FUNCTIONS, "reward function")
    if function is overlong:
        assert config.overlong_limit is not None, "the limit is derived before it comes here"
        assert config.overlong_buffer is not None, "the buffer is derived before it comes here"
        function = partial(overlong, limit=config.overlong_limit, buffer=config.overlong_buffer)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some callables written in C have no signature
        return _Function(spec, name, function, None, ())
    if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        raise ValueError(f"reward function {spec!r} takes positional-only arguments; it is called by keyword")
    named = [p for p in parameters if p.kind not in VARIADIC]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    required = [p.name for p in named if p.default is p.empty and p.name not in REWARD_ARGUMENTS]
    accepts = None if takes_any else frozenset(p.name for p in named)
    return _Function(spec, name, function, accepts, tuple(required))
