"""Scores completions with reward functions and reward models, and computes the weighted sum of their rewards.

Stage 2 of a training step: `RolloutBatch` -> `RewardScorer.score` -> `RewardedBatch`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from quatrain.config.errors import listed
from quatrain.config.sections.reward import RewardConfig, RewardEntry
from quatrain.reward.calls import (
    DATA_SOURCE,
    ERROR_REWARD,
    Caller,
    Function,
    InProcess,
    InWorkers,
    Samples,
    score_function,
    try_function,
)
from quatrain.reward.forms import prepared
from quatrain.reward.functions import (
    BUILTIN_FUNCTIONS,
    TAGS,
    accepted_answers,
    begun_answer,
    correct,
    graded,
    has_format,
    overlong,
    tag_count,
    why_unjudged,
)
from quatrain.reward.functions import format as format_reward
from quatrain.reward.values import Scores
from quatrain.types.batches import (
    ENVIRONMENT,
    EPISODE_COLUMNS,
    FAULTS,
    REWARD_ARGUMENTS,
    Prompt,
    PromptText,
    RewardedBatch,
    RolloutBatch,
)
from quatrain.types.metrics import Metric, combine, describe
from quatrain.workers.pool import Failure, Pool, default_workers
from quatrain.workers.process import log_output
from quatrain.workers.user_code import find_function, parameters_of

if TYPE_CHECKING:
    from quatrain.data.prompts import PromptSource
    from quatrain.data.table import TokenRow
    from quatrain.reward.model import RewardModel

logger = logging.getLogger(__name__)

WHAT = "reward function"
Decide = Callable[[Callable[[], Any]], Any]
MANY_ANSWERS = 1000
"""Different gold answers that are judged at the start; math-verify may take milliseconds for each."""
_STATS = ("mean", "std", "min", "max")
MADE_UP = "<think>1 + 1 = 2</think>\n<answer>2</answer>"
"""The completion on which users' functions are tried before the first rollout."""
_CUTS = (0, len(TAGS[0]), MADE_UP.index("\n"), MADE_UP.index(TAGS[2]))
_OF_ENVIRONMENT = ("environment_reward", "turn_rewards")


