"""The training loop: rollout, reward, advantages, update.

Called by `quatrain train` and `quatrain sft`. Run folder, resuming, evaluation, checkpoints and logging are
in `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from quatrain.ahead import Taken
from quatrain.cluster.stop import Stopped
from quatrain.config.load import Resolved
from quatrain.draw import NoSignal
from quatrain.report.progress import Progress
from quatrain.run import Run, Summary, open_run
from quatrain.stages import Stages
from quatrain.types import AdvantagedBatch
from quatrain.update.learner import TooManyBadSteps, TrainState


def train_step(
    stages: Stages,
    state: TrainState,
    taken: Taken,
    timed: Callable[[str], AbstractContextManager[None]],
) -> tuple[TrainState, AdvantagedBatch]:
    """Lines 3 and 4 of a training step; returns the new state and the batch.

    `taken` comes from lines 1 and 2, rollout and reward, which `Ahead` runs. Each stage runs in a context
    `timed(name)`.
    """
    rewarded = taken.rewarded
    if stages.update.scores_tokens:
        with timed("token_scores"):
            rewarded = stages.update.score_tokens(state, rewarded)
    with timed("advantage"):
        advantaged = stages.advantage.estimate(rewarded)
    with timed("update"):
        state = stages.update.step(state, advantaged)
    return replace(state, place=taken.place), advantaged


def train(resolved: Resolved, *, resume: str | None = None) -> Summary:
    """`quatrain train`: a new run, or the rest of a resumed one (`resume`: its name, its path, or `auto`).

    Raises ValueError for invalid input before any computation; TooManyBadSteps and NoSignal after saving a
    checkpoint, and `Stopped`, a KeyboardInterrupt, after a signal and a checkpoint of the last finished step.
    """
    with open_run(resolved, resume) as run:
        run.announce(f"{run.steps} steps of {run.step_size}")
        with Progress(run.steps) as run.progress:
            state, stages = run.begin()
            state = _train(run, state, stages)
            after = run.evaluate_last(state.params, state.train_step)
            run.export(state.params)
        return run.conclude(state.train_step, after)


def _train(run: Run, state: TrainState, stages: Stages) -> TrainState:
    run.progress.phase("train")
    run.evaluate_when_due(state)  # in a run that was stopped before it was evaluated
    while state.train_step < run.steps:
        try:
            with run.timed_step():
                taken = run.take(state)
                state, advantaged = train_step(stages, state, taken, run.timed)
            run.record(state.train_step, state.metrics, advantaged)
            run.evaluate_when_due(state)
            run.save_when_due(state)
        except TooManyBadSteps as stopped:
            run.record(stopped.state.train_step + 1, stopped.state.metrics, stopped.batch)
            run.save_before_end(stopped.state)
            raise
        except (NoSignal, Stopped):
            run.save_before_end(state)
            raise
    return state


def supervise(resolved: Resolved) -> Summary:
    """`quatrain sft`: only the supervised warm start, with evaluation before and after, and export.

    Raises ValueError for invalid input, including `sft.steps` 0.
    """
    steps = resolved.config.sft.steps
    if not steps:
        raise ValueError("supervised training needs a number of steps: sft.steps is 0; set it to 1 or more")
    with open_run(resolved, None) as run:
        run.resumable = False
        run.announce(f"{steps} supervised steps of {resolved.config.sft.batch_size} demonstrations")
        with Progress(steps) as run.progress:
            run.evaluate_first(run.loaded.params)
            params = run.warm_start(log_every_step=True)
            after = run.evaluate_last(params, steps)
            run.export(params)
        return run.conclude(steps, after)
