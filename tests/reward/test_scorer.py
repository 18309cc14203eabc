import dataclasses
import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rollouts import make_rollouts

from quatrain.config.schema import DataConfig, RewardConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.prompts import load_prompts
from quatrain.reward import calls
from quatrain.reward import scorer as scorer_module
from quatrain.reward.scorer import RewardScorer
from quatrain.types.batches import RolloutBatch
from quatrain.types.metrics import Metric

GOOD = "<think>3+4=7</think>\n<answer>7</answer>"
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward.py"


def make_scorer(tmp_path, source, *names, weight=1.0, workers=1, **settings):
    path = tmp_path / "rewards.py"
    path.write_text(source)
    functions = {f"{path}:{name}": weight for name in names}
    return RewardScorer(RewardConfig(functions=functions, workers=workers, **settings))


def results(metrics):
    return {name: metric.result() for name, metric in metrics.items()}


def test_the_weighted_sum_of_the_built_in_functions():
    batch = RewardScorer(RewardConfig()).score(make_rollouts([GOOD, "7", "<think>8"], answer=["7"] * 3))
    np.testing.assert_array_equal(batch.rewards_per_function, [[1, 1, 0], [1, 0, 0], [1, 0, 0.25]])
    np.testing.assert_array_equal(batch.rewards, np.float32([2.0, 1.0, 0.125]))
    assert batch.function_names == ("correct", "format", "tag_count")
    assert batch.function_weights.tolist() == [1.0, 0.5, 0.5]
    assert batch.rewards.dtype == batch.rewards_per_function.dtype == np.float32


def test_no_function_gives_no_reward():
    batch = RewardScorer(RewardConfig(functions={})).score(make_rollouts(["7", "8"]))
    assert batch.rewards_per_function.shape == (0, 2)
    assert np.isnan(batch.rewards).all()
    assert not batch.metrics


def test_metrics():
    batch = RewardScorer(RewardConfig(functions={"correct": 2.0})).score(
        make_rollouts(["7", "8"], answer=["7", "7"])
    )
    numbers = results(batch.metrics)
    assert 0 <= numbers.pop("reward/correct/seconds") < 60
    assert numbers == {
        "reward/mean": 1.0, "reward/std": 1.0, "reward/min": 0.0, "reward/max": 2.0,
        "reward/correct/mean": 0.5, "reward/correct/std": 0.5, "reward/correct/min": 0.0,
        "reward/correct/max": 1.0, "reward/correct/errors": 0.0, "reward/correct/abstained": 0.0,
    }  # fmt: skip


def test_an_abstention_leaves_no_term_and_all_of_them_leave_nan(tmp_path):
    source = "def a(completions, **_): return [None, 1, None]\ndef b(completions, **_): return [2, 2, None]\n"
    batch = make_scorer(tmp_path, source, "a", "b", weight=0.5).score(make_rollouts(["x", "y", "z"]))
    counts = results(batch.metrics)
    assert (counts["reward/a/abstained"], counts["reward/b/abstained"], counts["reward/a/errors"]) == (
        2,
        1,
        0,
    )
    np.testing.assert_array_equal(batch.rewards, np.float32([1.0, 1.5, np.nan]))
    np.testing.assert_array_equal(
        batch.rewards_per_function, np.float32([[np.nan, 1, np.nan], [2, 2, np.nan]])
    )
    assert results(batch.metrics)["reward/a/mean"] == 1.0


def test_a_sample_that_raises_costs_itself_alone(tmp_path, caplog):
    source = (
        "def length(completions, **_): return [len(c) for c in completions]\n"
        "def inverse(completions, **_): return [1 / len(c) for c in completions]\n"
    )
    scorer = make_scorer(tmp_path, source, "length", "inverse", weight=0.5)
    with caplog.at_level(logging.WARNING):
        batch = scorer.score(make_rollouts(["aa", "", "a", ""]))
    np.testing.assert_array_equal(batch.rewards_per_function, [[2, 0, 1, 0], [0.5, -1, 1, -1]])
    np.testing.assert_array_equal(batch.rewards, np.float32([1.25, -0.5, 1.0, -0.5]))
    assert results(batch.metrics)["reward/inverse/errors"] == 2
    assert results(batch.metrics)["reward/length/errors"] == 0
    assert "ZeroDivisionError" in caplog.text
    assert "`inverse`" in caplog.text


