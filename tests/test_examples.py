"""Every file in examples/ runs as its own docstring says."""

import ast
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from quatrain.config.load import load_config
from quatrain.reward.scorer import RewardScorer
from quatrain.types import RolloutBatch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GOOD = "<think>3+4=7</think>\n<answer>7</answer>"  # 39 characters
REWARDS = {"custom_reward.py": [1 + 0.2 * (1 - 39 / 200), 0.2]}


def test_every_example_is_executed_here():
    assert [path.name for path in EXAMPLES] == sorted(REWARDS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_command_of_an_example_gives_its_rewards(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    (command,) = [line for line in docstring.splitlines() if line.startswith("quatrain ")]
    _, _, *options = shlex.split(command)
    settings = [value for flag, value in pairwise(options) if flag == "--set"]
    config = load_config(None, settings, environ={}).config

    mask = np.tile([False, True], (2, 1))
    rollouts = RolloutBatch(
        input_ids=np.ones((2, 2), np.int32),
        attention_mask=np.ones((2, 2), np.bool_),
        completion_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.full(2, "stop"),
        group_ids=np.arange(2, dtype=np.int64),
        prompts=("How many?",) * 2,
        completions=(GOOD, ""),
        columns={"answer": ("7", "7")},
    )
    rewards = RewardScorer(config.reward).score(rollouts).rewards
    np.testing.assert_allclose(rewards, REWARDS[path.name], rtol=1e-6)
