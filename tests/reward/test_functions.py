from datetime import date, datetime, time, timedelta
from decimal import Decimal

import pytest

from quatrain.config.sections.reward import RewardConfig
from quatrain.reward import functions
from quatrain.reward.functions import (
    builtin_function,
    correct,
    format,
    has_format,
    overlong,
    tag_count,
    why_unjudged,
)
from quatrain.workers.pool import Failure

CHAT = [{"role": "user", "content": "3+4?"}]
GOOD = "<think>3+4=7</think>\n<answer>7</answer>"


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        (GOOD, True),
        ("<think></think>\n<answer></answer>", True),
        ("<think>a\nb</think>\n<answer>c\nd</answer>", True),
        (GOOD + "\n", False),
        (" " + GOOD, False),
        (GOOD.replace("\n", ""), False),
        (GOOD.replace("\n", " "), False),
        (GOOD.replace("\n", "\n\n"), True),
        (GOOD.replace("\n", "\n \n\n"), True),
        (GOOD + GOOD, False),
        (GOOD.replace("3+4", "<think>"), False),
        (GOOD.replace("3+4", "</answer>"), False),
        ("<answer>7</answer>\n<think>7</think>", False),
        ("<think>7</think>\n<answer>7", False),
        ("<Think>7</Think>\n<answer>7</answer>", False),
        ("", False),
    ],
)
def test_format(completion, verdict):
    assert has_format(completion) is verdict
    assert format(["q"], [completion]) == [float(verdict)]


def test_format_with_a_pattern_is_that_the_whole_completion_matches_it():
    """Catches a search in place of a whole match, and `.` that ends at a line break."""
    config = RewardConfig(functions={"format": {"args": {"pattern": r".*\\boxed\{[^{}]*\}\.?"}}})
    said = ["a\nb: \\boxed{7}.", "\\boxed{7}. Or 8.", "7", GOOD]
    assert builtin_function("format", config, "")(["q"] * 4, said) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("pattern", ["(", 7])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern):
    config = RewardConfig(functions={"format": {"args": {"pattern": pattern}}})
    with pytest.raises(ValueError, match=r"'format'.*(regular expression)"):
        builtin_function("format", config, "")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (GOOD, 1.0),
        ("", 0.0),
        ("<think>", 0.25),
        ("<think><think></think>", 0.25),
        ("</answer><answer></think>", 0.75),
        (GOOD * 2, 0.0),
    ],
)
def test_tag_count(completion, reward):
    assert tag_count(["q"], [completion]) == [reward]


REST = GOOD.removeprefix("<think>")


@pytest.mark.parametrize(
    ("prompt", "opening", "completion", "verdict", "tags"),
    [
        (CHAT, "<think>\n", REST, True, 1.0),
        (CHAT, "<think>\n", REST.replace("\n", "\n\n"), True, 1.0),
        (CHAT, "<think>\n", GOOD, False, 0.75),
        (CHAT, "", REST, False, 0.75),
        (CHAT, "", GOOD, True, 1.0),
        (CHAT, "<think>\n\n</think>\n\n", "<answer>7</answer>", True, 1.0),
        (CHAT, "<think>\n\n</think>\n\n", GOOD, False, 0.5),
        ("<|user|>3+4?<|assistant|><think>\n", "", REST, True, 1.0),
        ("3+4? Write <think> first.", "<think>", REST, False, 0.75),
        (CHAT, None, REST, True, 0.75),
        (CHAT, None, GOOD, True, 1.0),
        (CHAT, None, "<answer>7</answer>", False, 0.5),
    ],
)
def test_what_the_prompt_has_begun_belongs_to_the_format(prompt, opening, completion, verdict, tags):
    assert format([prompt], [completion], opening=opening) == [float(verdict)]
    assert tag_count([prompt], [completion], opening=opening) == [tags]


NAN = float("nan")


@pytest.mark.parametrize(
    ("gold", "said", "reward"),
    [
        (["5", "five"], "five", 1.0),
        (["5", "five"], "6", 0.0),
        ([4, None, 5.0], "5", 1.0),
        ((1, 2), "3", 0.0),
        (["a text of more words than three", "5"], "5", 1.0),
        (["a text of more words than three"], "5", None),
        ([], "5", None),
        ([[4], 5], "5", None),
        ([None], "None", None),
        ({"a": 5}, "5", None),
        (12.0, "12", 1.0),
        (0.30000000000000004, "0.3", 1.0),
        (0.30000000000000004, "0.30000000000000004", 1.0),
        (2.6799999999999997, "2.68", 1.0),
        (2.68, "2.69", 0.0),
        (1e21, "1000000000000000000000", 1.0),
        (NAN, "nan", None),
        (float("inf"), "inf", None),
        (12345678901234567891, "12345678901234567891", 1.0),
        (Decimal("12.50"), "12.5", 1.0),
        (Decimal("1E+3"), "1000", 1.0),
        (Decimal("NaN"), "NaN", None),
        (True, "True", 1.0),
        (True, "yes", 1.0),
        (True, "1", 0.0),
        (False, "no", 1.0),
        (False, "yes", 0.0),
        (date(2021, 1, 2), "2021-01-02", 1.0),
        (date(2021, 1, 2), "2021-01-03", 0.0),
        (datetime(2021, 1, 2), "2021-01-02", 1.0),
        (datetime(2021, 1, 2, 10), "2021-01-02 10:00", 1.0),
        (time(12, 30), "12:30", 1.0),
        (time(12, 30, 5), "12:30:05", 1.0),
        (timedelta(1), "1 day, 0:00:00", None),
        (b"5", "5", None),
    ],
)
def test_the_kinds_of_gold_answers(gold, said, reward):
    assert correct(["q"], [f"<answer>{said}</answer>"], answer=[gold]) == [reward]
    assert (why_unjudged(gold) is None) == (reward is not None)


def test_a_gold_answer_whose_comparison_fails_is_not_one_that_nobody_can_judge(monkeypatch):
    failure = Failure("crash", "the process of math-verify failed")
    monkeypatch.setattr(functions, "judge", lambda completions, answers, timeout_s: [failure])
    assert why_unjudged(r"\sqrt{x} + 1") is None


def test_correct_is_lenient_about_the_format_and_abstains_without_a_gold_answer():
    completions = [GOOD, "so it is 7", "8", "7"]
    assert correct(["q"] * 4, completions, answer=["7", "#### 7", "7", None], extra=[0] * 4) == [
        1.0,
        1.0,
        0.0,
        None,
    ]
    assert correct(["q"] * 3, ["7"] * 3, answer=["", " \n", "it is ####"]) == [None, None, None]


def test_correct_abstains_on_a_gold_answer_that_nobody_can_judge():
    gold = ["Because they are equal in area.", r"\frac{1}{", "even", "2x"]
    assert correct(["q"] * 4, ["it is even"] * 4, answer=gold) == [None, None, 1.0, 0.0]


def test_overlong_falls_linearly_over_the_buffer():
    lengths = (0, 6, 7, 8, 10, 12)
    got = overlong([""] * 6, [[0] * length for length in lengths], limit=10, buffer=4)
    assert got == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
