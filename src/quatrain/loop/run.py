"""A run: its parts, built from the configuration in one place, and what it does before and after training.

Data flow: `Resolved` -> `open_run` -> `Run` -> the loop of `train.py`. Each part has a file of its own:
`recorder.py`, `evaluations.py`, `checkpoints.py`, `reference.py`, `asynchronous.py`; what must agree when a
run is resumed is in `run/resume.py`.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from quatrain.agents.hubs import hub_rows
from quatrain.cluster.processes import agreement, decided_by_main, is_main_process, num_processes
from quatrain.cluster.stop import Stop, Stopped
from quatrain.config.dump import dump_yaml, plain
from quatrain.config.errors import listed
from quatrain.config.load import Resolved
from quatrain.config.schema import Config
from quatrain.config.secrets import redact
from quatrain.config.values import data_set_list, shown_data_sets
from quatrain.data.prompts import DemonstrationSource, PromptSource, check_columns, load_prompts
from quatrain.data.rows import NO_ROWS, GivenRows, read_rows
from quatrain.data.table import TokenRow
from quatrain.loop.asynchronous import AsyncRollouts
from quatrain.loop.build import (
    LoadedPolicy,
    build_engine,
    build_scorer,
    build_teachers,
    import_rewards,
    load_policy,
    teacher_prompts,
    without_reward_models,
)
from quatrain.loop.checkpoints import Checkpoints
from quatrain.loop.evaluate import Evaluator, results
from quatrain.loop.evaluations import Evaluations, best_of
from quatrain.loop.export import ADAPTER, export_policy
from quatrain.loop.hub import make_repository, push
from quatrain.loop.prompts import PromptSampler
from quatrain.loop.recorder import Recorder, peak_memory
from quatrain.loop.reference import Reference
from quatrain.loop.sft import warm_start, warm_start_data
from quatrain.loop.stages import Stages, build_advantage, build_learner, keeping_environments
from quatrain.loop.stop_when import StopWhen
from quatrain.models.lora import without_adapters
from quatrain.models.params import abstract_params
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.plan.batches import overview
from quatrain.plan.batches import plan as batch_plan
from quatrain.report.hints import Hints, hints_in
from quatrain.report.progress import waiting
from quatrain.report.start_up import stage, starting
from quatrain.report.writer import Report, own_messages
from quatrain.reward.scorer import MADE_UP, RewardScorer
from quatrain.rollout.fleet import Fleet
from quatrain.run import resume
from quatrain.run.checkpoint import Checkpointer, SaveFailed, form
from quatrain.run.description import describe, describe_end
from quatrain.run.run_dir import RunDir, checkpoint_steps
from quatrain.run.saved_state import check_saved_state
from quatrain.types.answer_text import AnswerTokens
from quatrain.types.batches import DATA_SOURCE
from quatrain.types.metrics import Metric, Metrics
from quatrain.update.critic import critic_params
from quatrain.update.learner import TrainState
from quatrain.update.teacher import has_teacher
from quatrain.update.teacher_prompts import TeacherPrompts

logger = logging.getLogger(__name__)
RewardFunctions = Mapping[str, Callable[..., Any]]
"""Python functions for entries of `reward.functions`, by their names there."""
_loading = threading.Lock()
"""One run of a process loads at a time: transformers' lazy imports fail in two threads at once."""
NO_FUNCTIONS: RewardFunctions = MappingProxyType({})
NOT_BEGUN = "the run had not begun; give the same command again"
PROBES = 4
"""Prompts for each inference server on which it is compared with the trainer before training begins."""
SERVER_TOLERANCE = 4
"""How many times `rollout.logprob_diff_warning` a server may differ from the trainer then."""
NEXT_CONFIG = Path("configs", "gsm8k_smollm2_cpu.yaml")


@dataclass(frozen=True)
class Summary:
    """Result of a run: its folder, its steps, and the metrics of the evaluations before and after."""

    run: Path
    steps: int
    before: Mapping[str, float]
    after: Mapping[str, float]


