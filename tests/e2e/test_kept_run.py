"""Whole runs with filters: what the sampler kept is recorded and replayed wherever tokens come from."""

import json

import numpy as np
import pytest
from runs import interrupted_after, small_run, steady_metrics
from safetensors.numpy import load_file
from test_agent_run import AGENT

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
    """P18. Would fail if a resumed run sampled other sets again, or a batch ahead lost its own."""
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
    rows = [
        {"prompt": [{"role": "user", "content": f"{name} has {thing}. How many now?"}], "answer": "2"}
        for name in ("Tom", "Ann", "Ben")
        for thing in ("apples", "books")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = (
        f"data.train={tmp_path}/rows.jsonl", f"data.eval={tmp_path}/rows.jsonl",
        "sft.data=builtin:arithmetic", f"rollout.agent={tmp_path}/agent.py:agent",
        "rollout.max_new_tokens=40", "rollout.agent_workers=2", "eval.accuracy=null", "run.steps=2",
    )  # fmt: skip
    run = train(small_run(tmp_path / "runs", "agents", *FILTERED, *options)).run
    check_replayed(trained_batches, run)


STRUCTURED = """
SCHEMA = {
    "type": "object",
    "properties": {"count": {"enum": [1, 2, 3]}, "sure": {"type": "boolean"}},
    "required": ["count", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


async def agent(client, row):
    answer = await client.chat(row["prompt"], response_format=FORMAT)
    return float('"sure":true' in answer["content"].replace(" ", ""))
"""


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True])
def test_answers_by_a_schema_are_trained_in_their_distribution(tmp_path, trained_batches, filtered):
    """Without filters masks alone are recorded; sampler and trainer agree in both. Would fail if the first
    token, which a prefill draws, had no mask, or the masks of a call were those of a step before."""
    pytest.importorskip("llguidance")
    (tmp_path / "agent.py").write_text(STRUCTURED)
    row = {"prompt": [{"role": "user", "content": "How many?"}], "answer": "2"}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    options = (
        f"data.train={tmp_path}/rows.jsonl", f"data.eval={tmp_path}/rows.jsonl",
        "sft.steps=0", f"rollout.agent={tmp_path}/agent.py:agent", "rollout.max_new_tokens=60",
        "eval.accuracy=null", "run.steps=2", "eval.every_steps=0", "rollout.agent_workers=1",
    )  # fmt: skip
    more = FILTERED if filtered else ()
    run = train(small_run(tmp_path / "runs", "structured", *more, *options)).run
    check_replayed(trained_batches, run)
    for batch in trained_batches:
        assert bool(len(batch.kept.masks)) != filtered
        assert batch.kept.counts.any() == filtered


@pytest.mark.slow
def test_dynamic_sampling_joins_sets(tmp_path, trained_batches):
    more = ("rollout.dynamic_sampling_rounds=3", "run.steps=2")
    check_replayed(trained_batches, train(small_run(tmp_path, "joined", *FILTERED, *more)).run)


def test_a_sampler_that_records_nothing_ends_the_run(tmp_path, monkeypatch):
    """Its tokens would be trained in another distribution than theirs, without an error."""
    monkeypatch.setattr("quatrain.types.rollouts.Sampling.num_kept", 0)
    with pytest.raises(ValueError, match="the sampler has recorded none of"):
        train(small_run(tmp_path, "none", *FILTERED, "run.steps=1", "sft.steps=0"))
