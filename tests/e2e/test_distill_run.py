"""Whole runs with a teacher: what they log, what they need no rewards for, and that they go on to the bit."""

import json

import jax
import numpy as np
import pytest
from architectures import changed
from resumed_runs import resumed_copy
from runs import small_run, steady_metrics
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


@pytest.mark.parametrize(
    ("loss", "top_k"),
    [
        ("forward_kl", 12),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("reverse_kl", 0), ("jsd", 0))),
    ],
)
def test_a_run_learns_from_whole_distributions_and_goes_on_to_the_bit(teacher, tmp_path, loss, top_k):
    options = _options(teacher, f"distill.loss={loss}", "run.steps=4", "sft.steps=0")
    options += (f"distill.top_k={top_k}",) if top_k else ()
    whole = train(small_run(tmp_path, "whole", *options)).run
    rows = read_metrics(whole / "metrics.jsonl")
    assert not unknown_metrics({name for row in rows for name in row} - {"step", "non_finite"})
    losses = [row["distill/loss"] for row in rows if "distill/loss" in row]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    of_evaluations = [row["eval/teacher_kl"] for row in rows if "eval/teacher_kl" in row]
    assert len(of_evaluations) == 3
    assert np.isfinite(of_evaluations).all()
    assert ("distill/topk_mass" in rows[-1]) == ("distill/topk_mass_policy" in rows[-1]) == bool(top_k)
    _assert_goes_on_to_the_bit(whole, tmp_path, options)


def _options(teacher, *more):
    own = ("update.kl_coef=0", "distill.rl_weight=0", "reward.functions={}", "optimizer.learning_rate=3e-3")
    return (f"distill.teacher={teacher}", *own, *more)


@pytest.mark.slow
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
    """A run that is resumed after its second step has the metrics and the weights of `whole`."""
    again = resumed_copy(whole, tmp_path / "killed", 2, *options)
    assert steady_metrics(again) == steady_metrics(whole)
    for a, b in zip(*(_arrays(run) for run in (again, whole)), strict=True):
        np.testing.assert_array_equal(a, b)


def _arrays(run):
    return jax.tree.leaves(load_hf(run / "final", np.float32)[1])


def test_the_plan_and_the_dry_run_know_the_teacher(teacher, tmp_path):
    text, _ = dry_run(small_run(tmp_path, "dry", *_options(teacher, "offload.teacher=true")))
    assert "teacher_passes" in text
    assert "distill_forward_passes" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "loss"),
    [("initial", "sampled"), ("policy", "sampled"), ("policy", "jsd")],
)
def test_the_run_teaches_itself_with_a_prompt_that_knows_the_answer(which, loss, tmp_path):
    hint = 'distill.prompt="The answer is {answer}."'
    options = (f"distill.teacher={which}", hint, "update.kl_coef=0", "run.steps=2", "eval.every_steps=0")
    options += ("eval.before=false", "sft.steps=0")
    options += () if loss == "sampled" else (f"distill.loss={loss}", "distill.top_k=16")
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


def test_a_prompt_of_an_evaluation_that_cannot_be_made_is_an_error_before_the_run(tmp_path):
    rows = [{"prompt": f"{number} + 3 =", "answer": "5", "hint": "five"} for number in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows[4]["hint"] = None
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"data.{name}={tmp_path / name}.jsonl" for name in ("train", "eval")]
    options += ["distill.teacher=policy", 'distill.prompt="It is {hint}."', "update.kl_coef=0", "sft.steps=0"]
    with pytest.raises(
        ValueError, match=r"eval\.jsonl, row 5: distill\.prompt names the column 'hint', which"
    ):
        train(small_run(tmp_path, "null", *options))


@pytest.mark.slow
def test_a_critic_and_a_divergence_from_a_teacher(teacher, tmp_path):
    options = (f"distill.teacher={teacher}", "distill.loss=forward_kl", "advantage.estimator=gae")
    run = train(small_run(tmp_path, "gae", *options, "run.steps=2", "eval.every_steps=0")).run
    steps = [row for row in read_metrics(run / "metrics.jsonl") if "distill/loss" in row]
    assert [row["update/optimizer_steps"] for row in steps] == [1, 1]
    assert all(np.isfinite([row["distill/loss"], row["critic/loss"]]).all() for row in steps)


def test_samples_have_the_teachers_log_probabilities_of_their_tokens(teacher, tmp_path):
    options = _options(teacher, "run.steps=1", "eval.every_steps=0", "eval.before=false", "sft.steps=0")
    run = train(small_run(tmp_path, "tokens", *options, "logging.sample_tokens=true")).run
    rows = [json.loads(line) for line in (run / "samples" / "step_000001.jsonl").read_text().splitlines()]
    [step] = [row for row in read_metrics(run / "metrics.jsonl") if "distill/teacher_logprob" in row]
    for row in rows:
        tokens = row["tokens"]
        assert len(tokens["teacher_logprobs"]) == len(tokens["ids"]) == len(tokens["sampler_logprobs"])
    assert len(rows) == 16
    every = [x for row in rows for x in row["tokens"]["teacher_logprobs"]]
    assert np.mean(every) == pytest.approx(step["distill/teacher_logprob"], rel=1e-4)


def test_an_evaluation_of_rows_that_the_teacher_cannot_read_has_no_kl(tmp_path):
    text = "Tom has 2 apples and buys 3 more. How many now?"
    rows = [{"prompt": text, "answer": "5", "hint": "five"}] * 8
    for name, keys in (("train", ("prompt", "answer", "hint")), ("eval", ("prompt", "answer"))):
        text = "".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    options = [f"data.{name}={tmp_path / name}.jsonl" for name in ("train", "eval")]
    options += ["distill.teacher=policy", 'distill.prompt="It is {hint}."', "update.kl_coef=0", "sft.steps=0"]
    run = train(small_run(tmp_path, "unread", *options, "run.steps=1", "eval.every_steps=0")).run
    said = (run / "run.log").read_text()
    assert "there is no eval/teacher_kl without the column hint of distill.prompt" in said
    assert not any("eval/teacher_kl" in row for row in read_metrics(run / "metrics.jsonl"))
