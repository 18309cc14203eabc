"""Scores completions with reward functions and reward models, and computes the weighted sum of their rewards.

Stage 2 of a training step: `RolloutBatch` -> `RewardScorer.score` -> `RewardedBatch`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from quatrain.config.derive import longest_of_run
from quatrain.config.errors import listed
from quatrain.config.schema import Config, RewardConfig
from quatrain.config.sections.judge import JUDGE
from quatrain.data import chat_template
from quatrain.data.gym_rows import check_installed
from quatrain.data.messages import MESSAGES
from quatrain.reward.calls import (
    ERROR_REWARD,
    TIMEOUTS_PER_WORKER,
    Function,
    Lender,
    Samples,
    Submit,
    call_in_process,
    call_in_workers,
    call_with_environments,
    plain_prompt,
    score_function,
    try_function,
)
from quatrain.reward.forms import TRAINER_STATE, FunctionScores, prepared
from quatrain.reward.functions import (
    BUILTIN_FUNCTIONS,
    FORMATS,
    IN_WORKERS,
    TAGS,
    accepted_answers,
    begun_answer,
    builtin_function,
    has_format,
    why_unjudged,
)
from quatrain.reward.judge.questions import Questions
from quatrain.reward.totals import Totals
from quatrain.types.batches import (
    DATA_SOURCE,
    ENVIRONMENT,
    ENVIRONMENTS,
    EPISODE_COLUMNS,
    REWARD_ARGUMENTS,
    Prompt,
    PromptText,
    RewardedBatch,
    RolloutBatch,
)
from quatrain.types.metrics import Metric, combine, describe
from quatrain.workers.pool import Failure, Pool, default_workers
from quatrain.workers.user_code import check_importable, find_function, parameters_of
from quatrain.workers.worker_process import log_output

if TYPE_CHECKING:
    from quatrain.data.policy import Policy
    from quatrain.data.prompts import PromptSource
    from quatrain.data.token_table import TokenRow
    from quatrain.reward.judge.judge import Judge
    from quatrain.reward.reward_model import RewardModel

logger = logging.getLogger(__name__)

WHAT = "reward function"
Decide = Callable[[Callable[[], Any]], Any]
MANY_ANSWERS = 1000
"""Different gold answers that are judged at the start; math-verify may take milliseconds for each."""
STATS = ("mean", "std", "min", "max")
MADE_UP = "<think>1 + 1 = 2</think>\n<answer>2</answer>"
"""The completion on which users' functions are tried before the first rollout."""
_CUTS = (0, len(TAGS[0]), MADE_UP.index("\n"), MADE_UP.index(TAGS[2]))
_OF_ENVIRONMENT = ("environment_reward", "turn_rewards")


