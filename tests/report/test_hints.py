import json

import pytest

from quatrain.config.load import load_config
from quatrain.report.hints import STEPS_AT_ZERO, STEPS_IN_A_ROW, Hints, hints_in

USERS = "reward.functions={b.py:f: 1.0, correct: 1.0}"
SLOW = {"time/step_s": 10.0, "reward/f/seconds": 3.1, "reward/correct/seconds": 0.4}


def hints(*overrides, steps=100, said=()):
    return Hints(load_config(None, overrides, environ={}).config, steps, said)


def told(looking, numbers, steps=STEPS_IN_A_ROW):
    """What the last of so many steps with the same numbers tells, where those before it tell nothing."""
    for step in range(1, steps):
        assert looking.found(step, numbers) == []
    return looking.found(steps, numbers)


@pytest.mark.parametrize(
    ("numbers", "name", "words"),
    [
        ({"rollout/truncated_fraction": 0.51}, "truncated", ["51%", "rollout.max_new_tokens (16)"]),
        (
            {"advantage/zero_signal_fraction": 1.0, "reward/mean": 0.5},
            "no_signal",
            ["mean 0.5", "samples/"],
        ),
        ({"batch/padding_fraction": 0.31}, "padding", ["31%", "update.max_tokens_per_device (it is 16384,"]),
        ({"distill/outside_mass": 2e-4}, "outside_mass", ["gives 0.0002", "distill.loss sampled"]),
        ({"update/rejected_fraction/k3": 0.5}, "rejected", ["the rule k3", "50%"]),
        ({"update/learning_rate": 0.0}, "learning_rate", ["optimizer.learning_rate is 0.0005", "linear"]),
    ],
)
def test_what_is_told_once(numbers, name, words):
    looking = hints()
    (hint,) = told(looking, numbers)
    assert hint.hint == name
    for word in words:
        assert word in hint.text
    assert looking.found(4, numbers) == []
    assert told(hints(said=[name]), numbers) == []


def test_episodes_that_are_cut_name_both_limits():
    """The fault: an episode that its environment's text has filled was told to let the policy write more."""
    looking = hints("rollout.environment=a.py:A", "rollout.max_environment_tokens=40")
    (hint,) = told(looking, {"rollout/truncated_fraction": 0.51})
    assert "rollout.max_new_tokens (16)" in hint.text
    assert "rollout.max_environment_tokens (40)" in hint.text


@pytest.mark.parametrize(
    ("overrides", "kept", "advice"),
    [
        (["model.vision_cache_bytes=1000"], 901, "raise model.vision_cache_bytes"),
        (["model.vision_cache_bytes=1000"], 899, "20 pictures: lower data.image_max_pixels"),
        (["model.vision=all"], 0, "data.image_max_pixels, or train less of the tower"),
    ],
)
def test_pictures_that_take_much_of_a_step_name_what_helps(overrides, kept, advice):
    numbers = {"time/step_s": 10.0, "time/vision_s": 3.1, "vision/tower_pictures": 20.0}
    looking = hints(*overrides)
    looking.found(0, numbers)  # which also compiles
    (hint,) = told(looking, numbers | {"vision/store_bytes": float(kept)})
    assert hint.hint == "slow_pictures"
    assert advice in hint.text
    assert "31%" in hint.text
    assert told(hints(), numbers | {"time/vision_s": 3.0}, STEPS_IN_A_ROW + 1) == []


def test_a_usual_step_between_begins_the_count_again():
    looking, wrong = hints(), {"rollout/truncated_fraction": 0.9}
    for step, numbers in enumerate((wrong, wrong, {}, wrong, wrong), 1):
        assert looking.found(step, numbers) == []
    assert [hint.hint for hint in looking.found(6, wrong)] == ["truncated"]


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"rollout/truncated_fraction": 0.5, "advantage/zero_signal_fraction": 0.99},
        {"time/step_s": 10.0, "reward/a/seconds": 3.0},
        {"batch/padding_fraction": 0.3, "update/learning_rate": 1e-9},
        {"distill/outside_mass": 1e-4, "update/rejected_fraction/k3": 0.3},
    ],
)
def test_nothing_is_told_of_a_usual_step(numbers):
    assert told(hints(), numbers) == []


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        ([USERS], "let several processes call it at once (reward.per_call: group or sample)"),
        (
            [USERS, "reward.per_call=group", "reward.workers=3"],
            "more processes call it (reward.workers, which is 3)",
        ),
        ([USERS, "reward.workers=0"], "reward.workers above 0"),
        (["reward.functions.f=1.0"], "in a file, as path.py:function, several processes can call it"),
        (["reward.functions={model:m/f: 1.0, correct: 1.0}"], "a smaller reward model"),
    ],
)
def test_a_slow_reward_is_told_with_what_applies_to_it(overrides, advice):
    looking = hints(*overrides)
    assert looking.found(1, SLOW) == []  # starts the workers
    (hint,) = told(looking, SLOW)
    assert hint.hint == "slow_reward"
    assert "31% of the step; the slowest is `f` with 3.1 s of 10.0 s" in hint.text
    assert advice in hint.text


def test_a_slow_function_that_no_setting_makes_faster_is_not_told():
    slow = {"time/step_s": 10.0, "reward/correct/seconds": 9.0, "reward/format/seconds": 0.1}
    assert told(hints(), slow, steps=9) == []


def test_rewards_of_rollouts_ahead_count_as_far_as_training_waits():
    assert told(hints(USERS), SLOW | {"time/wait_rollout_s": 2.0}, steps=9) == []
    (hint,) = told(hints(USERS), SLOW | {"time/wait_rollout_s": 8.0}, steps=4)
    assert "31% of the step" in hint.text


PADDED = {"batch/padding_fraction": 0.5, "update/optimizer_steps": 2.0}


def test_padding_with_sequences_per_micro_batch_names_the_token_budget():
    (hint,) = told(hints("update.micro_batch_size=4"), PADDED | {"batch/micro_batches": 8.0})
    assert "set it to null" in hint.text


def test_padding_of_several_micro_batches_asks_for_a_larger_budget():
    (hint,) = told(hints("update.max_tokens_per_device=512"), PADDED | {"batch/micro_batches": 8.0})
    assert "larger update.max_tokens_per_device (it is 512)" in hint.text
    assert "smaller" not in hint.text


def test_padding_of_one_micro_batch_asks_for_a_smaller_budget_where_there_is_one():
    longest = ["data.max_prompt_length=48", "rollout.max_new_tokens=16"]
    one = PADDED | {"batch/micro_batches": 2.0}
    (hint,) = told(hints(*longest, "update.max_tokens_per_device=128"), one)
    assert "smaller update.max_tokens_per_device (it is 128, and at least 64), or train on more" in hint.text
    (hint,) = told(hints(*longest, "update.max_tokens_per_device=127"), one)
    assert "max_tokens_per_device" not in hint.text
    assert "is not full; train on more sequences in an optimizer step (data.batch_size" in hint.text


def test_the_last_step_of_a_schedule_may_have_the_learning_rate_0():
    assert hints(steps=7).found(7, {"update/learning_rate": 0.0}) == []
    (hint,) = told(hints("optimizer.learning_rate=0"), {"update/learning_rate": 0.0})
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
