"""The batches of training in order, synchronous too: sampled and scored when it is their turn, or before.

Data flow: `PromptSampler` -> `step.collect` -> `AsyncRollouts.take` -> `TrainBatch`, for `step.learn`. With a
staleness of 0 a batch is collected when it is taken; with more, a thread collects the next ones while this
one is trained on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from quatrain.config.algorithms import takes
from quatrain.config.schema import Config
from quatrain.data.prompts import PromptSource
from quatrain.loop.curriculum import Curriculum
from quatrain.loop.prompts import PromptSampler
from quatrain.loop.stages import Stages
from quatrain.loop.step import collect
from quatrain.run.metrics import StageTimer
from quatrain.types.batches import Prompt, PromptPosition, RewardedBatch, RolloutBatch
from quatrain.types.metrics import Metric
from quatrain.update.learner import TrainState
from quatrain.workers.loop_thread import LoopThread, carry_out

END_TIMEOUT_S = 3.0
"""Seconds that closing waits for the thread; a reward function that takes longer is left behind."""
WAITING = "waiting for weights"
"""What `on_stage` is called with when the thread has nothing to do."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class TrainBatch:
    """The batch of a training step, and where the next step begins in the stream of prompts."""

    rewarded: RewardedBatch
    position: PromptPosition
    seconds: Mapping[str, float]
    """Seconds of each stage that the batch went through, and of waiting, by the name in `time/<name>_s`."""
    began: float
    """When its rollout began, by `time.perf_counter`."""