class RewardScorer:
    """The reward functions and reward models of `config` with their weights.

    `close` ends the worker processes; otherwise they end with the scorer or with this process. Raises
    ValueError if a function cannot be imported or called, and if `models` lacks a reward model.

    Args:
        models: the loaded reward models, one for each entry `model:PATH` (`reward_model.py`); scoring with
            them needs all processes of a run. None: these entries are left out, and the judge too.
        judge: the model of `reward.judge`, for the entry `judge`; scoring needs all processes of a run.
        functions: Python functions for entries of `reward.functions`, by their names there; they are called
            in this process.
        decide: calls its argument and returns the result; in a run of several processes in one of them, and
            broadcasts it (`cluster.processes.decided_by_main`), because users' functions may return different
            values in different processes. Only that process has worker processes.
        episodes: rollouts bring the columns EPISODE_COLUMNS, which the data need not have.
        opening: what the chat template begins of each answer (`data.chat_template.begun_answer`); None: not
            known.
        faults_abstain: an episode that a fault ended has no reward, in place of ERROR_REWARD.
        accuracy_beside: the values are an accuracy instead of rewards; that scorer's `opening` and worker
            processes are shared.
        workers_of: the worker processes are those of this scorer, which has the same functions and must be
            closed after this one.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        models: Mapping[str, RewardModel] | None = MappingProxyType({}),
        judge: Judge | None = None,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        decide: Decide = lambda f: f(),
        episodes: bool = False,
        opening: str | None = None,
        faults_abstain: bool = False,
        accuracy_beside: RewardScorer | None = None,
        workers_of: RewardScorer | None = None,
    ):
        self._decide, self._per_call, self._episodes = decide, config.per_call, episodes
        self._has_rewards = False
        self._fault_reward = np.nan if faults_abstain or not config.functions else ERROR_REWARD
        self._logged: dict[str, None] = {}  # names of the columns that functions logged
        self._told: set[str] = set()
        self.opening: str | None = opening if accuracy_beside is None else accuracy_beside.opening
        judged = () if JUDGE not in config.functions else (JUDGE,)
        left_out = {*config.models, *judged} if models is None else set()
        entries = {spec: entry for spec, entry in config.entries.items() if spec not in left_out}
        if models is None:
            models = {}
        elif missing := config.models.keys() - models.keys():
            raise ValueError(
                f"reward models must be loaded before the scorer is made; {', '.join(sorted(missing))} is "
                "not; pass models=quatrain.reward.reward_model.load_reward_models(…), or use "
                "quatrain.build_stages"
            )
        elif judged and judge is None:
            raise ValueError(
                "the judge must be made before the scorer is; pass judge=reward.judge.judge.Judge(…) "
                "or use quatrain.build_stages; eval.accuracy may be `judge` if it is in reward.functions too"
            )
        _check_functions(config, functions)
        names = short_names(config)
        self.function_names = tuple(names[spec] for spec in entries)
        """The names that reward functions and reward models have in metrics."""
        # An accuracy is what was answered, however the completion ended.
        self._totals = Totals.of(config, tuple(entries), penalises=accuracy_beside is None)
        self._models = {names[spec]: model for spec, model in models.items() if spec in config.models}
        self.judge = judge if judged else None
        self._computed = {*config.models, *judged}
        self._sources = {
            names[spec]: frozenset(entry.data_source)
            for spec, entry in entries.items()
            if entry.data_source is not None
        }
        # Processes are shared, because each imports what the functions need, which takes seconds and memory.
        other = accuracy_beside or workers_of
        shared = None if other is None else other._pool
        self._pool: Pool | None = shared or _pool(config, names, functions)
        self._owns_pool, self._is_accuracy = shared is None, accuracy_beside is not None
        try:
            self._functions = [
                self._function(spec, names[spec], config, functions.get(spec))
                for spec in entries
                if spec not in self._computed
            ]
        except BaseException:  # also a signal while a module is being imported
            self.close()
            raise
        self._builtin = {f.spec: f for f in self._functions if f.spec not in functions}
        self.formats = [name for name in FORMATS if name in self._builtin]
        """The built-in functions that ask for a format."""
        self._in_tags = [name for name in self.formats if not entries[name].args]
        weighted = episodes and ENVIRONMENT in entries and ENVIRONMENT not in functions
        self._environment_weight = entries[ENVIRONMENT].weight if weighted else 0.0
        self.asks_for_environments = episodes and any(ENVIRONMENTS not in f.hidden for f in self._functions)
        """Whether a function gets the environments of episodes, which must be kept for it."""
        reads = any(
            name in (f.accepts or f.required_columns) for f in self._functions for name in _OF_ENVIRONMENT
        )
        unread = not (self.asks_for_environments or reads)
        self._warns_of_unused = episodes and accuracy_beside is None and unread
        needs = {column: f"the reward `{f.name}`" for f in self._functions for column in f.required_columns}
        if judged and config.judge is not None:
            needs |= dict.fromkeys(Questions(config.judge).required_columns, "the question of reward.judge")
        brought = (*EPISODE_COLUMNS, ENVIRONMENTS) if episodes else ()
        needs = {column: what for column, what in needs.items() if column not in brought}
        if self._sources:
            needs[DATA_SOURCE] = f"data_source of the reward `{next(iter(self._sources))}`"
        self.required_by: Mapping[str, str] = MappingProxyType(needs)
        """Data column -> description of a reward function that needs it, for error messages."""
        self.required_columns = frozenset(needs)
        """Data columns that at least one reward function requires."""

    @classmethod
    def of(
        cls,
        config: Config,
        policy: Policy,
        functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        *,
        imported: RewardScorer | None = None,
        weights: bool = True,
        folder: Path | None = None,
    ) -> Self:
        """The reward stage of `config`, with its reward models loaded on their mesh, and its judge.

        `folder` is that of the run, for what the judge keeps. A judge on this run's devices is connected
        where the rollout is made (`loop/stages.py`).

        `functions` as in the constructor; `imported` is a scorer of them without reward models, whose worker
        processes are used. In a run of several processes, only the main process calls the functions, and all
        compute the scores of reward models together. Without `weights` there are no reward models. Raises
        ValueError for a function that cannot be imported or called, and for a reward model that is missing,
        damaged or of an unsupported kind.
        """
        # They bring JAX, which hints on a run do without.
        from quatrain.cluster.processes import decided_by_main, is_main_process
        from quatrain.reward.judge.judge import Judge
        from quatrain.reward.judge.on_server import ServerJudge
        from quatrain.reward.reward_model import load_reward_models

        models, judge, judging = None, None, config.reward.judge
        if weights and config.reward.judges and judging is not None:
            judge = Judge(judging, folder=folder, decide=decided_by_main, writes=is_main_process())
            if judging.base_url is not None:
                judge.connect(ServerJudge(judging, judge.spending))
        if weights:
            models = load_reward_models(
                config.reward,
                config.model,
                mesh=policy.meshes.reward,
                memory="host" if config.offload.reward_models else "device",
                longest=longest_of_run(config),
            )
        return cls(
            config.reward,
            models=models,
            judge=judge,
            functions=functions,
            decide=decided_by_main,
            episodes=config.rollout.has_episodes,
            opening=chat_template.begun_answer(policy.tokenizer),
            faults_abstain=config.rollout.agent_failure == "abstain",
            workers_of=imported,
        )

    def _function(
        self, spec: str, name: str, config: RewardConfig, from_python: Callable[..., Any] | None
    ) -> Function:
        """A reward function; a user's is called in the pool, or without one in this process."""
        entry, bound, most_timeouts = config.entries[spec], frozenset(config.entries[spec].args), 1
        path = spec if from_python is not None else IN_WORKERS.get(spec, spec)
        if path != spec:
            check_installed(f"{WHAT} {spec!r}")

        def users_function() -> Callable[..., Any]:
            found = from_python or find_function(path, BUILTIN_FUNCTIONS, WHAT)
            return prepared(found, spec, entry.args)

        if from_python is not None or self._pool is None or ":" not in path:
            is_users = from_python is not None or spec not in BUILTIN_FUNCTIONS
            function = users_function() if is_users else builtin_function(spec, config, self.opening)
            # A column of the name of a built-in function's limit must not replace the limit.
            bound |= getattr(function, "keywords", {}).keys()
            submit: Submit = partial(call_in_process, function, is_users)
            parameters = parameters_of(function)
        else:
            submit = partial(call_in_workers, self._pool, path, config.timeout_s)
            most_timeouts = TIMEOUTS_PER_WORKER * self._pool.num_workers
            # From the worker: a module of a user's that is imported here could end or hang the run.
            parameters = self._decide(partial(_loaded, self._pool, path))
        accepts: frozenset[str] | None = None
        required: tuple[str, ...] = ()
        if parameters is not None:  # some callables written in C have no signature
            kinds = {parameter: kind for parameter, kind, _ in parameters}
            if "POSITIONAL_ONLY" in kinds.values():
                raise ValueError(f"{WHAT} {spec!r} takes positional-only arguments; it is called by keyword")
            given = (*REWARD_ARGUMENTS, TRAINER_STATE)
            required = tuple(p for p, _, needed in parameters if needed and p not in given)
            if "VAR_KEYWORD" not in kinds.values():
                accepts = frozenset(p for p, kind in kinds.items() if kind != "VAR_POSITIONAL")
        # Given only to functions that name them: a column of **kwargs would be pickled for nothing, and
        # whoever names `environments` gets the objects themselves, which no other process has.
        on_request = {TRAINER_STATE, ENVIRONMENTS} if self._episodes else {TRAINER_STATE}
        hidden = frozenset(on_request - {p for p, _, _ in parameters or ()})
        if self._episodes and ENVIRONMENTS not in hidden:
            submit, most_timeouts = partial(call_with_environments, users_function()), 1
            if self._is_accuracy:
                raise ValueError(
                    f"eval.accuracy {spec} gets the environments of episodes, which are kept for reward "
                    "functions alone; name it in reward.functions too, with weight 0 if it is to add nothing"
                )
        sources = self._sources.get(name)
        return Function(spec, name, submit, accepts, hidden, required, bound, sources, most_timeouts)

    def close(self) -> None:
        """Ends the worker processes and the judge's connections; the scorer must not be used afterwards."""
        if self.judge is not None:
            self.judge.close()
        if self._pool is not None and self._owns_pool:
            self._pool.close()

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

        Raises ValueError if it abstains on those of all prompts that it is to judge. MANY_ANSWERS different
        answers of a kind that can be judged are, and more until one is; others count as judged.
        """
        judge = self._builtin.get("correct")
        if judge is None:
            return []
        known: dict[str, str] = {}

        def why_not(row: TokenRow) -> str | None:
            """Why `correct` abstains on a row, "" if it does not, None if it is not to judge it."""
            source, answer = row.columns.get(DATA_SOURCE), row.columns.get("answer")
            of_source = judge.sources is None or (isinstance(source, str) and source in judge.sources)
            if "answer" not in row.columns or not of_source:
                return None
            key = repr(answer)
            if key not in known:
                # Each takes a process some milliseconds: of a large data set the first ones tell.
                if len(known) >= MANY_ANSWERS and "" in known.values() and accepted_answers(answer):
                    return ""
                known[key] = why_unjudged(answer) or ""
            return known[key]

        unjudged = source.tally(why_not)
        judged, _ = unjudged.pop("", (0, 0))
        if not unjudged:
            return []
        kinds = ", ".join(f"{kind}: {count} (row {row})" for kind, (count, row) in unjudged.items())
        if not judged:
            raise ValueError(
                f"{name}: `correct` judges by gold answers that are text, numbers, true or false, dates, or "
                f"lists of right answers; in the column `answer` it can judge by none, which are {kinds}; "
                "name another column in data.answer_column, convert this one, or leave `correct` out"
            )
        total = sum(count for count, _ in unjudged.values())
        return [
            f"{name}: `correct` cannot judge by {total} of {total + judged} values of the column `answer`, "
            f"and abstains on their completions: {kinds}"
        ]

    def check_format(self, prompts: Iterable[Prompt], said: Callable[[str], str]) -> list[str]:
        """A warning if `format` or `tag_count` can be 1 for no completion of one of `prompts`.

        Not of a `format` with a pattern, because no completion is known that it matches. `said` gives the
        text of a completion whose tokens are those of its argument.
        """
        names = [f"`{name}`" for name in self._in_tags]
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
        """Calls each user's function once on MADE_UP, as two completions of a prompt; warnings of failures.

        `prompts` has a prompt of each data source, and the first of them is the first training prompt.
        `completion_ids` are the tokens of MADE_UP. Raises ValueError if a function returns the wrong number
        of values or values that are no numbers. Nothing is called without a prompt. With `per_call: sample`
        there is one completion.
        """
        copies = 1 if self._per_call == "sample" else 2

        def tried() -> Iterator[str]:
            for function in self._functions:
                sources = prompts.keys() if function.sources is None else function.sources
                prompt = next((prompts[source] for source in prompts if source in sources), None)
                if prompt is None or function.spec in BUILTIN_FUNCTIONS:
                    continue
                if self._episodes and ENVIRONMENTS not in function.hidden:  # which cannot be made up
                    continue
                try:
                    samples = _made_up(prompt, list(completion_ids), self._episodes, copies)
                    problem = try_function(function, samples)
                except ValueError as error:
                    made_up = f"it was tried on {copies} made-up completions of a training prompt"
                    raise ValueError(f"{error} ({made_up})") from None
                if problem is not None:
                    texts = "; completions are texts here, not lists of messages as TRL may give"
                    yield (
                        f"reward function `{function.name}` fails on a made-up completion of a training "
                        f"prompt ({problem}): every sample on which it fails gets -1"
                        f"{texts if 'string indices must be integers' in problem else ''}"
                    )

        warnings: list[str] = self._decide(lambda: list(tried()))
        sources = self._sources.get(JUDGE)
        judged = next((each for name, each in prompts.items() if sources is None or name in sources), None)
        if self.judge is not None and judged is not None:
            about = {**judged.columns, **({"messages": []} if self._episodes else {})}
            if problem := self.judge.try_on(about, plain_prompt(judged.text), MADE_UP):
                warnings.append(f"the judge fails on a made-up completion of a training prompt: {problem}")
        return warnings

    def check_prompt(self, prompt: PromptText) -> None:
        """Raises ValueError if a reward model cannot score the completions of `prompt`."""
        for model in self._models.values():
            model.check_prompt(prompt)

    def score(self, rollouts: RolloutBatch) -> RewardedBatch:
        """The rollouts with raw rewards per function and their weighted sum.

        Each episode is scored once, by the text and the columns of its first row and the tokens of all its
        rows, which all have its rewards. Metrics count episodes.

        Greedy completions that the rollouts have as a baseline are scored too, and counted with them.

        Where a function abstains (returns None) its raw reward is NaN and left out of the sum, counted in
        `reward/<name>/abstained`; a reward model abstains on a sample that it cannot score
        (`RewardModel.score`). Where a function fails (`pool.Failure`) or returns a value that is not finite,
        the raw reward is ERROR_REWARD, counted in `reward/<name>/errors`. An episode that a fault of its
        environment or agent ended has ERROR_REWARD (NaN with `faults_abstain`) in all and by each function;
        none is called for it. Raises ValueError for a wrong number of values, values that are not numbers, a
        column that a function needs and the rollouts lack, a column named like an argument of every function
        (REWARD_ARGUMENTS), and where an agent was to give all rewards and gave none.
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
        # In one process: users' functions may draw at random or ask servers, and rewards that differ between
        # processes would be different gradients of one batch.
        called = self._decide(lambda: self._called(rollouts))
        if self.asks_for_environments:
            columns = dict(rollouts.columns)
            for kept in filter(None, columns.pop(ENVIRONMENTS, ())):
                kept.close()
            rollouts = replace(rollouts, columns=columns)
        scores = {name: FunctionScores(*fields) for name, fields in called.items()}
        scores |= {name: self._by_model(name, model, rollouts) for name, model in self._models.items()}
        if self.judge is not None:
            scores[JUDGE] = self.judge.score(rollouts, self._sources.get(JUDGE))
        rollouts = self._with_columns(rollouts, scores)
        of_row, first_rows = rollouts.episodes
        raw = np.array([scores[name].values for name in self.function_names], np.float32)
        raw = raw.reshape(len(self.function_names), len(first_rows))
        failed = np.zeros(raw.shape, bool)
        for row, name in zip(failed, self.function_names, strict=True):
            row[[*scores[name].failed]] = True
        faults = rollouts.ended_by_fault[first_rows]
        raw[:, faults] = self._fault_reward
        metrics = _described(raw, scores, self.function_names)
        rewards, taken = self._totals(raw, rollouts.finish_reason[first_rows] == "length")
        rewards[faults] = self._fault_reward
        metrics |= describe("reward", rewards, STATS)
        if self._totals.has_penalty:
            has_reward = ~np.isnan(rewards)
            metrics["reward/stop_penalty"] = Metric(float(taken[has_reward].sum()), int(has_reward.sum()))
        self._check_environment_rewards(rollouts, raw[:, ~faults])
        if self._models:
            seconds = sum(scores[name].seconds for name in self._models)
            metrics["time/reward_models_s"] = Metric(seconds, reduction="sum")
        baseline_rewards = None
        if rollouts.baseline is not None:
            greedy = self.score(rollouts.baseline)
            metrics = combine(metrics, {k: m for k, m in greedy.metrics.items() if m.reduction == "sum"})
            metrics |= describe("reward/greedy", greedy.rewards, ("mean",))
            drawn = dict(zip(rollouts.baseline.compared, greedy.rewards, strict=True))
            # By group and role, and not by place: the greedy rollouts have another number of rows.
            # A role that the greedy episode has not played has nothing to be compared with.
            baseline_rewards = np.array([drawn.get(each, np.nan) for each in rollouts.compared], np.float32)
        return RewardedBatch(
            rollouts,
            rewards[of_row],
            raw[:, of_row],
            self.function_names,
            metrics,
            baseline_rewards=baseline_rewards,
            environment_weight=self._environment_weight,
            function_weights=self._totals.weights.astype(np.float32),
            failed=failed[:, of_row],
        )

    def _check_environment_rewards(self, rollouts: RolloutBatch, raw: np.ndarray) -> None:
        """Warns once of rewards of the environment that nothing reads; `raw` are those of whole episodes.

        Raises ValueError where an agent was to give all rewards, and gave none so far.
        """
        if self._warns_of_unused and any(rollouts.columns["environment_reward"]):
            self._warns_of_unused = False
            logger.warning(
                "the environment gives rewards, and no function of reward.functions asks for the column "
                f"{' or '.join(_OF_ENVIRONMENT)}; unless one reads it from **columns, add environment: 1.0 "
                "for the rewards to count"
            )
        self._has_rewards |= bool(np.isfinite(raw).any())
        if self.function_names == (ENVIRONMENT,) and not self._has_rewards and raw.size:
            raise ValueError(
                "the agent returned no reward (None) for any episode, and `environment`, which reads it, is "
                "the only reward function; let it return a number, or name functions that judge in "
                "reward.functions"
            )

    def _by_model(self, name: str, model: RewardModel, rollouts: RolloutBatch) -> FunctionScores:
        """The scores of a reward model, which abstains on samples of other sources than its own."""
        scores = model.score(rollouts)
        if name not in self._sources:
            return scores
        samples = Samples.of(rollouts)
        values = np.full(len(samples), np.nan, np.float32)
        held = samples.of_sources(self._sources[name])
        values[held] = np.asarray(scores.values, np.float32)[held]
        return scores._replace(values=values)

    def _with_columns(self, rollouts: RolloutBatch, scores: Mapping[str, FunctionScores]) -> RolloutBatch:
        """The rollouts with the columns that functions logged, in this batch or before."""
        of_row, _ = rollouts.episodes
        logged = {f"{name}/{key}": of for name, each in scores.items() for key, of in each.columns.items()}
        # Columns stay once they are there, so that samples of all batches have the same fields; the
        # dictionary is replaced and not changed, because another thread may score too.
        names = self._logged = self._logged | dict.fromkeys(logged)
        nothing = [None] * len(rollouts)
        columns = {name: tuple(logged.get(name, nothing)[row] for row in of_row) for name in names}
        return replace(rollouts, columns={**rollouts.columns, **columns}) if columns else rollouts

    def _called(self, rollouts: RolloutBatch) -> dict[str, tuple[Any, ...]]:
        """The fields of the `FunctionScores` of each reward function by its name, JSON-serialisable."""
        samples, called = Samples.of(rollouts), {}
        for function in self._functions:
            began = time.perf_counter()
            values, errors, failed, log = score_function(function, samples, self._per_call)
            counts = {"errors": errors.total()} | {f"errors/{kind}": n for kind, n in errors.items()}
            if log.unlogged:
                counts["unlogged"] = len(log.unlogged)
                if function.name not in self._told:
                    self._told.add(function.name)
                    logger.warning(
                        "reward function `%s` logs what is no finite number, has a name that no metric can "
                        "have, or is not one value per sample: %s; reward/%s/unlogged counts them",
                        *(function.name, log.unlogged[0], function.name),
                    )
            seconds = time.perf_counter() - began
            called[function.name] = values.tolist(), counts, seconds, log.metrics, log.columns, failed
        return called


