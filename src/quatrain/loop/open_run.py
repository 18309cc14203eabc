"""Opens a run: its folder and its lock, signals that stop it, and its report; and writes its results.

Data flow: `Resolved` -> `open_run` -> `Inputs` -> `build_run` -> the `Run` that `train.py` trains -> `export`
and `conclude`.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from quatrain.cluster.processes import agreement, decided_by_main, is_main_process, num_processes
from quatrain.cluster.stop import Stop, Stopped
from quatrain.config.data_sets import data_set_list
from quatrain.config.dump import dump_yaml, plain
from quatrain.config.load import Resolved
from quatrain.config.places import local_path
from quatrain.config.schema import Config
from quatrain.config.secrets import redact, redactor
from quatrain.config.tasks import COMMANDS
from quatrain.data.rows import NO_ROWS, GivenRows
from quatrain.loop.build import build_run
from quatrain.loop.export import ADAPTER, export_policy
from quatrain.loop.hub import make_repository, push
from quatrain.loop.inputs import NO_FUNCTIONS, Inputs, RewardFunctions
from quatrain.loop.run import Run
from quatrain.plan.batch_plan import overview
from quatrain.plan.batch_plan import plan as batch_plan
from quatrain.report.hints import Hints, hints_in
from quatrain.report.progress import waiting
from quatrain.report.start_up import starting
from quatrain.report.writer import Report, own_messages
from quatrain.run.description import describe, describe_end
from quatrain.run.run_dir import RunDir

logger = logging.getLogger(__name__)
_loading = threading.Lock()
"""One run of a process loads at a time: transformers' lazy imports fail in two threads at once."""
NOT_BEGUN = "the run had not begun; give the same command again"
NEXT_CONFIG = Path("configs", "gsm8k_smollm2_cpu.yaml")


@contextmanager
def open_run(
    resolved: Resolved,
    resume: str | None,
    reward_functions: RewardFunctions = NO_FUNCTIONS,
    rows: GivenRows = NO_ROWS,
) -> Iterator[Run]:
    """Creates the run's folder, the `Run` and its report; closes them at the end.

    For invalid input it raises an error before logging starts, deletes a new folder and does not change the
    folder of a resumed run. A signal that stops the run raises `Stopped`, with the command to go on.
    """
    config = resolved.config
    with ExitStack() as outer:
        stop = outer.enter_context(Stop(agreement()))
        named = resolved.chose("run.name")
        where = (config.run.dir, config.run.name)
        folder = RunDir.create(*where, resume=resume, named=named, stores=config.checkpoint.dir)
        outer.enter_context(closing(folder))
        outer.enter_context(own_messages())
        resolved = _in_its_place(resolved, folder)
        parts = outer.enter_context(ExitStack())
        stop.advice, stop.conclude = lambda: NOT_BEGUN, partial(_give_up, folder)
        try:
            if not (folder.resumed or folder.restarted):
                folder.write_config(dump_yaml(resolved))
            with stop.interruptible(), starting(), waiting(), _loading:
                inputs = Inputs(resolved, folder, stop, parts, reward_functions, rows)
                run = build_run(inputs)
                if repository := config.hub.push:  # last, so that invalid input leaves no repository
                    make = partial(make_repository, repository, private=config.hub.private)
                    decided_by_main(make)
        except BaseException as error:
            _give_up(folder, error)
            raise
        report = run.recorder.report = outer.enter_context(closing(_report(run)))
        stop.save, stop.conclude = run.save, partial(_conclude_beside, run)
        stop.advice = lambda: redact(how_to_go_on(run), os.environ) if is_main_process() else ""
        for warning in run.warnings:
            logger.warning("%s", warning)
        try:
            with parts.pop_all():  # ended before the report is
                changed = folder.changed_keys(dump_yaml(run.inputs.resolved))
                describe(folder, run.config, reward_functions, changed)
                _announce(run)
                yield run
        except BaseException as error:
            if isinstance(error, Stopped):
                error.advice = how_to_go_on(run)
            report.failed(error)
            raise


def _give_up(folder: RunDir, error: BaseException) -> None:
    """Deletes a new folder of a run that has not begun, because of `error`."""
    if isinstance(error, Stopped):
        error.advice = NOT_BEGUN
    folder.discard()


def _in_its_place(resolved: Resolved, folder: RunDir) -> Resolved:
    """A resumed run keeps its name and its place, whatever the given configuration sets."""
    if not folder.resumed:
        return resolved
    home = folder.path.resolve()
    place: dict[str, Any] = {"name": home.name}
    if local_path(resolved.config.run.dir).resolve() != home.parent:
        place["dir"] = str(home.parent)
    run = resolved.config.run.model_copy(update=place)
    return replace(resolved, config=resolved.config.model_copy(update={"run": run}))


