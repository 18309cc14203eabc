"""The task and the figures of `benchmarks/learning.py`; its runs take minutes and are not tests."""

import importlib
import json

import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("learning")


@pytest.fixture(scope="module")
def task(script):
    return importlib.import_module("peers.record_task")


def runs(*seeds, step_s=1.0):
    return [
        [{"reward": reward, "seconds": step_s * number} for number, reward in enumerate(seed, start=1)]
        for seed in seeds
    ]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"name": "Ben", "count": 7}', 1.0),
        ('{"name": "Ben", "count": 8}', 0.7),
        ('{"name": "Ida", "count": 8}', 0.4),
        ('{"name": "Ben", "count": "7"}', 0.7),
        ('{"count": 7, "name": "Ben"}', 0.0),
        ('{"name": "Ben", "count": 7, "thing": "eggs"}', 0.0),
        ('Here it is: {"name": "Ben", "count": 7}', 0.0),
        ("[1]", 0.0),
    ],
)
def test_a_record_is_rewarded_for_its_form_and_each_right_field(task, text, reward):
    """Catches a reward for text beside the record, for another form, or for a number that is a text."""
    assert task.record([text, [{"content": text}]], name=["Ben"] * 2, count=[7] * 2) == pytest.approx(
        [reward] * 2
    )


def test_true_is_no_count(task):
    """Catches a comparison with `==` alone."""
    assert task.record(['{"name": "Ben", "count": true}'], name=["Ben"], count=[1]) == pytest.approx([0.7])


def test_rows_are_different_and_the_same_each_time(task, tmp_path):
    """Catches rows that depend on the process, which would give two sides other prompts."""
    for name in ("one", "two"):
        task.write_rows(tmp_path / name, 200)
    lines = (tmp_path / "one").read_text().splitlines()
    assert lines == (tmp_path / "two").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["question"] for row in rows}) == 200
    task.write_rows(tmp_path / "three", 50, skip=150)
    assert (tmp_path / "three").read_text().splitlines() == lines[150:]
    assert all(row["name"] in row["question"] and str(row["count"]) in row["question"] for row in rows)


def test_seconds_are_compared_at_the_same_reward(script):
    """Catches levels read from one seed, before smoothing, or seconds of another step."""
    ours = runs([0.0, 0.2, 0.4, 0.6, 0.8], [0.0, 0.4, 0.4, 0.6, 0.8])
    theirs = runs([0.0, 0.0, 0.2, 0.4, 0.6], [0.0, 0.0, 0.4, 0.4, 0.6], step_s=4.0)
    found = script.comparison(ours, theirs)
    assert found["mean_reward"] == {"ours": [0.4, 0.44], "theirs": [0.24, 0.28]}
    # Means over three steps: ours 0.23, 0.43, 0.6 from step 3 on; theirs 0.1, 0.23, 0.43.
    assert found["levels"][0] == {
        "reward": 0.3, "steps_to": [4, 5], "seconds_to": [4.0, 20.0], "times_faster": 5.0,
    }  # fmt: skip
    assert found["levels"][-1] == {"reward": 0.9, "steps_to": [None, None]}
