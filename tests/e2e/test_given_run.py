"""Whole runs on data that exist: `quatrain sft`, `dpo` and `rm`."""

import gc
import json
import math
import shutil
import signal
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from given_runs import ROWS, TASKS, given_run, write_sums
from runs import interrupted_after, steady_metrics

from quatrain.cluster.processes import _read, _written
from quatrain.cluster.stop import Stopped
from quatrain.config.load import load_config
from quatrain.forward.predict import predict_tokens
from quatrain.loop import given
from quatrain.loop.export import export
from quatrain.loop.given import Course, GivenData, ReferenceLogprobs
from quatrain.loop.policy import load_policy
from quatrain.loop.train import dry_run, train
from quatrain.models.lora import adapters_of, with_trained
from quatrain.report.page_samples import read_samples
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.metrics import read_metrics
from quatrain.run.run_dir import checkpoint_steps
from quatrain.types.pictures import PicturesInJson
from quatrain.update.learner import TooManyBadSteps
from quatrain.update.supervised import GivenLearner

pytestmark = pytest.mark.usefixtures("narrow_model")


def _weights(run):
    return (run / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """finished(task) -> the summary of a whole run, and its folder's parent; each run is made once."""
    made = {}

    def of(task):
        if task not in made:
            folder = tmp_path_factory.mktemp(task)
            made[task] = train(given_run(folder, "whole", task)), folder
        return made[task]

    return of


@pytest.mark.parametrize("task", TASKS)
def test_a_run_learns_logs_what_is_documented_and_leaves_a_model(finished, task):
    """A loss of the wrong sign, a metric without a name, an evaluation of the rows that are trained on."""
    summary, _folder = finished(task)
    rows = read_metrics(summary.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(7)]
    assert not unknown_metrics({name for row in rows for name in row} - {"step", "non_finite"})
    evaluated = [row["step"] for row in rows if "eval/loss" in row]
    assert evaluated == [0, 2, 4, 6]
    assert summary.after["eval/loss"] != summary.before["eval/loss"]
    assert rows[-1][f"{task}/loss"] < rows[1][f"{task}/loss"]
    assert rows[-1]["loss"] == pytest.approx(rows[-1][f"{task}/loss"], rel=1e-6)
    assert rows[-1]["data/epoch"] == 2
    assert checkpoint_steps(summary.run) == [2, 4, 6]
    assert (summary.run / "report.html").is_file()
    assert "the run ends" not in (summary.run / "run.log").read_text()


@pytest.mark.parametrize("task", ["dpo", "rm"])
def test_before_the_first_step_all_rewards_are_0_and_the_loss_is_log_2(finished, task):
    """A reference of other rows or other weights than the policy's, a score head that is not zero."""
    rows = read_metrics(finished(task)[0].run / "metrics.jsonl")
    for prefix, row in (("eval", rows[0]), (task, rows[1])):
        assert row[f"{prefix}/loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert abs(row[f"{prefix}/margin"]) < 1e-5
        assert row[f"{prefix}/accuracy"] == 0.5 if task == "rm" else True
    if task == "dpo":
        assert max(abs(rows[1][f"dpo/reward_{answer}"]) for answer in ("chosen", "rejected")) < 1e-5


def _resumed(task, whole, folder, *overrides):
    """Checks that a run stopped in its fourth step, and resumed, is the run `whole` to the bit."""
    resolved = given_run(folder, "stopped", task, *overrides)
    with interrupted_after(3, GivenLearner), pytest.raises(KeyboardInterrupt):
        train(resolved)
    run = folder / "stopped"
    assert checkpoint_steps(run) == [2]
    resumed = train(resolved, resume="stopped")
    assert _weights(resumed.run) == _weights(whole.run)
    assert steady_metrics(resumed.run) == steady_metrics(whole.run)
    assert resumed.before == whole.before
    for step in range(1, 7):
        name = f"samples/step_{step:06d}.jsonl"
        assert (run / name).exists() == (whole.run / name).exists() == (task != "sft")
        assert task == "sft" or (run / name).read_text() == (whole.run / name).read_text()


def test_preferences_interrupted_and_resumed_are_the_uninterrupted_run_to_the_bit(finished):
    """And the reference comes from the file: what the weights of the checkpoint say would be another."""
    whole, folder = finished("dpo")
    _resumed("dpo", whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "rm"])
def test_others_interrupted_and_resumed_are_too(finished, task):
    whole, folder = finished(task)
    _resumed(task, whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_adapters_interrupted_and_resumed_are_too(task, tmp_path):
    whole = train(given_run(tmp_path, "whole", task, "lora.rank=2"))
    assert (whole.run / "final" / "adapter").is_dir()
    _resumed(task, whole, tmp_path, "lora.rank=2")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_process_that_is_killed_goes_on_to_the_bit(finished, task, tmp_path):
    """`kill -9` between two steps, of a process of its own."""
    whole, folder = finished(task)
    config = folder / f"{task}.yaml"
    config.write_text((whole.run / "config.yaml").read_text())
    script = (
        "import os, signal, sys\n"
        "from quatrain.models import families\n"
        "families._BUILTIN['tiny'] |= {'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, "
        "'head_dim': 8}\n"
        "from quatrain.config.load import load_config\n"
        "from quatrain.loop.train import train\n"
        "def dies(step, metrics):\n"
        "    if step == 5 and len(sys.argv) > 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"resolved = load_config({str(config)!r}, ['run.name=killed'], environ={{}}, task={task!r})\n"
        "train(resolved, resume=None if len(sys.argv) > 1 else 'killed', on_step=dies)\n"
    )
    first = subprocess.run([sys.executable, "-c", script, "dies"], capture_output=True, check=False)
    assert first.returncode == -9, first.stderr.decode()
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert _weights(folder / "killed") == _weights(whole.run)


def _course(resolved, reference_file=None):
    policy = load_policy(resolved.config, critic=False)
    data = GivenData.of(resolved.config, policy)
    steps = resolved.config.steps_of(len(data.train))
    return Course(resolved.config, policy, data, steps=steps, reference_file=reference_file), policy, steps


def test_every_row_is_seen_as_often_as_there_are_epochs(tmp_path):
    """The last batch has the rest: with whole batches alone some rows would be seen once more, or less."""
    course, _, steps = _course(given_run(tmp_path, "x", "sft", "sft.epochs=3"))
    seen = [tuple(row.input_ids.tolist()) for step in range(steps) for row in course.batch(step).rows]
    assert steps == 9  # 66 rows in batches of 8
    counts = Counter(seen)
    assert len(counts) == ROWS
    assert set(counts.values()) == {3}
    assert [len(course.batch(step).rows) for step in range(steps)] == [8] * 8 + [2]
    assert course.epoch(4)["data/epoch"].result() == pytest.approx(32 / 22)
    assert course.epoch(9)["data/epoch"].result() == 3


def test_parts_of_an_epoch_are_those_of_the_decimal():
    """As floats 1.1 times 10 is more than 11, and an eleventh batch would be a twelfth."""
    config = load_config(None, ["run.steps=null", "run.epochs=1.1", "data.batch_size=1"]).config
    assert [config.steps_of(rows) for rows in (10, 11, 20)] == [11, 13, 22]


def test_the_loss_of_an_evaluation_is_the_plain_mean_over_tokens_whatever_the_parts(tmp_path, monkeypatch):
    """A mean of the means of parts would weigh the tokens of a small part more."""
    course, policy, _ = _course(given_run(tmp_path, "x", "sft"))
    plain = course.evaluate(policy.params)
    table = course._table(course.evaluation.head(), "eval")
    predicted = predict_tokens(policy.params, table, model=course.spec, planner=course._forward_planner)
    mean = -predicted[table.completion_mask].astype(np.float64).mean()
    assert plain["eval/loss"].result() == pytest.approx(mean, rel=1e-6)
    assert plain["eval/perplexity"].result() == pytest.approx(math.exp(mean), rel=1e-6)
    monkeypatch.setattr("quatrain.loop.given.EVALUATED_ROWS", 1)  # parts of 8 rows, and of the last one
    assert course.evaluate(policy.params)["eval/loss"].result() == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_an_evaluation_of_several_data_sets_has_the_loss_of_each_over_all_its_rows(
    task, tmp_path, monkeypatch
):
    """In file order most parts have rows of one data set alone, which would be left out."""
    given_run(tmp_path, "x", task)
    rows = (tmp_path / f"{task}_eval.jsonl").read_text().splitlines(keepends=True)
    sizes = {"first": 6, "second": 3}
    (tmp_path / "first.jsonl").write_text("".join(rows[:6]))
    (tmp_path / "second.jsonl").write_text("".join(rows[6:]))
    both = f"{task}.eval=[{tmp_path / 'first.jsonl'},{tmp_path / 'second.jsonl'}]"
    monkeypatch.setattr("quatrain.loop.given.EVALUATED_ROWS", 1)
    resolved = given_run(tmp_path, "x", task, both, f"{task}.batch_size=4")
    course, policy, _ = _course(resolved, tmp_path / "reference.npz")
    course.keep_reference(policy.params)
    found = course.evaluate(policy.params)
    assert {f"eval/loss/{name}" for name in sizes} <= {*course.metric_names()} == {*found}
    counts = [found[f"eval/loss/{name}"].count for name in sizes]
    assert sum(counts) == found["eval/loss"].count
    assert task == "sft" or counts == [*sizes.values()]
    values = sum(found[f"eval/loss/{name}"].value for name in sizes)
    assert values == pytest.approx(found["eval/loss"].value, rel=1e-9)


def test_what_trains_does_not_keep_the_weights_that_it_began_with(tmp_path):
    """Where the policy waits in the host's memory, the devices would hold a copy for the whole run."""
    course, policy, _ = _course(given_run(tmp_path, "x", "sft"))
    leaf = weakref.ref(policy.params["embed"])
    del policy
    gc.collect()
    assert len(course.train) == ROWS
    assert leaf() is None


def test_the_reference_is_read_again_computed_again_or_refused(tmp_path):
    """That of `initial`, of another model and of the base of adapters; another row is another reference."""
    file = tmp_path / "reference.npz"
    course, policy, _ = _course(given_run(tmp_path, "x", "dpo"), file)
    course.keep_reference(policy.params)
    first = course.batch(0).table
    sums = first.of_rows["reference"]
    assert sums.shape == (16,)
    assert (sums < -1).all()
    predicted = predict_tokens(policy.params, first, model=course.spec, planner=course._forward_planner)
    np.testing.assert_allclose(sums, predicted.sum(axis=1, dtype=np.float64), rtol=1e-5)
    # Read: what is in the file counts, not what the weights say.
    content = dict(np.load(file))
    np.savez(file, **{**content, "train": content["train"] - 1})
    course.keep_reference(policy.params)
    np.testing.assert_allclose(course.batch(0).table.of_rows["reference"], sums - 1)
    file.unlink()
    course.keep_reference(policy.params)
    np.testing.assert_array_equal(course.batch(0).table.of_rows["reference"], sums)
    other = jax.tree.map(lambda x: x * 1.5, policy.params)
    with pytest.raises(
        ValueError, match=r"are of another the weights of model.path; set these back, or remove"
    ):
        course.keep_reference(other)
    write_sums(tmp_path / "dpo.jsonl", 11, ROWS)
    changed, policy, _ = _course(given_run(tmp_path, "x", "dpo"), file)
    with pytest.raises(ValueError, match=r"are of another the rows of dpo\.data; set these back"):
        changed.keep_reference(policy.params)
    # A run that is started again without a checkpoint begins anew: what its first attempt left is not its.
    changed.keep_reference(policy.params, resumed=False)
    assert not np.array_equal(changed.batch(0).table.of_rows["reference"], sums)
    changed.keep_reference(policy.params)


def test_the_reference_of_adapters_is_their_base_and_another_model_may_be_one(finished, tmp_path):
    """Adapters that moved must not move it; a model of a path is loaded, not the policy."""
    plain, policy, _ = _course(given_run(tmp_path, "x", "dpo"), tmp_path / "plain.npz")
    plain.keep_reference(policy.params)
    sums = plain.batch(0).table.of_rows["reference"]
    adapted, adapted_policy, _ = _course(
        given_run(tmp_path, "x", "dpo", "lora.rank=2"), tmp_path / "lora.npz"
    )
    params, arch = adapted_policy.params, adapted_policy.arch
    moved = jax.tree.map(lambda x: x + 0.1, adapters_of(params))
    adapted.keep_reference(with_trained(params, moved, arch))
    np.testing.assert_allclose(adapted.batch(0).table.of_rows["reference"], sums, rtol=1e-5)
    trained = finished("dpo")[0].run / "final"
    named, _, _ = _course(given_run(tmp_path, "x", "dpo", f"dpo.reference={trained}"), tmp_path / "named.npz")
    named.keep_reference(policy.params)
    found = named.batch(0).table.of_rows["reference"]
    assert np.abs(found - sums).max() > 0.05
    again, trained_policy, _ = _course(
        given_run(tmp_path, "x", "dpo", f"model.path={trained}"), tmp_path / "t.npz"
    )
    again.keep_reference(trained_policy.params)
    np.testing.assert_allclose(again.batch(0).table.of_rows["reference"], found, rtol=1e-5)


def test_the_main_process_reads_the_reference_for_all(tmp_path, monkeypatch):
    """Catches a resume that fails on hosts which do not see the folder of process 0."""
    path, hidden = tmp_path / "reference.npz", tmp_path / "hidden"
    sums = np.array([[-1.5, -2.25], [-3.0, np.pi]])
    ReferenceLogprobs(path).keep({"rows": ["a"]}, {"data": ([7, 3], sums)})
    path.rename(hidden)

    def by_main(decide):  # in which alone the file is there; the result goes to the others as JSON
        hidden.rename(path)
        try:
            text = json.dumps(decide(), default=_written(PicturesInJson()))
        finally:
            path.rename(hidden)
        return json.loads(text, object_hook=_read(PicturesInJson()))

    monkeypatch.setattr(given, "decided_by_main", by_main)
    reference = ReferenceLogprobs(path)
    assert reference.read({"rows": ["a"]})
    np.testing.assert_array_equal(reference.of("data", [3, 7]), sums[::-1])
    with pytest.raises(ValueError, match="are of another rows"):
        reference.read({"rows": ["b"]})


def test_a_lost_file_of_the_reference_is_computed_from_the_initial_weights_when_resumed(finished):
    """Not from those of the checkpoint, of which the loss would be log 2 again."""
    whole, folder = finished("dpo")
    copy = folder / "lost"
    shutil.copytree(whole.run, copy)
    for step in (4, 6):
        shutil.rmtree(copy / "checkpoints" / str(step))
    shutil.rmtree(copy / "final")
    (copy / "reference_logprobs.npz").unlink()
    resumed = train(given_run(folder, "lost", "dpo"), resume="lost")
    assert _weights(resumed.run) == _weights(whole.run)


def test_a_run_without_a_better_loss_ends_and_the_best_checkpoint_is_exported(tmp_path, monkeypatch):
    """Step 2 is the best; two evaluations later the run ends, and `best` is not the last."""
    losses = iter([3.0, 1.0, 2.0, 2.5, 2.0])
    plain = Course.evaluate

    def told(self, params):
        found = plain(self, params)
        return {**found, "eval/loss": replace(found["eval/loss"], value=next(losses), count=1.0)}

    monkeypatch.setattr(Course, "evaluate", told)
    options = (
        "sft.epochs=4", "run.stop_when={metric: eval/loss, patience: 2}",
        "checkpoint.best_metric=eval/loss", "checkpoint.best_mode=min", "checkpoint.every_steps=0",
    )  # fmt: skip
    summary = train(given_run(tmp_path, "patient", "sft", *options))
    assert summary.steps == 6
    assert "the 2. value in a row that is not better than 1" in (summary.run / "run.log").read_text()
    assert checkpoint_steps(summary.run) == [2, 6]
    assert export(summary.run, tmp_path / "best", step="best") == 2
    assert (tmp_path / "best" / "model.safetensors").read_bytes() != _weights(summary.run)


def test_a_run_that_ends_by_the_evaluation_it_was_stopped_in_ends_well(tmp_path, monkeypatch):
    """It ends where it is resumed; as a run that lacks its last checkpoint it would fail after the export."""
    losses: list[float | None] = [1.0, 2.0, None, 3.0, 3.0]
    plain = Course.evaluate

    def told(self, params):
        value = losses.pop(0)
        if value is None:
            raise Stopped(signal.SIGTERM)
        found = plain(self, params)
        return {**found, "eval/loss": replace(found["eval/loss"], value=value, count=1.0)}

    monkeypatch.setattr(Course, "evaluate", told)
    options = ("run.stop_when={metric: eval/loss, patience: 1}", "checkpoint.every_steps=0")
    resolved = given_run(tmp_path, "stopped", "sft", *options)
    with pytest.raises(Stopped):
        train(resolved)
    assert checkpoint_steps(tmp_path / "stopped") == [4]
    summary = train(resolved, resume="stopped")
    assert summary.steps == 4
    assert "the run ends with step 4 of 6: eval/loss is 3, the 1. value" in (
        (summary.run / "run.log").read_text()
    )


def stopped_in_evaluations(monkeypatch, *stops):
    """Whether each evaluation from now on is stopped, from the last: a list, to which more are added."""
    plain, left = Course.evaluate, [*stops]

    def evaluate(self, params):
        if left.pop():
            raise Stopped(signal.SIGTERM)
        return plain(self, params)

    monkeypatch.setattr(Course, "evaluate", evaluate)
    return left


def test_a_step_that_was_stopped_in_its_evaluation_ends_with_its_own_metrics_too(tmp_path, monkeypatch):
    """The resumed run compared the evaluation alone: it trained on, and `on_step` missed the step."""
    stops, seen = stopped_in_evaluations(monkeypatch, True), []

    def on_step(step, metrics):
        seen.append((step, metrics["sft/loss"] > 0, metrics["eval/loss"] > 0))

    options = ("run.stop_when={metric: sft/loss, at_most: 1000}", "eval.before=false", "eval.every_steps=1")
    resolved = given_run(tmp_path, "stopped", "sft", *options)
    with pytest.raises(Stopped):
        train(resolved, on_step=on_step)
    assert (checkpoint_steps(tmp_path / "stopped"), seen) == ([1], [])
    stops += [False, False]
    summary = train(resolved, resume="stopped", on_step=on_step)
    assert (summary.steps, seen) == (1, [(1, True, True)])


def test_a_run_that_was_stopped_in_its_final_evaluation_does_not_train_on(tmp_path, monkeypatch):
    """It had met its condition: resumed, it took a further step and ended with other weights."""
    stops = stopped_in_evaluations(monkeypatch, True)
    options = ("run.stop_when={metric: sft/loss, at_most: 1000}", "eval.before=false", "eval.every_steps=0")
    resolved = given_run(tmp_path, "stopped", "sft", *options)
    with pytest.raises(Stopped):
        train(resolved)
    assert checkpoint_steps(tmp_path / "stopped") == [1]
    stops += [False, False]
    assert train(resolved, resume="stopped").steps == 1
    assert train(resolved, resume="stopped").steps == 2  # now it had its results


def test_bad_steps_end_a_run_with_the_key_of_its_rate(tmp_path, monkeypatch):
    """Each is counted, and the record of the step that was given up is written."""
    plain = GivenLearner.step

    def ruined(self, state, batch):
        if state.train_step == 1:
            state = replace(state, params=jax.tree.map(lambda x: x * np.nan, state.params))
        return plain(self, state, batch)

    monkeypatch.setattr(GivenLearner, "step", ruined)
    with pytest.raises(
        TooManyBadSteps, match=r"max_bad_steps=1: .* lower dpo\.learning_rate or look at the data"
    ):
        train(given_run(tmp_path, "bad", "dpo", "update.max_bad_steps=1"))
    rows = read_metrics(tmp_path / "bad" / "metrics.jsonl")
    assert rows[-1]["update/bad_steps"] == 1
    assert "loss" in rows[-1]["non_finite"]


def test_the_pairs_with_the_largest_loss_are_samples_with_both_rewards(finished):
    """Those of the smallest loss would show what needs no look; the page reads them as groups of two."""
    run = finished("dpo")[0].run
    rows = [json.loads(line) for line in (run / "samples" / "step_000006.jsonl").read_text().splitlines()]
    losses = [row["columns"]["loss"] for row in rows if row["columns"]["answer"] == "chosen"]
    assert losses == sorted(losses, reverse=True)
    chosen, rejected = rows[:2]
    assert chosen["prompt"] == rejected["prompt"]
    assert chosen["group_id"] == rejected["group_id"]
    margin = chosen["reward"] - rejected["reward"]
    assert chosen["columns"]["loss"] == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-6)
    shown = read_samples(run / "samples" / "step_000006.jsonl")
    assert len(shown.samples) == len(rows)
    assert not shown.num_damaged


def test_a_run_is_exported_without_the_secrets_that_its_configuration_had(finished, tmp_path):
    """`config.yaml` has `[redacted]` in their place: an export asked for them by --set, which it has not."""
    whole = finished("sft")[0].run
    run = shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("final", "samples"))
    text = (run / "config.yaml").read_text()
    assert "  system_prompt: null" in text
    (run / "config.yaml").write_text(text.replace("  system_prompt: null", "  system_prompt: key [redacted]"))
    assert export(run, tmp_path / "out") == 6
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == _weights(whole)


