"""The end of a run: its model in the run's folder and on the Hub, and its results.

Used by `train.py` after the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quatrain.cluster.processes import is_main_process
from quatrain.config.schema import Config
from quatrain.config.values import data_set_list
from quatrain.loop.evaluate import results
from quatrain.loop.export import ADAPTER, export_policy
from quatrain.loop.hub import push_at_end
from quatrain.loop.run import Run
from quatrain.run.description import describe_end

NEXT_CONFIG = Path("configs", "gsm8k_smollm2_cpu.yaml")


@dataclass(frozen=True)
class Summary:
    """Result of a run: its folder, its steps, and the metrics of the evaluations before and after."""

    run: Path
    steps: int
    before: Mapping[str, float]
    after: Mapping[str, float]


def export(run: Run, params: Any, step: int) -> None:
    """Write the model of `step` for transformers, wait for the last checkpoint, and push to the Hub."""
    run.recorder.progress.stage("export")
    loaded, base = run.loaded, run.config.model.path
    export_policy(run.folder.final, loaded.arch, params, loaded.tokenizer, loaded.sampling, base=base)
    if run.resumable:
        run.checkpoints.check_last()
    if (repository := run.config.hub.push) and is_main_process():
        address = push_at_end(run.folder.final, repository, run=run.folder.path, step=step)
        if address is not None:
            run.recorder.report.event(f"the model and its card are on the Hub: {address}")


def conclude(run: Run, steps: int, after: Mapping[str, float]) -> Summary:
    """Log the results of the run."""
    event = run.recorder.report.event
    for line in results(run.evaluator.sets, run.evaluations.before, after):
        event(line)
    if run.evaluations.best is not None:
        event(str(run.evaluations.best))
    describe_end(run.folder, steps)
    event(f"run page: {run.folder.page}")
    event(f"metrics, samples, checkpoints and log: {run.folder.path}")
    event(f"the trained model, for transformers: {run.folder.final}")
    if run.loaded.arch.lora:
        event(f"its adapters, for peft: {run.folder.final / ADAPTER}")
    if run.config.model.path.startswith("builtin:"):
        event(f"next, a real model:{_next_command(run.config)}")
    return Summary(run.folder.path, steps, run.evaluations.before, after)


def _next_command(config: Config) -> str:
    """How to train a real model, on the data of `config` if it is the user's own."""
    if not any(name.startswith("builtin:") for name in data_set_list(config.data.train)):
        return " set model.path to a folder, a .gguf file or a model on the Hub"
    if NEXT_CONFIG.is_file() and Path("Makefile").is_file():
        return f"\n  make smollm2 && .venv/bin/quatrain train {NEXT_CONFIG}"
    return (
        " set model.path to a folder or a model on the Hub, data.train and data.eval to your prompts, and "
        "data.question_column to the column of their questions"
    )