def test_a_batch_that_raises_without_a_guilty_sample_is_one_error(tmp_path):
    source = "def single(completions, **_):\n    assert len(completions) == 1\n    return [3]\n"
    batch = make_scorer(tmp_path, source, "single").score(make_rollouts(["a", "b"]))
    np.testing.assert_array_equal(batch.rewards, [3, 3])
    assert results(batch.metrics)["reward/single/errors"] == 1
    assert not batch.failed.any()


def test_a_batch_says_which_rewards_are_those_of_failures(tmp_path):
    """Else evaluations take each -1 of a batch with a failure for one, and leave wrong answers out."""
    source = (
        "def graded(completions, **_):\n"
        "    assert 'x' not in completions\n"
        "    return [-1.0 if c == 'wrong' else 1.0 for c in completions]\n"
        "def calm(completions, **_): return [-1.0 for _ in completions]\n"
    )
    batch = make_scorer(tmp_path, source, "graded", "calm").score(make_rollouts(["wrong", "x", "right"]))
    np.testing.assert_array_equal(batch.rewards_per_function, [[-1, -1, 1], [-1, -1, -1]])
    np.testing.assert_array_equal(batch.failed, [[False, True, False], [False] * 3])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_exits_is_an_error_of_its_sample(tmp_path, caplog, workers):
    source = (
        "import sys\n"
        "def leave(completions, **_):\n    return [sys.exit() if c == 'b' else 1.0 for c in completions]\n"
    )
    with caplog.at_level(logging.WARNING):
        batch = make_scorer(tmp_path, source, "leave", workers=workers).score(make_rollouts(["a", "b", "c"]))
    np.testing.assert_array_equal(batch.rewards, [1, -1, 1])
    counts = results(batch.metrics)
    assert counts["reward/leave/errors"] == counts["reward/leave/errors/exit"] == 1
    assert "SystemExit" in caplog.text


def test_an_interrupt_ends_scoring(tmp_path):
    source = "def stop(completions, **_): raise KeyboardInterrupt\n"
    with pytest.raises(KeyboardInterrupt):
        make_scorer(tmp_path, source, "stop", workers=0).score(make_rollouts(["a", "b"]))


def test_values_that_are_not_finite_are_errors(tmp_path):
    source = "def odd(completions, **_): return [float('nan'), float('inf'), 1e39, True, 0.5]\n"
    batch = make_scorer(tmp_path, source, "odd").score(make_rollouts(list("abcde")))
    np.testing.assert_array_equal(batch.rewards, [-1, -1, -1, 1, 0.5])
    assert results(batch.metrics)["reward/odd/errors"] == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1.0]", "expected 2, got 1"),
        ("[]", "expected 2, got 0"),
        ("None", "returned NoneType"),
        ("'ab'", "returned str"),
        ("{0: 1, 1: 1}", "returned dict"),
        ("[1, 'x']", "str 'x'"),
        ("[1, [2]]", "list"),
    ],
)
def test_a_wrong_return_value_is_an_error(tmp_path, body, message):
    scorer = make_scorer(tmp_path, f"def wrong(completions, **_): return {body}\n", "wrong")
    with pytest.raises(ValueError, match=rf"rewards.py:wrong.*{message.replace('[', '.')}"):
        scorer.score(make_rollouts(["a", "b"]))


def test_arrays_are_taken_as_lists(tmp_path):
    source = "import numpy as np\ndef array(completions, **_): return np.arange(2)\n"
    np.testing.assert_array_equal(
        make_scorer(tmp_path, source, "array").score(make_rollouts(["a", "b"])).rewards, [0, 1]
    )


