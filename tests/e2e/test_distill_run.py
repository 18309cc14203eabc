"""Whole runs with a teacher: what they log, what they need no rewards for, and that they go on to the bit."""

import jax
import numpy as np
import pytest
from architectures import changed
from runs import interrupted_after, small_run, steady_metrics
from teachers import save_policy

from quatrain.loop.train import dry_run, train
from quatrain.models.families import builtin_architecture
from quatrain.run.catalogue import unknown_metrics
from quatrain.run.metrics import read_metrics
from quatrain.weights.hf import load_hf

pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer, narrow_model):
    arch = builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
    return save_policy(
        tmp_path_factory.mktemp("models") / "teacher", changed(arch, num_layers=3, width=64), tokenizer
    )


@pytest.mark.parametrize("loss", ["reverse_kl", pytest.param("jsd", marks=pytest.mark.slow)])
def test_a_run_learns_from_whole_distributions_and_goes_on_to_the_bit(teacher, tmp_path, loss):
    options = _options(teacher, f"distill.loss={loss}", "run.steps=6", "sft.steps=0", "eval.every_steps=0")
    whole = train(small_run(tmp_path, "whole", *options)).run
    rows = read_metrics(whole / "metrics.jsonl")
    assert not unknown_metrics({name for row in rows for name in row} - {"step", "non_finite"})
    losses = [row["distill/loss"] for row in rows if "distill/loss" in row]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    _assert_goes_on_to_the_bit(whole, tmp_path, options)


def _options(teacher, *more):
    own = ("update.kl_coef=0", "distill.rl_weight=0", "reward.functions={}", "optimizer.learning_rate=3e-3")
    return (f"distill.teacher={teacher}", *own, *more)


def test_a_run_learns_from_its_teacher_without_rewards_and_goes_on_to_the_bit(teacher, tmp_path):
    options = _options(
        teacher, "run.steps=6", "sft.steps=0", "eval.every_steps=0", "distill.warmdown_steps=2"
    )
    whole = train(small_run(tmp_path, "whole", *options)).run
    rows = read_metrics(whole / "metrics.jsonl")
    names = {name for row in rows for name in row} - {"step", "non_finite"}
    assert not unknown_metrics(names)
    steps = [row for row in rows if "distill/kl" in row]
    assert len(steps) == 6
    assert min(row["update/grad_norm"] for row in steps) > 0
    assert [row["update/optimizer_steps"] for row in steps] == [1] * 6
    assert {"distill/teacher_logprob", "distill/clipped_fraction", "time/teacher_s"} <= names
    assert not any(name.startswith("reward/") for name in names)
    _assert_goes_on_to_the_bit(whole, tmp_path, options)


def _assert_goes_on_to_the_bit(whole, tmp_path, options):
    """A run that is stopped after three steps and resumed has the metrics and the weights of `whole`."""
    with pytest.raises(KeyboardInterrupt), interrupted_after(3):
        train(small_run(tmp_path, "stopped", *options))
    again = train(small_run(tmp_path, "stopped", *options), resume="stopped").run
    assert steady_metrics(again) == steady_metrics(whole)
    for a, b in zip(*(_arrays(run) for run in (again, whole)), strict=True):
        np.testing.assert_array_equal(a, b)


def _arrays(run):
    return jax.tree.leaves(load_hf(run / "final", np.float32)[1])


def test_the_plan_and_the_dry_run_know_the_teacher(teacher, tmp_path):
    text, _ = dry_run(small_run(tmp_path, "dry", *_options(teacher, "offload.teacher=true")))
    assert "teacher_passes" in text
    assert "distill_forward_passes" in text


@pytest.mark.parametrize("which", ["policy", "initial"])
def test_the_run_teaches_itself_with_a_prompt_that_knows_the_answer(which, tmp_path):
    hint = 'distill.prompt="The answer is {answer}."'
    options = (f"distill.teacher={which}", hint, "update.kl_coef=0", "run.steps=2", "eval.every_steps=0")
    run = train(small_run(tmp_path, which, *options)).run
    steps = [row for row in read_metrics(run / "metrics.jsonl") if "distill/kl" in row]
    assert len(steps) == 2
    assert all(np.isfinite(row["distill/kl"]) and row["distill/no_teacher"] == 0 for row in steps)
    assert (run / "reference").is_dir() == (which == "initial")
    resumed = train(small_run(tmp_path, which, *options, "run.steps=3"), resume=which).run
    assert len([row for row in read_metrics(resumed / "metrics.jsonl") if "distill/kl" in row]) == 3


def test_a_prompt_that_names_no_column_is_refused_before_the_run(tmp_path):
    options = ("distill.teacher=policy", 'distill.prompt="{nothing}"')
    with pytest.raises(ValueError, match="nothing"):
        train(small_run(tmp_path, "bad", *options))
    with pytest.raises(ValueError, match=r"distill\.prompt must be set for distill\.teacher policy"):
        small_run(tmp_path, "bad", "distill.teacher=policy")
