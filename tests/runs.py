"""Runs small enough for a test, and what two that compute the same have in common."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from quatrain.config.load import load_config
from quatrain.data import builtin
from quatrain.report import writer
from quatrain.run.metrics import read_metrics
from quatrain.update.learner import Learner

SMALL = (
    "data.batch_size=4",
    "rollout.n=4",
    "run.steps=4",
    "sft.steps=3",
    "eval.num_prompts=8",
    "eval.final_num_prompts=8",
    "eval.every_steps=2",
    "checkpoint.every_steps=2",
)
CHANGING = re.compile(
    r"^time/|^memory/|_per_s$|^reward/.*/seconds$|compilations$|^rollout/(prefill|decode)_s$"
)
"""Timings and memory differ between runs; whether something compiles depends on what ran before."""


def steady_metrics(run: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics without those that differ between runs that compute the same."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not CHANGING.search(key)} for row in rows]


def small_run(folder, name, *overrides):
    """The configuration of a small run `name` in `folder`."""
    settings = (*SMALL, f"run.dir={folder}", f"run.name={name}", *overrides)
    return load_config(None, settings, environ={})


@contextmanager
def interrupted_after(steps, learner=Learner):
    """Ctrl-C in the update, by a `learner`, of the training step after `steps` finished ones."""
    plain_step = learner.step

    def dies(self, state, batch):
        if state.train_step == steps:
            raise KeyboardInterrupt
        return plain_step(self, state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "step", dies)
        yield


# For the conftest.py of a folder whose tests train.


@pytest.fixture(scope="module", autouse=True)
def without_plots():
    """Runs draw no plot.png, which costs as much as a step; `tests/report/` tests it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "can_plot", lambda: False)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_rows():
    """`builtin:arithmetic` has 68 rows and its held-out part 40, which render fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin, "TRAIN_ROWS_PER_FACT", 2)
        patch.setattr(builtin, "HELDOUT_ROWS", 40)
        builtin._arithmetic.cache_clear()
        yield
    builtin._arithmetic.cache_clear()
