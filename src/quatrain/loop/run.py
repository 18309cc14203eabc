"""A run around the training loop: folder, resuming, evaluation, checkpoints, logging and export.

Used by `train.py`. A `Run` is created from the configuration before any computation and exists until the end.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from quatrain.cluster.processes import agreement, decided_by_main, is_main_process, num_processes
from quatrain.cluster.stop import Stop, Stopped
from quatrain.config.derive import value_at
from quatrain.config.dump import dump_yaml, plain
from quatrain.config.errors import listed, nearest_keys
from quatrain.config.load import Resolved
from quatrain.config.schema import Config
from quatrain.config.secrets import REDACTED, comparable, redact, same
from quatrain.config.values import shown_data_sets
from quatrain.data.prompts import PromptSource, load_prompts
from quatrain.loop.asynchronous import AsyncRollouts, TrainBatch
from quatrain.loop.build import build_engine, build_scorer, load_policy
from quatrain.loop.evaluate import Evaluation, Evaluator, finite_numbers, result, results
from quatrain.loop.export import ADAPTER, export_policy
from quatrain.loop.prompts import PromptSampler
from quatrain.loop.sft import warm_start, warm_start_data
from quatrain.loop.stages import Stages, build_advantage, build_learner
from quatrain.models.lora import trained_part, with_trained, without_adapters
from quatrain.models.params import abstract_params
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.compilations import compile_seconds
from quatrain.parallel.host_memory import peak_bytes
from quatrain.parallel.mesh import to_memory, unshared
from quatrain.plan.batches import overview
from quatrain.plan.batches import plan as batch_plan
from quatrain.report.hints import Hints, hints_in
from quatrain.report.progress import Progress, waiting
from quatrain.report.recorder import Report, own_messages
from quatrain.reward.calls import DATA_SOURCE
from quatrain.reward.scorer import MADE_UP
from quatrain.rollout.fleet import Fleet
from quatrain.run.best import Best
from quatrain.run.checkpoint import Checkpointer, NonFiniteState, SaveFailed
from quatrain.run.metrics import StageTimer
from quatrain.run.run_dir import RunDir, checkpoint_steps
from quatrain.run.saved_state import check_saved_state
from quatrain.types.batches import AdvantagedBatch, PromptPlace
from quatrain.types.metrics import Metric, Metrics
from quatrain.types.rollouts import RolloutProgress
from quatrain.update.critic import critic_params
from quatrain.update.learner import TrainState
from quatrain.update.reference import followed
from quatrain.update.trainer import ModelState
from quatrain.weights.adapter import check_base

logger = logging.getLogger(__name__)
RewardFunctions = Mapping[str, Callable[..., Any]]
"""Python functions for entries of `reward.functions`, by their names there."""
_loading = threading.Lock()
"""One run of a process loads at a time: transformers' lazy imports fail in two threads at once."""
NO_FUNCTIONS: RewardFunctions = MappingProxyType({})
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
    resolved: Resolved, resume: str | None, reward_functions: RewardFunctions = NO_FUNCTIONS
) -> Iterator[Run]:
    """Creates the run's folder, the `Run` and its report; closes them at the end.

    For invalid input it raises an error before logging starts, deletes a new folder and does not change the
    folder of a resumed run. A signal that stops the run raises `Stopped`, with the command to go on.
    """
    with Stop(agreement()) as stop, _opened(resolved, resume, stop, reward_functions) as run:
        yield run


@contextmanager
def _opened(
    resolved: Resolved, resume: str | None, stop: Stop, reward_functions: RewardFunctions
) -> Iterator[Run]:
    config = resolved.config
    assert config.run.name is not None, "run.name is derived before it comes here"
    named = resolved.chose("run.name")
    folder = RunDir.create(config.run.dir, config.run.name, resume=resume, named=named)
    if folder.resumed:  # a resumed run keeps its name and its place, whatever the given configuration sets
        home = folder.path.resolve()
        place: dict[str, Any] = {"name": home.name}
        if Path(config.run.dir).resolve() != home.parent:
            place["dir"] = str(home.parent)
        run_section = config.run.model_copy(update=place)
        resolved = replace(resolved, config=config.model_copy(update={"run": run_section}))
    with closing(folder), own_messages():
        try:
            if not (folder.resumed or folder.restarted):
                folder.write_config(dump_yaml(resolved))
            with stop.interruptible(), waiting("loading model and data"), _loading:
                run = Run(resolved, folder, stop, reward_functions)
        except BaseException as error:
            if isinstance(error, Stopped):
                error.advice = "the run had not begun; give the same command again"
            folder.discard()
            raise
        run.report = Report(
            folder,
            config.logging,
            redact=lambda text: redact(text, os.environ),
            run_config=plain(resolved),
            token_text=lambda token: run.loaded.tokenizer.decode([token]),
            hints=Hints(config, run.steps, hints_in(folder.hints) if folder.resumed else ()),
        )
        for warning in run.warnings:
            logger.warning("%s", warning)
        with closing(run.report):
            try:
                with closing(run):
                    yield run
            except BaseException as error:
                if isinstance(error, Stopped):
                    error.advice = run.how_to_go_on()
                run.report.failed(error)
                raise