class RewardScorer:
    """The reward functions and reward models of `config` with their weights.

    `models` are the loaded reward models, one for each entry `model:PATH` (`reward.model`); scoring with them
    needs all processes of a run. `functions` are Python functions for entries of `reward.functions`, by their
    names there; they are called in this process. `decide` calls its argument and returns the result. In a run
    of several processes it must do so in one process and broadcast the result
    (`cluster.processes.decided_by_main`), because users' functions may return different values in different
    processes; only that process has worker processes. With `episodes`, rollouts bring the columns
    EPISODE_COLUMNS, which the data need not have. `opening` is what the chat template begins of each answer
    (`data.chat_template.begun_answer`); None: not known. With `accuracy_beside`, the values are an accuracy
    instead of rewards, and that scorer's `opening` and worker processes are shared. `close` ends the worker
    processes; otherwise they end with the scorer or with this process. Raises ValueError if a function cannot
    be imported or called, and if `models` lacks a reward model.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        models: Mapping[str, RewardModel] = MappingProxyType({}),
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        decide: Decide = lambda f: f(),
        episodes: bool = False,
        opening: str | None = None,
        accuracy_beside: RewardScorer | None = None,
    ):
        self._decide, self._per_call = decide, config.per_call
        self.opening: str | None = opening if accuracy_beside is None else accuracy_beside.opening
        missing = config.models.keys() - models.keys()
        if missing:
            raise ValueError(
                f"reward models must be loaded before the scorer is made; {', '.join(sorted(missing))} is "
                "not; pass models=quatrain.reward.model.load_reward_models(…), or use quatrain.build_stages"
            )
        _check_given(config, functions)
        names = short_names(config)
        self._weights = {names[spec]: entry.weight for spec, entry in config.entries.items()}
        self._models = {names[spec]: models[spec] for spec in config.models}
        self._sources = {
            names[spec]: frozenset(entry.data_source)
            for spec, entry in config.entries.items()
            if entry.data_source is not None
        }
        shared = None if accuracy_beside is None else accuracy_beside._pool
        self._pool: Pool | None = shared or _pool(config, names, functions)
        self._owns_pool = shared is None
        try:
            self._functions = list(_functions(config, names, functions, self._pool, decide, self.opening))
        except BaseException:  # also a signal while a module is being imported
            self.close()
            raise
        needs = {column: f"the reward `{f.name}`" for f in self._functions for column in f.required_columns}
        self._builtin = {f.spec: f for f in self._functions if f.spec not in functions}
        self._episodes, self._warned_of_unused = episodes, False
        weighted = config.entries.get(ENVIRONMENT) if episodes and ENVIRONMENT not in functions else None
        self._environment_weight = weighted.weight if weighted else 0.0
        self._reads_environment = accuracy_beside is not None or any(
            name in (f.accepts or f.required_columns) for f in self._functions for name in _OF_ENVIRONMENT
        )
        if episodes:
            needs = {column: reward for column, reward in needs.items() if column not in EPISODE_COLUMNS}
        if self._sources:
            needs[DATA_SOURCE] = f"data_source of the reward `{next(iter(self._sources))}`"
        self.required_by: Mapping[str, str] = MappingProxyType(needs)
        """Data column -> description of a reward function that needs it, for error messages."""
        self.required_columns = frozenset(needs)
        """Data columns that at least one reward function requires."""

    def close(self) -> None:
        """Ends the worker processes; the scorer must not be used afterwards."""
        if self._pool is not None and self._owns_pool:
            self._pool.close()

    @property
    def function_names(self) -> tuple[str, ...]:
        """The names that reward functions and reward models have in metrics."""
        return tuple(self._weights)

    @property
    def routes(self) -> bool:
        """Whether a reward is for samples of some data sources only."""
        return bool(self._sources)

    def check_sources(self, known: Sequence[object]) -> None:
        """Raises ValueError if a reward names a data source that is not in `known`, those of the data."""
        for name, sources in self._sources.items():
            missing = sorted(sources - set(known))
            if missing:
                raise ValueError(
                    f"data_source of the reward `{name}` must name values of the column `{DATA_SOURCE}`, "
                    f"which are {listed(dict.fromkeys(known))}; got {missing[0]}; correct the name in "
                    "reward.functions"
                )

    def check_answers(self, name: str, source: PromptSource) -> list[str]:
        """A warning if `correct` abstains on all completions of some prompts of `source`, called `name`.

        Raises ValueError if it abstains on those of all prompts that it is to judge.
        """
        judge = self._builtin.get("correct")
        if judge is None:
            return []
        found = source.tally(_by_answer(judge.sources))
        judged, _ = found.pop("", (0, 0))
        if not found:
            return []
        kinds = ", ".join(f"{kind}: {count} (row {row})" for kind, (count, row) in found.items())
        if not judged:
            raise ValueError(
                f"{name}: `correct` judges by gold answers that are text, numbers, true or false, dates, or "
                f"lists of right answers; in the column `answer` it can judge by none, which are {kinds}; "
                "name another column in data.answer_column, convert this one, or leave `correct` out"
            )
        total = sum(count for count, _ in found.values())
        return [
            f"{name}: `correct` cannot judge by {total} of {total + judged} values of the column `answer`, "
            f"and abstains on their completions: {kinds}"
        ]

    def check_format(self, prompts: Iterable[Prompt], said: Callable[[str], str]) -> list[str]:
        """A warning if `format` or `tag_count` can be 1 for no completion of one of `prompts`.

        `said` gives the text of a completion whose tokens are those of its argument.
        """
        names = [f"`{name}`" for name in ("format", "tag_count") if name in self._builtin]
        for prompt in prompts if names else ():
            begun = begun_answer(prompt.text, self.opening)
            if not any(has_format(begun + said(MADE_UP[at:])) for at in _CUTS):
                return [
                    f"{' and '.join(names)} can never be 1: the completion {MADE_UP!r} is read as "
                    f"{begun + said(MADE_UP)!r}, with what the prompt has begun of the answer; take a "
                    "tokenizer and a chat template (data.chat_template) that keep the tags as text and begin "
                    "none but <think>, or leave the reward out"
                ]
        return []

    def try_on(self, prompts: Mapping[Any, Prompt], completion_ids: Sequence[int]) -> list[str]:
        """Calls each user's function once on the completion MADE_UP of a prompt; a warning for each failure.

        `prompts` has a prompt of each data source, and the first of them is the first training prompt.
        `completion_ids` are the tokens of MADE_UP. Raises ValueError if a function returns the wrong number
        of values or values that are no numbers. Nothing is called without a prompt.
        """
        warnings: list[str] = self._decide(lambda: list(self._tried(prompts, list(completion_ids))))
        return warnings

    def _tried(self, prompts: Mapping[Any, Prompt], completion_ids: list[int]) -> Iterator[str]:
        for function in self._functions:
            sources = prompts.keys() if function.sources is None else function.sources
            prompt = next((prompts[source] for source in prompts if source in sources), None)
            if prompt is None or function.spec in BUILTIN_FUNCTIONS:
                continue
            try:
                problem = try_function(function, _made_up(prompt, completion_ids, self._episodes))
            except ValueError as error:
                raise ValueError(
                    f"{error} (it was tried on a made-up completion of a training prompt)"
                ) from None
            if problem is not None:
                yield (
                    f"reward function `{function.name}` fails on a made-up completion of a training prompt "
                    f"({problem}): every sample on which it fails gets -1"
                )

    def check_prompt(self, prompt: PromptText) -> None:
        """Raises ValueError if a reward model cannot score the completions of `prompt`."""
        for model in self._models.values():
            model.check_prompt(prompt)

    def score(self, rollouts: RolloutBatch) -> RewardedBatch:
        """The rollouts with raw rewards per function and their weighted sum.

        If the rollouts have greedy completions as a baseline, these are scored too; errors, abstentions and
        other counts include theirs.

        If a function abstains (returns None) on a sample, its raw reward is NaN and it is left out of the
        sum; `reward/<name>/abstained` counts these samples. A reward model abstains on a sample that it
        cannot score (`RewardModel.score`). If a function fails (`pool.Failure`) or returns a value
        that is not finite, the raw reward of each failing sample is `ERROR_REWARD`, counted in
        `reward/<name>/errors`. An episode that a fault of its environment ended has the reward `ERROR_REWARD`
        in all and by each function, none of which is called for it. Raises
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
        scores |= {name: self._by_model(name, model, rollouts) for name, model in self._models.items()}
        raw = np.array([scores[name].values for name in self._weights], np.float32)
        raw = raw.reshape(len(self._weights), len(rollouts))
        faults = np.isin(rollouts.finish_reason, FAULTS)
        raw[:, faults] = ERROR_REWARD
        metrics: dict[str, Metric] = {}
        for row, name in zip(raw, self._weights, strict=True):
            metrics |= describe(f"reward/{name}", row, _STATS)
            counts: dict[str, float] = {**scores[name].counts, "abstained": int(np.isnan(row).sum())}
            counts["seconds"] = scores[name].seconds
            metrics |= {f"reward/{name}/{what}": Metric(n, reduction="sum") for what, n in counts.items()}
        rewards = _weighted_sum(raw, list(self._weights.values()))
        rewards[faults] = ERROR_REWARD
        self._warn_of_unused(rollouts)
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
            rollouts,
            rewards,
            raw,
            self.function_names,
            metrics,
            baseline_rewards=baseline_rewards,
            environment_weight=self._environment_weight,
        )

    def _warn_of_unused(self, rollouts: RolloutBatch) -> None:
        """Says once that an environment gives rewards which no function reads."""
        if not self._episodes or self._reads_environment or self._warned_of_unused:
            return
        if any(rollouts.columns["environment_reward"]):
            self._warned_of_unused = True
            logger.warning(
                "the environment gives rewards, and no function of reward.functions asks for the column "
                f"{' or '.join(_OF_ENVIRONMENT)}; unless one reads it from **columns, add environment: 1.0 "
                "for the rewards to count"
            )

    def _by_model(self, name: str, model: RewardModel, rollouts: RolloutBatch) -> Scores:
        """The scores of a reward model, which abstains on samples of other sources than its own."""
        scores = model.score(rollouts)
        if name not in self._sources:
            return scores
        own = np.zeros(len(rollouts), np.bool_)
        own[Samples.of(rollouts).of_sources(self._sources[name])] = True
        return scores._replace(values=np.where(own, np.asarray(scores.values, np.float32), np.nan))

    def _called(self, rollouts: RolloutBatch) -> dict[str, tuple[list[float], dict[str, int], float]]:
        """The fields of the `Scores` of each reward function by its name, JSON-serialisable."""
        samples = Samples.of(rollouts)
        called: dict[str, tuple[list[float], dict[str, int], float]] = {}
        for function in self._functions:
            began = time.perf_counter()
            values, errors = score_function(function, samples, self._per_call)
            kinds = {f"errors/{kind}": count for kind, count in errors.items()}
            seconds = time.perf_counter() - began
            called[function.name] = values.tolist(), {"errors": errors.total(), **kinds}, seconds
        return called