def test_a_function_gets_the_arguments_it_names(tmp_path):
    source = (
        "def some(prompts, level, bonus=None): return [len(prompts[0][0]['content']) + level[0] + bonus[0]]\n"
        "def every(completions, **columns): return [len(columns)] * len(completions)\n"
    )
    scorer = make_scorer(tmp_path, source, "some", "every")
    assert scorer.required_columns == frozenset({"level"})
    assert scorer.required_by == {"level": "the reward `some`"}
    prompts = [({"role": "user", "content": "abc"},)]
    batch = scorer.score(make_rollouts(["x"], prompts, level=[10], bonus=[100], other=[0]))
    np.testing.assert_array_equal(
        batch.rewards_per_function, [[113], [6]]
    )  # prompts, completion_ids, finish_reasons and three columns


def test_token_ids_and_finish_reasons_are_those_of_the_policy(tmp_path):
    source = (
        "seen = []\n"
        "def see(completion_ids, finish_reasons):\n"
        "    seen.append((completion_ids, finish_reasons))\n"
        "    return [len(ids) + (r == 'length') / 2 for ids, r in zip(completion_ids, finish_reasons)]\n"
        "def any_of_them(completions, **columns):\n"
        "    return [float('finish_reasons' in columns)] * len(completions)\n"
    )
    # A prompt of one token, then tokens of the policy around one that it did not write, then padding.
    mask = np.array([[False, True, False, True, False], [False, True, True, True, False]])
    rollouts = RolloutBatch(
        input_ids=np.arange(10, dtype=np.int32).reshape(2, 5),
        attention_mask=np.array([[True] * 4 + [False]] * 2),
        completion_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.array(["stop", "length"]),
        group_ids=np.arange(2, dtype=np.int64),
        prompts=("q", "q"),
        completions=("a", "b"),
    )
    scorer = make_scorer(tmp_path, source, "see", "any_of_them", workers=0)
    assert scorer.required_columns == frozenset()
    np.testing.assert_array_equal(scorer.score(rollouts).rewards_per_function, [[2, 3.5], [1, 1]])
    seen = scorer._functions[0].submit.args[0].__globals__["seen"]
    assert seen == [([[1, 3], [6, 7, 8]], ["stop", "length"])]
    assert all(type(token) is int for ids in seen[0][0] for token in ids)
    assert all(type(reason) is str for reason in seen[0][1])


@pytest.mark.parametrize("abstains", [False, True])
def test_what_an_episode_gets_that_a_fault_ended(abstains):
    rollouts = make_rollouts(["7", "7", "8"], answer=["7"] * 3)
    rollouts = replace(rollouts, finish_reason=np.array(["error", "stop", "timeout"]))
    batch = RewardScorer(RewardConfig(functions={"correct": 2.0}), faults_abstain=abstains).score(rollouts)
    lost = np.nan if abstains else -1.0
    np.testing.assert_array_equal(batch.rewards, [lost, 2.0, lost])
    assert batch.metrics["reward/correct/abstained"].result() == 2 * abstains


def test_an_agent_that_was_to_give_the_rewards_and_gave_none_ends_the_run():
    scorer = RewardScorer(RewardConfig(functions={"environment": 1.0}), episodes=True)
    columns = {"messages": [[], []], "turn_rewards": [[], []]}
    with pytest.raises(ValueError, match=r"returned no reward \(None\) for any episode"):
        scorer.score(make_rollouts(["a", "b"], environment_reward=[None, None], **columns))
    some = scorer.score(make_rollouts(["a", "b"], environment_reward=[None, 0.5], **columns))
    np.testing.assert_array_equal(some.rewards, [np.nan, 0.5])