@contextmanager
def open_run(
    resolved: Resolved,
    resume: str | None,
    reward_functions: RewardFunctions = NO_FUNCTIONS,
    rows: GivenRows = NO_ROWS,
    *,
    teaches: bool = True,
) -> Iterator[Run]:
    """Creates the run's folder, the `Run` and its report; closes them at the end.

    For invalid input it raises an error before logging starts, deletes a new folder and does not change the
    folder of a resumed run. A signal that stops the run raises `Stopped`, with the command to go on.
    """
    config = resolved.config
    with ExitStack() as outer:
        stop = outer.enter_context(Stop(agreement()))
        named = resolved.chose("run.name")
        folder = RunDir.create(config.run.dir, config.run.name, resume=resume, named=named)
        outer.enter_context(closing(folder))
        outer.enter_context(own_messages())
        resolved = _in_its_place(resolved, folder)
        parts = outer.enter_context(ExitStack())
        stop.advice, stop.conclude = lambda: NOT_BEGUN, partial(_give_up, folder)
        try:
            if not (folder.resumed or folder.restarted):
                folder.write_config(dump_yaml(resolved))
            with stop.interruptible(), starting(), waiting(), _loading:
                run = build_run(resolved, folder, stop, parts, reward_functions, rows, teaches=teaches)
        except BaseException as error:
            _give_up(folder, error)
            raise
        report = run.recorder.report = outer.enter_context(closing(_report(run)))
        stop.save, stop.conclude = run.save, run.conclude_beside
        stop.advice = lambda: redact(run.how_to_go_on(), os.environ) if is_main_process() else ""
        for warning in run.warnings:
            logger.warning("%s", warning)
        try:
            with parts.pop_all():  # ended before the report is
                changed = folder.changed_keys(dump_yaml(run.resolved))
                describe(folder, run.config, reward_functions, changed)
                yield run
        except BaseException as error:
            if isinstance(error, Stopped):
                error.advice = run.how_to_go_on()
            report.failed(error)
            raise


def _give_up(folder: RunDir, error: BaseException) -> None:
    """Deletes a new folder of a run that has not begun, because of `error`."""
    if isinstance(error, Stopped):
        error.advice = NOT_BEGUN
    folder.discard()


def _in_its_place(resolved: Resolved, folder: RunDir) -> Resolved:
    """A resumed run keeps its name and its place, whatever the given configuration sets."""
    if not folder.resumed:
        return resolved
    home = folder.path.resolve()
    place: dict[str, Any] = {"name": home.name}
    if Path(resolved.config.run.dir).resolve() != home.parent:
        place["dir"] = str(home.parent)
    run = resolved.config.run.model_copy(update=place)
    return replace(resolved, config=resolved.config.model_copy(update={"run": run}))


def _report(run: Run) -> Report:
    folder, tokenizer = run.folder, run.loaded.tokenizer
    return Report(
        folder,
        run.config.logging,
        redact=lambda text: redact(text, os.environ),
        run_config=plain(run.resolved),
        token_text=lambda token: tokenizer.decode([token]),
        hints=Hints(run.config, run.steps, hints_in(folder.hints) if folder.resumed else ()),
    )


