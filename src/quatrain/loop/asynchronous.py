"""Batches in the order of training, sampled and scored up to some training steps before their turn.

Lines 1 and 2 of a training step. Data flow: `Draws` -> rollout -> reward -> `Ahead.take` -> `Taken`, for the
rest of the step in `train.py`. With a lag of 0 a batch is sampled when it is taken; with more, a thread
samples the next ones while this one is trained on.
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

from quatrain.engine.service import EngineService
from quatrain.loop.prompts import Draws
from quatrain.reward.scorer import RewardScorer
from quatrain.run.metrics import StageTimer
from quatrain.types.batches import Prompt, PromptPlace, RewardedBatch, RolloutBatch
from quatrain.types.metrics import Metric
from quatrain.types.rollouts import Rollouts
from quatrain.update.learner import TrainState

END_TIMEOUT_S = 3.0
"""Seconds that closing waits for the thread; a reward function that takes longer is left behind."""
WAITING = "waiting for weights"
"""What `on_stage` is called with when the thread has nothing to do."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Taken:
    """The batch of a training step, and where the next step begins in the stream of prompts."""

    rewarded: RewardedBatch
    place: PromptPlace
    seconds: Mapping[str, float]
    """Seconds of each stage that the batch went through, and of waiting, by the name in `time/<name>_s`."""
    began: float
    """When its rollout began, by `time.perf_counter`."""