def test_an_episode_of_several_rows_is_scored_once(tmp_path):
    """By its first row, and the tokens that the policy sampled in all of them; metrics count episodes."""
    source = (
        "seen = []\n"
        "def see(completions, completion_ids, answer):\n"
        "    seen.append((completions, completion_ids, answer))\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    rollouts = make_rollouts(["last", "other", "earlier"], answer=["1", "2", "3"])
    rollouts = replace(
        rollouts,
        input_ids=np.array([[9, 4], [9, 5], [9, 6]], np.int32),
        group_ids=np.array([3, 3, 3]),
        episode_ids=np.array([8, 5, 8]),
    )
    scorer = make_scorer(tmp_path, source, "see", workers=0)
    batch = scorer.score(rollouts)
    seen = scorer._functions[0].submit.args[0].__globals__["seen"]
    assert seen == [(["other", "last"], [[5], [4, 6]], ["2", "1"])]
    assert batch.rewards.tolist() == [2, 1, 2]
    assert batch.metrics["reward/mean"] == Metric(3.0, 2)


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "finish_reasons"])
def test_a_column_with_the_name_of_an_argument_is_an_error(name):
    scorer = RewardScorer(RewardConfig(functions={"format": 1.0}))
    with pytest.raises(ValueError, match=rf"the data has a column `{name}`.*rename the column"):
        scorer.score(replace(make_rollouts(["x"]), columns={name: (0,)}))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_changes_nothing_that_others_or_later_steps_see(tmp_path, workers):
    source = (
        "def thief(prompts, completions, completion_ids, tests):\n"
        "    completions.clear()\n"
        "    for values in (prompts[0], completion_ids[0], tests[0]['cases']): values.clear()\n"
        "    return [0.0] * 2\n"
        "def count(prompts, completions, completion_ids, tests):\n"
        "    nested = (prompts[0], completion_ids[0], tests[0]['cases'])\n"
        "    return [len(completions) + sum(map(len, nested))] * 2\n"
    )
    prompts = [({"role": "user", "content": "q"},)] * 2
    rollouts = make_rollouts(["a", "b"], prompts, tests=[{"cases": [1, 2, 3]}, {"cases": []}])
    scorer = make_scorer(tmp_path, source, "thief", "count", workers=workers)
    for _ in range(2):
        batch = scorer.score(rollouts)
        np.testing.assert_array_equal(batch.rewards_per_function, [[0, 0], [7, 7]])


def test_a_missing_column_is_an_error():
    scorer = RewardScorer(RewardConfig())
    assert scorer.required_columns == frozenset({"answer"})
    with pytest.raises(
        ValueError, match=r"the reward `correct` needs the column `answer`; the data has gold"
    ):
        scorer.score(make_rollouts(["7"], gold=["7"]))


def test_an_empty_batch():
    assert RewardScorer(RewardConfig()).score(make_rollouts([], answer=[])).rewards.shape == (0,)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("corect", "unknown; built in are correct, format, tag_count"),
        ("no.such.module:f", "no.such.module cannot be imported"),
        ("json:no_such", "json has no attribute 'no_such'"),
        ("math:pi", "must be callable; it is a float"),
        ("missing.py:f", "no such file"),
    ],
)
def test_a_function_that_cannot_be_had_is_an_error(spec, message):
    with pytest.raises(ValueError, match=message):
        RewardScorer(RewardConfig(functions={spec: 1.0}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("raise KeyError('x')", "KeyError"),
        ("import sys; sys.exit()", "SystemExit"),
        ("def f(completions, /): pass", "positional-only"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(tmp_path, source, message):
    with pytest.raises(ValueError, match=message):
        make_scorer(tmp_path, source, "f")


def test_functions_of_one_name_keep_their_whole_spec(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / f"{folder}.py").write_text("def f(completions): return [0] * len(completions)\n")
    functions = {
        f"{tmp_path}/a.py:f": 1.0,
        f"{tmp_path}/b.py:f": 1.0,
        "quatrain.reward.functions:format": 1.0,
    }
    names = RewardScorer(RewardConfig(functions=functions)).score(make_rollouts(["x"])).function_names
    assert names == (f"{tmp_path}/a.py:f", f"{tmp_path}/b.py:f", "format")


def prompts_of(tmp_path, *answers, **columns):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q", "answer": a, **columns} for a in answers]
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_prompts(str(path), DataConfig(), builtin_tokenizer(), seed=0)


CORRECT = RewardConfig(functions={"correct": 1.0})


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"a": 1}, "of the type dict"),
        (None, "null"),
        (float("nan"), "NaN or infinite"),
        ([], "of the type list"),
        ([["5"]], "of the type list"),
        ("a text of more words than three", "text or notation that cannot be compared"),
    ],
)
def test_answers_that_correct_cannot_judge_are_counted_or_an_error(tmp_path, answer, kind):
    scorer = RewardScorer(CORRECT)
    found = scorer.check_answers("set", prompts_of(tmp_path, "5", answer, 7, answer))
    assert found == [
        "set: `correct` cannot judge by 2 of 4 values of the column `answer`, and abstains on their "
        f"completions: {kind}: 2 (row 2)"
    ]
    assert scorer.check_answers("set", prompts_of(tmp_path, "5", ["5", "five"], 0.5, True)) == []
    none = prompts_of(tmp_path, answer, answer)
    with pytest.raises(ValueError, match=rf"set: .* can judge by none, which are {kind}: 2 \(row 1\); name"):
        scorer.check_answers("set", none)
    assert RewardScorer(RewardConfig(functions={"format": 1.0})).check_answers("set", none) == []