def test_rows_of_other_data_do_not_go_on(finished):
    """A resumed run on other rows would be neither run."""
    _whole, folder = finished("sft")
    data = folder / "sft.jsonl"
    before = data.read_text()
    try:
        data.write_text(before.replace("10 +", "11 +"))
        with pytest.raises(ValueError, match=r"sft\.data of a resumed run must not change: .* as many rows"):
            train(given_run(folder, "whole", "sft", "sft.epochs=2"), resume="whole")
        # Of fewer rows the epochs make fewer steps: not the steps are named, which must not change either.
        data.write_text("".join(before.splitlines(keepends=True)[:10]))
        with pytest.raises(ValueError, match=r"sft\.data of a resumed run must not change: .* had 22 rows"):
            train(given_run(folder, "whole", "sft", "sft.epochs=2"), resume="whole")
    finally:
        data.write_text(before)


def test_a_dry_run_says_what_a_run_would_be_and_leaves_nothing(tmp_path):
    for task, words in (("sft", "22 examples"), ("dpo", "22 pairs"), ("rm", "22 pairs")):
        plan, _ = dry_run(given_run(tmp_path, "dry", task))
        assert plan.startswith(f"6 steps of 8 {words.split()[1]}, {words}\n")
        assert not (tmp_path / "dry").exists()


def test_supervised_training_generates_where_there_are_prompts(tmp_path):
    """`data.eval` is completed and scored beside the loss, before and after training."""
    options = ("sft.steps=1", "sft.data=builtin:arithmetic", "eval.final_num_prompts=4", "eval.num_prompts=4")
    settings = (*options, f"run.dir={tmp_path}", "run.name=both", "sft.batch_size=8")
    summary = train(load_config(None, settings, environ={}, task="sft"))
    assert {"eval/accuracy_lenient", "eval/reward", "eval/num_prompts"} <= summary.after.keys()
    assert "eval/loss" not in summary.after  # no sft.eval
    assert list((summary.run / "samples").glob("eval_*.jsonl"))