def _by_answer(sources: frozenset[str] | None) -> Callable[[TokenRow], str | None]:
    """What gives why `correct` abstains on a row, "" if it does not, and None for rows of other `sources`.

    MANY_ANSWERS different answers of a kind that can be judged are, and more until one is; others count as
    judged.
    """
    known: dict[str, str] = {}

    def kind(row: TokenRow) -> str | None:
        source, answer = row.columns.get(DATA_SOURCE), row.columns.get("answer")
        if "answer" not in row.columns or not (
            sources is None or (isinstance(source, str) and source in sources)
        ):
            return None
        key = repr(answer)
        if key not in known:
            if len(known) >= MANY_ANSWERS and "" in known.values() and accepted_answers(answer):
                return ""
            known[key] = why_unjudged(answer) or ""
        return known[key]

    return kind


def _made_up(prompt: Prompt, completion_ids: list[int], episodes: bool) -> Samples:
    text = prompt.text if isinstance(prompt.text, str) else [dict(message) for message in prompt.text]
    columns = dict(prompt.columns)
    if episodes:
        answer = {"role": "assistant", "content": MADE_UP}
        columns |= {"messages": [*text, answer], "environment_reward": 0.0, "turn_rewards": [0.0]}
    arguments = {
        **{name: [value] for name, value in columns.items()},
        "prompts": [text],
        "completions": [MADE_UP],
        "completion_ids": [completion_ids],
        "finish_reasons": ["stop"],
    }
    return Samples(arguments, [prompt.group_id])