def test_only_answers_that_correct_is_to_judge_are_checked(tmp_path):
    entry = {"correct": {"weight": 1.0, "data_source": ["math"]}}
    scorer = RewardScorer(RewardConfig(functions=entry))
    assert scorer.check_answers("set", prompts_of(tmp_path, None, data_source="code")) == []
    with pytest.raises(ValueError, match=r"null: 1 \(row 1\)"):
        scorer.check_answers("set", prompts_of(tmp_path, None, data_source="math"))
    own = RewardScorer(CORRECT, functions={"correct": lambda completions, **_: [0.0]})
    assert own.check_answers("set", prompts_of(tmp_path, None)) == []


def test_of_many_answers_so_many_are_judged_that_one_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(scorer_module, "MANY_ANSWERS", 2)
    texts = [f"a text of more {word}" for word in ("words", "letters", "lines", "pages")]
    source = prompts_of(tmp_path, *texts, "5", "another text of more words", None)
    (warning,) = RewardScorer(CORRECT).check_answers("set", source)
    assert warning.endswith("text or notation that cannot be compared: 4 (row 1), null: 1 (row 7)")


def test_a_format_that_no_completion_can_have_is_said(tmp_path):
    prompts = prompts_of(tmp_path, "5").head()
    chat = [replace(prompts[0], text=({"role": "user", "content": "q"},))]
    for opening in ("", "<think>\n", "<think>\n\n</think>\n\n", "<think>\nOkay"):
        assert RewardScorer(RewardConfig(), opening=opening).check_format(chat, str) == []
    without_tags = re.compile("</?think>").sub
    (warning,) = RewardScorer(RewardConfig(), opening="").check_format(chat, partial(without_tags, ""))
    assert warning.startswith(
        "`format` and `tag_count` can never be 1: the completion '<think>1 + 1 = 2</think>"
    )
    assert r"is read as '1 + 1 = 2\n<answer>2</answer>'" in warning
    (warning,) = RewardScorer(RewardConfig(), opening="<think><think>").check_format(chat, str)
    assert "can never be 1" in warning
    assert RewardScorer(CORRECT, opening="<think><think>").check_format(chat, str) == []


def test_the_opening_of_the_template_belongs_to_the_format():
    chat = ({"role": "user", "content": "q"},)
    rollouts = make_rollouts([GOOD, GOOD.removeprefix("<think>")], [chat] * 2, opening=["a", "b"])
    config = RewardConfig(functions={"format": 1.0, "tag_count": 1.0})
    assert RewardScorer(config, opening="").score(rollouts).rewards.tolist() == [2.0, 0.75]
    assert RewardScorer(config, opening="<think>").score(rollouts).rewards.tolist() == [0.75, 2.0]