def _described(
    raw: np.ndarray, scores: Mapping[str, FunctionScores], names: Sequence[str]
) -> dict[str, Metric]:
    """The metrics `reward/<name>/…` of each function: of its values, its counts, and what it logged."""
    metrics: dict[str, Metric] = {}
    for row, name in zip(raw, names, strict=True):
        abstained, seconds = int(np.isnan(row).sum()), scores[name].seconds
        sums = {**scores[name].counts, "abstained": abstained, "seconds": seconds}
        metrics |= describe(f"reward/{name}", row, STATS)
        metrics |= {f"reward/{name}/{what}": Metric(n, reduction="sum") for what, n in sums.items()}
        logged = scores[name].metrics.items()
        metrics |= {f"reward/{name}/{key}": Metric(total[0], total[1]) for key, total in logged}
    return metrics


def _made_up(prompt: Prompt, completion_ids: list[int], episodes: bool, copies: int) -> Samples:
    lent = Lender()
    text = lent(MESSAGES, plain_prompt(prompt.text))
    columns = {name: lent(name, value) for name, value in prompt.columns.items()}
    if episodes:
        answer = {"role": "assistant", "content": MADE_UP}
        columns |= {"messages": [*text, answer], "environment_reward": 0.0, "turn_rewards": [0.0]}
    arguments = {
        **columns,
        "prompts": text,
        "completions": MADE_UP,
        "completion_ids": completion_ids,
        "finish_reasons": "stop",
        TRAINER_STATE: 0,
    }
    return Samples({name: [value] * copies for name, value in arguments.items()}, [prompt.group_id] * copies)