def _check_given(config: RewardConfig, functions: Mapping[str, Any]) -> None:
    """Raises ValueError unless functions given from Python are callable and entries of the configuration."""
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(
                f"a reward function must be callable; {name!r} in reward_functions is a "
                f"{type(function).__name__}; give a function"
            )
        if name not in config.functions or name in config.models:
            raise ValueError(
                "a reward function that is given from Python must be an entry of reward.functions, which has "
                f"its weight; the entries are {listed(config.functions)}, and reward_functions has "
                f"{name!r}; add "
                f"it, as load_config(overrides=['reward.functions.{name}=1.0'])"
            )


def _pool(
    config: RewardConfig, names: Mapping[str, str], functions: Mapping[str, Callable[..., Any]]
) -> Pool | None:
    """Workers for users' functions; None if there are none, or if `reward.workers` is 0."""
    num_workers = default_workers() if config.workers is None else config.workers
    users = config.functions.keys() - config.models.keys() - BUILTIN_FUNCTIONS.keys() - functions.keys()
    if not (users and num_workers):
        return None
    return Pool(
        WHAT,
        num_workers,
        convert="quatrain.reward.values:plain_rewards",
        prepare="quatrain.reward.forms:prepared",
        args={spec: entry.args for spec, entry in config.entries.items()},
        memory_mb=config.memory_mb,
        on_output=partial(_log_output, names),
    )


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


