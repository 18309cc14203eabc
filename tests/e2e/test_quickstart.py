"""The quickstart learns, and what it gains comes from reinforcement."""

import os
import subprocess
import sys

import numpy as np
import pytest
from runs import small_run

from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics

ACCURACY = "eval/accuracy_strict"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """quickstart(name, "key=value", ...): accuracy before and after the quickstart, shortened.

    In a process that compiles as XLA does by default: here computing takes longer than compiling.
    """
    folder = tmp_path_factory.mktemp("quickstart")
    short = ("eval.every_steps=0", "eval.num_prompts=100", "eval.final_num_prompts=100", f"run.dir={folder}")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name != "XLA_FLAGS" and not name.startswith("QUATRAIN_")
    }

    def run(name, *overrides):
        settings = (
            part for override in (*short, f"run.name={name}", *overrides) for part in ("--set", override)
        )
        command = (sys.executable, "-m", "quatrain", "train", *settings)
        done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows = read_metrics(folder / name / "metrics.jsonl")
        return rows[0][ACCURACY], rows[-1][ACCURACY]

    return run


@pytest.fixture(scope="module")
def learning(quickstart):
    return quickstart("learning", "run.steps=12")


@pytest.mark.usefixtures("narrow_model")
def test_rewards_alone_teach_a_small_model(tmp_path):
    """The quick form: from random weights, a reward that each token earns by itself is earned more often."""
    (tmp_path / "digits.py").write_text(
        "def digits(completions):\n"
        "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]\n"
    )
    options = (
        f"reward.functions={{'{tmp_path}/digits.py:digits': 1.0}}", "sft.steps=0", "run.steps=20",
        "eval.before=false", "eval.every_steps=0", "checkpoint.every_steps=0", "optimizer.learning_rate=2e-2",
        "optimizer.warmup_steps=0", "optimizer.schedule=constant",
    )  # fmt: skip
    run = train(small_run(tmp_path, "digits", *options)).run
    rewards = [row["reward/mean"] for row in read_metrics(run / "metrics.jsonl") if "reward/mean" in row]
    assert len(rewards) == 20
    assert np.mean(rewards[-4:]) > np.mean(rewards[:2]) + 0.3, rewards


@pytest.mark.slow
def test_the_quickstart_learns(learning):
    before, after = learning
    assert before <= 0.5
    assert after >= before + 0.2


@pytest.mark.slow
def test_without_a_learning_rate_nothing_is_gained(learning, quickstart):
    assert quickstart("still", "optimizer.learning_rate=0", "run.steps=4") == (learning[0], learning[0])
