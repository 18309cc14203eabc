"""The training loop: a step of the run, and then the evaluation and the checkpoint that are due.

Called by `quatrain train`, `sft`, `dpo` and `rm`, whose steps are those of `run.py`: on what is sampled, or
on data that exist. Run folder, resuming, evaluation, checkpoints and logging are in `open_run.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import jax

from quatrain.cluster.processes import agreement, decided_by_main, is_main_process, num_processes
from quatrain.cluster.stop import Stop, Stopped
from quatrain.config.errors import shown
from quatrain.config.load import Resolved
from quatrain.config.places import is_bucket, local_path
from quatrain.data.rows import NO_ROWS, GivenRows
from quatrain.loop.build import build_run
from quatrain.loop.inputs import Inputs
from quatrain.loop.open_run import Summary, conclude, export, open_run
from quatrain.loop.prompts import NoSignal
from quatrain.loop.run import Run
from quatrain.parallel.compilation_cache import ProgramCount
from quatrain.plan import device_memory
from quatrain.plan.batch_plan import plan as batch_plan
from quatrain.plan.batch_plan import render
from quatrain.plan.placement import placement
from quatrain.report.progress import Progress
from quatrain.run.description import has_ended_with
from quatrain.run.metrics import row_of
from quatrain.run.run_dir import RunDir
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
    """`quatrain train`, or `sft`, `dpo` or `rm` by `run.task`: a new run, or the rest of a resumed one.

    `resume` is the name or the path of the run to go on with, or `auto`. `reward_functions` has Python
    functions for entries of `reward.functions`, by their names there. They are called in this process,
    without limits on time and memory. `rows` has data sets, as lists of dicts or tables, by their names in
    `data.train`, `data.eval`, and in `data` and `eval` of the command's section.

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
    _check_on_step(on_step)
    with open_run(resolved, resume, reward_functions, rows) as run:
        first = max(run.folder.steps(), default=0)
        task = resolved.config.run.task
        kind = "resumed" if first else "train" if task == "rl" else task
        programs = ProgramCount(kind, resolved.config)
        with Progress(run.steps, first=first, programs=programs) as run.recorder.progress:
            state = _train(run, run.begin(), on_step)
            after = run.evaluations.last(state.params, state.train_step, version=state.step)
            export(run, state.params, state.train_step)
        return conclude(run, state.train_step, after)


def _check_on_step(on_step: OnStep | None) -> None:
    """Raises ValueError unless it can be called with the number of a step and its metrics."""
    if on_step is None:
        return
    try:
        inspect.signature(on_step).bind(0, {})
    except TypeError as error:  # also what `signature` raises for what cannot be called
        raise ValueError(
            f"on_step must be a function of the step and its metrics; got {shown(on_step)} ({error}); write "
            "it as def on_step(step, metrics)"
        ) from None
    except ValueError:
        pass  # a function of C without a signature


def _of_task(
    task: str,
    resolved: Resolved,
    *,
    resume: str | None = None,
    reward_functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    rows: GivenRows = NO_ROWS,
    on_step: OnStep | None = None,
) -> Summary:
    """As `train`, of a configuration with this `run.task`; raises ValueError for one with another."""
    if isinstance(resolved, Resolved) and resolved.config.run.task != task:
        raise ValueError(
            f"quatrain.{task} runs what quatrain.load_config('my.yaml', task='{task}') returns; got a "
            f"configuration with run.task {resolved.config.run.task}; load it with that task"
        )
    return train(resolved, resume=resume, reward_functions=reward_functions, rows=rows, on_step=on_step)


sft, dpo, rm = (partial(_of_task, task) for task in ("sft", "dpo", "rm"))
"""The commands of these names."""


