"""The script that makes pairs of a model's own answers, and trains on them."""

import json
import re

import pytest

from quatrain.config.load import load_config
from quatrain.config.settings import QUICKSTART


@pytest.fixture(scope="module")
def script(load_script):
    load_script("algorithms")  # which it imports
    return load_script("preferences")


def samples(script, *rows):
    return [script.Sample(*row) for row in rows]


def test_pairs_are_a_right_and_a_wrong_answer_of_one_prompt_each_used_once(script):
    """Catches the two the wrong way round, answers of another prompt, and a pair more than was asked for."""
    found = script.pairs_of(
        samples(
            script,
            ("p", "w1", False),
            ("p", "r1", True),
            ("q", "w", False),
            ("p", "r2", True),
            ("p", "w2", False),
            ("p", "r3", True),
            ("p", "w3", False),
            ("q", "r1", True),
            ("q", "r2", True),
        ),
        most=2,
    )
    assert found == [
        {"prompt": "p", "chosen": "r1", "rejected": "w1"},
        {"prompt": "p", "chosen": "r2", "rejected": "w2"},
        {"prompt": "q", "chosen": "r1", "rejected": "w"},
    ]


def test_no_pair_has_an_answer_that_is_neither_or_empty(script):
    """Of an answer that was cut, and of an empty one, which `quatrain dpo` refuses."""
    rows = samples(
        script,
        *[("cut", "w", None), ("cut", "r", True), ("empty", " \n", False), ("empty", "r", True)],
        *[("all right", "r", True), ("all right", "r", True), ("all wrong", "w", False)],
    )
    assert script.pairs_of(rows, most=2) == []


def test_prompts_are_held_out_with_all_their_samples(script):
    """Catches a split by samples: a prompt of which one stands on both sides."""
    rows = samples(script, *[(prompt, str(at), at % 2 == 0) for at, prompt in enumerate("abcabcbadd")])
    trained, held_out = script.split_by_prompt(rows, 1)
    assert {sample.prompt for sample in held_out} == {"d"}
    assert trained == rows[:8]
    trained, held_out = script.split_by_prompt(rows, 3)
    assert ({s.prompt for s in trained}, {s.prompt for s in held_out}) == ({"a"}, {"b", "c", "d"})
    assert script.split_by_prompt(rows, 0) == (rows, [])


def test_the_settings_of_every_stage_are_a_valid_configuration(script, tmp_path):
    for stage, command in script.COMMANDS.items():
        overrides = [f"{k}={json.dumps(v)}" for k, v in script.settings_of(stage, tmp_path, 2).items()]
        file, task = (QUICKSTART, "rl") if command == "train" else (None, command)
        config = load_config(file, overrides, environ={}, task=task).config
        begins = "builtin:tiny" if stage == "warm" else str(tmp_path / f"{script.BEFORE[stage]}-2" / "final")
        assert (config.seed, config.model.path) == (2, begins)
        if stage in script.HAS_PAIRS:
            assert (config.given.steps, config.given.batch_size) == (60, 64)
            assert re.fullmatch(r"pairs-dpo-[12](-format)?-2\.jsonl", config.given.data.rpartition("/")[2])
        if command == "train":
            assert config.reward.functions == {f"model:{tmp_path / 'rm-2' / 'final'}": 1.0}
            pull = (0.5, "k2") if stage == "rl" else (0.05, "k3")
            assert (config.update.kl_coef, config.update.kl_estimator) == pull
            assert (config.sft.steps, config.run.steps) == (0, 100)


def test_tables_show_the_last_evaluation_and_what_is_missing(script):
    """A stage that failed is as one that was not run, and a run of `rl` shows both its ends."""
    curve, up = [[0, 0.25], [60, 0.5]], [[0, -1.0], [100, 2.0]]
    falls = [[0, 0.25], [20, 0.5], [100, 0.125]]
    counts = {"pairs": 9, "held_out_pairs": 2}
    rows = [
        {"variant": "warm", "seed": 0, script.ACCURACY: [[80, 0.2]], script.STRICT: [[80, 0.1]]},
        {"variant": "dpo-1", "seed": 0, **counts, script.ACCURACY: curve},
        {"variant": "dpo-2", "seed": 0, "error": "no"},
        {"variant": "rl", "seed": 0, script.ACCURACY: curve, script.REWARD: up},
        {"variant": "rl-far", "seed": 0, script.ACCURACY: falls, script.REWARD: up},
    ]
    dpo, rl = (part.splitlines() for part in script.tables(rows).split("\n\n"))
    assert dpo[2] == "| 0 | 0.200 (0.100) | 9 + 2 | – | 0.500 | – | – | – | – |"
    assert rl[2] == "| 0 | – | 0.250 | 0.500 | -1.000 | 2.000 | 0.500 at step 20 | 0.125 | 2.000 |"
    assert {len(line.split("|")) for line in (*dpo, *rl)} == {11}