@dataclass
class Run:
    """The parts of one run of `steps` training steps; `build_run` makes them."""

    resolved: Resolved
    folder: RunDir
    stop: Stop
    loaded: LoadedPolicy
    prompts: PromptSource
    demonstrations: DemonstrationSource | None
    evaluator: Evaluator
    stages: Stages
    batches: AsyncRollouts
    recorder: Recorder
    reference: Reference
    evaluations: Evaluations
    checkpoints: Checkpoints
    stop_when: StopWhen
    steps: int
    warnings: list[str]
    """Of data that are probably not what is meant, and of rewards that fail on a made-up completion."""
    resumable: bool = True
    """Whether `quatrain train` goes on with the run after it was stopped."""
    state: TrainState | None = None
    """After the last finished step, while the run trains."""

    @property
    def config(self) -> Config:
        """The configuration, with derived values."""
        return self.resolved.config

    @property
    def step_size(self) -> str:
        """Description of the number of prompts and samples in a training step."""
        return f"{self.config.data.batch_size} prompts x {self.config.rollout.n} samples"

    def announce(self, plan: str, *, samples: bool = True) -> None:
        """Log a summary of the run, its batch plan, and the numbers of skipped and truncated prompts.

        A run that never `samples` training batches has no batch plan.
        """
        event = self.recorder.report.event
        event(f"run {self.folder.name}: {plan}")
        if samples:
            batches = batch_plan(self.config, devices=jax.device_count(), processes=num_processes())
            for line in overview(batches):
                event(line)
            self.folder.write_plan(batches.to_dict())
        data, sft = self.config.data, self.config.sft
        train = shown_data_sets(data.train)
        for spec, source in (
            (train, self.prompts),
            *((shown_data_sets(data.eval_sets[each.name]), each.source) for each in self.evaluator.sets),
            (f"demonstrations of {shown_data_sets(sft.data)}", self.demonstrations),
        ):
            if source is not None and source.skipped + source.truncated:
                event(
                    f"{spec}: {source.skipped} prompts skipped, {source.truncated} truncated, longer than "
                    f"data.max_prompt_length={data.max_prompt_length} tokens"
                )
        if self.prompts.filtered:
            event(
                f"{train}: {self.prompts.filtered} prompts left out by their pass rates, "
                f"{len(self.prompts)} kept"
            )

    def begin(self) -> TrainState:
        """The initial training state: after the warm start, or from a checkpoint."""
        if self.folder.restarted:
            self.folder.start_over()
            self.folder.write_config(dump_yaml(self.resolved))
        params = self.loaded.params if self.folder.resumed else self.warm_start()
        self.loaded = replace(self.loaded, params=None)
        show = self.recorder.progress.stage
        show("optimizer state")
        state = self.stages.update.init(params, self._critic_params(params))
        del params  # they may wait in the host's memory from here on
        show("reference")
        self.reference.begin(state.params, resumed=self.folder.resumed)
        if self.folder.resumed:
            show("reading the checkpoint")
            state = self.checkpoints.restore(state)
            self.folder.write_config(dump_yaml(self.resolved))
        if self.config.rollout.servers:
            self._compare_servers(state)
        if not self.folder.resumed:
            self.evaluations.first(state.params)
        return state

    def _compare_servers(self, state: TrainState) -> None:
        """Raises ValueError if a server and the trainer give the same tokens other log-probabilities."""
        limit = self.config.rollout.logprob_diff_warning
        if limit is None:
            self.recorder.report.event(
                "log-probabilities of servers and trainer are not compared, because "
                "rollout.logprob_diff_warning is null"
            )
            return
        engine, servers = self.stages.rollout, self.config.rollout.servers
        fleet = getattr(engine, "fleet", engine)  # that of agents, or the sampler itself
        assert isinstance(fleet, Fleet), "servers are workers of a fleet"
        prompts, sampling = self.prompts.head(PROBES), replace(engine.sampling, n=1)
        fleet.sync_weights(state.params, state.step)
        tickets = [fleet.submit(prompts, sampling=sampling, worker=each) for each in range(len(servers))]
        for server, ticket in zip(servers, tickets, strict=True):
            gap = self.stages.update.sampler_mismatch(state, fleet.wait(ticket))
            if not gap <= SERVER_TOLERANCE * limit:
                raise ValueError(
                    "a server (rollout.servers) and the trainer must agree in log-probabilities of sampled "
                    f"tokens; {server} differs by {gap:.3g} nats on average on the first {len(prompts)} "
                    f"prompts, more than {SERVER_TOLERANCE} times rollout.logprob_diff_warning ({limit:g}). "
                    "See that it computes in the trainer's precision (vLLM: --dtype float32 or model.dtype: "
                    "bfloat16), returns processed log-probabilities (vLLM: --logprobs-mode "
                    "processed_logprobs) and was started from this model without quantization"
                )

    def _critic_params(self, params: Any) -> Any:
        """The critic's parameters at the start: as loaded, or copies of the policy's `params`; else None."""
        arch, loaded = self.loaded.critic_arch, self.loaded.critic_params
        if arch is None:
            return None
        self.loaded = replace(self.loaded, critic_params=None)
        return critic_params(params, arch, self.loaded.meshes.critic) if loaded is None else loaded

    def warm_start(self, *, log_every_step: bool = False) -> Any:
        """The parameters after the supervised steps, or the loaded parameters if there is no warm start."""
        if self.demonstrations is None:
            return self.loaded.params
        steps, recorder = self.config.sft.steps, self.recorder
        recorder.progress.phase("warm start", total=steps)

        def on_step(step: int, metrics: Metrics) -> None:
            self.stop.safe_point()
            recorder.progress.step(step)
            metrics = {**metrics, **peak_memory()}
            if log_every_step:
                recorder.report.log(step, metrics)
            elif step == steps:
                recorder.report.log(0, metrics)

        # Nothing of a warm start is kept when it is stopped.
        with self.stop.interruptible(), recorder.timer.stage("sft"):
            return warm_start(self.config, self.loaded, self.demonstrations, on_step=on_step)

    def save(self) -> None:
        """Save a checkpoint of the last finished step, if the run trains."""
        if self.state is not None:
            self.checkpoints.save_before_end(self.state)

    def conclude_beside(self, stopped: Stopped) -> None:
        """Close what shows and writes the run, whose own thread computes and will not come back."""
        self.recorder.progress.close()
        stopped.advice = self.how_to_go_on()
        self.recorder.report.failed(stopped)
        self.recorder.report.close()

    def how_to_go_on(self) -> str:
        """What a run that was stopped has saved, and the command that goes on with it."""
        steps = checkpoint_steps(self.folder.path)
        before = f"cd {shlex.quote(os.getcwd())} && "  # for relative paths, and `.env`
        if not self.resumable:
            return f"nothing was saved; remove {self.folder.path}, or choose another run.name, to start again"
        if steps:
            command = f"{before}quatrain train --resume {shlex.quote(str(self.folder.path))}"
            return f"step {max(steps)} is saved; go on with:\n  {command}"
        done = "before its first step"
        if self.state is not None and self.state.train_step:  # a second signal
            done = f"step {self.state.train_step} is not saved"
        where = [f"run.name={self.folder.name}", f"run.dir={self.folder.path.parent}"]
        options = " ".join(f"--set {shlex.quote(option)}" for option in where)
        return f"{done}; start it again with:\n  {before}quatrain train --resume auto {options}"

    def export(self, params: Any, step: int) -> None:
        """Write the model of `step` for transformers, wait for the last checkpoint, and push to the Hub.

        If the push fails, that is logged as an error with the command to push again: the run has its model.
        """
        self.recorder.progress.stage("export")
        loaded, base = self.loaded, self.config.model.path
        export_policy(self.folder.final, loaded.arch, params, loaded.tokenizer, loaded.sampling, base=base)
        if self.resumable:
            self.checkpoints.check_last()
        if (repository := self.config.hub.push) and is_main_process():
            try:
                address = push(self.folder.final, repository, run=self.folder.path, step=step)
                self.recorder.report.event(f"the model and its card are on the Hub: {address}")
            except (ValueError, OSError) as error:
                again = f"quatrain export {shlex.quote(str(self.folder.path))} --push {repository}"
                logger.error("%s; the model is in %s; push it with:\n  %s", error, self.folder.final, again)

    def conclude(self, steps: int, after: Mapping[str, float]) -> Summary:
        """Log the results of the run."""
        event = self.recorder.report.event
        for line in results(self.evaluator.sets, self.evaluations.before, after):
            event(line)
        if self.evaluations.best is not None:
            event(str(self.evaluations.best))
        describe_end(self.folder, steps)
        event(f"run page: {self.folder.page}")
        event(f"metrics, samples, checkpoints and log: {self.folder.path}")
        event(f"the trained model, for transformers: {self.folder.final}")
        if self.loaded.arch.lora:
            event(f"its adapters, for peft: {self.folder.final / ADAPTER}")
        if self.config.model.path.startswith("builtin:"):
            event(f"next, a real model:{_next_command(self.config)}")
        return Summary(self.folder.path, steps, self.evaluations.before, after)


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


