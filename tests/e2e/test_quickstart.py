"""The quickstart learns, and what it gains comes from reinforcement."""

import pytest

from quatrain.config.load import load_config
from quatrain.train import train

ACCURACY = "eval/accuracy_strict"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """quickstart(name, "key=value", ...): the summary of the quickstart, shortened."""
    folder = tmp_path_factory.mktemp("quickstart")
    short = ("eval.every_steps=0", "eval.num_prompts=100", "eval.final_num_prompts=100", f"run.dir={folder}")

    def run(name, *overrides):
        return train(load_config(None, (*short, f"run.name={name}", *overrides), environ={}))

    return run


@pytest.fixture(scope="module")
def learning(quickstart):
    return quickstart("learning", "run.steps=24")


def test_the_quickstart_learns(learning):
    assert learning.before[ACCURACY] <= 0.5
    assert learning.after[ACCURACY] >= learning.before[ACCURACY] + 0.2


@pytest.mark.slow
def test_without_a_learning_rate_nothing_is_gained(learning, quickstart):
    still = quickstart("still", "optimizer.learning_rate=0", "run.steps=4")
    assert learning.before[ACCURACY] == still.before[ACCURACY] == still.after[ACCURACY]