def _check_functions(config: RewardConfig, functions: Mapping[str, Any]) -> None:
    """Raises ValueError unless functions given from Python are callable and entries of the configuration."""
    if not isinstance(functions, Mapping):
        raise ValueError(
            "reward_functions must be a mapping from names in reward.functions to functions; got "
            f"{type(functions).__name__}; give {{'mine': mine}}, and its weight as reward.functions.mine=1.0"
        )
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(
                f"a reward function must be callable; {name!r} in reward_functions is a "
                f"{type(function).__name__}; give a function"
            )
        if name not in config.functions or name in config.models:
            raise ValueError(
                "a reward function that is given from Python must be an entry of reward.functions, which has "
                f"its weight; the entries are {listed(config.functions)}, and reward_functions has {name!r}; "
                f"add it, as load_config(overrides=['reward.functions.{name}=1.0'])"
            )


def _pool(
    config: RewardConfig, names: Mapping[str, str], functions: Mapping[str, Callable[..., Any]]
) -> Pool | None:
    """Workers for users' functions; None if there are none, or if `reward.workers` is 0."""
    num_workers = default_workers() if config.workers is None else config.workers
    computed = config.models.keys() | BUILTIN_FUNCTIONS.keys() | {JUDGE}
    users = config.functions.keys() - computed - functions.keys()
    if not (users and num_workers):
        return None
    called = {IN_WORKERS.get(spec, spec): name for spec, name in names.items()}
    return Pool(
        WHAT,
        num_workers,
        convert="quatrain.reward.forms:plain_rewards",
        prepare="quatrain.reward.forms:prepared",
        args={IN_WORKERS.get(spec, spec): entry.args for spec, entry in config.entries.items()},
        memory_mb=config.memory_mb,
        on_output=lambda path, text: log_output(logger, f"reward function `{called.get(path, path)}`", text),
    )


def short_names(config: RewardConfig) -> dict[str, str]:
    """Spec -> name in metrics: the function's name, or the whole spec if two functions have the same name.

    The name of a reward model is the last part of its path.
    """
    short = {spec: spec.rpartition(":")[2] for spec in config.functions}
    short |= {spec: Path(path).name for spec, path in config.models.items()}
    shared = Counter(short.values())
    return {spec: name if shared[name] == 1 else spec for spec, name in short.items()}


def _loaded(pool: Pool, spec: str) -> list[Any] | None:
    """The parameters of a user's function, which a worker imports."""
    check_importable(spec, "a reward function", "set reward.workers to 0")
    reply = pool.load(spec)
    if isinstance(reply, Failure):
        raise ValueError(f"{WHAT} {spec!r} cannot be imported ({reply.kind}): {reply.detail}")
    if "refused" in reply:
        raise ValueError(reply["refused"])
    return reply["parameters"]