def build_run(
    resolved: Resolved,
    folder: RunDir,
    stop: Stop,
    parts: ExitStack,
    reward_functions: RewardFunctions = NO_FUNCTIONS,
    rows: GivenRows = NO_ROWS,
    *,
    weights: bool = True,
    teaches: bool = True,
) -> Run:
    """The parts of a run in `folder`, each checked when it is made; raises ValueError for invalid input.

    `parts` ends what was made, in reverse order, also after an error here. Without `weights` the run is
    checked and cannot begin: no weights are read, nor reward models. Without `teaches` it has no training
    steps, and no teacher is made.
    """
    config = resolved.config
    _check_given(config, rows)
    store = Checkpointer(folder.checkpoints, config.checkpoint.keep)
    parts.callback(_close, store)
    saved = store.read_host() if folder.resumed else None
    if saved is not None:
        check_saved_state(saved, folder.checkpoints)
        resume.check_config(config, saved, folder)
    _refuse_staleness_in_several_processes(config)
    warm = bool(config.sft.steps and not folder.resumed)
    recorder = Recorder(config, folder.path, stop)
    # What a user may have mistaken comes before what takes long.
    stage("reward functions")
    imported = import_rewards(config, reward_functions)
    parts.callback(imported.close)
    if num_processes() == 1:  # several read a part of the files each, and say what is wrong together
        rows = _read_data(config, rows, imported, demonstrations=warm)
    loaded = load_policy(config, weights=weights)
    stage("prompts and reward models" if weights and config.reward.models else "prompts")
    scored = config if weights else without_reward_models(config)
    scorer = build_scorer(scored, loaded, reward_functions, imported=imported)
    reads = teacher_prompts(config, loaded)
    prompts = _load_prompts(config, loaded, scorer, rows, reads)
    recorder.skipped = {
        f"data/{what}_prompts": Metric(getattr(prompts, what), reduction="sum")
        for what in ("skipped", "truncated", "filtered")
    }
    policy = abstract_params(loaded.arch, config.model.param_dtype, loaded.meshes.train)
    base = _fingerprint_of_base(loaded), form(without_adapters(policy)) if loaded.arch.lora else None
    identity = resume.Identity(config, folder, len(prompts), prompts.digests(), *base)
    if saved is not None:
        identity.check(saved)
    evaluator = Evaluator(config, loaded, scorer, rows)
    parts.callback(evaluator.close)
    warnings = [*_check_data(config, prompts, scorer, evaluator), *evaluator.warnings]
    stage("a first call of each reward function")
    warnings += _try_rewards(loaded, prompts, scorer, evaluator)
    advantage = build_advantage(config)
    demonstrations = warm_start_data(config, loaded, rows) if warm else None
    if demonstrations is not None:
        name = shown_data_sets(config.sft.data)
        warnings += [f"demonstrations of {name}: {warning}" for warning in demonstrations.warnings]
    per_epoch = math.ceil(len(prompts) / config.data.batch_size)
    steps = config.run.steps or max(1, math.ceil(config.run.epochs * per_epoch))
    if saved is not None:
        resume.check_steps(steps, saved["train_step"], folder.path)
    stage(
        "rollout, advantage and update" if config.distill.teacher is None else "teacher, rollout and update"
    )
    teacher, of_words = None, None
    if teaches:
        longest = _longest_read(config, reads, prompts, evaluator)
        teacher, of_words = build_teachers(config, loaded, weights=weights, longest_prompt=longest)
    if teacher is not None and isinstance(config.distill.teacher, dict):
        teacher.check_sources(prompts.values_of(DATA_SOURCE))
    learner = build_learner(config, loaded, steps=steps, teacher=of_words or teacher)
    best = best_of(config, folder, evaluator)
    stop_when = StopWhen(config, evaluator, scorer.function_names)
    _check_profile_steps(config, steps)
    engine = build_engine(
        config,
        keeping_environments(config, loaded, scorer),
        on_progress=recorder.show_decoding,
        usual_prompt=prompts.usual_longest(config.data.batch_size),
    )
    parts.callback(engine.close)
    stages = Stages(engine, scorer, advantage, learner, teacher)
    batches = _ahead(config, stages, prompts, recorder, steps)
    parts.callback(batches.close)
    parts.callback(imported.close)  # before the batches, whose thread may wait for a reward function
    parts.callback(evaluator.close)
    reference = Reference(config, loaded, learner, folder.reference)
    scorer_of_tokens = of_words.scorer if of_words else teacher
    evaluations = Evaluations(
        *(config, evaluator, best, engine, batches, recorder, stop),
        steps=steps,
        teacher_kl=partial(learner.teacher_kl, scorer_of_tokens) if scorer_of_tokens else None,
    )
    state = (loaded.arch, reference, evaluations)
    checkpoints = Checkpoints(config, folder, store, *state, recorder, steps=steps, identity=identity)
    if saved is not None:
        checkpoints.check(learner.abstract(policy, _abstract_critic(config, loaded)))
    if weights and (repository := config.hub.push):  # last, so that invalid input leaves no repository
        decided_by_main(lambda: make_repository(repository, private=config.hub.private))
    return Run(
        *(resolved, folder, stop, loaded, prompts, demonstrations, evaluator, stages, batches, recorder),
        *(reference, evaluations, checkpoints, stop_when, steps, warnings),
    )


