"""Whole runs of an agent that branches and edits its history: sampler and trainer agree, also resumed."""

import json

import numpy as np
import pytest
from runs import interrupted_after, small_run
from test_episodes_run import samples_of

from quatrain.config.errors import ConfigError
from quatrain.loop.train import train
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("narrow_model")

AGENT = """
import asyncio
import random


async def agent(client, row):
    messages = list(row["prompt"])
    await asyncio.sleep(random.random() / 50)
    messages += [await client.chat(messages, max_tokens=8), {"role": "user", "content": "Ann has more."}]
    both = [client.chat([*messages, {"role": "user", "content": text}], max_tokens=6) for text in "ab"]
    answers = await asyncio.gather(*both)
    if client.sample == 1:
        raise ValueError("the second sample")
    messages[1] = {"role": "assistant", "content": "I said nothing."}
    last = await client.chat(messages, max_tokens=5)
    reward = sum(answer["content"].count("e") for answer in [*answers, last])
    return {"reward": reward, "metrics": {"letters": len(last["content"])}}
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    (folder / "agent.py").write_text(AGENT)
    rows = [
        {"prompt": [{"role": "user", "content": f"{name} has {thing}. How many now?"}], "answer": "2"}
        for name in ("Tom", "Ann", "Ben")
        for thing in ("apples", "books")
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        f"data.train={folder}/rows.jsonl", f"data.eval={folder}/rows.jsonl", "sft.data=builtin:arithmetic",
        f"rollout.agent={folder}/agent.py:agent", "rollout.max_new_tokens=40", "rollout.agent_workers=1",
        "eval.num_prompts=6", "logging.samples_per_step=64", "eval.accuracy=null",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, options):
    short = ("sft.steps=0", "run.steps=2", "eval.every_steps=0")
    return train(small_run(tmp_path_factory.mktemp("runs"), "whole", *options, *short)).run


def rows_of(run):
    return [row for row in read_metrics(run / "metrics.jsonl") if "agent/turns/mean" in row]


def test_sampler_and_trainer_agree_on_the_tokens_of_every_row(whole):
    rows = rows_of(whole)
    assert len(rows) == 2
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4
    for row in rows:
        assert row["agent/sequences/max"] == 3
        assert row["agent/branches"] > 0
        assert row["agent/errors"] > 0
        assert row["agent/own/letters"] > 0
    logged = {name for row in read_metrics(whole / "metrics.jsonl") for name in row}
    assert unknown_metrics(logged - {"step", "time"}) == []
    assert any(name.startswith("eval/agent/") for name in logged)


def test_samples_are_sequences_with_the_reward_of_their_episode(whole):
    samples = samples_of(whole, "step")
    several = [sample for sample in samples if sample["episode"]["sequences"] == 3]
    assert several
    for sample in several:
        same = [
            other
            for other in samples
            if (other["step"], other["group_id"], other["episode"]["sample"])
            == (sample["step"], sample["group_id"], sample["episode"]["sample"])
        ]
        assert sorted(other["episode"]["sequence"] for other in same) == [0, 1, 2]
        answers = [turn for other in same for turn in other["turns"] if "answer" in turn]
        trained = [turn["answer"] for turn in answers if turn.get("trained", True)]
        assert sorted(trained) == sorted({turn["answer"] for turn in answers}) == [1, 2, 3, 4]
        assert len(answers) == 5  # the first is the context of both answers after it
        assert sorted(other["episode"].get("began", "") for other in same) == ["", "", "message 1 changed"]
        assert len({other["reward"] for other in same}) == len({other["advantage"] for other in same}) == 1
    failed = [sample for sample in samples if sample["finish_reason"] == "error"]
    assert failed
    assert {sample["reward"] for sample in failed} == {-1.0}
    assert (whole / "report.html").stat().st_size > 10_000


def said(run):
    """What was sampled in each training step, by group and sample, in the sequences of the episode."""
    found = {}
    for sample in samples_of(run, "step"):
        place = sample["step"], sample["group_id"], sample["episode"]["sample"]
        texts = [turn["content"] for turn in sample["turns"]]
        found[place] = sorted([*found.get(place, []), texts])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [(), ("rollout.max_staleness=1",)])
def test_a_resumed_run_samples_what_the_uninterrupted_one_does(options, tmp_path, ahead):
    """Up to rounding: which sequences are decoded together depends on time."""
    options = (*options, *ahead)
    whole = said(train(small_run(tmp_path, "whole", *options)).run)
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path, "stopped", *options))
    resumed = said(train(small_run(tmp_path, "stopped", *options), resume="stopped").run)
    assert whole.keys() == resumed.keys()
    assert np.mean([whole[place] == resumed[place] for place in whole]) >= 0.97


@pytest.mark.slow
def test_weights_exchanged_in_flight(options, tmp_path):
    more = ("rollout.max_staleness=2", "rollout.in_flight=true", "rollout.agent_concurrency=3")
    run = train(small_run(tmp_path, "flight", *options, *more)).run
    rows = rows_of(run)
    assert len(rows) == 4
    assert all(np.isfinite(row["reward/mean"]) for row in rows)
    assert max(row["async/staleness_max"] for row in rows) > 0


@pytest.mark.slow
def test_remax_compares_with_an_episode_that_is_played_greedily(tmp_path, options):
    short = ("sft.steps=0", "run.steps=2", "eval.every_steps=0", "advantage.estimator=remax")
    rows = rows_of(train(small_run(tmp_path, "greedy", *options, *short)).run)
    assert len(rows) == 2
    for row in rows:
        difference = row["reward/mean"] - row["reward/greedy/mean"]
        assert row["advantage/mean"] == pytest.approx(difference, abs=1e-5)
    assert any(row["reward/greedy/mean"] for row in rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.environment=game.py:Game"], "rollout.agent.*must be null with rollout.environment"),
        (["advantage.turn_credit=true"], "advantage.turn_credit.*has no effect"),
        (["rollout.environment_workers=2"], "rollout.environment_workers.*has no effect"),
    ],
)
def test_what_does_not_go_with_an_agent(tmp_path, options, settings, message):
    with pytest.raises(ConfigError, match=message):
        small_run(tmp_path, "refused", *options, *settings)