def _report(run: Run) -> Report:
    folder, tokenizer = run.folder, run.loaded.tokenizer
    return Report(
        folder,
        run.config.logging,
        redactor=lambda: redactor(os.environ),
        run_config=plain(run.inputs.resolved),
        token_text=lambda token: tokenizer.decode([token]),
        hints=Hints(run.config, run.steps, hints_in(folder.hints) if folder.resumed else ()),
    )


def _conclude_beside(run: Run, stopped: Stopped) -> None:
    """Close what shows and writes the run, whose own thread computes and will not come back."""
    run.recorder.progress.close()
    stopped.advice = how_to_go_on(run)
    run.recorder.report.failed(stopped)
    run.recorder.report.close()


def how_to_go_on(run: Run) -> str:
    """What a run that was stopped has saved, and the command that goes on with it."""
    steps = list[int]()
    with suppress(ValueError):  # of a bucket that cannot be read
        steps = run.folder.steps()
    command = COMMANDS[run.config.run.task]
    # In its folder, for relative paths, and `.env`.
    resume = f"cd {shlex.quote(os.getcwd())} && quatrain {command} --resume"
    if steps:
        return f"step {max(steps)} is saved; go on with:\n  {resume} {shlex.quote(str(run.folder.path))}"
    done = "before its first step"
    if run.state is not None and run.state.train_step:  # a second signal
        done = f"step {run.state.train_step} is not saved"
    where = [f"run.name={run.folder.name}", f"run.dir={run.folder.path.parent}"]
    options = " ".join(f"--set {shlex.quote(option)}" for option in where)
    return f"{done}; start it again with:\n  {resume} auto {options}"


def _announce(run: Run) -> None:
    """Log a summary of the run, its batch plan, and the numbers of rows that are not trained on."""
    config, event = run.config, run.recorder.report.event
    event(f"run {run.folder.name}: {run.length}")
    layout = {"devices": jax.device_count(), "processes": num_processes()}
    batches = batch_plan(config, **layout, pictures=run.pictures)
    for line in overview(batches):
        event(line)
    run.folder.write_plan(batches.to_dict())
    for line in run.about_data:
        event(line)


@dataclass(frozen=True)
class Summary:
    """Result of a run: its folder, its steps, and the metrics of the evaluations before and after."""

    run: Path
    steps: int
    before: Mapping[str, float]
    after: Mapping[str, float]


def export(run: Run, params: Any, step: int) -> None:
    """Write the model of `step` for transformers, wait for the last checkpoint, and push to the Hub.

    If the push fails, that is logged as an error with the command to push again: the run has its model.
    """
    run.recorder.progress.stage("export")
    loaded, base = run.loaded, run.config.model.path
    given = loaded.arch, params, loaded.tokenizer, loaded.sampling
    export_policy(run.folder.final, *given, base=base, whole=loaded.whole)
    run.checkpoints.check_last()
    if (repository := run.config.hub.push) and is_main_process():
        try:
            address = push(run.folder.final, repository, run=run.folder.path, step=step)
            run.recorder.report.event(f"the model and its card are on the Hub: {address}")
        except (ValueError, OSError) as error:
            again = f"quatrain export {shlex.quote(str(run.folder.path))} --push {repository}"
            logger.error("%s; the model is in %s; push it with:\n  %s", error, run.folder.final, again)


def conclude(run: Run, steps: int, after: Mapping[str, float]) -> Summary:
    """Log the results of the run."""
    event = run.recorder.report.event
    for line in run.evaluations.results(after):
        event(line)
    if run.evaluations.best is not None:
        event(str(run.evaluations.best))
    describe_end(run.folder, steps)
    event(f"run page: {run.folder.page}")
    event(f"metrics, samples, checkpoints and log: {run.folder.path}")
    if run.folder.store:
        event(f"the checkpoints alone: {run.folder.checkpoints}")
    event(f"the trained model, for transformers: {run.folder.final}")
    if run.loaded.arch.lora:
        event(f"its adapters, for peft: {run.folder.final / ADAPTER}")
    if run.config.model.path.startswith("builtin:"):
        event(f"next, a real model:{_next_command(run.config)}")
    return Summary(run.folder.path, steps, run.evaluations.before, after)


def _next_command(config: Config) -> str:
    """How to train a real model, on the data of `config` if it is the user's own."""
    own_data = not any(name.startswith("builtin:") for name in data_set_list(config.data.train))
    if own_data or config.run.on_given_data:
        return " set model.path to a folder, a .gguf file or a model on the Hub"
    if NEXT_CONFIG.is_file() and Path("Makefile").is_file():
        return f"\n  make smollm2 && .venv/bin/quatrain train {NEXT_CONFIG}"
    return (
        " set model.path to a folder or a model on the Hub, data.train and data.eval to your prompts, and "
        "data.question_column to the column of their questions"
    )