def _read_data(config: Config, rows: GivenRows, imported: RewardScorer, *, demonstrations: bool) -> GivenRows:
    """`rows` with those of each data set of the run, which must have the columns that rewards need."""
    data, sft = config.data, config.sft.data
    sets = [(data.train, False), *((spec, False) for spec in data.eval_sets.values())]
    sets += [(sft, True)] if demonstrations else []
    for spec, are_demonstrations in sets:
        if any(each not in rows for each in data_set_list(spec)):
            stage(f"data: {shown_data_sets(spec)}")
        rows = hub_rows(config, spec, rows)
        rows = {**rows, **{each: read_rows(each) for each in data_set_list(spec) if each not in rows}}
        needed = {"completion": "the supervised warm start"} if are_demonstrations else imported.required_by
        check_columns(spec, data, needed, demonstrations=are_demonstrations, rows=rows)
    return rows


def _load_prompts(
    config: Config, loaded: LoadedPolicy, scorer: RewardScorer, rows: GivenRows, reads: TeacherPrompts | None
) -> PromptSource:
    """The training prompts, with the columns that reward functions, chat template and teacher need."""
    needed = {} if reads is None else dict.fromkeys(reads.columns, "the teacher's prompt (distill.prompt)")
    if isinstance(config.distill.teacher, dict):
        needed[DATA_SOURCE] = "distill.teacher"
    return load_prompts(
        config.data.train,
        config.data,
        loaded.tokenizer,
        seed=config.seed,
        required_columns={**scorer.required_by, **loaded.required_by, **needed},
        check_prompt=scorer.check_prompt,
        turns=loaded.turns,
        by_pass_rate=True,
        rows=hub_rows(config, config.data.train, rows),
    )


