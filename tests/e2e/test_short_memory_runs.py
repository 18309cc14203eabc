"""Runs whose cache holds few sequences: samples are preempted, and train as with memory for all.

The quick form is `engine/test_admission.py`: the tokens of preempted samples.
"""

import json

import numpy as np
import pytest
from runs import interrupted_after, small_run, steady_metrics
from safetensors.numpy import load_file

from quatrain.engine import engine
from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("narrow_model")

AHEAD = ("rollout.max_staleness=1", "eval.every_steps=0", "rollout.max_new_tokens=48")
"""Samples of steps 2 to 4 are drawn while the step before is learned."""
FEW_BYTES = 3 << 14


def short_memory(patch):
    patch.setattr(engine, "memory_for_cache", lambda mesh, other_bytes: FEW_BYTES)


@pytest.fixture(scope="module")
def little(tmp_path_factory, narrow_model):
    """A run with little memory."""
    with pytest.MonkeyPatch.context() as patch:
        short_memory(patch)
        return train(small_run(tmp_path_factory.mktemp("runs"), "little", *AHEAD)).run


def completions(run, step):
    lines = (run / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [sample["completion"] for sample in map(json.loads, lines)]


def preempted(run):
    return [row["rollout/preempted"] for row in read_metrics(run / "metrics.jsonl")[1:]]


@pytest.mark.slow
def test_samples_ahead_that_are_preempted_train_the_same(little, tmp_path):
    enough = train(small_run(tmp_path, "enough", *AHEAD)).run
    assert preempted(enough) == [0] * 4
    assert min(preempted(little)) > 0
    for step in range(1, 5):
        assert completions(little, step) == completions(enough, step)
    one, other = (load_file(run / "final" / "model.safetensors") for run in (enough, little))
    for name, weight in one.items():
        np.testing.assert_allclose(other[name], weight, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_a_resumed_run_preempts_what_the_uninterrupted_one_does(little, tmp_path, monkeypatch):
    short_memory(monkeypatch)
    stopped = small_run(tmp_path, "stopped", *AHEAD)
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        train(stopped)
    resumed = train(stopped, resume="stopped").run
    assert steady_metrics(resumed) == steady_metrics(little)
    one, other = (run / "final" / "model.safetensors" for run in (little, resumed))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_samples_in_flight_may_be_preempted(tmp_path, monkeypatch):
    """What was sampled of them before new weights came keeps its tokens, log-probabilities and versions."""
    short_memory(monkeypatch)
    options = (*AHEAD, "rollout.in_flight=true", "run.steps=5")
    run = train(small_run(tmp_path, "flight", *options)).run
    rows = read_metrics(run / "metrics.jsonl")[1:]
    assert sum(preempted(run)) > 0
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["async/staleness_max"] for row in rows) <= 1
    fresh = [row["rollout/logprob_diff_max"] for row in rows if row["async/staleness_max"] == 0]
    assert len(fresh) >= 1
    assert max(fresh) < 1e-4
