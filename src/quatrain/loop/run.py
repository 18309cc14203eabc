"""A run: its parts, and what it does before and after training.

Data flow: `Inputs` -> `build_run` (`build.py`) -> `Run` -> the loop of `train.py`. Each part has a file of
its own: `recorder.py`, `evaluations.py`, `checkpoints.py`, `reference.py`, `asynchronous.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quatrain.config.dump import dump_yaml
from quatrain.config.schema import Config
from quatrain.data.examples import ExampleSource
from quatrain.data.prompts import PromptSource
from quatrain.loop.asynchronous import AsyncRollouts
from quatrain.loop.checkpoints import Checkpoints
from quatrain.loop.evaluate import Evaluator
from quatrain.loop.evaluations import Evaluations
from quatrain.loop.inputs import Inputs
from quatrain.loop.policy import LoadedPolicy
from quatrain.loop.recorder import Recorder, peak_memory
from quatrain.loop.reference import Reference
from quatrain.loop.sft import warm_start
from quatrain.loop.stages import Stages
from quatrain.loop.stop_when import StopWhen
from quatrain.rollout.fleet import Fleet, OneWorker
from quatrain.rollout.rollouts import Rollouts
from quatrain.run.run_dir import RunDir
from quatrain.types.metrics import Metrics
from quatrain.update.critic import critic_params
from quatrain.update.learner import TrainState

PROBES = 4
"""Prompts for each inference server on which it is compared with the trainer before training begins."""
SERVER_TOLERANCE = 4
"""How many times `rollout.logprob_diff_warning` a server may differ from the trainer then."""


@dataclass
class Run:
    """The parts of one run of `steps` training steps; `build_run` makes them."""

    inputs: Inputs
    loaded: LoadedPolicy
    prompts: PromptSource
    examples: ExampleSource | None
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

    def __post_init__(self) -> None:
        if self.inputs.saved is not None:
            abstract = self.loaded.abstract(self.config.model.param_dtype)
            self.checkpoints.check(self.stages.update.abstract(*abstract))

    @property
    def config(self) -> Config:
        """The configuration, with derived values."""
        return self.inputs.config

    @property
    def folder(self) -> RunDir:
        """The folder of the run."""
        return self.inputs.folder

    @property
    def length(self) -> str:
        """Its training steps, and their prompts and samples, in words."""
        data, rollout = self.config.data, self.config.rollout
        return f"{self.steps} steps of {data.batch_size} prompts x {rollout.n} samples"

    def begin(self) -> TrainState:
        """The initial training state: after the warm start, or from a checkpoint."""
        if self.folder.restarted:
            self.folder.start_over()
            self.folder.write_config(dump_yaml(self.inputs.resolved))
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
            self.folder.write_config(dump_yaml(self.inputs.resolved))
        if self.config.rollout.servers:
            compare_servers(self, state)
        if not self.folder.resumed:
            self.evaluations.first(state.params)
        return state

    def _critic_params(self, params: Any) -> Any:
        """The critic's parameters at the start: as loaded, or copies of the policy's `params`; else None."""
        arch, loaded = self.loaded.critic_arch, self.loaded.critic_params
        if arch is None:
            return None
        self.loaded = replace(self.loaded, critic_params=None)
        return critic_params(params, arch, self.loaded.meshes.critic) if loaded is None else loaded

    def warm_start(self, *, log_every_step: bool = False) -> Any:
        """The parameters after the supervised steps, or the loaded parameters if there is no warm start."""
        if self.examples is None:
            return self.loaded.params
        steps, recorder = self.config.sft.steps, self.recorder
        recorder.progress.phase("warm start", total=steps)

        def on_step(step: int, metrics: Metrics) -> None:
            self.inputs.stop.safe_point()
            recorder.progress.step(step)
            metrics = {**metrics, **peak_memory()}
            if log_every_step:
                recorder.report.log(step, metrics)
            elif step == steps:
                recorder.report.log(0, metrics)

        # Nothing of a warm start is kept when it is stopped.
        with self.inputs.stop.interruptible(), recorder.timer.stage("sft"):
            return warm_start(self.config, self.loaded, self.examples, on_step=on_step)

    def save(self) -> None:
        """Save a checkpoint of the last finished step, if the run trains."""
        if self.state is not None:
            self.checkpoints.save_before_end(self.state)


def compare_servers(run: Run, state: TrainState) -> None:
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
    tickets = [probed.submit(prompts) for probed in each]
    for server, probed, ticket in zip(servers, each, tickets, strict=True):
        gap = run.stages.update.sampler_mismatch(state, probed.wait(ticket))
        if not gap <= SERVER_TOLERANCE * limit:
            raise ValueError(
                "a server (rollout.servers) and the trainer must agree in log-probabilities of sampled "
                f"tokens; {server} differs by {gap:.3g} nats on average on the first {len(prompts)} "
                f"prompts, more than {SERVER_TOLERANCE} times rollout.logprob_diff_warning ({limit:g}). "
                "See that it computes in the trainer's precision (vLLM: --dtype float32 or model.dtype: "
                "bfloat16), returns processed log-probabilities (vLLM: --logprobs-mode "
                "processed_logprobs) and was started from this model without quantization"
            )