def _train(run: Run, state: TrainState, on_step: OnStep | None) -> TrainState:
    recorder, evaluations, checkpoints = run.recorder, run.evaluations, run.checkpoints
    recorder.progress.phase("train", first=state.train_step)
    run.state = state
    end = _ended_before(run, state.train_step, on_step)
    if found := evaluations.when_due(state):  # the run was stopped before it, and so within this step
        end = _end(run, state.train_step, {**_logged(run, state.train_step), **found}, on_step)
    while state.train_step < run.steps and end is None:
        try:
            with recorder.step(state.train_step + 1):
                state, batch = run.step(state)
                run.state = state
            run.record(state.train_step, state.metrics, batch)
            evaluations.when_due(state)
            end = _end(run, state.train_step, recorder.numbers, on_step)
            checkpoints.save_when_due(state)
        except TooManyBadSteps as stopped:
            bad = stopped.state
            run.record(bad.train_step + 1, bad.metrics, stopped.batch)
            checkpoints.save_before_end(bad)
            raise
        except (NoSignal, Stopped):
            checkpoints.save_before_end(state)
            raise
    return state


def _logged(run: Run, step: int) -> dict[str, float]:
    """The finite metrics of `step` that an earlier part of the run has logged; none if they are gone."""
    row = row_of(run.folder.metrics, step) if is_main_process() else {}
    return {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}


def _end(run: Run, step: int, numbers: Mapping[str, float], on_step: OnStep | None) -> str | None:
    """Why the run ends with `step`, by `run.stop_when` or `on_step`, which is called in any case, or None.

    That it ends early is logged, and known to its checkpoints.
    """
    if on_step is None and not run.config.run.stop_when:
        return None

    def decide() -> str | None:
        reached = run.stop_when.reached(numbers)
        answer = on_step(step, dict(numbers)) if on_step else None
        if not (answer is None or isinstance(answer, bool)):
            raise ValueError(
                f"on_step must return True to end the run, or False or None; got {shown(answer)}"
            )
        return reached or ("on_step returned True" if answer else None)

    end = cast("str | None", decided_by_main(decide))
    if end is not None and step < run.steps:
        run.recorder.report.event(f"the run ends with step {step} of {run.steps}: {end}")
        run.checkpoints.end_at(step, end)
    return end


def _ended_before(run: Run, step: int, on_step: OnStep | None) -> str | None:
    """Why a resumed run ends with the `step` of its checkpoint, as it was to before it was stopped, or None.

    It was stopped in its last evaluation or its export; where it has come to its end, it trains on.
    """
    why, run.checkpoints.ended = run.checkpoints.ended, None
    if why is None or (on_step is None and not run.config.run.stop_when):
        return None
    if decided_by_main(lambda: has_ended_with(run.folder.description, step)):
        return None
    run.recorder.report.event(
        f"the run had ended with step {step} of {run.steps}, without its results: {why}"
    )
    run.checkpoints.end_at(step, why)
    return why


def dry_run(resolved: Resolved, *, resume: str | None = None) -> tuple[str, list[str]]:
    """`--dry-run` of `quatrain train`, `sft`, `dpo` and `rm`: all before the first step but reading weights.

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
    store = config.checkpoint.dir
    roots = [local_path(root).absolute() for root in (config.run.dir, store) if root and not is_bucket(root)]
    roots.sort(key=lambda root: -len(root.parts))  # one may be in the other
    new = [[path for path in (root, *root.parents) if not path.exists()] for root in roots]
    named = resolved.chose("run.name")
    where = (config.run.dir, config.run.name)
    made = RunDir.create(*where, resume=resume, named=named, stores=config.checkpoint.dir)
    with Stop(agreement()) as stop, closing(made) as folder:
        stop.conclude = lambda stopped: folder.discard()
        try:
            with stop.interruptible(), ExitStack() as parts:
                run = build_run(Inputs(resolved, folder, stop, parts, weights=False))
                placed = placement(config, devices=jax.device_count(), device_memory=_device_memory())
                lines = [
                    *filter(None, [folder.note]),
                    f"{run.length}, {run.rows}",
                    *run.about_data,
                    render(batch_plan(config, devices=jax.device_count(), pictures=run.pictures)),
                    *device_memory.totals_table(placed),
                ]
                return "\n".join(lines), [*run.warnings, *placed.warnings, *missing_services(config.logging)]
        finally:
            folder.discard()
            for paths in new:
                with suppress(OSError):  # another run has begun in it
                    for path in paths:
                        path.rmdir()


def _device_memory() -> int | None:
    """Bytes of a device, where it tells; a CPU does not."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
