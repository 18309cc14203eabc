"""A run: its parts, and what it does before, in and after each training step.

Data flow: `Inputs` -> `build_run` (`build.py`) -> `Run` -> the loop of `train.py`. Each part has a file of
its own: `recorder.py`, `evaluations.py`, `checkpoints.py`, `reference.py`, `asynchronous.py`, `given.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from quatrain.config.data_sets import shown_data_sets
from quatrain.config.dump import dump_yaml
from quatrain.config.schema import Config
from quatrain.data.prompts import PromptSource
from quatrain.loop.asynchronous import AsyncRollouts
from quatrain.loop.checkpoints import Checkpoints
from quatrain.loop.evaluate import Evaluator
from quatrain.loop.evaluations import Evaluations
from quatrain.loop.given import Course, warm_start
from quatrain.loop.inputs import Inputs
from quatrain.loop.policy import LoadedPolicy
from quatrain.loop.prompts import picture_tokens
from quatrain.loop.recorder import Recorder, peak_memory
from quatrain.loop.reference import Reference
from quatrain.loop.stages import Stages
from quatrain.loop.step import learn
from quatrain.loop.stop_when import StopWhen
from quatrain.plan.batch_plan import PictureTokens
from quatrain.rollout.fleet import Fleet, OneWorker
from quatrain.rollout.rollouts import Rollouts
from quatrain.rollout.start_fleet import looks
from quatrain.run.run_dir import RunDir
from quatrain.types.batches import AdvantagedBatch, Prompt
from quatrain.types.metrics import Metrics
from quatrain.update.critic import critic_params
from quatrain.update.learner import TrainState
from quatrain.update.supervised import GivenBatch

PROBES = 4
"""Prompts for each inference server on which it is compared with the trainer before training begins."""
SERVER_TOLERANCE = 4
"""How many times `rollout.logprob_diff_warning` a server may differ from the trainer then."""


@dataclass(kw_only=True)
class Run(ABC):
    """The parts of one run of `steps` training steps; `build_run` makes them."""

    inputs: Inputs
    loaded: LoadedPolicy
    recorder: Recorder
    evaluations: Evaluations
    checkpoints: Checkpoints
    stop_when: StopWhen
    steps: int
    warnings: list[str]
    """Of data that are probably not what is meant, and of rewards that fail on a made-up completion."""
    state: TrainState | None = None
    """After the last finished step, while the run trains."""

    @property
    def config(self) -> Config:
        """The configuration, with derived values."""
        return self.inputs.config

    @property
    def folder(self) -> RunDir:
        """The folder of the run."""
        return self.inputs.folder

    @property
    @abstractmethod
    def length(self) -> str:
        """Its training steps, and what each trains on, in words."""

    @property
    @abstractmethod
    def rows(self) -> str:
        """What there is to train on, in words."""

    @property
    def about_data(self) -> list[str]:
        """What is said of rows that are not trained on, beside the warnings: a sentence each."""
        return []

    @property
    def pictures(self) -> PictureTokens | None:
        """Of the prompts of training, for the plan; None if none has pictures. All processes must ask."""
        return None

    @abstractmethod
    def init(self, *, resumed: bool) -> TrainState:
        """The state before the first step, with the reference; a resumed run replaces its numbers."""

    @abstractmethod
    def step(self, state: TrainState) -> tuple[TrainState, Any]:
        """The state after one training step from `state`, whose arrays it takes over, and its batch."""

    @abstractmethod
    def record(self, step: int, metrics: Metrics, batch: Any) -> None:
        """Writes what training step `step` gave on its batch."""

    def begin(self) -> TrainState:
        """The initial training state: after the warm start, or from a checkpoint."""
        if self.folder.restarted or (self.folder.store and not self.folder.resumed):
            self.folder.start_over()
            self.folder.write_config(dump_yaml(self.inputs.resolved))
        state = self.init(resumed=self.folder.resumed)
        if self.folder.resumed:
            self.recorder.progress.stage("reading the checkpoint")
            state = self.checkpoints.restore(state)
            self.folder.write_config(dump_yaml(self.inputs.resolved))
        self.check_begun(state)
        if not self.folder.resumed:
            self.evaluations.first(state.params)
        return state

    def check_begun(self, state: TrainState) -> None:  # noqa: B027
        """Raises ValueError if the run cannot go on from `state`."""

    def save(self) -> None:
        """Save a checkpoint of the last finished step, if the run trains."""
        if self.state is not None:
            self.checkpoints.save_before_end(self.state)


@dataclass(kw_only=True)
class RolloutRun(Run):
    """`quatrain train`: steps on what is sampled for prompts, after a warm start if there is one."""

    evaluator: Evaluator
    prompts: PromptSource
    demonstrations: Course | None
    stages: Stages
    batches: AsyncRollouts
    reference: Reference

    def __post_init__(self) -> None:
        if self.inputs.saved is not None:
            abstract = self.loaded.abstract(self.config.model.param_dtype)
            self.checkpoints.check(self.stages.update.abstract(*abstract))

    @property
    def length(self) -> str:
        """Its training steps, and their prompts and samples, in words."""
        data, rollout = self.config.data, self.config.rollout
        return f"{self.steps} steps of {data.batch_size} prompts x {rollout.n} samples"

    @property
    def rows(self) -> str:
        """The number of prompts."""
        return f"{len(self.prompts)} training prompts"

    @property
    def about_data(self) -> list[str]:
        """Of the prompts of training and evaluation, and of mixtures."""
        data, sft = self.config.data, self.config.sft
        train = shown_data_sets(data.train)
        sets = ((shown_data_sets(data.eval_sets[each.name]), each.source) for each in self.evaluator.sets)
        lines = self.prompts.mixture(self.steps * data.batch_size)
        if self.demonstrations is not None:
            drawn = self.demonstrations.train.mixture(sft.steps * sft.batch_size)
            lines += [f"examples, {line}" for line in drawn]
        lines += [
            f"{spec}: {source.skipped} prompts skipped, {source.truncated} truncated, longer than "
            f"data.max_prompt_length={data.max_prompt_length} tokens"
            for spec, source in ((train, self.prompts), *sets)
            if source.skipped + source.truncated
        ]
        if self.prompts.filtered:
            kept = f"{self.prompts.filtered} prompts left out by their pass rates, {len(self.prompts)} kept"
            lines.append(f"{train}: {kept}")
        return lines

    @property
    def pictures(self) -> PictureTokens | None:
        return picture_tokens(self.prompts)

    def init(self, *, resumed: bool) -> TrainState:
        """After the warm start, with the reference."""
        params = self.loaded.params if resumed else self.warm_start()
        self.loaded = replace(self.loaded, params=None)
        show = self.recorder.progress.stage
        show("optimizer state")
        state = self.stages.update.init(params, self._critic_params(params))
        del params  # they may wait in the host's memory from here on
        show("reference")
        self.reference.begin(state.params, resumed=resumed)
        return state

    def check_begun(self, state: TrainState) -> None:
        """Raises ValueError if a server and the trainer disagree."""
        if self.config.rollout.servers:
            compare_servers(self, state)

    def _critic_params(self, params: Any) -> Any:
        """The critic's parameters at the start: as loaded, or copies of the policy's `params`; else None."""
        arch, loaded = self.loaded.critic_arch, self.loaded.critic_params
        if arch is None:
            return None
        self.loaded = replace(self.loaded, critic_params=None)
        return critic_params(params, arch, self.loaded.meshes.critic) if loaded is None else loaded

    def warm_start(self) -> Any:
        """The parameters after the supervised steps, or the loaded parameters if there is no warm start."""
        if self.demonstrations is None:
            return self.loaded.params
        steps, recorder = self.config.sft.steps, self.recorder
        recorder.progress.phase("warm start", total=steps)

        def on_step(step: int, metrics: Metrics) -> None:
            self.inputs.stop.safe_point()
            recorder.progress.step(step)
            if step == steps:
                recorder.report.log(0, {**metrics, **peak_memory()})

        # Nothing of a warm start is kept when it is stopped.
        with self.inputs.stop.interruptible(), recorder.timer.stage("sft"):
            return warm_start(self.demonstrations, self.loaded.params, on_step)

    def step(self, state: TrainState) -> tuple[TrainState, AdvantagedBatch]:
        """A batch of rollouts, and what is learnt from it."""
        stop, recorder = self.inputs.stop, self.recorder
        with stop.interruptible():
            batch = self.batches.take(state)
        recorder.took(batch)
        # Until the first optimizer step takes over the arrays of `state`. Another name for what comes out: a
        # signal right after it finds the old state given away, and waits until it is recorded.
        with stop.interruptible_while(partial(self.checkpoints.holds, state)):
            updated, advantaged = learn(self.stages, state, batch.rewarded, timed=recorder.timed)
        updated = replace(updated, position=batch.position)
        self.reference.move_when_due(updated)
        return updated, advantaged

    def record(self, step: int, metrics: Metrics, batch: AdvantagedBatch) -> None:
        """Writes metrics, samples and warnings of a training step."""
        rollouts, rewarded = batch.rollouts, batch.rewarded
        metrics = {**rollouts.metrics, **rewarded.metrics, **batch.metrics, **metrics}
        num_tokens = float(rollouts.attention_mask.sum())
        self.recorder.record(step, metrics, num_tokens, accuracy=self.evaluations.accuracy)
        self.recorder.report.samples(step, batch)


@dataclass(kw_only=True)
class GivenRun(Run):
    """`quatrain sft`, `dpo` and `rm`: steps on data that exist."""

    course: Course

    def __post_init__(self) -> None:
        if self.inputs.saved is not None:
            params, _ = self.loaded.abstract(self.config.model.param_dtype)
            self.checkpoints.check(self.course.learner.abstract(params))

    @property
    def length(self) -> str:
        """Its training steps, and the rows of each, in words."""
        return f"{self.steps} steps of {self.course.section.batch_size} {self.course.unit}"

    @property
    def rows(self) -> str:
        """The number of rows, by what they are."""
        return f"{len(self.course.train)} {self.course.unit}"

    @property
    def about_data(self) -> list[str]:
        """How often the data sets of a mixture are drawn."""
        return self.course.train.mixture(self.steps * self.course.section.batch_size)

    def init(self, *, resumed: bool) -> TrainState:
        """As loaded, with the log-probabilities of the reference, if there is one."""
        params, show = self.loaded.params, self.recorder.progress.stage
        self.loaded = replace(self.loaded, params=None)
        show("reference")
        with self.inputs.stop.interruptible():
            self.course.keep_reference(params, resumed=resumed)
        show("optimizer state")
        return self.course.learner.init(params)

    def step(self, state: TrainState) -> tuple[TrainState, GivenBatch]:
        """One optimizer step on the rows of its number."""
        stop, timed = self.inputs.stop, self.recorder.timed
        with stop.interruptible(), timed("data"):
            batch = self.course.batch(state.train_step)
        with stop.interruptible_while(partial(self.checkpoints.holds, state)), timed("update"):
            return self.course.learner.step(state, batch)

    def record(self, step: int, metrics: Metrics, batch: GivenBatch) -> None:
        """Writes metrics of a training step, and the rows with the largest loss."""
        metrics = {**metrics, **self.course.epoch(step)}
        loss, accuracy = metrics["loss"].result(), self.evaluations.accuracy
        self.recorder.record(step, metrics, batch.num_tokens, accuracy=accuracy, loss=loss)
        self.recorder.report.rows(step, partial(self.course.samples, batch))


def compare_servers(run: RolloutRun, state: TrainState) -> None:
    """Raises ValueError if a server and the trainer give the same tokens other log-probabilities."""
    limit = run.config.rollout.logprob_diff_warning
    if limit is None:
        run.recorder.report.event(
            "log-probabilities of servers and trainer are not compared, because "
            "rollout.logprob_diff_warning is null"
        )
        return
    rollout, servers = run.stages.rollout, run.config.rollout.servers
    assert isinstance(rollout.sampler, Fleet), "servers are workers of a fleet"
    prompts, sampling = run.prompts.head(PROBES), replace(rollout.sampling, n=1)
    rollout.sync_weights(state.params, state.step)
    each = [Rollouts(OneWorker(rollout.sampler, i), rollout.tokenizer, sampling) for i in range(len(servers))]
    sets = [prompts]
    if run.loaded.arch.vision is not None and run.prompts.has_pictures:
        # Apart: among texts, a server that sees other pixels than the trainer would differ by little.
        look = looks(run.loaded).one
        sets.append([Prompt(0, np.array(look.ids, np.int32), "", pictures=look.pictures)])
    asked = [(name, probed, [probed.submit(each) for each in sets]) for name, probed in zip(servers, each)]
    for server, probed, tickets in asked:
        gap = max(run.stages.update.sampler_mismatch(state, probed.wait(ticket)) for ticket in tickets)
        if not gap <= SERVER_TOLERANCE * limit:
            raise ValueError(
                "a server (rollout.servers) and the trainer must agree in log-probabilities of sampled "
                f"tokens; {server} differs by {gap:.3g} nats on average on the first {len(prompts)} "
                f"prompts, more than {SERVER_TOLERANCE} times rollout.logprob_diff_warning ({limit:g}). "
                "See that it computes in the trainer's precision (vLLM: --dtype float32 or model.dtype: "
                "bfloat16), returns processed log-probabilities (vLLM: --logprobs-mode "
                "processed_logprobs), was started from this model without quantization, and resizes pictures "
                "as here"
            )