class AsyncRollouts:
    """The batches of a run of `steps` training steps on `prompts`, in order.

    The batch of step t is sampled whole by one version of the weights: those after step t - `max_staleness`,
    or newer ones where a barrier lies between. Barriers are the steps of checkpoints, the multiples of
    `checkpoint.every_steps`: batches from step c on are sampled by the weights after step c or newer, so
    nothing is in flight at a checkpoint, and a resumed run samples what the uninterrupted one does.

    With `rollout.in_flight`, weights are exchanged between two decode calls, and the samples of the next
    batch begin in the slots that become free while the last of this one decode. A batch is then sampled by
    weights after step t - `max_staleness` or newer, often by several versions, which depend on the timing;
    each token carries its own. There is no dynamic sampling then.

    With a staleness above 0, everything that uses the rollout must go through `take` and `run`; rewards are
    computed in the thread too. `on_stage` is called with the name of each stage when it begins, from the
    thread that runs it.
    """

    def __init__(
        self,
        config: Config,
        stages: Stages,
        prompts: PromptSource,
        steps: int,
        on_stage: Callable[[str], None] = lambda stage: None,
    ):
        rollout = config.rollout
        rounds, size = rollout.dynamic_sampling_rounds, config.data.batch_size
        curriculum = Curriculum.of(config, prompts, stages.reward)
        self._stages = stages
        self._sampler = PromptSampler(
            prompts,
            batch_size=size,
            rounds=rounds,
            curriculum=curriculum,
            by_function=takes(config.advantage.estimator, "function_rewards"),
        )
        self._max_staleness, self._in_flight = rollout.max_staleness, rollout.in_flight
        self._steps, self._barrier_every = steps, config.checkpoint.every_steps
        self._on_stage = on_stage
        self._thread = LoopThread("quatrain-rollout", "the rollout was closed", lambda: None)
        self._batches: deque[Future[TrainBatch]] = deque()
        self._position = PromptPosition()
        self._next_step = 0
        self._idle_since: float | None = None
        self._latest: tuple[Any, int] | None = None
        """The weights of batches in flight, and their version."""

    def take(self, state: TrainState) -> TrainBatch:
        """The batch of training step number `state.train_step`; waits until it is sampled and scored.

        Steps must be taken in order. An error in sampling or scoring a batch is raised when it is taken.
        """
        step = state.train_step
        if not self._batches:
            self._position = state.position
        elif step != self._next_step:
            raise ValueError(
                f"batches are taken in the order of steps: the next is {self._next_step}, got {step}"
            )
        self._next_step = step + 1
        first = step + len(self._batches)
        end = min(step + self._max_staleness + 1, self._next_barrier(step), self._steps)
        began = time.perf_counter()
        if first < end or (self._in_flight and self._batches):
            self._begin(range(first, end), self._weights(state.params), state.step)
        copied = time.perf_counter()
        batch = self._batches.popleft().result()
        if not self._max_staleness:
            return batch
        now = time.perf_counter()
        waited = {"copy_weights": copied - began, "wait_rollout": now - copied, "lead": now - batch.began}
        aged = {**batch.rewarded.metrics, **staleness(batch.rewarded.rollouts, state.step)}
        rewarded = replace(batch.rewarded, metrics=aged)
        return replace(batch, rewarded=rewarded, seconds={**batch.seconds, **waited})

    def _begin(self, steps: Iterable[int], weights: Any, version: int) -> None:
        """Begin the batches of `steps` with `weights` of `version`."""
        if not self._in_flight:
            for step in steps:
                self._batches.append(self._run(partial(self._sample, step, weights, version)))
            return
        self._latest = weights, version
        self._stages.rollout.sync_weights(weights, version)
        for step in steps:
            prompts, self._position = self._sampler.next(self._position)
            ticket = self._stages.rollout.submit(prompts, step=step)
            began = time.perf_counter()
            job = partial(self._finish, step, prompts, ticket, self._position, began)
            self._batches.append(self._run(job))

    def run(self, job: Callable[[], T]) -> T:
        """What `job` returns, run in its turn: after the batches that are being sampled, before others."""
        return self._run(partial(self._in_turn, job)).result()

    def close(self) -> None:
        """End the thread, if there is one, and close the rollout; batches not taken are discarded."""
        for batch in self._batches:
            batch.cancel()
        self._stages.rollout.close()  # so that a batch that is being sampled ends
        if not self._thread.close(END_TIMEOUT_S):
            logger.warning(
                "the rollout's thread did not end within %g seconds and is left behind; a reward function or "
                "a compilation is still running in it",
                END_TIMEOUT_S,
            )

    def _run(self, job: Callable[[], T]) -> Future[T]:
        """`job`, run in the thread of the rollout; without a staleness here and now."""
        done: Future[T] = Future()
        if self._max_staleness:
            self._thread.do(carry_out, job, done)
        else:
            done.set_result(job())
        return done

    def _next_barrier(self, step: int) -> int:
        every = self._barrier_every
        return (step // every + 1) * every if every else self._steps

    def _weights(self, params: Any) -> Any:
        """The rollout's weights; with a staleness they are copies, because training takes over `params`."""
        return self._stages.rollout.copy_weights(params) if self._max_staleness else params

    def _sample(self, step: int, weights: Any, version: int) -> TrainBatch:
        """The batch of training step number `step`, with `weights` of `version`."""
        began = time.perf_counter()
        timer = StageTimer()
        waited = 0.0 if self._idle_since is None else began - self._idle_since

        def sample(prompts: Sequence[Prompt]) -> RewardedBatch:
            return collect(self._stages, prompts, step=step, timed=partial(self._timed, timer))

        with self._timed(timer, "rollout"):
            self._stages.rollout.sync_weights(weights, version)
        rewarded, self._position = self._sampler.take(self._position, sample)
        self._release()
        self._idle()
        seconds = {stage: timer.seconds(stage) for stage in ("rollout", "reward")}
        if self._max_staleness:
            seconds["wait_weights"] = waited
        return TrainBatch(rewarded, self._position, seconds, began)

    def _finish(
        self, step: int, prompts: Sequence[Prompt], ticket: Any, position: PromptPosition, began: float
    ) -> TrainBatch:
        """The batch in flight for `ticket` since `began`; the step after it begins at `position`."""
        timer = StageTimer()
        timed = partial(self._timed, timer)
        rewarded = collect(self._stages, prompts, step=step, ticket=ticket, timed=timed)
        scored = timer.seconds("reward")
        in_flight = time.perf_counter() - began - scored
        self._idle()
        return TrainBatch(rewarded, position, {"rollout": in_flight, "reward": scored}, began)

    @contextmanager
    def _timed(self, timer: StageTimer, stage: str) -> Iterator[None]:
        """Shows a stage and measures its seconds."""
        self._on_stage(stage)
        with timer.stage(stage):
            yield

    def _idle(self) -> None:
        """The thread has nothing to do from now on."""
        self._idle_since = time.perf_counter()
        if self._max_staleness:
            self._on_stage(WAITING)

    def _in_turn(self, job: Callable[[], T]) -> T:
        """What `job` returns; it may use other weights than those of the batches in flight."""
        try:
            return job()
        finally:
            if self._latest is not None:  # of batches in flight, which go on with their weights
                self._stages.rollout.sync_weights(*self._latest)
            self._release()
            self._idle()

    def _release(self) -> None:
        """Give the sampler's memory to the update; a rollout ahead of training needs it meanwhile."""
        if not self._max_staleness:
            self._stages.rollout.release()


def staleness(rollouts: RolloutBatch, version: int) -> dict[str, Metric]:
    """Metrics of the ages of the weights that sampled each token, in optimizer steps before `version`."""
    mask = rollouts.completion_mask
    ages = version - rollouts.policy_version[mask]
    if not ages.size:
        return {}
    versions = [len(np.unique(row[own])) for row, own in zip(rollouts.policy_version, mask, strict=True)]
    return {
        "async/staleness_mean": Metric(float(ages.sum()), ages.size),
        "async/staleness_max": Metric(float(ages.max()), reduction="max"),
        "async/versions_per_sequence_max": Metric(float(max(versions)), reduction="max"),
    }
