"""What a run is made from: its configuration, what it saved before, its reward functions and its data.

Data flow: `Resolved`, and what a program gives beside it -> `Inputs.of` -> `build_run`, in which prompts are
read and tried with the tokenizer. What a user may have mistaken is found before a model is loaded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

from quatrain.cluster.processes import decided_by_main, num_processes
from quatrain.cluster.stop import Stop
from quatrain.config.data_sets import data_set_list, shown_data_sets
from quatrain.config.errors import listed
from quatrain.config.load import Resolved
from quatrain.config.schema import Config
from quatrain.data.examples import ExampleSource, check_example_columns
from quatrain.data.prompts import PromptSource, check_columns
from quatrain.data.rows import NO_ROWS, GivenRows, read_rows
from quatrain.data.token_table import TokenRow
from quatrain.episodes.hubs import hub_rows
from quatrain.loop.evaluate import Evaluator
from quatrain.loop.policy import LoadedPolicy
from quatrain.loop.sft import warm_start_data
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
    run is checked and cannot begin: no weights are read, nor reward models. Without `teaches` it has no
    training steps, and no teacher is made.
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
        teaches: bool = True,
    ):
        self.resolved, self.folder, self.stop, self.parts = resolved, folder, stop, parts
        self._functions, self.rows, self.weights, self.teaches = functions, rows, weights, teaches
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
        stage("reward functions")
        self.imported = RewardScorer(  # before there is a tokenizer, or a reward model
            config.reward,
            models=None,
            functions=functions,
            decide=decided_by_main,
            episodes=config.rollout.has_episodes,
        )
        """The reward functions, in whose worker processes they are called."""
        parts.callback(self.imported.close)
        # Several processes read a part of the files each, and say what is wrong together, with the tokenizer.
        if num_processes() == 1:
            self.rows = self._read_data()

    @property
    def config(self) -> Config:
        """The configuration, with derived values."""
        return self.resolved.config

    @property
    def _starts_warm(self) -> bool:
        return bool(self.config.sft.steps and not self.folder.resumed)

    def _read_data(self) -> GivenRows:
        """The rows of each data set of the run, which must have the columns that rewards need."""
        data, rows = self.config.data, self.rows
        sets = [(spec, False) for spec in (data.train, *data.eval_sets.values())]
        sets += [(self.config.sft.data, True)] if self._starts_warm else []
        for spec, shows in sets:
            if any(each not in rows for each in data_set_list(spec)):
                stage(f"data: {shown_data_sets(spec)}")
            rows = hub_rows(self.config, spec, rows)
            rows = {**rows, **{each: read_rows(each) for each in data_set_list(spec) if each not in rows}}
            if shows:
                check_example_columns(spec, data, "assistant", rows)
            else:
                check_columns(spec, data, self.imported.required_by, rows=rows)
        return rows

    def scorer(self, policy: LoadedPolicy) -> RewardScorer:
        """The reward stage, of the functions that were imported."""
        stage("prompts and reward models" if self.weights and self.config.reward.models else "prompts")
        return RewardScorer.of(
            self.config, policy, self._functions, imported=self.imported, weights=self.weights
        )

    def prompts(self, policy: LoadedPolicy, scorer: RewardScorer, evaluator: Evaluator) -> PromptSource:
        """The training prompts, with the columns that reward functions, chat template and teacher need."""
        config, reads = self.config, evaluator.reads
        columns = () if reads is None else reads.columns
        needed = dict.fromkeys(columns, "the teacher's prompt (distill.prompt)")
        if isinstance(config.distill.teacher, dict):
            needed[DATA_SOURCE] = "distill.teacher"
        return policy.prompts(config, config.data.train, scorer, self.rows, needed, by_pass_rate=True)

    def examples(self, policy: LoadedPolicy) -> ExampleSource | None:
        """Those of the warm start; None if there is none."""
        return warm_start_data(self.config, policy, self.rows) if self._starts_warm else None

    def steps(self, prompts: PromptSource) -> int:
        """The training steps of the run; raises ValueError for keys that name others."""
        run = self.config.run
        per_epoch = math.ceil(len(prompts) / self.config.data.batch_size)
        steps = run.steps or max(1, math.ceil(run.epochs * per_epoch))
        if self.saved is not None:
            resume.check_steps(steps, self.saved["train_step"], self.folder.path)
        if beyond := [step for step in run.profile_steps if step > steps]:
            raise ValueError(
                f"run.profile_steps must be steps of the run, which has {steps}; got {beyond[0]}; name other "
                "steps, or raise run.steps"
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
        if not self.teaches:
            return None
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
        prompts: PromptSource,
        evaluator: Evaluator,
        examples: ExampleSource | None,
    ) -> list[str]:
        """Of data that are probably not what is meant, and of functions that fail on a made-up completion.

        Raises ValueError if no answer can be judged.
        """
        data, sft = self.config.data, shown_data_sets(self.config.sft.data)
        name = shown_data_sets(data.train)
        warnings = [f"{name}: {warning}" for warning in prompts.warnings]
        warnings += scorer.check_answers(name, prompts)
        for each in evaluator.sets:
            warnings += _shared_questions(shown_data_sets(data.eval_sets[each.name]), prompts, each.source)
        warnings = [warning for warning in warnings if warning not in evaluator.warnings]  # of the same data
        warnings += [*evaluator.warnings, *_try_rewards(policy, scorer, prompts, evaluator)]
        shown = [] if examples is None else examples.warnings
        return [*warnings, *(f"examples of {sft}: {warning}" for warning in shown)]


def _check_given(config: Config, rows: GivenRows) -> None:
    """Raises ValueError for rows given from Python that no key of the configuration names."""
    if not isinstance(rows, Mapping):
        raise ValueError(
            "rows must be a mapping from names in data.train, data.eval or sft.data to lists of dicts; got "
            f"{type(rows).__name__}; give rows={{'people': [{{'prompt': …}}]}} and data.train=people"
        )
    data = config.data
    named = [*data_set_list(data.train), *chain(*map(data_set_list, data.eval_sets.values()))]
    named += data_set_list(config.sft.data) if config.sft.data else ()
    for name in rows:
        if name not in named:
            raise ValueError(
                "rows that are given from Python must be named in data.train, data.eval or sft.data, which "
                f"have {listed(dict.fromkeys(named))}; rows has {name!r}; name it, as load_config(overrides="
                f"['data.train={name}'])"
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


def _try_rewards(
    policy: LoadedPolicy, scorer: RewardScorer, prompts: PromptSource, evaluator: Evaluator
) -> list[str]:
    """Calls users' reward functions once, and checks the data sources that they name; their warnings."""
    if scorer.routes:
        sources = [prompts, *(data_set.source for data_set in evaluator.sets)]
        scorer.check_sources([value for source in sources for value in source.values_of(DATA_SOURCE)])
    stage("a first call of each reward function")
    tokenizer, first = policy.tokenizer, prompts.first_by(DATA_SOURCE)
    answers = AnswerTokens(tokenizer)

    def said(text: str) -> str:
        return answers.text(tokenizer.encode(text, add_special_tokens=False))

    ids = tokenizer.encode(MADE_UP, add_special_tokens=False)
    return [*scorer.check_format(first.values(), said), *scorer.try_on(first, ids)]
