"""What `benchmarks/evaluation.py` says of two lists of answers; its runs take minutes and are not tests."""

import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("evaluation")


def answer(tokens, text="x", prompt=(1, 2), **more):
    return {"prompt": list(prompt), "tokens": tokens, "text": text, "answer": "4", **more}


@pytest.mark.parametrize(
    ("own", "other", "named"),
    [
        (answer([5, 6]), answer([5, 6]), None),
        (answer([5, 7]), answer([5, 6], seconds=[0, 7], gaps=[2.0, 1e-5]), "tie"),
        (answer([5, 7]), answer([5, 6], seconds=[0, 7], gaps=[2.0, 0.1]), "another token"),
        (answer([5, 8]), answer([5, 6], seconds=[0, 7], gaps=[2.0, 1e-5]), "another token"),
        (answer([5]), answer([5, 6], seconds=[0, 7], gaps=[2.0, 1e-5]), "one ends where the other goes on"),
        (answer([5], prompt=(1,)), answer([5]), "another prompt"),
        (answer([5], text="y"), answer([5]), "another text of the same tokens"),
    ],
)
def test_what_differs_is_a_tie_or_named(script, own, other, named):
    """Catches a wrong template, stop token or text that passes as a tie, and a tie of a third token."""
    told = script.comparison([own], [other], 1e-3)
    assert told["equal"] == (named is None)
    assert [each["token"] for each in told["ties"]] == ([1] if named == "tie" else [])
    assert [each["why"] for each in told["errors"]] == ([] if named in (None, "tie") else [named])


def test_the_accuracy_of_both_is_by_the_same_answers(script):
    """Catches answers of another row, or one side's texts judged for both."""
    ours = [answer([1], text="<answer>4</answer>"), answer([1], text="<answer>5</answer>")]
    theirs = [answer([1], text="<answer>4</answer>"), answer([1], text="<answer>4</answer>")]
    assert script.comparison(ours, theirs, 1e-3)["accuracy"] == {"ours": 0.5, "theirs": 1.0}
