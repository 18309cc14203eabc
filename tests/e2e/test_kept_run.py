"""Whole runs with filters: what the sampler kept is recorded and replayed wherever tokens come from."""

import numpy as np
import pytest
from runs import interrupted_after, small_run, steady_metrics
from safetensors.numpy import load_file
from test_agent_run import AGENT

from quatrain.data.builtin import builtin_rows
from quatrain.loop.train import train
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.metrics import read_metrics
from quatrain.update.learner import Learner

pytestmark = pytest.mark.usefixtures("narrow_model")

FILTERED = ("rollout.top_p=0.9", "eval.every_steps=0", "update.num_mini_batches=2", "update.kl_coef=0.01")


@pytest.fixture
def trained_batches(monkeypatch):
    """The batches that runs have trained on."""
    seen, plain = [], Learner.step

    def step(self, state, batch):
        seen.append(batch.rollouts)
        return plain(self, state, batch)

    monkeypatch.setattr(Learner, "step", step)
    return seen


def check_replayed(batches, run):
    """Every sampled token has a set with that token in it; sampler and trainer agree (P17)."""
    rows = read_metrics(run / "metrics.jsonl")
    assert not unknown_metrics({name for row in rows for name in row} - {"step"})
    for batch in batches:
        np.testing.assert_array_equal(batch.kept.has_set, batch.completion_mask)
    for row in rows:
        assert row.get("rollout/logprob_diff_max", 0.0) < 1e-4


@pytest.mark.parametrize(
    "more", [(), pytest.param(("rollout.max_staleness=1", "eval.num_prompts=4"), marks=pytest.mark.slow)]
)
def test_resumed_is_uninterrupted_to_the_bit(tmp_path, trained_batches, more):
    """P18. Would fail if a set were not part of what a resumed run samples again, or a batch ahead lost it."""
    whole = train(small_run(tmp_path, "whole", *FILTERED, *more)).run
    check_replayed(trained_batches, whole)
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path, "stopped", *FILTERED, *more))
    resumed = train(small_run(tmp_path, "stopped", *FILTERED, *more), resume="stopped").run
    assert steady_metrics(resumed) == steady_metrics(whole)
    tensors = [load_file(run / "final" / "model.safetensors") for run in (whole, resumed)]
    for name, values in tensors[0].items():
        np.testing.assert_array_equal(values, tensors[1][name], err_msg=name)


@pytest.mark.slow
def test_agents_turns_keep_the_sets_of_their_tokens(tmp_path, trained_batches):
    """Of an agent that branches and edits its history, whose turns are rows of several lengths."""
    (tmp_path / "agent.py").write_text(AGENT)
    options = (
        *FILTERED, "sft.steps=0", "run.steps=2", f"rollout.agent={tmp_path}/agent.py:agent",
        "reward.functions={environment: 1.0}", "data.train=mine", "data.eval=null",
    )  # fmt: skip
    run = train(small_run(tmp_path, "agents", *options), rows={"mine": builtin_rows("arithmetic")}).run
    check_replayed(trained_batches, run)


@pytest.mark.slow
def test_dynamic_sampling_joins_sets(tmp_path, trained_batches):
    more = ("rollout.dynamic_sampling_rounds=3", "run.steps=2")
    check_replayed(trained_batches, train(small_run(tmp_path, "joined", *FILTERED, *more)).run)


def test_a_sampler_that_records_nothing_ends_the_run(tmp_path, monkeypatch):
    """Its tokens would be trained in another distribution than theirs, without an error."""
    monkeypatch.setattr("quatrain.types.rollouts.Sampling.num_kept", 0)
    with pytest.raises(ValueError, match="the sampler has recorded none of"):
        train(small_run(tmp_path, "none", *FILTERED, "run.steps=1", "sft.steps=0"))
