"""The training step, in four lines: rollout, reward, advantages, update; with a teacher, one more.

`collect` is lines 1 and 2, `learn` lines 3 and 4. The loop (`train.py`) takes a batch from `AsyncRollouts`,
which calls `collect`: at once, or with rollouts ahead in the rollout's thread, some steps early. Then it
calls `learn`. A training loop of one's own calls both (`examples/by_hand.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from quatrain.loop.prompts import source_metrics
from quatrain.loop.stages import Stages
from quatrain.types.batches import AdvantagedBatch, Prompt, RewardedBatch
from quatrain.update.learner import TrainState

Timed = Callable[[str], AbstractContextManager[None]]
"""The context in which the stage of a name runs: it may show the stage, and measure its seconds."""


def untimed(stage: str) -> AbstractContextManager[None]:
    """The context of a stage that nobody measures."""
    return nullcontext()


def collect(
    stages: Stages, prompts: Sequence[Prompt], *, step: int, ticket: Any = None, timed: Timed = untimed
) -> RewardedBatch:
    """Lines 1 and 2 of training step `step`: completions of `prompts`, and their rewards.

    The weights are those of the last `stages.rollout.sync_weights`. With `ticket`, the prompts were submitted
    before, and their completions are waited for (`rollout.in_flight`).
    """
    rollout, reward = stages.rollout, stages.reward
    with timed("rollout"):
        rollouts = rollout.generate(prompts, step=step) if ticket is None else rollout.wait(ticket)
    with timed("reward"):
        rewarded = reward.score(rollouts)
    of_sources = source_metrics(prompts, rewarded)
    return replace(rewarded, metrics={**rewarded.metrics, **of_sources}) if of_sources else rewarded


def learn(
    stages: Stages, state: TrainState, rewarded: RewardedBatch, *, timed: Timed = untimed
) -> tuple[TrainState, AdvantagedBatch]:
    """Lines 3 and 4: advantages of the batch, and the state after the update, with its metrics.

    What the estimator and the loss need of models comes first: a teacher's log-probabilities, and of those of
    `state` log-probabilities and a critic's values. Takes over the parameters of `state`.
    """
    teacher, advantage, update = stages.teacher, stages.advantage, stages.update
    if teacher is not None:
        with timed("teacher"):
            rewarded = teacher.score(rewarded, own=partial(update.own_scores, state.params))
    if update.needs_logprobs_and_values:
        with timed("token_scores"):
            rewarded = update.compute_logprobs_and_values(state, rewarded)
    with timed("advantage"):
        advantaged = advantage.estimate(rewarded)
    with timed("update"):
        state = update.step(state, advantaged)
    return state, advantaged
