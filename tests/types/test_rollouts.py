"""Batches made of finished completions, with tokens that the policy did not sample between its own."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.schema import (
    AdvantageConfig,
    LoggingConfig,
    LogprobConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    UpdateConfig,
)
from quatrain.forward.specs import PolicySpec
from quatrain.report.writer import Report
from quatrain.reward.scorer import RewardScorer
from quatrain.run.run_dir import RunDir
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Completion, Sampling, rollout_batch
from quatrain.update.learner import Learner

REWARD = """
def longest(completions, completion_ids, finish_reasons, answer):
    assert finish_reasons == ["stop", "length", "stop", "stop"]
    return [float(len(ids)) for ids in completion_ids]
"""


def _turns(*turns: tuple[list[int], list[int]], reason: str = "stop") -> Completion:
    """A completion of several turns: what the policy sampled, then what the environment answered."""
    completion = Completion()
    for version, (sampled, given) in enumerate(turns):
        completion.extend(sampled, [-0.5] * len(sampled), version)
        if given:
            completion.begin_turn(given)
    completion.finish_reason = reason
    return completion


@pytest.fixture
def batch(tokenizer):
    prompts = [Prompt(7, np.array([4, 5, 6], np.int32), "one", {"answer": "1"})] * 2
    prompts += [Prompt(8, np.array([4], np.int32), "two", {"answer": "2"})] * 2
    completions = [
        _turns(([10, 11], [20, 21]), ([12], [])),
        _turns(([10], []), reason="length"),
        _turns(([10], [20]), ([11], [21, 22]), ([12, 13], [])),
        _turns(([14, 15], [])),
    ]
    return rollout_batch(list(zip(prompts, completions)), tokenizer, {})


def test_tokens_of_an_environment_are_context_and_not_completion(batch, tokenizer):
    assert batch.input_ids[0, :8].tolist() == [4, 5, 6, 10, 11, 20, 21, 12]
    assert batch.completion_mask[0].tolist() == [False] * 3 + [True, True, False, False, True]
    assert batch.policy_version[0].tolist() == [-1, -1, -1, 0, 0, -1, -1, 1]
    assert batch.rollout_logprobs[2].tolist() == [0, -0.5, 0, -0.5, 0, 0, -0.5, -0.5]
    assert batch.attention_mask.sum(axis=1).tolist() == [8, 4, 8, 3]
    assert batch.completion_lengths.tolist() == [3, 1, 4, 2]
    assert batch.completions[0] == tokenizer.decode([12])
    results = {name: metric.result() for name, metric in batch.metrics.items()}
    assert results["length/prompt/mean"] == 2.0
    assert results["length/completion/mean"] == 2.5
    assert results["length/total/max"] == 8
    assert results["rollout/truncated_fraction"] == 0.25


def test_a_batch_with_holes_goes_through_all_stages(batch, tmp_path, small_params, train_on):
    """Rewards, advantages, update, metrics and samples see the policy's tokens, and count no others."""
    path = tmp_path / "mine.py"
    path.write_text(REWARD)
    rewarded = RewardScorer(RewardConfig(functions={f"{path}:longest": 1.0})).score(batch)
    assert rewarded.rewards.tolist() == [3, 1, 4, 2]
    advantaged = AdvantageEstimator(AdvantageConfig(estimator="dr_grpo")).estimate(rewarded)
    assert advantaged.advantages[0].tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    state = train_on(advantaged, small_params)
    assert state.metrics["update/entropy"].count == 10  # the policy's tokens
    assert state.metrics["update/behaviour_weight_mean"].count == 10
    assert state.metrics["batch/tokens"].result() == 23

    folder = RunDir.create(tmp_path, "run")
    report = Report(folder, LoggingConfig(), redactor=lambda: lambda text: text, run_config={})
    report.log(1, {**batch.metrics, **rewarded.metrics, **advantaged.metrics, **state.metrics})
    report.samples(1, advantaged)
    report.close()
    rows = [json.loads(line) for line in (folder.samples / "step_000001.jsonl").read_text().splitlines()]
    assert sorted(row["completion_tokens"] for row in rows) == [1, 2, 3, 4]


@pytest.fixture
def train_on(small_arch):
    def train(batch, params):
        learner = Learner(
            PolicySpec(small_arch, remat="none"),
            # The tokens of this batch are of several versions.
            UpdateConfig(
                mini_batch_size=2,
                max_tokens_per_device=32,
                correction="truncate",
                loss_aggregation="token_mean",
            ),
            LogprobConfig(max_tokens_per_device=32),
            OptimizerConfig(name="sgd", learning_rate=0.0),
            max_new_tokens=8,
            total_steps=1,
            seed=0,
        )
        return learner.step(learner.init(jax.tree.map(jnp.array, params)), batch)

    return train


def test_sampling_of_the_configuration():
    sampling = Sampling.of(RolloutConfig(n=4, max_new_tokens=9, temperature=0.7, top_k=5, stop=("x",)))
    assert sampling == Sampling(4, 9, 0.7, top_k=5, stop=("x",), replays=True)
    assert sampling.num_kept == 5


def test_what_is_recorded_of_sampling():
    """Would fail if a greedy baseline recorded all words, or a list had more words than programs return."""
    assert Sampling.of(RolloutConfig(top_p=0.9)).num_kept == 512
    assert Sampling.of(RolloutConfig()).num_kept == 0
    assert replace(Sampling.of(RolloutConfig(top_p=0.9)), temperature=0.0).num_kept == 0
    assert Sampling.of(RolloutConfig(top_p=0.9, replay_mask=False)).num_kept == 0
    assert Sampling(1, 1, top_k=600, replays=True).num_kept == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature >= 0 .*, got -1.0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"top_k": -1}, "top_k >= 0"),
        ({"top_p": 0.0}, "top_p <= 1"),
        ({"top_p": 1.5}, "got 1.5"),
        ({"min_p": 2.0}, "min_p <= 1"),
    ],
)
def test_a_sampling_out_of_range_is_refused(options, message):
    """As data, the numbers are not checked by what computes with them."""
    with pytest.raises(ValueError, match=message):
        Sampling(1, 4, **options)