class Run:
    """One run: its folder, policy, data and stages; `progress` is set while the run is in progress."""

    report: Report
    progress: Progress
    resumable = True
    """Whether `quatrain train` goes on with the run after it was stopped."""

    def __init__(
        self,
        resolved: Resolved,
        folder: RunDir,
        stop: Stop,
        reward_functions: RewardFunctions = NO_FUNCTIONS,
        *,
        weights: bool = True,
    ):
        """Without `weights`, the run is checked and cannot begin: no weights are read, nor reward models."""
        self.resolved, self.config, self.folder, self.stop = resolved, resolved.config, folder, stop
        config = self.config
        self.checkpoints = Checkpointer(folder.checkpoints, config.checkpoint.keep)
        self.reference = Checkpointer(folder.path / "reference")
        saved = self.checkpoints.read_host() if folder.resumed else {}
        if folder.resumed:
            check_saved_state(saved, folder.checkpoints)
            self._check_resumable(saved["config"])
        lag = config.rollout.max_staleness
        if lag and num_processes() > 1:
            raise ValueError(
                "rollout.max_staleness must be 0 in a run of several processes, also for a rollout with "
                "devices of its own: its thread and training would begin their collectives in another order "
                f"in each process; got {lag} and {num_processes()} processes; set 0, or run one process with "
                "all devices"
            )
        self.timer = StageTimer()
        self.loaded = load_policy(config, weights=weights)
        scored = config if weights else _without_reward_models(config)
        self.base = self._fingerprint_of_base()
        if folder.resumed:
            self._check_base(saved)
        self.scorer = build_scorer(scored, self.loaded, reward_functions)
        self.prompts = self._load_prompts()
        self.data = self.prompts.digests()
        if folder.resumed:
            self._check_prompts(saved)
        self.evaluator = Evaluator(config, self.loaded, self.scorer)
        self.evaluated_as = self._evaluated_as()
        self.warnings = [*self._check_data(), *self.evaluator.warnings, *self._try_rewards()]
        """Of data that are probably not what is meant, and of rewards that fail on a made-up completion."""
        self.advantage = build_advantage(config)
        warm = config.sft.steps and not folder.resumed
        self.demonstrations = warm_start_data(config, self.loaded.tokenizer) if warm else None
        if self.demonstrations is not None:
            name = shown_data_sets(config.sft.data or config.data.train)
            self.warnings += [f"demonstrations of {name}: {each}" for each in self.demonstrations.warnings]
        per_epoch = math.ceil(len(self.prompts) / config.data.batch_size)
        self.steps = config.run.steps or max(1, math.ceil(config.run.epochs * per_epoch))
        if folder.resumed:
            self._check_steps(saved["train_step"])
        self.learner = build_learner(config, self.loaded, steps=self.steps)
        self.best = self._best()
        self._check_profile_steps()
        self.engine = build_engine(
            config,
            self.loaded,
            on_progress=self._show_decoding,
            usual_prompt=self.prompts.usual_longest(config.data.batch_size),
        )
        self.stages = Stages(self.engine, self.scorer, self.advantage, self.learner)
        self.batches = self._batches()
        self._tracing = False
        self.before: dict[str, float] = {}
        self.accuracy: float | None = None
        self._save_failed: SaveFailed | None = None
        """Why the last checkpoint could not be written."""
        self._evaluated: int | None = None
        """The training step that was evaluated last."""

    @property
    def step_size(self) -> str:
        """Description of the number of prompts and samples in a training step."""
        return f"{self.config.data.batch_size} prompts x {self.config.rollout.n} samples"

    def _load_prompts(self) -> PromptSource:
        return load_prompts(
            self.config.data.train,
            self.config.data,
            self.loaded.tokenizer,
            seed=self.config.seed,
            required_columns={**self.scorer.required_by, **self.loaded.required_by},
            check_prompt=self.scorer.check_prompt,
            turns=self.loaded.turns,
            by_pass_rate=True,
        )

    def _best(self) -> Best | None:
        checkpoint = self.config.checkpoint
        if checkpoint.best_metric is None:
            return None
        if self.config.data.eval is None:
            raise ValueError(
                f"checkpoint.best_metric needs evaluations; got {checkpoint.best_metric} and data.eval null; "
                "set data.eval, or checkpoint.best_metric to null"
            )
        names = self.evaluator.metric_names()
        if checkpoint.best_metric not in names:
            raise ValueError(
                "checkpoint.best_metric must be a metric that every evaluation has, of which the nearest is "
                f"{nearest_keys(checkpoint.best_metric, names)[0]}; got {checkpoint.best_metric}; they are "
                f"{listed(names)}"
            )
        return Best(self.folder.path, checkpoint.best_metric, checkpoint.best_mode)

    def _note_best(self, step: int, numbers: Mapping[str, float]) -> None:
        """Remember `step` if its evaluation is the best so far; `save_when_due` then saves a checkpoint."""
        if self.best is not None and self.resumable and self.best.note(step, numbers):
            self.checkpoints.pinned.append(step)

    def _try_rewards(self) -> list[str]:
        """Calls users' reward functions once, and checks the data sources that they name; their warnings."""
        if self.scorer.routes:
            sources = [self.prompts, *(each.source for each in self.evaluator.sets)]
            self.scorer.check_sources([value for each in sources for value in each.values_of(DATA_SOURCE)])
        tokenizer, prompts = self.loaded.tokenizer, self.prompts.first_by(DATA_SOURCE)

        def said(text: str) -> str:
            ids = tokenizer.encode(text, add_special_tokens=False)
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        ids = tokenizer.encode(MADE_UP, add_special_tokens=False)
        return [*self.scorer.check_format(prompts.values(), said), *self.scorer.try_on(prompts, ids)]

    def _check_data(self) -> list[str]:
        """Warnings about the training prompts; raises ValueError if no answer can be judged."""
        name = shown_data_sets(self.config.data.train)
        found = [f"{name}: {warning}" for warning in self.prompts.warnings]
        found += self.scorer.check_answers(name, self.prompts)
        return [warning for warning in found if warning not in self.evaluator.warnings]  # of the same data

    def _batches(self) -> AsyncRollouts:
        config = self.config
        sampler = PromptSampler(
            self.prompts,
            batch_size=config.data.batch_size,
            rounds=config.rollout.dynamic_sampling_rounds,
        )
        return AsyncRollouts(
            self.stages,
            sampler,
            max_staleness=config.rollout.max_staleness,
            steps=self.steps,
            barrier_every=config.checkpoint.every_steps,
            in_flight=config.rollout.in_flight,
            on_stage=self._show_ahead,
        )

    def take(self, state: TrainState) -> TrainBatch:
        """The batch of the training step that begins with `state`."""
        if self.config.rollout.max_staleness:
            self.progress.stage("waiting for the rollout")
        with self.stop.interruptible():
            batch = self.batches.take(state)
        for stage, seconds in batch.seconds.items():
            self.timer.add(stage, seconds)
        return batch

    def announce(self, plan: str) -> None:
        """Log a summary of the run, its batch plan, and the numbers of skipped and truncated prompts."""
        self.report.event(f"run {self.folder.name}: {plan}")
        batches = batch_plan(self.config, devices=jax.device_count(), processes=num_processes())
        for line in overview(batches):
            self.report.event(line)
        self.folder.write_plan(batches.to_dict())
        data, sft = self.config.data, self.config.sft
        train = shown_data_sets(data.train)
        for spec, source in (
            (train, self.prompts),
            *((shown_data_sets(data.eval_sets[each.name]), each.source) for each in self.evaluator.sets),
            (f"demonstrations of {shown_data_sets(sft.data or data.train)}", self.demonstrations),
        ):
            if source is not None and source.skipped + source.truncated:
                self.report.event(
                    f"{spec}: {source.skipped} prompts skipped, {source.truncated} truncated, longer than "
                    f"data.max_prompt_length={data.max_prompt_length} tokens"
                )
        if self.prompts.filtered:
            self.report.event(
                f"{train}: {self.prompts.filtered} prompts left out by their pass rates, "
                f"{len(self.prompts)} kept"
            )

    def close(self) -> None:
        """End the workers of reward functions, the rollout's thread and the writing of checkpoints."""
        try:
            with closing(self.batches):
                # First, because the rollout's thread may wait for a reward function.
                self.evaluator.close()
                self.scorer.close()
        finally:
            try:
                self.checkpoints.close()
            except SaveFailed as error:
                logger.error("%s", error)  # `export` raises it in a run that comes to its end

    def begin(self) -> TrainState:
        """The initial training state: after the warm start, or from a checkpoint."""
        config = self.config
        if self.folder.restarted:
            self.folder.start_over()
            self.folder.write_config(dump_yaml(self.resolved))
        params = self.loaded.params if self.folder.resumed else self.warm_start()
        self.loaded = replace(self.loaded, params=None)
        state = self.learner.init(params, self._critic_params(params))
        del params  # they may wait in the host's memory from here on
        if config.needs_reference or self._saves_reference:
            self.learner.reference = self._reference(state.params)
        if self.folder.resumed:
            state = self._restore(state)
        if config.rollout.servers:
            self._compare_servers(state)
        if not self.folder.resumed:
            self.evaluate_first(state.params)
        return state

    def _compare_servers(self, state: TrainState) -> None:
        """Raises ValueError if a server and the trainer give the same tokens other log-probabilities."""
        limit = self.config.rollout.logprob_diff_warning
        if limit is None:
            self.report.event(
                "log-probabilities of servers and trainer are not compared, because "
                "rollout.logprob_diff_warning is null"
            )
            return
        engine, servers = self.engine, self.config.rollout.servers
        assert isinstance(engine, Fleet), "servers are workers of a fleet"
        prompts, sampling = self.prompts.head(PROBES), replace(engine.sampling, n=1)
        engine.sync_weights(state.params, state.step)
        tickets = [engine.submit(prompts, sampling=sampling, worker=each) for each in range(len(servers))]
        for server, ticket in zip(servers, tickets, strict=True):
            gap = self.learner.sampler_gap(state, engine.wait(ticket))
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
        steps = self.config.sft.steps
        self.progress.phase("warm start", total=steps)

        def on_step(step: int, metrics: Metrics) -> None:
            self.stop.border()
            self.progress.step(step)
            metrics = {**metrics, **_peak_memory()}
            if log_every_step:
                self.report.log(step, metrics)
            elif step == steps:
                self.report.log(0, metrics)

        with self.timer.stage("sft"):
            return warm_start(self.config, self.loaded, self.demonstrations, on_step=on_step)

    def _fingerprint_of_base(self) -> str | None:
        """The fingerprint of the frozen base; None without adapters, or if no weights are read."""
        if self.loaded.arch.lora is None or self.loaded.params is None:
            return None
        return tree_fingerprint(without_adapters(self.loaded.params))

    def _check_base(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError if a checkpoint's adapters are those of another base."""
        if self.base is not None:
            check_base(saved.get("base"), self.base, self.config.model.path, self.folder.path)

    @property
    def _saves_reference(self) -> bool:
        """Whether checkpoints hold the reference: it follows the policy, or is the base and a warm start."""
        config = self.config
        warm = config.lora.rank and config.sft.steps
        return bool(config.update.reference_sync_steps or warm)

    def _reference(self, params: Any) -> Any:
        """The reference policy: a frozen copy of the policy at the start of training, on its role's devices.

        It is saved in the run's folder for resuming, and offloaded to host memory if `offload.reference`.

        With adapters it is the base without them, which is in memory and needs no copy. Where they are
        trained by a warm start, or the reference follows the policy, it has copies of the adapters.
        """
        arch = self.loaded.arch
        if arch.lora:
            if not self._saves_reference:
                return without_adapters(params)
            adapters = trained_part(params, arch)
            copies = jax.tree.map(unshared, to_memory("device", adapters), adapters)
            return with_trained(params, copies, arch)
        mesh = self.loaded.meshes.reference
        like = abstract_params(self.loaded.arch, self.config.model.param_dtype, mesh)
        with closing(self.reference) as store:
            if not self.folder.resumed:
                store.save(0, {"params": params}, {})
            _, arrays, _ = store.restore({"params": like})
        return to_memory("host" if self.config.offload.reference else "device", arrays["params"])

    def move_reference_when_due(self, state: TrainState) -> None:
        """Move the reference to the policy every `update.reference_sync_steps` training steps."""
        update = self.config.update
        if update.reference_sync_steps and state.train_step % update.reference_sync_steps == 0:
            arch = self.loaded.arch
            old, new = (trained_part(params, arch) for params in (self.learner.reference, state.params))
            moved = followed(old, new, update.reference_mixup)
            self.learner.reference = with_trained(self.learner.reference, moved, arch)

    def _check_profile_steps(self) -> None:
        beyond = [step for step in self.config.run.profile_steps if step > self.steps]
        if beyond:
            raise ValueError(
                f"run.profile_steps must be steps of the run, which has {self.steps}; got {beyond[0]}; name "
                "other steps, or raise run.steps"
            )

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Traces a training step if `run.profile_steps` has it; consecutive steps are one trace."""
        steps = self.config.run.profile_steps
        if step in steps and not self._tracing and is_main_process():
            jax.profiler.start_trace(str(self.folder.path / "profile"))
            self._tracing = True
        goes_on = False
        try:
            yield
            goes_on = step + 1 in steps
        finally:
            if self._tracing and not goes_on:
                jax.profiler.stop_trace()
                self._tracing = False

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        """Measures the seconds of a training step, and those spent compiling in it."""
        before = compile_seconds()
        try:
            with self.timer.stage("step"):
                yield
        finally:
            self.timer.add("compile", compile_seconds() - before)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Shows `stage` in the progress display, and measures its seconds."""
        self.progress.stage(stage)
        with self.timer.stage(stage):
            yield

    def _show_ahead(self, stage: str) -> None:
        """Show what the rollout does: as the stage of the step, or beside it where it runs ahead."""
        if self.config.rollout.max_staleness:
            self.progress.beside(stage)
        else:
            self.progress.stage(stage)

    def _show_decoding(self, decoding: RolloutProgress) -> None:
        if self.config.rollout.max_staleness:
            self.progress.beside(f"rollout: {decoding}")
        else:
            self.progress.detail(str(decoding))
        self.stop.border()

    def record(self, step: int, update: Metrics, advantaged: AdvantagedBatch) -> None:
        """Log the metrics and samples of a training step, and update the progress display."""
        step_s = self.timer.seconds("step")
        rollouts, rewarded = advantaged.rollouts, advantaged.rewarded
        tokens_per_s = float(rollouts.attention_mask.sum()) / step_s
        metrics = {
            **rollouts.metrics,
            **rewarded.metrics,
            **advantaged.metrics,
            **update,
            **self.timer.metrics(),
            **_peak_memory(),
            "throughput/tokens_per_s": Metric(tokens_per_s),
            "data/skipped_prompts": Metric(self.prompts.skipped, reduction="sum"),
            "data/truncated_prompts": Metric(self.prompts.truncated, reduction="sum"),
            "data/filtered_prompts": Metric(self.prompts.filtered, reduction="sum"),
        }
        self.report.log(step, metrics)
        self.report.samples(step, advantaged)
        self.report.hint(step, metrics)
        gap = logprob_diff_warning(self.config, update)
        if gap is not None:
            logger.warning("step %d: %s", step, gap)
        self.progress.step(
            step,
            reward=metrics["reward/mean"].result() if "reward/mean" in metrics else None,
            accuracy=None if self.accuracy is None else f"{self.accuracy:.3f} of {self._num_evaluated()}",
            tokens_per_s=tokens_per_s,
        )

    def evaluate_first(self, params: Any) -> None:
        """Evaluate `params` before training, unless `eval.before` is false."""
        if self.config.eval.before:
            self.before = self._evaluate(params, 0, 0, "evaluation before training")

    def evaluate_last(self, params: Any, step: int, *, version: int) -> dict[str, float]:
        """Evaluate `params` after the last step, on `eval.final_num_prompts`; returns the metrics.

        `version`: optimizer steps of `params`.
        """
        return self._evaluate(params, step, version, "final evaluation", last=True)

    def evaluate_when_due(self, state: TrainState) -> None:
        """Evaluate every `eval.every_steps` training steps, except after the last."""
        if self._evaluation_is_due(state.train_step):
            self._evaluate(state.params, state.train_step, state.step, "evaluation")

    def _num_evaluated(self) -> int:
        """Number of prompts of the accuracy that progress lines show."""
        return len(self.evaluator.sets[0].prompts(self.config.eval.usual_num_prompts))

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.config.eval.every_steps
        return bool(every and step) and step % every == 0 and step < self.steps and step != self._evaluated

    def _evaluate(
        self, params: Any, step: int, version: int, name: str, *, last: bool = False
    ) -> dict[str, float]:
        if not self.evaluator.sets:
            return {}
        config = self.config.eval
        first, count = (
            config.usual_num_prompts,
            config.final_num_prompts if last else config.usual_num_prompts,
        )
        total = self.evaluator.num_completions(self.engine, count)
        self.progress.stage(name)

        def job() -> Evaluation:
            self.engine.sync_weights(params, version)
            return self.evaluator.evaluate(
                self.engine,
                first=first,
                count=count,
                on_progress=lambda done: self.progress.stage(f"{name} {done}/{total}"),
            )

        with self.stop.interruptible(), self.timer.stage("eval"):
            found = self.batches.run(job)
        self._evaluated = step
        self.report.log(step, {**found.metrics, **self.timer.metrics()})
        self.report.evaluation(step, found.samples)
        self.report.page()
        numbers = finite_numbers(found.metrics)
        if not last:
            self.report.event(f"evaluation at step {step}: {result(self.evaluator.sets, numbers)}")
        self._note_best(step, numbers)
        self.accuracy = numbers.get(f"{self.evaluator.sets[0].prefix}accuracy_lenient")
        return numbers

    def save_when_due(self, state: TrainState) -> None:
        """Save a checkpoint every `checkpoint.every_steps` training steps, at a new best, and after the last.

        After optimizer steps that were not applied, weights may be ruined; until one is applied again, the
        checkpoints before them are not displaced by others.
        """
        every, last = self.config.checkpoint.every_steps, state.train_step == self.steps
        due = (bool(every) and state.train_step % every == 0) or state.train_step in self.checkpoints.pinned
        bad_steps = max(model.bad_steps for model in (state, state.critic) if model is not None)
        if last or (due and not bad_steps):
            self.save(state)
            self.report.log(state.train_step, self.timer.metrics())
            self.report.page()
        elif due:
            logger.warning(
                "no checkpoint of step %d: the last %d optimizer steps were not applied",
                state.train_step,
                bad_steps,
            )
        if self.best is not None and self.best.found and self.best.found["step"] == state.train_step:
            self._confirm_best(self.best)

    def _confirm_best(self, best: Best) -> None:
        """Forget the best evaluation, the last one, if its checkpoint could not be written."""
        assert best.found is not None
        with self._reported_if_failed():
            self.checkpoints.wait()
        if best.found["step"] not in decided_by_main(self.checkpoints.steps):
            self.checkpoints.pinned.remove(best.found["step"])
            best.withdraw()

    def save(self, state: TrainState) -> None:
        """Save a checkpoint of `state`, unless one of the same or a later step exists.

        If a checkpoint cannot be written, a run of one process reports it and goes on, one of several raises
        SaveFailed. Raises NonFiniteState if parameters or optimizer state have numbers that are not finite.
        """
        with self._reported_if_failed():
            self.checkpoints.wait()
        latest = decided_by_main(self.checkpoints.latest_step)
        if latest is not None and state.train_step <= latest:
            return
        self.progress.stage("checkpoint")
        with self.timer.stage("checkpoint"), self._reported_if_failed():
            try:
                self.checkpoints.save(state.train_step, self._arrays(state), self._host(state))
            except NonFiniteState as error:
                before = "there is no checkpoint before it"
                if latest is not None:
                    before = f"continue from step {latest} with `--resume {self.folder.name}`"
                raise NonFiniteState(f"{error}; lower optimizer.learning_rate; {before}") from error

    def save_before_end(self, state: TrainState) -> None:
        """Save a checkpoint of `state` in a run that ends early; what prevents it is logged."""
        try:
            self.save(state)
        except NonFiniteState as error:
            logger.error("%s", error)

    @contextmanager
    def _reported_if_failed(self) -> Iterator[None]:
        try:
            yield
        except SaveFailed as error:
            if num_processes() > 1:  # the others wait for this one's files
                raise
            self._save_failed = error
            logger.warning(
                "%s; the run goes on; its newest checkpoint is of step %s",
                error,
                self.checkpoints.latest_step(),
            )

    def _arrays(self, state: TrainState) -> dict[str, Any]:
        """The arrays of a checkpoint: what is trained, not a frozen base. See `_saves_reference`."""
        arch = self.loaded.arch
        arrays = {"params": trained_part(state.params, arch), "opt_state": state.opt_state}
        if state.critic is not None:
            arrays["critic"] = {"params": state.critic.params, "opt_state": state.critic.opt_state}
        if self._saves_reference:
            arrays["reference"] = trained_part(self.learner.reference, arch)
        return arrays

    def _host(self, state: TrainState) -> dict[str, Any]:
        """What a checkpoint holds besides arrays."""
        return {
            **_counts(state),
            "train_step": state.train_step,
            "place": asdict(state.place),
            "reward_kl_coef": state.reward_kl_coef,
            "critic": None if state.critic is None else _counts(state.critic),
            "config": {
                key: comparable(value, os.environ) for key, value in _kept_on_resume(self.config).items()
            },
            "num_prompts": len(self.prompts),
            "data": comparable(self.data, os.environ),
            "before": self.before,
            "evaluated_as": {
                what: comparable(value, os.environ) for what, value in self.evaluated_as.items()
            },
            "accuracy": self.accuracy,
            "evaluation_due": self._evaluation_is_due(state.train_step),
            "best": None if self.best is None else self.best.found,
            **({} if self.base is None else {"base": self.base}),
        }

    def _evaluated_as(self) -> dict[str, Any]:
        """What decides whether two evaluations of a run can be compared, as JSON values."""
        config = self.config
        count = config.eval.usual_num_prompts
        return {
            "data.eval": {name: shown_data_sets(spec) for name, spec in config.data.eval_sets.items()},
            "num_prompts": count,
            "accuracy": config.eval.accuracy,
            "max_new_tokens": config.eval.max_new_tokens or config.rollout.max_new_tokens,
            **_episodes_as(config),
            "rows": {each.name: each.source.digests(count) for each in self.evaluator.sets},
        }

    def _changed_evaluations(self, saved: Mapping[str, Any]) -> list[str]:
        """What differs from the evaluations of the checkpoint `saved`."""
        now = self.evaluated_as
        before = {"rows": now["rows"]} | saved.get("evaluated_as", now)  # earlier versions saved no digests
        changed = [
            what for what in {**before, **now} if what not in before or not same(before[what], now.get(what))
        ]
        if changed != ["rows"]:
            return [what for what in changed if what != "rows"]
        return [
            f"{part} of {shown_data_sets(self.config.data.eval_sets[name])}"
            for name, digests in now["rows"].items()
            for part in _differing(before["rows"].get(name, {}), digests)
        ]

    def _check_resumable(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError if the configuration changes the prompt stream or needs a missing reference."""
        for key, value in _kept_on_resume(self.config).items():
            # The default for keys that are newer than the checkpoint.
            before = saved.get(key, comparable(value_at(Config(), key), os.environ))
            if not same(before, value):
                known = before[REDACTED] if isinstance(before, dict) else before
                raise ValueError(
                    f"{key} of a resumed run must not change: {self.folder.path} has {known}, got "
                    f"{redact(str(value), os.environ)}; set {key} back, or start another run"
                )
        if self.config.copies_reference and not self.reference.steps():
            key, value = (
                ("update.kl_coef", self.config.update.kl_coef)
                if self.config.update.kl_coef
                else ("reward.kl_coef", self.config.reward.kl_coef)
            )
            raise ValueError(
                f"a run can be resumed with {key} above 0 only if it was started so: the reference policy "
                f"is saved at the start; {self.folder.path} has none, got {key} {value}; set {key} back to "
                "0, or start another run"
            )

    def _check_prompts(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError if `data.train` does not have the rows of the run's checkpoint `saved`."""
        now, before = len(self.prompts), saved["num_prompts"]
        spec = shown_data_sets(self.config.data.train)
        if now != before:
            raise ValueError(
                f"data.train of a resumed run must not change: {spec} had {before} prompts that were not "
                f"skipped, and has {now}; restore the data and data.max_prompt_length, or start another run"
            )
        digests = saved.get("data", self.data)  # a checkpoint of an earlier version has none
        changed = [] if same(digests, self.data) else _differing(digests, self.data)
        if changed:
            raise ValueError(
                f"data.train of a resumed run must not change: {spec} has as many rows as before, and "
                f"{listed(changed)} differ; restore the data, and the keys of data, the tokenizer and the "
                "chat template that prompts are made with, or start another run"
            )

    def _check_steps(self, done: int) -> None:
        """Raises ValueError if the run has fewer steps than its newest checkpoint, that of step `done`."""
        if self.steps < done:
            raise ValueError(
                f"run.steps of a resumed run must not be below the step of its newest checkpoint: "
                f"{self.folder.path} has one of step {done}, got {self.steps} steps; raise run.steps (or "
                "run.epochs), or export an earlier checkpoint with `quatrain export RUN OUTPUT --step N`"
            )

    def _restore(self, state: TrainState) -> TrainState:
        wanted = jax.tree.map(_abstract, self._arrays(state))
        for leaf in jax.tree.leaves(self._arrays(state)):
            leaf.delete()  # there may not be memory for the state that a run begins with beside the restored
        step, arrays, host = self.checkpoints.restore(wanted)
        check_saved_state(host, self.folder.checkpoints)
        self._check_resumable(host["config"])  # an earlier checkpoint's, if the latest is damaged
        self._check_prompts(host)
        self._check_base(host)
        arrays["params"] = with_trained(state.params, arrays["params"], self.loaded.arch)
        self.checkpoints.set_aside()
        self.folder.rewind(step)
        self.folder.write_config(dump_yaml(self.resolved))
        self.before, self.accuracy = host["before"], host["accuracy"]
        changed = self._changed_evaluations(host)
        if changed:
            logger.warning(
                "the evaluations have changed in %s: they are compared neither with that before training nor "
                "with the best so far",
                ", ".join(changed),
            )
            self.before = {}
        self._evaluated = None if host["evaluation_due"] else step
        self._announce_moved_barrier(step)
        if self._saves_reference:
            reference = arrays.pop("reference")
            self.learner.reference = with_trained(self.learner.reference, reference, self.loaded.arch)
        if self.best is not None:
            found = [] if changed else self.checkpoints.steps()
            self.best.restore(host.get("best"), step, found)
            self.checkpoints.pinned = [] if self.best.found is None else [self.best.found["step"]]
        critic = state.critic and replace(state.critic, **arrays.pop("critic"), **host["critic"])
        return replace(
            state,
            **arrays,
            critic=critic,
            step=host["step"],
            bad_steps=host["bad_steps"],
            train_step=host["train_step"],
            reward_kl_coef=host["reward_kl_coef"],
            place=PromptPlace(**host["place"]),
        )

    def _announce_moved_barrier(self, step: int) -> None:
        every = self.config.checkpoint.every_steps
        if self.config.rollout.max_staleness and (not every or step % every):
            self.report.event(
                f"the checkpoint of step {step} is not one of checkpoint.every_steps: the next batches are "
                "sampled by newer weights than in a run that was not stopped there"
            )

    def how_to_go_on(self) -> str:
        """What a run that was stopped has saved, and the command that goes on with it."""
        steps, settings = checkpoint_steps(self.folder.path), self.config.run
        if not self.resumable:
            return f"nothing was saved; remove {self.folder.path}, or choose another run.name, to start again"
        if steps:
            command = f"quatrain train --resume {shlex.quote(str(self.folder.path))}"
            return f"step {max(steps)} is saved; go on with: {command}"
        where = [f"run.name={self.folder.name}", f"run.dir={settings.dir}"]
        options = " ".join(f"--set {shlex.quote(option)}" for option in where)
        return f"before its first step; start it again with: quatrain train --resume auto {options}"

    def export(self, params: Any) -> None:
        """Write the model for transformers, and wait for the last checkpoint."""
        self.progress.stage("export")
        loaded = self.loaded
        base = self.config.model.path
        export_policy(self.folder.final, loaded.arch, params, loaded.tokenizer, loaded.sampling, base=base)
        self.checkpoints.wait()
        newest = decided_by_main(self.checkpoints.latest_step)
        if self.resumable and newest != self.steps:
            raise SaveFailed(
                f"the model is exported to {self.folder.final}, but the newest checkpoint is of step "
                f"{newest}, not {self.steps}: {self._save_failed}; then resume the run"
            )

    def conclude(self, steps: int, after: Mapping[str, float]) -> Summary:
        """Log the results of the run."""
        event = self.report.event
        for line in results(self.evaluator.sets, self.before, after):
            event(line)
        if self.best is not None:
            event(str(self.best))
        event(f"metrics, samples, checkpoints and log: {self.folder.path}")
        event(f"the trained model, for transformers: {self.folder.final}")
        if self.loaded.arch.lora:
            event(f"its adapters, for peft: {self.folder.final / ADAPTER}")
        if self.config.model.path.startswith("builtin:"):
            event(f"next, a real model: {_next_command()}")
        return Summary(self.folder.path, steps, self.before, after)


def logprob_diff_warning(config: Config, update: Metrics) -> str | None:
    """The warning for a step if sampler and trainer differ by more than `rollout.logprob_diff_warning`.

    None if they do not, if no token was trained on, and if the key is null.
    """
    limit, mean = config.rollout.logprob_diff_warning, update.get("rollout/logprob_diff_mean")
    if limit is None or mean is None or not mean.result() > limit:
        return None
    return (
        f"log-probabilities of sampler and trainer differ by {mean.result():.3g} nats on average and "
        f"{update['rollout/logprob_diff_max'].result():.3g} at most (rollout.logprob_diff_warning is "
        f"{limit:g}): the trained policy differs from the one that was sampled from. Sample without "
        f"rollout.top_p, top_k and min_p, or set model.dtype to float32 (it is {config.model.dtype}); null "
        "disables this warning"
    )


def _next_command() -> str:
    """How to train a real model, in a copy of the repository or elsewhere."""
    if NEXT_CONFIG.is_file() and Path("Makefile").is_file():
        return f"make smollm2 && .venv/bin/quatrain train {NEXT_CONFIG}"
    return (
        "set model.path to a folder or a model on the Hub, data.train and data.eval to your prompts, and "
        "data.question_column to the column of their questions"
    )


def _without_reward_models(config: Config) -> Config:
    functions = {
        name: entry for name, entry in config.reward.functions.items() if name not in config.reward.models
    }
    return config.model_copy(update={"reward": config.reward.model_copy(update={"functions": functions})})


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _peak_memory() -> dict[str, Metric]:
    peak = peak_bytes()
    return {} if peak is None else {"memory/peak_gib": Metric(peak / 2**30, reduction="max")}


def _counts(state: ModelState) -> dict[str, int]:
    return {"step": state.step, "bad_steps": state.bad_steps}


def _episodes_as(config: Config) -> dict[str, Any]:
    """What decides the episodes of an evaluation; nothing where completions have one turn."""
    rollout = config.rollout
    if not rollout.has_episodes:
        return {}
    return {
        "environment": rollout.environment,
        "tools": list(rollout.tools),
        "max_turns": rollout.max_turns,
        "max_environment_tokens": rollout.max_environment_tokens,
    }


def _kept_on_resume(config: Config) -> dict[str, Any]:
    """The keys that determine what is sampled for each training step, and what a checkpoint holds.

    They must not change on resume.
    """
    return {
        "seed": config.seed,
        "data.train": config.data.train if isinstance(config.data.train, str) else list(config.data.train),
        "data.shuffle": config.data.shuffle,
        "data.batch_size": config.data.batch_size,
        "rollout.n": config.rollout.n,
        "data.pass_rate_column": config.data.pass_rate_column,
        "data.min_pass_rate": config.data.min_pass_rate,
        "data.max_pass_rate": config.data.max_pass_rate,
        "rollout.max_staleness": config.rollout.max_staleness,
        "rollout.in_flight": config.rollout.in_flight,
        "update.reference_sync_steps": config.update.reference_sync_steps,
        "optimizer.state_dtype": config.optimizer.state_dtype,
        **(
            {"critic_optimizer.state_dtype": config.critic_optimizer.state_dtype}
            if config.critic.enabled
            else {}
        ),
        "lora.rank": config.lora.rank,
        **(
            {"lora.alpha": config.lora.alpha, "lora.targets": list(config.lora.targets)}
            if config.lora.rank
            else {}
        ),
        # With adapters, the reference after a warm start is part of a checkpoint.
        **({"sft.steps": config.sft.steps} if config.lora.rank else {}),
        # With staleness, checkpoints decide which weights sample a batch.
        **({"checkpoint.every_steps": config.checkpoint.every_steps} if config.rollout.max_staleness else {}),
    }


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of the digests that are not the same in both."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]