def _functions(
    config: RewardConfig,
    names: Mapping[str, str],
    given: Mapping[str, Callable[..., Any]],
    pool: Pool | None,
    decide: Decide,
    opening: str | None,
) -> Iterator[Function]:
    """The reward functions of `config`; without a pool, users' functions are called in this process."""
    for spec, entry in config.entries.items():
        if spec in config.models:
            continue
        caller: Caller
        if spec in given or pool is None or ":" not in spec:
            function = given.get(spec) or find_function(spec, BUILTIN_FUNCTIONS, WHAT)
            own = spec in BUILTIN_FUNCTIONS and spec not in given
            function = _builtin(spec, config, entry, opening) if own else prepared(function, spec, entry.args)
            caller = InProcess(function, copies=not own)
            parameters = parameters_of(function)
        else:
            caller = InWorkers(pool, spec, config.timeout_s)
            parameters = decide(partial(_loaded, pool, spec))
        yield _function(spec, names[spec], caller, parameters, entry)


def _builtin(spec: str, config: RewardConfig, entry: RewardEntry, opening: str | None) -> Callable[..., Any]:
    """A built-in function with its arguments; raises ValueError for arguments that it does not have."""
    function: Callable[..., Any] = BUILTIN_FUNCTIONS[spec]
    if function is overlong:
        assert config.overlong_limit is not None, "the limit is derived before it comes here"
        assert config.overlong_buffer is not None, "the buffer is derived before it comes here"
        if entry.args:
            raise ValueError(
                f"reward function 'overlong' takes limit and buffer from reward.overlong_limit and "
                f"reward.overlong_buffer; got args {listed(entry.args)}; set these keys instead"
            )
        return partial(overlong, limit=config.overlong_limit, buffer=config.overlong_buffer)
    if function is correct:
        function = partial(graded, timeout_s=config.timeout_s)
    if entry.args:
        raise ValueError(
            f"reward function {spec!r} is built in and has no arguments of its own; got args "
            f"{listed(entry.args)}; leave them out"
        )
    if function in (format_reward, tag_count):
        return partial(function, opening=opening)
    return function


def _loaded(pool: Pool, spec: str) -> list[Any] | None:
    """The parameters of a user's function, which a worker imports."""
    if spec.startswith("__main__:"):
        raise ValueError(
            f"{WHAT} {spec!r} is defined in the running program, which worker processes cannot import; put "
            "it into a file and name it as `path/file.py:function`, or set reward.workers to 0"
        )
    reply = pool.load(spec)
    if isinstance(reply, Failure):
        raise ValueError(f"{WHAT} {spec!r} cannot be imported ({reply.kind}): {reply.detail}")
    if "refused" in reply:
        raise ValueError(reply["refused"])
    return reply["parameters"]


def _function(
    spec: str, name: str, caller: Caller, parameters: Sequence[Any] | None, entry: RewardEntry
) -> Function:
    # A column of the name of a built-in function's limit must not replace the limit.
    bound = frozenset(entry.args) | getattr(getattr(caller, "function", None), "keywords", {}).keys()
    sources = None if entry.data_source is None else frozenset(entry.data_source)
    if parameters is None:  # some callables written in C have no signature
        return Function(spec, name, None, (), caller, bound, sources)
    kinds = {parameter: kind for parameter, kind, _ in parameters}
    if "POSITIONAL_ONLY" in kinds.values():
        raise ValueError(f"{WHAT} {spec!r} takes positional-only arguments; it is called by keyword")
    required = tuple(p for p, _, needed in parameters if needed and p not in REWARD_ARGUMENTS)
    named = frozenset(p for p, kind in kinds.items() if kind not in ("VAR_POSITIONAL", "VAR_KEYWORD"))
    accepts = None if "VAR_KEYWORD" in kinds.values() else named
    return Function(spec, name, accepts, required, caller, bound, sources)


def _log_output(names: Mapping[str, str], spec: str, text: str) -> None:
    log_output(logger, f"reward function `{names.get(spec, spec)}`", text)
