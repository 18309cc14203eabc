"""Whole runs of a model with experts: routes are recorded and replayed wherever tokens come from."""

import json

import numpy as np
import pytest
from runs import interrupted_after, small_run, steady_metrics
from safetensors.numpy import load_file
from test_agent_run import AGENT

from quatrain.config.errors import ConfigError
from quatrain.data.builtin import builtin_rows
from quatrain.loop.train import train
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.metrics import read_metrics
from quatrain.update.learner import Learner

pytestmark = pytest.mark.usefixtures("narrow_model")

MOE = ("model.path=builtin:tiny_moe", "sft.steps=2", "run.steps=3", "eval.every_steps=0")
AHEAD = (*MOE, "rollout.max_staleness=1", "checkpoint.every_steps=2", "run.steps=4", "eval.num_prompts=4")


@pytest.fixture
def trained_batches(monkeypatch):
    """The batches that runs have trained on."""
    seen, plain = [], Learner.step

    def step(self, state, batch):
        seen.append(batch.rollouts)
        return plain(self, state, batch)

    monkeypatch.setattr(Learner, "step", step)
    return seen


@pytest.mark.slow
def test_a_run_replays_what_it_samples(tmp_path, trained_batches):
    options = (
        *MOE, "sft.steps=0", "run.steps=2", "update.num_mini_batches=2", "update.router_aux_coef=0.01",
        "data.train=mine", "data.eval=null",
    )  # fmt: skip
    run = train(small_run(tmp_path, "moe", *options), rows={"mine": builtin_rows("arithmetic")}).run
    rows = read_metrics(run / "metrics.jsonl")
    assert not unknown_metrics({name for row in rows for name in row} - {"step"})
    for batch, row in zip(trained_batches, rows, strict=True):
        assert batch.routes.shape[2:] == (2, 2)
        recorded = (batch.routes != 255).any(axis=(2, 3))
        np.testing.assert_array_equal(recorded.sum(axis=1), batch.lengths - 1)
        assert row["moe/replay_changed"] == 0
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert 0 < row["update/router_aux_loss"] < 0.1


@pytest.mark.slow
def test_a_run_without_recording_trains_too(tmp_path, trained_batches):
    run = train(small_run(tmp_path, "live", *MOE, "run.steps=1", "rollout.record_routes=false")).run
    assert trained_batches[0].routes is None
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert "moe/replay_changed" not in last
    assert last["moe/load_max"] >= 1


@pytest.mark.slow
def test_resumed_is_uninterrupted_to_the_bit_with_batches_ahead(tmp_path):
    whole = train(small_run(tmp_path, "whole", *AHEAD)).run
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path, "stopped", *AHEAD))
    resumed = train(small_run(tmp_path, "stopped", *AHEAD), resume="stopped").run
    assert steady_metrics(resumed) == steady_metrics(whole)
    tensors = [load_file(run / "final" / "model.safetensors") for run in (whole, resumed)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, values in tensors[0].items():
        np.testing.assert_array_equal(values, tensors[1][name], err_msg=name)


@pytest.mark.slow
def test_agents_turns_keep_the_routes_of_their_tokens(tmp_path, trained_batches):
    """Of an agent that branches and edits its history: sampler and trainer agree, and no route is missing."""
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [
        {"prompt": [{"role": "user", "content": f"{name} has {thing}. How many now?"}], "answer": "2"}
        for name in ("Tom", "Ann", "Ben")
        for thing in ("apples", "books")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = (
        f"data.train={tmp_path}/rows.jsonl", f"data.eval={tmp_path}/rows.jsonl",
        "sft.data=builtin:arithmetic", f"rollout.agent={tmp_path}/agent.py:agent",
        "rollout.max_new_tokens=40", "rollout.agent_workers=2", "eval.accuracy=null",
    )  # fmt: skip
    run = train(small_run(tmp_path / "runs", "agent", *MOE, *options)).run
    for batch in trained_batches:
        recorded = (batch.routes != 255).any(axis=(2, 3))
        predicting = np.roll(batch.completion_mask, -1, axis=1)
        assert recorded[predicting].all()
    for row in read_metrics(run / "metrics.jsonl")[-3:]:
        assert row["moe/replay_changed"] == 0
        assert row["rollout/logprob_diff_max"] < 1e-4


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rollout.record_routes=true", r"rollout\.record_routes must be auto or false for a model without"),
        ("update.router_aux_coef=0.1", r"update\.router_aux_coef must be 0 for a model without experts"),
    ],
)
def test_a_model_without_experts_is_refused(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        train(small_run(tmp_path, "dense", option, "sft.steps=0"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("rollout.record_routes=false",), "must be 0 for rollout.record_routes false"),
        (("lora.rank=4",), "must be 0 with lora.rank"),
    ],
)
def test_an_auxiliary_loss_without_routes_or_trained_routers_is_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        small_run(tmp_path, "x", *MOE, "update.router_aux_coef=0.1", *options)
