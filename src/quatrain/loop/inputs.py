"""What a run is made from: its configuration, what it saved before, its reward functions and its data.

Data flow: `Resolved`, and what a program gives beside it -> `Inputs.of` -> `build_run`, in which prompts are
read and tried with the tokenizer. What a user may have mistaken is found before a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

from quatrain.cluster.processes import decided_by_main, num_processes
from quatrain.cluster.stop import Stop
from quatrain.config.data_sets import TrainingSpec, data_set_list, shown_data_sets
from quatrain.config.errors import listed
from quatrain.config.load import Resolved
from quatrain.config.schema import Config
from quatrain.data.prompts import PromptSource, check_columns
from quatrain.data.rows import NO_ROWS, GivenRows, read_rows
from quatrain.data.token_table import TokenRow
from quatrain.episodes.hubs import hub_rows
from quatrain.loop.evaluate import Evaluator
from quatrain.loop.given import Course, check_columns_of_given
from quatrain.loop.policy import LoadedPolicy
from quatrain.report.start_up import stage
from quatrain.reward.scorer import MADE_UP, RewardScorer
from quatrain.run import resume
from quatrain.run.checkpoint import Checkpointer, SaveFailed
from quatrain.run.resume import check_saved_state
from quatrain.run.run_dir import RunDir
from quatrain.types.answer_text import AnswerTokens
from quatrain.types.batches import DATA_SOURCE
from quatrain.update.teacher import Teacher, TeacherLoader, WordTeacher, has_teacher

logger = logging.getLogger(__name__)
RewardFunctions = Mapping[str, Callable[..., Any]]
"""Python functions for entries of `reward.functions`, by their names there."""
NO_FUNCTIONS: RewardFunctions = MappingProxyType({})


class Inputs:
    """What a run in `folder` is made from, checked before a model is loaded.

    Configuration and checkpoint agree, reward functions can be called, data have their columns: raises
    ValueError where they do not. `parts` ends what is made from it, in reverse order. Without `weights` the
    run is checked and cannot begin: no weights are read, nor reward models.
    """

    def __init__(
        self,
        resolved: Resolved,
        folder: RunDir,
        stop: Stop,
        parts: ExitStack,
        functions: RewardFunctions = NO_FUNCTIONS,
        rows: GivenRows = NO_ROWS,
        *,
        weights: bool = True,
    ):
        self.resolved, self.folder, self.stop, self.parts = resolved, folder, stop, parts
        self._functions, self.rows, self.weights = functions, rows, weights
        config = resolved.config
        _check_given(config, rows)
        self.store = Checkpointer(folder.checkpoints, config.checkpoint.keep)
        parts.callback(_close, self.store)
        self.saved = self.store.read_host() if folder.resumed else None
        """What the newest checkpoint says of the run; None if it does not go on from one."""
        if self.saved is not None:
            check_saved_state(self.saved, folder.checkpoints)
            resume.check_config(config, self.saved, folder)
        _refuse_staleness_in_several_processes(config)
        self.imported: RewardScorer | None = None
        """The reward functions, in whose worker processes they are called; None where nothing is scored."""
        if config.generates:
            stage("reward functions")
            self.imported = RewardScorer(  # before there is a tokenizer, or a reward model
                config.reward,
                models=None,
                functions=functions,
                decide=decided_by_main,
                episodes=config.rollout.has_episodes,
            )
            parts.callback(self.imported.close)
        # Several processes read a part of the files each, and say what is wrong together, with the tokenizer.
        if num_processes() == 1:
            self.rows = self._read_data()

    @property
    def config(self) -> Config:
        """The configuration, with derived values."""
        return self.resolved.config

    @property
    def starts_warm(self) -> bool:
        """Whether training begins with a warm start."""
        config = self.config
        return bool(not config.run.on_given_data and config.sft.steps and not self.folder.resumed)

    def _read_data(self) -> GivenRows:
        """The rows of each data set of the run; prompts must have the columns that rewards need."""
        config, rows = self.config, self.rows
        prompts: list[TrainingSpec] = [] if self.imported is None else [*config.data.eval_sets.values()]
        given: list[TrainingSpec] = [config.sft.data] if self.starts_warm else []
        if config.run.on_given_data:
            given += [spec for spec in (config.given.data, config.given.eval) if spec is not None]
        else:
            prompts.insert(0, config.data.train)
        for spec in (*prompts, *given):
            if any(each not in rows for each in data_set_list(spec)):
                stage(f"data: {shown_data_sets(spec)}")
            rows = hub_rows(config, spec, rows)
            rows = {**rows, **{each: read_rows(each) for each in data_set_list(spec) if each not in rows}}
        for spec in prompts:
            assert self.imported is not None
            check_columns(spec, config.data, self.imported.required_by, rows=rows)
        for spec in given:
            check_columns_of_given(config, spec, rows)
        return rows

    def scorer(self, policy: LoadedPolicy) -> RewardScorer:
        """The reward stage, of the functions that were imported."""
        stage("prompts and reward models" if self.weights and self.config.reward.models else "prompts")
        assert self.imported is not None
        given: dict[str, Any] = {"imported": self.imported, "weights": self.weights}
        scorer = RewardScorer.of(self.config, policy, self._functions, folder=self.folder.path, **given)
        self.parts.callback(scorer.close)
        return scorer

    def prompts(self, policy: LoadedPolicy, scorer: RewardScorer, evaluator: Evaluator) -> PromptSource:
        """The training prompts, with the columns that reward functions, chat template and teacher need."""
        config, reads = self.config, evaluator.reads
        columns = () if reads is None else reads.columns
        needed = dict.fromkeys(columns, "the teacher's prompt (distill.prompt)")
        if isinstance(config.distill.teacher, dict):
            needed[DATA_SOURCE] = "distill.teacher"
        return policy.prompts(config, config.data.train, scorer, self.rows, needed, by_pass_rate=True)

    def demonstrations(self, policy: LoadedPolicy) -> Course | None:
        """The supervised steps of the warm start; None if there is none."""
        return Course.warm_start(self.config, policy, self.rows) if self.starts_warm else None

    def steps(self, num_rows: int) -> int:
        """The training steps of the run on so many rows; raises ValueError for keys that name others."""
        config = self.config
        steps = config.steps_of(num_rows)
        if self.saved is not None:
            resume.check_steps(config, steps, self.saved["train_step"], self.folder.path)
        if beyond := [step for step in config.run.profile_steps if step > steps]:
            raise ValueError(
                f"run.profile_steps must be steps of the run, which has {steps}; got {beyond[0]}; name other "
                f"steps, or raise {config.key_of('steps')}"
            )
        return steps

    def teacher(
        self, policy: LoadedPolicy, prompts: PromptSource, evaluator: Evaluator
    ) -> Teacher | WordTeacher | None:
        """The teacher, if the run has one; its own prompts, if it has some, are all made once.

        Raises ValueError, which names data set and row, for a prompt that cannot be made.
        """
        config, reads, longest = self.config, evaluator.reads, 0
        stage(
            "rollout, advantage and update"
            if config.distill.teacher is None
            else "teacher, rollout and update"
        )
        if reads is not None:
            taught = [each for each in evaluator.sets if evaluator.taught(each)]
            sets = [(config.data.train, prompts)]
            sets += [(config.data.eval_sets[each.name], each.source) for each in taught]
            has = partial(has_teacher, config.distill)
            longest = max(reads.longest(shown_data_sets(spec), source, has) for spec, source in sets)
        teacher = TeacherLoader(config, policy, longest).load(reads, weights=self.weights)
        if isinstance(teacher, Teacher) and isinstance(config.distill.teacher, dict):
            teacher.check_sources(prompts.values_of(DATA_SOURCE))
        return teacher

    def warnings(
        self,
        policy: LoadedPolicy,
        scorer: RewardScorer,
        prompts: PromptSource | None,
        evaluator: Evaluator,
        given: Course | None,
    ) -> list[str]:
        """Of data that are probably not what is meant, and of functions that fail on a made-up completion.

        `prompts`: those of training, if it has some. Raises ValueError if no answer can be judged.
        """
        data, warnings = self.config.data, list[str]()
        if prompts is not None:
            name = shown_data_sets(data.train)
            warnings += [f"{name}: {warning}" for warning in prompts.warnings]
            warnings += scorer.check_answers(name, prompts)
            for each in evaluator.sets:
                of_set = shown_data_sets(data.eval_sets[each.name])
                warnings += _shared_questions(of_set, prompts, each.source)
            warnings = [each for each in warnings if each not in evaluator.warnings]  # of the same data
        sources = [*([] if prompts is None else [prompts]), *(each.source for each in evaluator.sets)]
        warnings += [*evaluator.warnings, *_try_rewards(policy, scorer, sources)]
        return [*warnings, *([] if given is None else given.warnings)]


def _check_given(config: Config, rows: GivenRows) -> None:
    """Raises ValueError for rows given from Python that no key of the configuration names."""
    task, data = config.run.task, config.data
    keys = ["data.train", "data.eval", "sft.data"]
    named = [*data_set_list(data.train), *chain(*map(data_set_list, data.eval_sets.values()))]
    named += data_set_list(config.sft.data) if config.sft.data else ()
    if config.run.on_given_data:
        keys = [f"{task}.data", f"{task}.eval", "data.eval"]
        named += [
            name for spec in (config.given.data, config.given.eval) if spec for name in data_set_list(spec)
        ]
    names = f"{', '.join(keys[:-1])} or {keys[-1]}"
    if not isinstance(rows, Mapping):
        raise ValueError(
            f"rows must be a mapping from names in {names} to lists of dicts; got "
            f"{type(rows).__name__}; give rows={{'people': [{{'prompt': …}}]}} and {keys[0]}=people"
        )
    for name in rows:
        if name not in named:
            raise ValueError(
                f"rows that are given from Python must be named in {names}, which "
                f"have {listed(dict.fromkeys(named))}; rows has {name!r}; name it, as load_config(overrides="
                f"['{keys[0]}={name}'])"
            )


def _refuse_staleness_in_several_processes(config: Config) -> None:
    staleness = config.rollout.max_staleness
    if staleness and num_processes() > 1:
        raise ValueError(
            "rollout.max_staleness must be 0 in a run of several processes, also for a rollout with "
            "devices of its own: its thread and training would begin their collectives in another order "
            f"in each process; got {staleness} and {num_processes()} processes; set 0, or run one process "
            "with all devices"
        )


def _close(store: Checkpointer) -> None:
    try:
        store.close()
    except SaveFailed as error:
        logger.error("%s", error)  # `export` raises it in a run that comes to its end


def _shared_questions(name: str, train: PromptSource, evaluation: PromptSource) -> list[str]:
    """A warning if questions of reasoning-gym are in both; raises ValueError for half of the evaluation's."""

    def question(row: TokenRow) -> str | None:
        named = row.columns.get("rg")
        return named.get("digest") if isinstance(named, Mapping) else None

    trained, asked = train.tally(question), evaluation.tally(question)
    shared = sum(count for digest, (count, _) in asked.items() if digest in trained)
    if shared and 2 * shared >= len(evaluation):
        raise ValueError(
            f"{name}: evaluation must ask other questions than training; {shared} of its {len(evaluation)} "
            "are in data.train; entry i of seed s is made with the seed s + i, so take a seed from the "
            "training's seed + size on, or a configuration with more different questions"
        )
    return [f"{name}: {shared} of {len(evaluation)} are questions of data.train too"] if shared else []


def _try_rewards(policy: LoadedPolicy, scorer: RewardScorer, sources: Sequence[PromptSource]) -> list[str]:
    """Calls users' reward functions once, and checks the data sources that they name; their warnings."""
    if scorer.routes:
        scorer.check_sources([value for source in sources for value in source.values_of(DATA_SOURCE)])
    stage("a first call of each reward function")
    tokenizer, first = policy.tokenizer, sources[0].first_by(DATA_SOURCE)
    answers = AnswerTokens(tokenizer)

    def said(text: str) -> str:
        return answers.text(tokenizer.encode(text, add_special_tokens=False))

    ids = tokenizer.encode(MADE_UP, add_special_tokens=False)
    return [*scorer.check_format(first.values(), said), *scorer.try_on(first, ids)]
