"""A run on a mixture whose prompts are drawn by their pass rates: its metrics, and how it goes on."""

import json
from collections import defaultdict
from contextlib import closing

import numpy as np
import pytest
from runs import interrupted_after, small_run, steady_metrics

from quatrain.data.builtin import builtin_rows
from quatrain.loop.train import dry_run, train
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.checkpoint import Checkpointer
from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("narrow_model")


def options(folder):
    """Files `plus` and `minus` of the built-in rows, three to one, and a curriculum that forgets nothing."""
    rows = builtin_rows("arithmetic")
    paths = []
    for name, sign in (("plus", "+"), ("minus", "-")):
        own = [row for row in rows if sign in row["completion"]]
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, own)))
    mixture = [{"path": str(path), "weight": weight} for path, weight in zip(paths, (3, 1), strict=True)]
    return (
        f"data.train={json.dumps(mixture)}",
        "data.eval=builtin:arithmetic-heldout",
        "data.curriculum={reward: short, low: 0.3, outside: 0.5, newest: 1.0}",
        "reward.functions={correct: 1.0, short: 0.5}",
        "run.steps=4",
    )


def short(completion_ids):
    """A reward of which an untrained model has all sorts."""
    return [len(ids) % 4 / 4 for ids in completion_ids]


def trained(folder, name, *settings, **how):
    return train(small_run(folder, name, *settings), reward_functions={"short": short}, **how).run


def place(run):
    """Where the newest checkpoint says that the run is in its data."""
    with closing(Checkpointer(run / "checkpoints", keep=1)) as store:
        return store.read_host()["place"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    settings = options(folder)
    return trained(folder, "whole", *settings), settings


def test_each_step_has_its_shares_and_metrics_of_each_data_set(whole):
    run, _ = whole
    rows = read_metrics(run / "metrics.jsonl")[1:]
    assert not unknown_metrics({name for row in rows for name in row} - {"step", "non_finite"})
    for row in rows:
        samples = {name: row[f"source/{name}/samples"] for name in ("plus", "minus")}
        assert samples == {"plus": 12, "minus": 4}  # of 4 samples for each prompt
        for name, total in (("reward", "reward/mean"), ("reward/correct", "reward/correct/mean")):
            weighted = sum(count * row[f"source/{source}/{name}"] for source, count in samples.items())
            assert weighted / 16 == pytest.approx(row[total])
        lengths = sum(count * row[f"source/{source}/completion_length"] for source, count in samples.items())
        assert lengths / 16 == pytest.approx(row["length/completion/mean"])
    log = (run / "run.log").read_text()
    assert "mixture: plus, weight 3 of 4: " in log
    assert "examples, mixture: minus, weight 1 of 4: " in log


def test_the_rates_are_those_of_the_samples(whole):
    """Worked out again from the samples on disk, by the text of each prompt."""
    run, _ = whole
    rates, seen = {}, []
    for step in range(1, 5):
        values = defaultdict(list)
        for line in (run / "samples" / f"step_{step:06d}.jsonl").read_text("utf-8").split("\n")[:-1]:
            sample = json.loads(line)
            values[sample["group_id"], json.dumps(sample["prompt"])].append(sample["rewards"]["short"])
        assert {group for group, _ in values} == set(range(4 * step - 4, 4 * step))
        rates |= {prompt: np.mean(np.float32(own), dtype=np.float64) for (_, prompt), own in values.items()}
        seen.append(len(rates))
    saved = place(run)["rates"]
    known = [rate for rate in saved if rate is not None]
    assert sorted(known) == sorted(rates.values())
    assert len(set(known)) > 3
    rows = read_metrics(run / "metrics.jsonl")[1:]
    assert [len(saved) - row["curriculum/unseen"] for row in rows] == seen
    assert rows[-1]["curriculum/rate"] == pytest.approx(np.mean(known))
    assert rows[-1]["curriculum/below"] == sum(rate < 0.3 for rate in known)


@pytest.mark.parametrize("ahead", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_draws_the_same_prompts(whole, tmp_path, ahead):
    """Bit for bit: place, rates and weights; also with batches that are sampled ahead of training."""
    run, settings = whole
    settings = (*settings, f"rollout.max_staleness={ahead}", "update.mini_batch_size=4")
    if ahead:
        run = trained(tmp_path, "whole", *settings)
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        trained(tmp_path, "stopped", *settings)
    resumed = trained(tmp_path, "stopped", *settings, resume="stopped")
    weights = [(each / "final" / "model.safetensors").read_bytes() for each in (run, resumed)]
    assert weights[0] == weights[1]
    assert steady_metrics(run) == steady_metrics(resumed)
    assert place(run) == place(resumed)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda text: text.replace('"weight": 3', '"weight": 2'), "data.train"),
        (lambda text: text.replace("low: 0.3", "low: 0.2"), "data.curriculum"),
    ],
)
def test_weights_and_the_curriculum_cannot_change_on_resume(whole, change, key):
    run, settings = whole
    with pytest.raises(ValueError, match=f"{key} of a resumed run must not change"):
        dry_run(small_run(run.parent, "unused", *map(change, settings)), resume="whole")


def test_a_dry_run_says_what_the_mixture_is(tmp_path):
    more = ("reward.functions={correct: 1.0}", "data.curriculum={}")
    plan, _ = dry_run(small_run(tmp_path, "dry", *options(tmp_path), *more))
    lines = [line for line in plan.splitlines() if line.startswith("mixture: ")]
    assert [line.partition(":")[2].partition(":")[0] for line in lines] == [
        " plus, weight 3 of 4",
        " minus, weight 1 of 4",
    ]
    assert "prompts_per_step_of_minus" in plan