class Ahead:
    """The batches of a run of `steps` training steps, in order.

    The batch of step t is sampled whole by one version of the weights: those after step t - `lag`, or newer
    ones where a fence lies between. Fences are the multiples of `fence_every` (0: none), the steps of
    checkpoints: batches from step c on are sampled by the weights after step c or newer, so nothing is in
    flight at a checkpoint, and a resumed run samples what the uninterrupted one does.

    With `in_flight`, weights are exchanged between two decode calls, and the samples of the next batch begin
    in the slots that become free while the last of this one decode. A batch is then sampled by weights after
    step t - `lag` or newer, often by several versions, which depend on the timing; each token carries its
    own. `draws` must not sample dynamically.

    With a lag, everything that uses `rollout` must go through `take` and `run`; `reward` is called from the
    thread too. `on_stage` is called with the name of each stage when it begins, from the thread that runs it.
    """

    def __init__(
        self,
        rollout: Rollouts,
        reward: RewardScorer,
        draws: Draws,
        *,
        lag: int,
        steps: int,
        fence_every: int,
        in_flight: bool = False,
        on_stage: Callable[[str], None] = lambda stage: None,
    ):
        self._rollout, self._reward, self._draws = rollout, reward, draws
        self._lag, self._steps, self._fence_every = lag, steps, fence_every
        self._in_flight = in_flight
        self._on_stage = on_stage
        self._service = EngineService(rollout, name="quatrain-rollout") if lag else None
        self._batches: deque[Future[Taken]] = deque()
        self._place = PromptPlace()
        self._next_step = 0
        self._idle_since: float | None = None
        self._latest: tuple[Any, int] | None = None
        """The weights of batches in flight, and their version."""

    def take(self, state: TrainState) -> Taken:
        """The batch of training step number `state.train_step`; waits until it is sampled and scored.

        Steps must be taken in order. An error in sampling or scoring a batch is raised when it is taken.
        """
        step = state.train_step
        if not self._batches:
            self._place = state.place
        elif step != self._next_step:
            raise ValueError(
                f"batches are taken in the order of steps: the next is {self._next_step}, got {step}"
            )
        self._next_step = step + 1
        first = step + len(self._batches)
        end = min(step + self._lag + 1, self._next_fence(step), self._steps)
        began = time.perf_counter()
        if first < end or (self._in_flight and self._batches):
            self._begin(range(first, end), self._weights(state.params), state.step)
        placed = time.perf_counter()
        taken = self._batches.popleft().result()
        if not self._lag:
            return taken
        now = time.perf_counter()
        waited = {"place_weights": placed - began, "wait_rollout": now - placed, "lead": now - taken.began}
        aged = {**taken.rewarded.metrics, **staleness(taken.rewarded.rollouts, state.step)}
        rewarded = replace(taken.rewarded, metrics=aged)
        return replace(taken, rewarded=rewarded, seconds={**taken.seconds, **waited})

    def _begin(self, steps: Iterable[int], weights: Any, version: int) -> None:
        """Begin the batches of `steps` with `weights` of `version`."""
        if not self._in_flight:
            for step in steps:
                self._batches.append(self._run(partial(self._sample, step, weights, version)))
            return
        self._latest = weights, version
        self._rollout.sync_weights(weights, version)
        for step in steps:
            prompts, self._place = self._draws.next(self._place)
            ticket = self._rollout.submit(prompts, step=step)
            job = partial(self._finish, ticket, self._place, time.perf_counter())
            self._batches.append(self._run(job))

    def run(self, job: Callable[[], T]) -> T:
        """What `job` returns, run in its turn: after the batches that are being sampled, before others."""
        return self._run(partial(self._in_turn, job)).result()

    def close(self) -> None:
        """End the thread, if there is one, and close the rollout; batches not taken are discarded."""
        for batch in self._batches:
            batch.cancel()
        if self._service is None:
            self._rollout.close()
        elif not self._service.close(END_TIMEOUT_S):
            logger.warning(
                "the rollout's thread did not end within %g seconds and is left behind; a reward function or "
                "a compilation is still running in it",
                END_TIMEOUT_S,
            )

    def _run(self, job: Callable[[], T]) -> Future[T]:
        """`job`, run in the thread of the rollout; without a lag here and now."""
        if self._service is not None:
            return self._service.run(job)
        done: Future[T] = Future()
        done.set_result(job())
        return done

    def _next_fence(self, step: int) -> int:
        every = self._fence_every
        return (step // every + 1) * every if every else self._steps

    def _weights(self, params: Any) -> Any:
        """The rollout's weights; with a lag they are copies, because training takes over `params`."""
        if not self._lag:
            return params
        return self._rollout.place(params)

    def _sample(self, step: int, weights: Any, version: int) -> Taken:
        """The batch of training step number `step`, with `weights` of `version`: lines 1 and 2."""
        began = time.perf_counter()
        timer = StageTimer()
        waited = 0.0 if self._idle_since is None else began - self._idle_since

        def sample(prompts: Sequence[Prompt]) -> RewardedBatch:
            with self._stage("rollout", timer):
                rollouts = self._rollout.generate(prompts, step=step)
            with self._stage("reward", timer):
                rewarded = self._reward.score(rollouts)
            return rewarded

        with self._stage("rollout", timer):
            self._rollout.sync_weights(weights, version)
        rewarded, self._place = self._draws.take(self._place, sample)
        self._release()
        self._idle()
        seconds = {stage: timer.seconds(stage) for stage in ("rollout", "reward")}
        if self._lag:
            seconds["wait_weights"] = waited
        return Taken(rewarded, self._place, seconds, began)

    def _finish(self, ticket: Any, place: PromptPlace, began: float) -> Taken:
        """The batch in flight for `ticket` since `began`; the step after it begins at `place`."""
        timer = StageTimer()
        with self._stage("rollout", timer):
            rollouts = self._rollout.wait(ticket)
        in_flight = time.perf_counter() - began
        with self._stage("reward", timer):
            rewarded = self._reward.score(rollouts)
        self._idle()
        return Taken(rewarded, place, {"rollout": in_flight, "reward": timer.seconds("reward")}, began)

    @contextmanager
    def _stage(self, name: str, timer: StageTimer) -> Iterator[None]:
        """Shows a stage and measures its seconds."""
        self._on_stage(name)
        with timer.stage(name):
            yield

    def _idle(self) -> None:
        """The thread has nothing to do from now on."""
        self._idle_since = time.perf_counter()
        if self._lag:
            self._on_stage(WAITING)

    def _in_turn(self, job: Callable[[], T]) -> T:
        """What `job` returns; it may use other weights than those of the batches in flight."""
        try:
            return job()
        finally:
            if self._latest is not None:  # of batches in flight, which go on with their weights
                self._rollout.sync_weights(*self._latest)
            self._release()
            self._idle()

    def _release(self) -> None:
        """Give the sampler's memory to the update; a rollout ahead of training needs it meanwhile."""
        if not self._lag:
            self._rollout.release()


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