def _longest_read(
    config: Config, reads: TeacherPrompts | None, prompts: PromptSource, evaluator: Evaluator
) -> int:
    """Tokens of the longest of the teacher's own prompts, which are all made once; 0 without any.

    Raises ValueError, which names data set and row, for one that cannot be made.
    """
    if reads is None:
        return 0
    sets = [
        (config.data.eval_sets[each.name], each.source) for each in evaluator.sets if evaluator.taught(each)
    ]
    return max(
        reads.longest(shown_data_sets(spec), source, partial(has_teacher, config.distill))
        for spec, source in [(config.data.train, prompts), *sets]
    )


def _ahead(
    config: Config, stages: Stages, prompts: PromptSource, recorder: Recorder, steps: int
) -> AsyncRollouts:
    """The rewarded batches of the run's steps, sampled ahead as far as the configuration says."""
    rounds = config.rollout.dynamic_sampling_rounds
    return AsyncRollouts(
        stages,
        PromptSampler(prompts, batch_size=config.data.batch_size, rounds=rounds),
        max_staleness=config.rollout.max_staleness,
        steps=steps,
        barrier_every=config.checkpoint.every_steps,
        in_flight=config.rollout.in_flight,
        on_stage=recorder.show_sampling,
    )


def _close(store: Checkpointer) -> None:
    try:
        store.close()
    except SaveFailed as error:
        logger.error("%s", error)  # `export` raises it in a run that comes to its end


