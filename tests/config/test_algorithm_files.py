"""The tables of algorithms that the configuration reads from the source of `ops`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quatrain
from quatrain.config.algorithms import ESTIMATORS, LOSSES
from quatrain.config.fields import is_default
from quatrain.config.load import load_config
from quatrain.config.schema import Config
from quatrain.ops import advantages, losses

LOSS = """
from quatrain.ops.tokens import TokenLoss

AGGREGATION = "seq_mean_token_sum"


def half(tokens, *, clip_low, part=0.5):
    return TokenLoss(-part * tokens.advantages * tokens.logprobs)
"""
ESTIMATOR = """
import numpy as np

SCALES = ("batch", "none")
COMPARES_SAMPLES = True


def ranks(rewards, baseline_rewards, power=1.0, scale="batch"):
    return np.argsort(np.argsort(rewards)).astype(np.float32) ** power
"""
USE = """
from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.load import load_config
from quatrain.update.objective import PolicyObjective

resolved = load_config(None, ["update.loss=half", "update.loss_args={part: 2.0}", "advantage.estimator=ranks",
    "advantage.args={power: 2.0}", "rollout.n=1"], {})
config = resolved.config
objective = PolicyObjective.of(config.update, on_policy=True)
objective.check()
print(dict(objective.arguments), config.update.loss_aggregation, config.advantage.scale)
print(config.rollout.greedy_baseline, AdvantageEstimator(config.advantage).inputs)
print(any("compares the samples of one prompt" in text for text in resolved.warnings))
try:
    load_config(None, ["advantage.estimator=ranks", "advantage.scale=group"], {})
except ValueError as error:
    print(error)
"""


def test_a_loss_and_an_estimator_are_one_file_each(tmp_path):
    copy = tmp_path / "quatrain"
    shutil.copytree(Path(quatrain.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "ops" / "losses" / "half.py").write_text(LOSS)
    (copy / "ops" / "advantages" / "ranks.py").write_text(ESTIMATOR)
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[:3] == [
        "{'clip_low': 0.2, 'part': 2.0} seq_mean_token_sum batch",
        "True ('rewards', 'baseline_rewards')",
        "True",
    ], done.stderr
    assert "advantage.scale must be batch or none for advantage.estimator ranks" in done.stdout


def test_the_configuration_knows_what_ops_has():
    assert list(LOSSES) == list(losses.POLICY_LOSSES)
    assert list(ESTIMATORS) == list(advantages.ADVANTAGE_ESTIMATORS)
    for name, estimator in ESTIMATORS.items():
        assert estimator.parameters[0] == "rewards", name
        assert estimator.scales, name
    assert LOSSES["ppo_clip"].parameters == ("tokens", "clip_low", "clip_high", "dual_clip")
    assert LOSSES["gspo"].aggregation == "seq_mean_token_mean"
    assert ESTIMATORS["dr_grpo"].aggregation == "seq_mean_token_sum_norm"
    assert [name for name, loss in LOSSES.items() if loss.reads_sampler] == ["dppo", "dppo_kl", "dro"]
    assert [name for name, loss in LOSSES.items() if loss.without_signal] == ["dro"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_critic_and_the_greedy_baseline_follow_the_inputs(estimator):
    config = load_config(None, [f"advantage.estimator={estimator}"], {}).config
    assert config.critic.enabled == (estimator in ("gae", "length_adaptive_gae"))
    assert config.rollout.greedy_baseline == (estimator == "remax")
    assert is_default(Config(), "critic.enabled")
