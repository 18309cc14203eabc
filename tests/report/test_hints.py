import json

import pytest

from quatrain.config.load import load_config
from quatrain.report.hints import STEPS_AT_ZERO, Hints, hints_in


def hints(*overrides, steps=100, said=()):
    return Hints(load_config(None, overrides, environ={}).config, steps, said)


@pytest.mark.parametrize(
    ("numbers", "name", "words"),
    [
        ({"rollout/truncated_fraction": 0.51}, "truncated", ["51%", "rollout.max_new_tokens (16)"]),
        (
            {"advantage/zero_signal_fraction": 1.0, "reward/mean": 0.5},
            "no_signal",
            ["mean 0.5", "samples/"],
        ),
        (
            {
                "time/reward_s": 4.0,
                "time/step_s": 10.0,
                "reward/a/seconds": 1.0,
                "reward/b.py:f/seconds": 3.0,
            },
            "slow_reward",
            ["40% of the step", "`b.py:f` with 3.0 s of 10.0 s", "reward.per_call"],
        ),
        ({"batch/padding_fraction": 0.31}, "padding", ["31%", "update.max_tokens_per_device (it is 16384)"]),
        ({"update/learning_rate": 0.0}, "learning_rate", ["optimizer.learning_rate is 0.0005", "linear"]),
    ],
)
def test_what_is_told_once(numbers, name, words):
    looking = hints()
    (hint,) = looking.found(1, numbers)
    assert hint.hint == name
    for word in words:
        assert word in hint.text
    assert looking.found(2, numbers) == []
    assert hints(said=[name]).found(1, numbers) == []


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"rollout/truncated_fraction": 0.5, "advantage/zero_signal_fraction": 0.99},
        {"time/reward_s": 3.0, "time/step_s": 10.0, "reward/a/seconds": 3.0},
        {"batch/padding_fraction": 0.3, "update/learning_rate": 1e-9},
    ],
)
def test_nothing_is_told_of_a_usual_step(numbers):
    assert hints().found(1, numbers) == []


def test_padding_with_sequences_per_micro_batch_names_the_token_budget():
    (hint,) = hints("update.micro_batch_size=4").found(1, {"batch/padding_fraction": 0.5})
    assert "set it to null" in hint.text


def test_the_last_step_of_a_schedule_may_have_the_learning_rate_0():
    assert hints(steps=7).found(7, {"update/learning_rate": 0.0}) == []
    (hint,) = hints("optimizer.learning_rate=0").found(1, {"update/learning_rate": 0.0})
    assert "set it above 0" in hint.text


def test_a_reward_that_is_always_0():
    looking = hints()
    zero = {f"reward/{name}/{stat}": 0.0 for name in ("format", "mine") for stat in ("min", "max")}
    for step in range(1, STEPS_AT_ZERO):
        assert looking.found(step, zero) == []
    assert looking.found(STEPS_AT_ZERO, zero | {"reward/mine/max": 1.0})[0].hint == "always_zero:format"
    for step in range(1, STEPS_AT_ZERO):
        assert looking.found(step, zero) == []
    (hint,) = looking.found(STEPS_AT_ZERO, zero)
    assert hint.hint == "always_zero:mine"
    assert "`mine` returned 0 for every completion of 5 steps" in hint.text


def test_names_are_read_from_a_damaged_file(tmp_path):
    path = tmp_path / "hints.jsonl"
    assert hints_in(path) == []
    rows = [json.dumps({"step": 1, "hint": "padding", "text": "…"}), "{", "[]", '{"hint": "no_sig']
    path.write_text("\n".join(rows))
    assert hints_in(path) == ["padding"]


def test_an_environment_that_gives_no_reward_is_where_to_look():
    zero = {f"reward/environment/{stat}": 0.0 for stat in ("min", "max")}
    looking = hints("rollout.environment=a.py:Game", "reward.functions={environment: 1.0}")
    (hint,) = [hint for step in range(STEPS_AT_ZERO) for hint in looking.found(step + 1, zero)]
    assert "the environment gave no reward: look at the episodes in samples/" in hint.text
    assert "completions in samples" not in hint.text