@pytest.mark.parametrize(
    ("source", "warned"),
    [
        ("def f(completions, environment_reward): return environment_reward", False),
        ("def f(completions, turn_rewards=None): return [1.0] * len(completions)", False),
        ("def f(completions, **columns): return columns['environment_reward']", True),
        ("def f(completions): return [1.0] * len(completions)", True),
    ],
)
def test_rewards_of_an_environment_that_nothing_reads_are_said_once(tmp_path, caplog, source, warned):
    path = tmp_path / "rewards.py"
    path.write_text(source)
    episode = {"messages": [[]], "environment_reward": [1.0], "turn_rewards": [[1.0]]}
    scorer = RewardScorer(RewardConfig(functions={f"{path}:f": 1.0}, workers=0), episodes=True)
    for _ in range(2):
        scorer.score(make_rollouts(["x"], **episode))
    said = [record.message for record in caplog.records if "the environment gives rewards" in record.message]
    assert len(said) == warned
    caplog.clear()
    zero = RewardConfig(functions={"environment": 0.0})
    RewardScorer(zero, episodes=True).score(make_rollouts(["x"], **episode))
    accuracy = RewardConfig(functions={"tag_count": 1.0})
    RewardScorer(accuracy, episodes=True, accuracy_beside=scorer).score(make_rollouts(["x"], **episode))
    assert not caplog.records


def test_an_accuracy_is_called_in_the_workers_of_the_rewards(tmp_path):
    source = "import os\ndef a(completions): return [os.getpid()]\ndef b(completions): return [os.getpid()]\n"
    scorer = make_scorer(tmp_path, source, "a")
    accuracy = RewardConfig(functions={f"{tmp_path}/rewards.py:b": 1.0}, workers=1)
    own = RewardScorer(accuracy, accuracy_beside=scorer)
    rollouts = make_rollouts(["x"])
    (process,) = scorer.score(rollouts).rewards.tolist()
    assert own.score(rollouts).rewards.tolist() == [process]
    own.close()
    assert scorer.score(rollouts).rewards.tolist() == [process]
    scorer.close()


def test_the_example():
    batch = RewardScorer(RewardConfig(functions={f"{EXAMPLE}:brevity": 0.5})).score(
        make_rollouts(["", "x" * 50, "x" * 500])
    )
    np.testing.assert_array_equal(batch.rewards, [0.5, 0.375, 0])


def test_a_call_of_user_code_goes_through_one_seam(monkeypatch):
    seen = []
    monkeypatch.setattr(
        calls, "call_reward", lambda function, arguments: seen.append(sorted(arguments)) or [1.0]
    )
    RewardScorer(RewardConfig(functions={"format": 1.0})).score(make_rollouts(["x"], level=[1]))
    assert seen == [["completion_ids", "completions", "finish_reasons", "level", "prompts"]]


def test_importing_the_scorer_is_light():
    heavy = "{'jax', 'math_verify', 'sympy', 'transformers'}"
    code = f"import sys, quatrain.reward.scorer; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_page_on_rewards_shows_the_example():
    page = (EXAMPLE.parents[1] / "docs" / "reward.md").read_text()
    shown = page.split("```python\n")[1].split("```")[0]
    assert EXAMPLE.read_text().endswith(shown)


def test_counts_include_the_greedy_completions(tmp_path):
    path = tmp_path / "picky.py"
    path.write_text(
        "def picky(completions):\n"
        "    assert 'bad' not in completions\n"
        "    return [1.0 if text == 'good' else None for text in completions]\n"
    )
    rollouts = make_rollouts(["good", "good"])
    greedy = make_rollouts(["bad", "odd"])
    batch = RewardScorer(RewardConfig(functions={f"{path}:picky": 1.0})).score(
        dataclasses.replace(rollouts, baseline=greedy)
    )
    assert batch.metrics["reward/picky/errors"].result() == 1
    assert batch.metrics["reward/picky/abstained"].result() == 1
    assert batch.metrics["reward/mean"].result() == 1  # of the samples alone
    np.testing.assert_array_equal(batch.baseline_rewards, np.float32([-1, np.nan]))


def test_a_column_does_not_replace_an_argument_that_was_bound_in_python():
    def above(completions, limit):
        return [float(len(text) > limit) for text in completions]

    scorer = RewardScorer(RewardConfig(functions={"long": 1.0}), functions={"long": partial(above, limit=2)})
    rollouts = replace(make_rollouts(["abc", "a"]), columns={"limit": [9, 0]})
    assert scorer.score(rollouts).rewards.tolist() == [1.0, 0.0]
