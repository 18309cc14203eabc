"""Evaluations of small runs: sets, accuracy functions, the same prompts before and after, what is kept."""

import json
from contextlib import closing

import pytest
from runs import interrupted_after, small_run

from quatrain.engine.engine import RolloutEngine
from quatrain.loop.evaluate import Evaluator, evaluate_run
from quatrain.loop.policy import load_policy
from quatrain.loop.train import train
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.reward.scorer import RewardScorer
from quatrain.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("narrow_model")
SUM = "Tom has {} apples and loses 0. How many now?"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two evaluation sets and an accuracy function of its own."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "judge.py").write_text(
        "def half(completions, answer, **columns):\n"
        "    return [None if a == 3 else 0.5 if a == 2 else 7.0 for a in answer]\n\n\n"
        "def fails(completions, **columns):\n    raise RuntimeError('no')\n"
    )
    rows = [{"prompt": SUM.format(i), "answer": i, "note": [i]} for i in range(1, 6)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (
        f"data.eval={{sums: {folder / 'sums.jsonl'}, words: 'builtin:arithmetic-heldout'}}",
        f"eval.accuracy={folder / 'judge.py'}:half",
        f"reward.functions={{correct: 1.0, {folder / 'judge.py'}:fails: 0.0}}",
        "eval.num_prompts=3", "eval.final_num_prompts=4", "eval.max_new_tokens=5", "eval.n=2",
        "eval.top_p=0.9", "run.steps=1", "sft.steps=0",
    )  # fmt: skip
    return train(small_run(folder, "run", *options)), options


def samples(run, step):
    lines = (run / "samples" / f"eval_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_set_has_metrics_of_the_same_prompts_before_and_after(run):
    summary = run[0]
    first, last = (read_metrics(summary.run / "metrics.jsonl")[i] for i in (0, -1))
    for row in (first, last):
        for name in ("sums", "words"):
            assert row[f"eval/{name}/num_prompts"] == 3
            assert f"eval/{name}/accuracy_strict" not in row  # no reward asks for the format
        # 1 is bounded to 1, 2 counts half, 3 is left out.
        assert row["eval/sums/accuracy_lenient"] == row["eval/sums/mean_at_n"] == 0.75
        assert row["eval/sums/pass_at_n"] == 1
        assert row["eval/sums/reward/fails"] == -1
        assert row["eval/sums/reward/fails/errors"] == row["eval/sums/reward/fails/errors/error"] == 3
        assert row["eval/sums/completion_length"] <= 5
    assert "eval/sums/final/num_prompts" not in first
    assert last["eval/sums/final/num_prompts"] == last["eval/words/final/num_prompts"] == 4
    assert last["eval/sums/final/accuracy_lenient"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert last["eval/sums/final/reward/fails/errors"] == 4


def test_the_metrics_of_an_evaluation_are_known_before_it(run):
    summary, options = run
    config = small_run(summary.run.parent, "unused", *options).config
    loaded = load_policy(config, weights=False)
    with (
        closing(RewardScorer.of(config, loaded)) as scorer,
        closing(Evaluator(config, loaded, scorer)) as made,
    ):
        names = made.metric_names()
    row = read_metrics(summary.run / "metrics.jsonl")[0]
    logged = {name for name in row if name.startswith("eval/")} - {"eval/sums/reward/fails/errors/error"}
    assert set(names) == logged - {"eval/words/reward/fails/errors/error"}


def test_its_completions_are_kept(run):
    before, after = (samples(run[0].run, step) for step in (0, 1))
    assert len(before) == 2 * 3 * 3  # of two sets, three prompts, one greedy and two sampled completions
    assert len(after) == 2 * 4 * 3
    keys = [(s["set"], s["prompt_index"], s["greedy"], s["sample"]) for s in after]
    assert len(set(keys)) == len(after)
    third = next(s for s in after if (s["set"], s["prompt_index"], s["greedy"]) == ("sums", 2, True))
    assert third["step"] == 1
    assert third["prompt"] == SUM.format(3)
    assert third["columns"] == {"answer": 3, "note": [3]}
    assert third["correct"] is None
    assert third["strict"] is None
    assert third["rewards"]["fails"] == -1
    assert third["completion_tokens"] <= 5


def test_the_results_are_told_with_their_numbers_of_prompts(run):
    log = (run[0].run / "run.log").read_text()
    assert "held-out sums accuracy, on 3 prompts: 0.750 before, 0.750 after training\n" in log
    assert "held-out sums accuracy, on 4 prompts: 0.833 after training\n" in log
    assert "held-out words accuracy, on 3 prompts: 1.000 before, 1.000 after" in log
    assert "strict accuracy" not in log


def test_quatrain_eval_reports_all_its_prompts(run, tmp_path):
    summary, options = run
    alone = evaluate_run(small_run(tmp_path, "x", *options, f"model.path={summary.run / 'final'}"))
    assert alone["eval/sums/num_prompts"] == 4
    assert alone["eval/sums/accuracy_lenient"] == pytest.approx(
        summary.after["eval/sums/final/accuracy_lenient"]
    )
    assert not [name for name in alone if "/final/" in name]


def test_strict_accuracy_needs_the_format_and_evaluation_before_can_be_left_out(tmp_path):
    summary = train(small_run(tmp_path, "run", "run.steps=1", "sft.steps=0", "eval.before=false"))
    assert summary.before == {}
    verdicts = [(s["correct"], s["strict"]) for s in samples(summary.run, 1)]
    assert len(verdicts) == 8
    assert summary.after["eval/accuracy_lenient"] == sum(lenient for lenient, _ in verdicts) / 8
    assert summary.after["eval/accuracy_strict"] == sum(strict for _, strict in verdicts) / 8
    assert not (summary.run / "samples" / "eval_000000.jsonl").exists()
    assert [row["step"] for row in read_metrics(summary.run / "metrics.jsonl")] == [1]


def test_without_gold_answers_there_is_no_accuracy_unless_a_function_is_named(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a poem"}\n')
    options = (f"data.eval={data}", f"data.train={data}", "reward.functions={tag_count: 1}", "sft.steps=0")
    found = evaluate_run(small_run(tmp_path, "x", *options))
    assert found["eval/reward"] == found["eval/reward/tag_count"]
    assert not [name for name in found if "accuracy" in name]
    with pytest.raises(ValueError, match=r"eval\.accuracy correct needs the column `answer`"):
        evaluate_run(small_run(tmp_path, "x", *options, "eval.accuracy=correct"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data.eval={final: a.jsonl}"], r"data\.eval must be data sets, or a mapping"),
        (["data.eval={a/b: a.jsonl}"], r"data\.eval must be data sets.*is not final or reward"),
        (["data.eval={}"], r"data\.eval must be data sets"),
        (["data.eval={a: 3}"], r"data\.eval must be a data set"),
        (["eval.accuracy=model:x"], r"eval\.accuracy must be a function"),
        (["eval.top_p=0.5"], r"eval\.top_p has no effect with eval\.n 0"),
        (["eval.temperature=0.5"], r"eval\.temperature has no effect with eval\.n 0"),
    ],
)
def test_bad_settings(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path, "x", *options)


def test_completions_longer_than_the_model_has_positions(tmp_path):
    with pytest.raises(ValueError, match=r"max_prompt_length \+ eval\.max_new_tokens is 100032 tokens"):
        evaluate_run(small_run(tmp_path, "x", "eval.max_new_tokens=100000"))


def test_an_accuracy_function_that_fails_judges_nothing(run, tmp_path):
    folder, options = run[0].run.parent, run[1]
    found = evaluate_run(small_run(tmp_path, "x", *options, f"eval.accuracy={folder / 'judge.py'}:fails"))
    assert found["eval/sums/accuracy_errors"] == 4 * 3
    assert not [name for name in found if "accuracy_lenient" in name or "at_n" in name]


def test_named_sets_have_the_layer_that_set_them(tmp_path):
    resolved = small_run(tmp_path, "x", "data.eval={g.1: a.jsonl, m: b.jsonl}")
    assert resolved.provenance["data.eval.g.1"] == resolved.provenance["data.eval.m"] == "--set"


def test_an_accuracy_function_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no_such"):
        evaluate_run(small_run(tmp_path, "x", "eval.accuracy=no_such"))


def test_what_is_probably_wrong_is_told_once_and_kept(tmp_path):
    options = ("run.steps=3", "sft.steps=0", "rollout.max_new_tokens=3", "eval.every_steps=0")
    run = train(small_run(tmp_path, "run", *options)).run
    (hint, *_) = [json.loads(line) for line in (run / "hints.jsonl").read_text().splitlines()]
    assert (hint["step"], hint["hint"]) == (3, "truncated")
    log = (run / "run.log").read_text()
    assert log.count("of the completions were cut at rollout.max_new_tokens (3)") == 1
    assert f"step 3: {hint['text']}" in log
    assert json.loads((run / "plan.json").read_text())["sequences_per_step"] == 16
    assert "batch: 4 prompts x 4 samples = 16 sequences" in log
    assert "evaluation at step 0: accuracy 0.000, strict accuracy 0.000 (on 8 prompts)" in log
    assert read_metrics(run / "metrics.jsonl")[-1]["reward/correct/seconds"] >= 0


@pytest.fixture
def synced(monkeypatch):
    """The version and a fingerprint of the weights in each call of `sync_weights`."""
    seen = []
    plain = RolloutEngine.sync_weights

    def sync_weights(self, params, version):
        seen.append((version, tree_fingerprint(params)))
        plain(self, params, version)

    monkeypatch.setattr(RolloutEngine, "sync_weights", sync_weights)
    return seen


TWO_STEPS_EACH = ("run.steps=3", "update.mini_batch_size=2", "eval.every_steps=1", "checkpoint.every_steps=1")
CRITIC = ("advantage.estimator=gae", "critic.warmup_steps=2")


@pytest.mark.parametrize(
    ("more", "versions"),
    [
        pytest.param(("sft.steps=0",), [0, 0, 2, 2, 4, 4, 6], id="two optimizer steps each"),
        pytest.param(
            ("sft.steps=1", *CRITIC),
            [0, 0, 0, 0, 0, 0, 2],
            id="the policy rests",
            marks=pytest.mark.slow,  # `update/test_critic.py` counts its steps
        ),
        pytest.param(
            ("sft.steps=0", "update.max_bad_steps=9", "update.loss=loss.py:not_a_number"),
            [0] * 7,
            id="steps that are not applied",
            marks=pytest.mark.slow,  # `update/test_learner.py` counts them
        ),
    ],
)
def test_weights_of_a_version_are_the_same_also_in_evaluations(tmp_path, synced, monkeypatch, more, versions):
    """Because a fleet's workers load each version once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text(
        "from quatrain.ops.tokens import TokenLoss\n\n\n"
        "def not_a_number(tokens):\n    return TokenLoss(tokens.logprobs * float('nan'))\n"
    )
    train(small_run(tmp_path, "r", *TWO_STEPS_EACH, *more))
    assert [version for version, _ in synced] == versions
    assert len(set(synced)) == len({weights for _, weights in synced}) == len(set(versions))


def test_weights_of_a_version_are_the_same_in_a_resumed_run(tmp_path, synced):
    resolved = small_run(tmp_path, "r", *TWO_STEPS_EACH, "sft.steps=0")
    with interrupted_after(2), pytest.raises(KeyboardInterrupt):
        train(resolved)
    began = len(synced)
    train(resolved, resume="r")
    assert [version for version, _ in synced[began:]] == [4, 6]
    assert len(set(synced)) == len({weights for _, weights in synced}) == 4