def _refuse_staleness_in_several_processes(config: Config) -> None:
    staleness = config.rollout.max_staleness
    if staleness and num_processes() > 1:
        raise ValueError(
            "rollout.max_staleness must be 0 in a run of several processes, also for a rollout with "
            "devices of its own: its thread and training would begin their collectives in another order "
            f"in each process; got {staleness} and {num_processes()} processes; set 0, or run one process "
            "with all devices"
        )


def _fingerprint_of_base(loaded: LoadedPolicy) -> str | None:
    """The fingerprint of the frozen base; None without adapters, or if no weights are read."""
    if loaded.arch.lora is None or loaded.params is None:
        return None
    return tree_fingerprint(without_adapters(loaded.params))


def _abstract_critic(config: Config, loaded: LoadedPolicy) -> Any:
    """The critic's parameters as `ShapeDtypeStruct`s; None without one."""
    if loaded.critic_arch is None:
        return None
    return abstract_params(loaded.critic_arch, config.model.param_dtype, loaded.meshes.critic)


def _check_data(
    config: Config, prompts: PromptSource, scorer: RewardScorer, evaluator: Evaluator
) -> list[str]:
    """Warnings about the training prompts; raises ValueError if no answer can be judged."""
    name = shown_data_sets(config.data.train)
    warnings = [f"{name}: {warning}" for warning in prompts.warnings]
    warnings += scorer.check_answers(name, prompts)
    for each in evaluator.sets:
        warnings += _shared_questions(shown_data_sets(config.data.eval_sets[each.name]), prompts, each.source)
    return [warning for warning in warnings if warning not in evaluator.warnings]  # of the same data


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
    loaded: LoadedPolicy, prompts: PromptSource, scorer: RewardScorer, evaluator: Evaluator
) -> list[str]:
    """Calls users' reward functions once, and checks the data sources that they name; their warnings."""
    if scorer.routes:
        sources = [prompts, *(data_set.source for data_set in evaluator.sets)]
        scorer.check_sources([value for source in sources for value in source.values_of(DATA_SOURCE)])
    tokenizer, first = loaded.tokenizer, prompts.first_by(DATA_SOURCE)
    answers = AnswerTokens(tokenizer)

    def said(text: str) -> str:
        return answers.text(tokenizer.encode(text, add_special_tokens=False))

    ids = tokenizer.encode(MADE_UP, add_special_tokens=False)
    return [*scorer.check_format(first.values(), said), *scorer.try_on(first, ids)]


def _check_profile_steps(config: Config, steps: int) -> None:
    beyond = [step for step in config.run.profile_steps if step > steps]
    if beyond:
        raise ValueError(
            f"run.profile_steps must be steps of the run, which has {steps}; got {beyond[0]}; name other "
            "steps, or raise run.steps"
        )


def _next_command(config: Config) -> str:
    """How to train a real model, on the data of `config` if it is the user's own."""
    if not any(name.startswith("builtin:") for name in data_set_list(config.data.train)):
        return " set model.path to a folder, a .gguf file or a model on the Hub"
    if NEXT_CONFIG.is_file() and Path("Makefile").is_file():
        return f"\n  make smollm2 && .venv/bin/quatrain train {NEXT_CONFIG}"
    return (
        " set model.path to a folder or a model on the Hub, data.train and data.eval to your prompts, and "
        "data.question_column to the column of their questions"
    )
