"""Whole runs with lists of data, Python rewards, a moving reference and a best checkpoint."""

import json
import shutil

import numpy as np
import pytest
from runs import interrupted_after, small_run, steady_metrics
from safetensors.numpy import load_file

from quatrain.loop.export import export
from quatrain.loop.train import train
from quatrain.run.run_dir import checkpoint_steps

pytestmark = pytest.mark.usefixtures("narrow_model")
OPTIONS = (
    "data.train=['builtin:arithmetic', 'builtin:arithmetic-heldout']",
    "data.eval=builtin:arithmetic-heldout",
    "data.shuffle=false",
    "update.kl_coef=0.1",
    "update.reference_sync_steps=1",
    "update.reference_mixup=0.5",
    "offload.reference=true",
    "optimizer.learning_rate=1e-2",
    "checkpoint.best_metric=eval/completion_length",
    "checkpoint.keep=1",
    "eval.every_steps=1",
    "reward.functions={length: {weight: 0.1, args: {least: 1}}, correct: 1.0}",
)


def length(completions, *, least=0):
    return [float(max(len(text), least)) for text in completions]


def run_of(folder, name, *options, **given):
    return train(small_run(folder, name, *OPTIONS, *options), reward_functions={"length": length}, **given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("runs"), "whole", "run.profile_steps=[2]").run


def weights(run):
    return load_file(run / "final" / "model.safetensors")


@pytest.mark.slow
def test_what_a_run_with_these_keys_leaves(whole):
    assert list((whole / "profile").rglob("*.xplane.pb"))
    found = json.loads((whole / "best.json").read_text())
    assert found["metric"] == "eval/completion_length"
    values = {row["step"]: row[found["metric"]] for row in steady_metrics(whole) if found["metric"] in row}
    assert found["value"] == max(values[step] for step in (1, 2, 3, 4)) == values[found["step"]]
    assert checkpoint_steps(whole) == sorted({found["step"], 4})


@pytest.mark.slow
def test_the_reference_moves_by_its_part(whole, tmp_path):
    """A reference that takes over the policy after each step has no divergence from it in the next."""

    def divergences(run):
        return [row["update/kl"] for row in steady_metrics(run) if "update/kl" in row]

    half = divergences(whole)
    assert len(half) == 4
    assert half[0] == pytest.approx(0.0, abs=1e-6)
    assert min(half[1:]) > 1e-6
    taken_over = run_of(tmp_path, "taken_over", "update.reference_mixup=1.0").run
    assert divergences(taken_over) == pytest.approx([0.0] * 4, abs=1e-6)


@pytest.mark.slow
def test_interrupted_and_resumed_is_the_same_to_the_bit(whole, tmp_path):
    with interrupted_after(3), pytest.raises(KeyboardInterrupt):
        run_of(tmp_path, "cut")
    (tmp_path / "cut" / "best.json").unlink()
    resumed = run_of(tmp_path, "cut", resume="cut").run
    assert steady_metrics(resumed) == steady_metrics(whole)
    assert (resumed / "best.json").read_text() == (whole / "best.json").read_text()
    for name, array in weights(whole).items():
        np.testing.assert_array_equal(weights(resumed)[name], array)


@pytest.mark.slow
def test_the_best_checkpoint_is_exported(whole, tmp_path):
    best = json.loads((whole / "best.json").read_text())["step"]
    assert export(whole, tmp_path / "best", step="best") == best
    with pytest.raises(ValueError, match=r"named by its step, or as best; got last"):
        export(whole, tmp_path / "last", step="last")
    (tmp_path / "run").mkdir()
    shutil.copy(whole / "config.yaml", tmp_path / "run")
    with pytest.raises(ValueError, match=r"has no best checkpoint \(no best\.json in it\)"):
        export(tmp_path / "run", tmp_path / "none", step="best")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.shuffle=true", r"data\.shuffle of a resumed run must not change"),
        ("data.train=['builtin:arithmetic', 'builtin:arithmetic']", r"data\.train of a resumed run must"),
        ("update.reference_sync_steps=2", r"update\.reference_sync_steps of a resumed run must not change"),
    ],
)
def test_what_a_resumed_run_must_keep(whole, override, message):
    with pytest.raises(ValueError, match=message):
        run_of(whole.parent, "whole", override, resume="whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("run.profile_steps=[5]",), r"run\.profile_steps must be steps of the run, which has 4; got 5"),
        (
            ("checkpoint.best_metric=eval/acuracy_lenient",),
            r"best_metric must be a metric that every evaluation has, of which the nearest is "
            r"eval/accuracy_lenient; got eval/acuracy_lenient; they are eval/accuracy_errors, ",
        ),
        (
            ("checkpoint.best_metric=eval/mean_at_n",),
            r"every evaluation has; got eval/mean_at_n; they are eval/accuracy_errors, ",
        ),
        (
            ("reward.functions={length: {data_source: gsm8k}}",),
            "data_source of the reward `length` needs the column `data_source`",
        ),
    ],
)
def test_bad_keys_end_a_run_before_it_trains(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run_of(tmp_path, "bad", "sft.steps=0", *options)


def test_a_best_checkpoint_needs_evaluations(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.best_metric needs evaluations"):
        run_of(tmp_path, "bad", "data.train=builtin:arithmetic-heldout", "data.eval=null")
    assert not (tmp_path / "bad").exists()
