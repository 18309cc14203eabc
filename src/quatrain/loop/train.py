"""The training loop: a batch, `step.learn`, and then the evaluation and the checkpoint that are due.

Called by `quatrain train` and `quatrain sft`. Run folder, resuming, evaluation, checkpoints and logging are
in `open_run.py` and `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import jax

from quatrain.cluster.processes import agreement, decided_by_main, num_processes
from quatrain.cluster.stop import Stop, Stopped
from quatrain.config.derive import value_at
from quatrain.config.errors import shown
from quatrain.config.load import Resolved
from quatrain.config.schema import Config
from quatrain.data.rows import NO_ROWS, GivenRows
from quatrain.loop.build import build_run
from quatrain.loop.inputs import Inputs
from quatrain.loop.open_run import Summary, conclude, export, open_run
from quatrain.loop.prompts import NoSignal
from quatrain.loop.run import Run
from quatrain.loop.step import learn
from quatrain.parallel.compilation_cache import ProgramCount
from quatrain.plan import device_memory
from quatrain.plan.batch_plan import plan as batch_plan
from quatrain.plan.batch_plan import render
from quatrain.plan.placement import placement
from quatrain.report.progress import Progress
from quatrain.run.run_dir import RunDir, checkpoint_steps
from quatrain.run.services import missing_services
from quatrain.update.learner import TooManyBadSteps, TrainState

OnStep = Callable[[int, Mapping[str, float]], bool | None]


def train(
    resolved: Resolved,
    *,
    resume: str | None = None,
    reward_functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    rows: GivenRows = NO_ROWS,
    on_step: OnStep | None = None,
) -> Summary:
    """`quatrain train`: a new run, or the rest of a resumed one (`resume`: its name, its path, or `auto`).

    `reward_functions` has Python functions for entries of `reward.functions`, by their names there. They are
    called in this process, without limits on time and memory. `rows` has data sets, as lists of dicts or
    tables, by their names in `data.train`, `data.eval` and `sft.data`.

    `on_step(step, metrics)` is called after each training step, and its evaluation if it has one, with the
    metrics that both logged, by name; in a run of several processes, in the main one. The run ends with that
    step, as after its last, if it returns True. What it raises ends the run as an error.

    Raises ValueError for invalid input before any computation; TooManyBadSteps and NoSignal after saving a
    checkpoint, and `Stopped`, a KeyboardInterrupt, after a signal and a checkpoint of the last finished step.
    """
    if not isinstance(resolved, Resolved):
        raise ValueError(
            f"quatrain.train takes what quatrain.load_config returns; got {type(resolved).__name__}; give "
            "quatrain.load_config('my.yaml')"
        )
    with open_run(resolved, resume, reward_functions, rows) as run:
        first = max(checkpoint_steps(run.folder.path), default=0)
        programs = ProgramCount("resumed" if first else "train", resolved.config)
        with Progress(run.steps, first=first, programs=programs) as run.recorder.progress:
            state = _train(run, run.begin(), on_step)
            after = run.evaluations.last(state.params, state.train_step, version=state.step)
            export(run, state.params, state.train_step)
        return conclude(run, state.train_step, after)


def _train(run: Run, state: TrainState, on_step: OnStep | None) -> TrainState:
    recorder, evaluations, checkpoints = run.recorder, run.evaluations, run.checkpoints
    recorder.progress.phase("train", first=state.train_step)
    run.state = state
    evaluations.when_due(state)  # in a run that was stopped before it was evaluated
    end = None
    while state.train_step < run.steps and end is None:
        try:
            with recorder.step(state.train_step + 1):
                with run.inputs.stop.interruptible():
                    batch = run.batches.take(state)
                recorder.took(batch)
                # Until the first optimizer step takes over the arrays of `state`. Another name for what comes
                # out: a signal right after it finds the old state given away, and waits until it is recorded.
                with run.inputs.stop.interruptible_while(partial(checkpoints.holds, state)):
                    updated, advantaged = learn(run.stages, state, batch.rewarded, timed=recorder.timed)
            state = run.state = replace(updated, position=batch.position)
            run.reference.move_when_due(state)
            recorder.record(state.train_step, state.metrics, advantaged, evaluations.accuracy)
            evaluations.when_due(state)
            end = _end(run, state.train_step, on_step)
            if end is not None and state.train_step < run.steps:
                recorder.report.event(f"the run ends with step {state.train_step} of {run.steps}: {end}")
                checkpoints.end_at(state.train_step)
            checkpoints.save_when_due(state)
        except TooManyBadSteps as stopped:
            bad = stopped.state
            recorder.record(bad.train_step + 1, bad.metrics, stopped.batch, evaluations.accuracy)
            checkpoints.save_before_end(bad)
            raise
        except (NoSignal, Stopped):
            checkpoints.save_before_end(state)
            raise
    return state


def _end(run: Run, step: int, on_step: OnStep | None) -> str | None:
    """Why the run ends with `step`, by `run.stop_when` or `on_step`, which is called in any case, or None."""
    if on_step is None and not run.config.run.stop_when:
        return None

    def decide() -> str | None:
        reached = run.stop_when.reached(run.recorder.numbers)
        answer = on_step(step, dict(run.recorder.numbers)) if on_step else None
        if not (answer is None or isinstance(answer, bool)):
            raise ValueError(
                f"on_step must return True to end the run, or False or None; got {shown(answer)}"
            )
        return reached or ("on_step returned True" if answer else None)

    return cast("str | None", decided_by_main(decide))


def dry_run(resolved: Resolved, *, resume: str | None = None) -> tuple[str, list[str]]:
    """`quatrain train --dry-run`: everything before the first rollout but reading weights.

    Data are read and tokenised, reward functions are loaded and tried, estimator, loss and meshes are
    checked, and so is what must agree with the checkpoint of a run to resume. Returns the plan as text, and
    warnings, also of packages that are not installed. No folder is left, and that of a resumed run is not
    changed. Raises ValueError for invalid input, and in a run of several processes.
    """
    config = resolved.config
    if num_processes() > 1:
        raise ValueError(
            f"--dry-run needs a single process; got {num_processes()}; start it without the others"
        )
    root = Path(config.run.dir).absolute()
    new = [path for path in (root, *root.parents) if not path.exists()]
    named = resolved.chose("run.name")
    made = RunDir.create(config.run.dir, config.run.name, resume=resume, named=named)
    with Stop(agreement()) as stop, closing(made) as folder:
        stop.conclude = lambda stopped: folder.discard()
        try:
            with stop.interruptible(), ExitStack() as parts:
                run = build_run(Inputs(resolved, folder, stop, parts, weights=False))
                placed = placement(config, devices=jax.device_count(), device_memory=_device_memory())
                lines = [
                    *filter(None, [folder.note]),
                    f"{run.length}, {len(run.prompts)} training prompts",
                    *run.prompts.mixture(run.steps * config.data.batch_size),
                    render(batch_plan(config, devices=jax.device_count())),
                    *device_memory.totals_table(placed),
                ]
                return "\n".join(lines), [*run.warnings, *placed.warnings, *missing_services(config.logging)]
        finally:
            folder.discard()
            with suppress(OSError):  # another run has begun in it
                for path in new:
                    path.rmdir()


def _refuse_keys_of_training(config: Config) -> None:
    """Raises ValueError for keys that ask `quatrain sft` for what only training steps have."""
    defaults: dict[str, Any] = {
        "run.profile_steps": (),
        "run.stop_when": {},
        "checkpoint.best_metric": None,
        "hub.push": None,
    }
    for key, empty in defaults.items():
        value = value_at(config, key)
        if value != empty:
            raise ValueError(
                f"{key} must not be set for quatrain sft, which has no training steps and saves no "
                f"checkpoints; got {shown(value)}; leave it out, or use quatrain train with sft.steps"
            )


def _device_memory() -> int | None:
    """Bytes of a device, where it tells; a CPU does not."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def train_sft(resolved: Resolved) -> Summary:
    """`quatrain sft`: only the supervised warm start, with evaluation before and after, and export.

    Raises ValueError for invalid input, including `sft.steps` 0 and keys that need training steps.
    """
    steps = resolved.config.sft.steps
    if not steps:
        raise ValueError("supervised training needs a number of steps: sft.steps is 0; set it to 1 or more")
    _refuse_keys_of_training(resolved.config)
    with open_run(resolved, None, teaches=False) as run:
        run.resumable = False
        programs = ProgramCount("sft", resolved.config)
        with Progress(steps, programs=programs) as run.recorder.progress:
            run.evaluations.first(run.loaded.params)
            params = run.warm_start(log_every_step=True)
            after = run.evaluations.last(params, steps, version=steps)
            export(run, params, steps)
        return conclude(run, steps, after)
