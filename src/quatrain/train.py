"""Builds everything a run needs, then runs the stanza: rollout, reward, advantages, update.

The top of the house: called by `quatrain train`. No maths here.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.checkpoint import Checkpointer
from quatrain.cluster.processes import decided_by_main, num_processes
from quatrain.config.dump import dump_yaml, plain
from quatrain.config.environment import redact
from quatrain.config.load import Resolved
from quatrain.config.schema import Config
from quatrain.data.prompts import PromptSource, load_prompts
from quatrain.evaluate import evaluate, finite_numbers, left_out
from quatrain.export import export_policy
from quatrain.metrics import Metric, Metrics
from quatrain.models.params import abstract_params
from quatrain.parallel.mesh import in_memory
from quatrain.plan.batches import plan as batch_plan
from quatrain.plan.batches import render
from quatrain.policy import build_engine, build_policy, load_policy
from quatrain.report.metrics import StageTimer
from quatrain.report.progress import Progress
from quatrain.report.run_dir import RunDir
from quatrain.report.sinks import Report
from quatrain.reward.scorer import RewardScorer
from quatrain.rollout.engine import RolloutEngine, RolloutProgress
from quatrain.sft import warm_start, warm_start_data
from quatrain.types import AdvantagedBatch
from quatrain.update.learner import Learner, TooManyBadSteps, TrainState

logger = logging.getLogger(__name__)
NEXT_COMMAND = "make smollm2 && .venv/bin/quatrain train configs/gsm8k_smollm2_cpu.yaml"


@dataclass(frozen=True)
class Summary:
    """What a run came to: metrics of the evaluations before and after, and where its files are."""

    run: Path
    steps: int
    before: Mapping[str, float]
    after: Mapping[str, float]


def train(resolved: Resolved, *, resume: str | None = None) -> Summary:
    """`quatrain train`: a whole run, or the rest of one. `resume`: a run's name, its path, or `auto`.

    Raises ValueError for bad input, before anything is computed, and TooManyBadSteps, after a checkpoint.
    """
    with _opened(resolved, resume) as run:
        return run.train()


def supervise(resolved: Resolved) -> Summary:
    """`quatrain sft`: the supervised warm start by itself, evaluated before and after, and exported.

    Raises ValueError for bad input, `sft.steps` of 0 included.
    """
    if not resolved.config.sft.steps:
        raise ValueError("supervised training needs a number of steps: sft.steps is 0; set it to 1 or more")
    with _opened(resolved, None) as run:
        return run.supervise()


@contextmanager
def _opened(resolved: Resolved, resume: str | None) -> Iterator[_Run]:
    """What the run is made of, in its folder, then its report around everything that is computed.

    Bad input is found before the report starts, and leaves neither a folder nor a change in that of a
    resumed run.
    """
    config = resolved.config
    assert config.run.name is not None, "run.name is derived before it comes here"
    folder = RunDir.create(config.run.dir, config.run.name, resume=resume)
    if folder.resumed:  # under the name it has, whatever a configuration given anew would call it
        run_section = config.run.model_copy(update={"name": folder.name})
        resolved = replace(resolved, config=config.model_copy(update={"run": run_section}))
    try:
        if not (folder.resumed or folder.restarted):
            folder.write_config(dump_yaml(resolved))
        run = _Run(resolved, folder)
    except BaseException:
        folder.discard()
        raise
    run.report = Report(
        folder,
        config.logging,
        redact=lambda text: redact(text, os.environ),
        run_config=plain(resolved),
    )
    with closing(run.report):
        try:
            with closing(run.checkpoints):
                yield run
        except BaseException as error:
            run.report.failed(error)
            raise


@dataclass(frozen=True)
class _Stages:
    """The four lines."""

    rollout: RolloutEngine
    reward: RewardScorer
    advantage: AdvantageEstimator
    update: Learner


class _Run:
    report: Report
    progress: Progress

    def __init__(self, resolved: Resolved, run: RunDir):
        self.resolved, self.config, self.run = resolved, resolved.config, run
        config = self.config
        self.checkpoints = Checkpointer(run.checkpoints, config.checkpoint.keep)
        self.reference = Checkpointer(run.path / "reference")
        if run.resumed:
            self._check_resumable()
        self.timer = StageTimer()
        self.loaded = load_policy(config)
        self.scorer = RewardScorer(config.reward, decide=decided_by_main)
        self.prompts = self._load_prompts(config.data.train)
        self.heldout = self._load_prompts(config.data.eval) if config.data.eval else None
        self.engine = build_engine(config, self.loaded, on_progress=self._show_decoding)
        self.advantage = AdvantageEstimator(config.advantage)
        warm = config.sft.steps and not run.resumed
        self.demonstrations = warm_start_data(config, self.loaded.tokenizer) if warm else None
        per_epoch = math.ceil(len(self.prompts) / config.data.batch_size)
        self.steps = config.run.steps or max(1, math.ceil(config.run.epochs * per_epoch))
        self.before: dict[str, float] = {}
        self.accuracy: float | None = None

    def supervise(self) -> Summary:
        """Evaluate, warm start, evaluate, export."""
        steps = self.config.sft.steps
        self._announce(f"{steps} supervised steps of {self.config.sft.batch_size} demonstrations")
        count = self.config.eval.final_num_prompts
        with Progress(steps) as self.progress:
            self.before = self._evaluate(self.loaded.params, 0, count, "evaluation before training")
            params = self._warm_start(log_every_step=True)
            after = self._evaluate(params, steps, count, "final evaluation")
            export_policy(self.run.final, self.loaded.arch, params, self.loaded.tokenizer)
        return self._conclude(steps, after)

    def train(self) -> Summary:
        """Warm start or restore, evaluate, train, evaluate, export."""
        size = f"{self.config.data.batch_size} prompts x {self.config.rollout.n} samples"
        self._announce(f"{self.steps} steps of {size}")
        with Progress(self.steps) as self.progress:
            state, stages = self._begin()
            try:
                state = self._train(state, stages)
            except TooManyBadSteps as stopped:
                self._record(stopped.state.train_step + 1, stopped.state.metrics, stopped.batch)
                self._save(stopped.state)
                raise
            count = self.config.eval.final_num_prompts
            after = self._evaluate(state.params, state.train_step, count, "final evaluation")
            self.progress.stage("export")
            export_policy(self.run.final, self.loaded.arch, state.params, self.loaded.tokenizer)
            self.checkpoints.wait()
        return self._conclude(state.train_step, after)

    def _load_prompts(self, spec: str) -> PromptSource:
        return load_prompts(
            spec,
            self.config.data,
            self.loaded.tokenizer,
            seed=self.config.seed,
            required_columns=self.scorer.required_columns,
        )

    def _announce(self, plan: str) -> None:
        self.report.event(f"run {self.run.name}: {plan}")
        batches = batch_plan(self.config, devices=jax.device_count(), processes=num_processes())
        for line in render(batches).splitlines():
            self.report.event(line)
        data, sft = self.config.data, self.config.sft
        for spec, source in (
            (data.train, self.prompts),
            (data.eval, self.heldout),
            (f"demonstrations of {sft.data or data.train}", self.demonstrations),
        ):
            if source is not None and source.skipped + source.truncated:
                self.report.event(
                    f"{spec}: {source.skipped} prompts skipped, {source.truncated} truncated, longer than "
                    f"data.max_prompt_length={data.max_prompt_length} tokens"
                )

    def _begin(self) -> tuple[TrainState, _Stages]:
        """The state training starts from (warm start or checkpoint) and the stages around it."""
        config = self.config
        if self.run.restarted:
            self.run.start_over()
            self.run.write_config(dump_yaml(self.resolved))
        params = self.loaded.params if self.run.resumed else self._warm_start()
        self.loaded = replace(self.loaded, params=None)
        reference = self._reference(params) if config.update.kl_coef else None
        stages = _Stages(self.engine, self.scorer, self.advantage, self._learner(reference))
        state = stages.update.init(params)
        if self.run.resumed:
            state = self._restore(state)
        else:
            count = config.eval.num_prompts
            self.before = self._evaluate(state.params, 0, count, "evaluation before training")
        return state, stages

    def _warm_start(self, *, log_every_step: bool = False) -> Any:
        if self.demonstrations is None:
            return self.loaded.params
        steps = self.config.sft.steps
        self.progress.phase("warm start", total=steps)

        def on_step(step: int, metrics: Metrics) -> None:
            self.progress.step(step)
            if log_every_step:
                self.report.log(step, metrics)
            elif step == steps:
                self.report.log(0, metrics)

        with self.timer.stage("sft"):
            return warm_start(self.config, self.loaded, self.demonstrations, on_step=on_step)

    def _reference(self, params: Any) -> Any:
        """A frozen copy of the policy training started from, kept beside the checkpoints for resuming.

        On the devices of its role, in their memory or their host's.
        """
        mesh = self.loaded.meshes.reference
        like = abstract_params(self.loaded.arch, self.config.model.param_dtype, mesh)
        with closing(self.reference) as store:
            if not self.run.resumed:
                store.save(0, {"params": params}, {})
            _, arrays, _ = store.restore({"params": like})
        return in_memory("host" if self.config.offload.reference else "device", arrays["params"])

    def _learner(self, reference: Any) -> Learner:
        config = self.config
        assert config.update.mini_batch_size is not None, "batch sizes are derived before they come here"
        mini_batches = math.ceil(config.data.batch_size / config.update.mini_batch_size)
        return Learner(
            build_policy(config, self.loaded, temperature=config.rollout.temperature or 1.0),
            config.update,
            config.logprob,
            config.optimizer,
            max_new_tokens=config.rollout.max_new_tokens,
            total_steps=self.steps * config.update.epochs * mini_batches,
            seed=config.seed,
            reference=reference,
            optimizer_memory="host" if config.offload.optimizer else "device",
        )

    def _train(self, state: TrainState, stages: _Stages) -> TrainState:
        self.progress.phase("train")
        while state.train_step < self.steps:
            state, advantaged = self._step(state, stages)
            self._record(state.train_step, state.metrics, advantaged)
            every, last = self.config.eval.every_steps, state.train_step == self.steps
            if every and state.train_step % every == 0 and not last:
                count = self.config.eval.num_prompts
                self._evaluate(state.params, state.train_step, count, "evaluation")
            every = self.config.checkpoint.every_steps
            if last or (every and state.train_step % every == 0):
                self._save(state)
                self.report.log(state.train_step, self.timer.metrics())
        return state

    def _step(self, state: TrainState, stages: _Stages) -> tuple[TrainState, AdvantagedBatch]:
        """One stanza."""
        step, config = state.train_step, self.config
        with self.timer.stage("step"):
            prompts = self.prompts.batch(step, config.data.batch_size)
            with self._stage("rollout"):
                stages.rollout.sync_weights(state.params, state.step)
                rollouts = stages.rollout.generate(prompts, step=step)
            with self._stage("reward"):
                rewarded = stages.reward.score(rollouts)
            with self._stage("advantage"):
                advantaged = stages.advantage.estimate(rewarded)
            with self._stage("update"):
                state = stages.update.step(state, advantaged)
        return state, advantaged

    def _stage(self, name: str) -> Any:
        self.progress.stage(name)
        return self.timer.stage(name)

    def _show_decoding(self, decoding: RolloutProgress) -> None:
        self.progress.detail(str(decoding))

    def _record(self, step: int, update: Metrics, advantaged: AdvantagedBatch) -> None:
        step_s = self.timer.seconds("step")
        rollouts, rewarded = advantaged.rollouts, advantaged.rewarded
        tokens_per_s = float(rollouts.attention_mask.sum()) / step_s
        metrics = {
            **rollouts.metrics,
            **rewarded.metrics,
            **advantaged.metrics,
            **update,
            **self.timer.metrics(),
            "throughput/tokens_per_s": Metric(tokens_per_s),
            "data/skipped_prompts": Metric(self.prompts.skipped, reduction="sum"),
            "data/truncated_prompts": Metric(self.prompts.truncated, reduction="sum"),
        }
        self.report.log(step, metrics)
        self.report.samples(step, advantaged)
        gap = logprob_diff_warning(self.config, update)
        if gap is not None:
            logger.warning("step %d: %s", step, gap)
        self.progress.step(
            step,
            reward=metrics["reward/mean"].result() if "reward/mean" in metrics else None,
            accuracy=self.accuracy,
            tokens_per_s=tokens_per_s,
        )

    def _evaluate(self, params: Any, step: int, count: int | None, name: str) -> dict[str, float]:
        if self.heldout is None:
            return {}
        self.progress.stage(name)
        self.engine.sync_weights(params, step)
        with self.timer.stage("eval"):
            metrics = evaluate(
                self.engine,
                self.scorer,
                self.heldout.head(count),
                self.config.eval,
                on_progress=lambda done, total: self.progress.stage(f"{name} {done}/{total}"),
            )
        self.report.log(step, {**metrics, **left_out(self.heldout), **self.timer.metrics()})
        numbers = finite_numbers(metrics)
        self.accuracy = numbers.get("eval/accuracy_strict")
        return numbers

    def _save(self, state: TrainState) -> None:
        latest = decided_by_main(self.checkpoints.latest_step)
        if latest is not None and state.train_step <= latest:
            return
        self.progress.stage("checkpoint")
        with self.timer.stage("checkpoint"):
            self.checkpoints.save(
                state.train_step,
                {"params": state.params, "opt_state": state.opt_state},
                {
                    "step": state.step,
                    "train_step": state.train_step,
                    "bad_steps": state.bad_steps,
                    "config": _kept_on_resume(self.config),
                    "before": self.before,
                    "accuracy": self.accuracy,
                },
            )

    def _check_resumable(self) -> None:
        """The stream of prompts and the reference policy are those of the run so far."""
        saved = self.checkpoints.read_host()["config"]
        for key, value in _kept_on_resume(self.config).items():
            if value != saved[key]:
                raise ValueError(
                    f"a run is resumed with its own {key}: {self.run.path} has {saved[key]}, got {value}; "
                    f"set {key} back, or start another run"
                )
        if self.config.update.kl_coef and not self.reference.steps():
            raise ValueError(
                "a run keeps the policy its KL is taken to when it starts with update.kl_coef above 0: "
                f"{self.run.path} has none, got update.kl_coef {self.config.update.kl_coef}; "
                "set update.kl_coef back to 0, or start another run"
            )

    def _restore(self, state: TrainState) -> TrainState:
        target = {"params": state.params, "opt_state": state.opt_state}
        step, arrays, host = self.checkpoints.restore(target)
        self.run.rewind(step)
        self.run.write_config(dump_yaml(self.resolved))
        self.before, self.accuracy = host["before"], host["accuracy"]
        return replace(
            state, **arrays, step=host["step"], train_step=host["train_step"], bad_steps=host["bad_steps"]
        )

    def _conclude(self, steps: int, after: Mapping[str, float]) -> Summary:
        event = self.report.event
        for key, name in (("eval/accuracy_strict", "accuracy"), ("eval/reward", "reward")):
            if key in after:
                before = f"{self.before[key]:.3f} before, " if key in self.before else ""
                event(f"held-out {name}: {before}{after[key]:.3f} after {steps} steps")
        event(f"metrics, samples, checkpoints and log: {self.run.path}")
        event(f"the trained model, for transformers: {self.run.final}")
        if self.config.model.path.startswith("builtin:"):
            event(f"next, a real model: {NEXT_COMMAND}")
        return Summary(self.run.path, steps, self.before, after)


def logprob_diff_warning(config: Config, update: Metrics) -> str | None:
    """What to tell of a step whose sampler and trainer disagree by more than `rollout.logprob_diff_warning`.

    None where they do not, where no token was trained on, and where the key is null.
    """
    limit, mean = config.rollout.logprob_diff_warning, update.get("rollout/logprob_diff_mean")
    if limit is None or mean is None or not mean.result() > limit:
        return None
    return (
        f"log-probabilities of sampler and trainer differ by {mean.result():.3g} nats in the mean, "
        f"{update['rollout/logprob_diff_max'].result():.3g} at most, and rollout.logprob_diff_warning is "
        f"{limit:g}: the gradient is not that of the policy that was sampled from. Sample without "
        "rollout.top_p, top_k and min_p, take fewer or smaller optimizer steps on a rollout batch, or set "
        f"model.dtype to float32 (it is {config.model.dtype}); null switches this warning off"
    )


def _kept_on_resume(config: Config) -> dict[str, Any]:
    """The keys behind the stream of prompts and random numbers: a checkpoint is a place in that stream."""
    return {
        "seed": config.seed,
        "data.train": config.data.train,
        "data.batch_size": config.data.batch_size,
        "rollout.n": config.rollout.n,
    }
