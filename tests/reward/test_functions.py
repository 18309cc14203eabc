import pytest

from quatrain.reward.functions import correct, format, has_format, overlong, tag_count

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
