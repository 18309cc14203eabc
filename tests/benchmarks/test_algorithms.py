"""The script that trains the quickstart with every estimator and every loss."""

import json

import pytest
import yaml

from quatrain.config.algorithms import ESTIMATORS, LOSSES
from quatrain.config.load import load_config

TINY = (
    "sft.steps=1",
    "sft.batch_size=4",
    "data.batch_size=2",
    "rollout.n=2",
    "rollout.max_new_tokens=4",
    "eval.num_prompts=4",
    "eval.final_num_prompts=4",
    "eval.every_steps=1",
)


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("algorithms")


def result(variant, seed=0, **figures):
    row = {"variant": variant, "seed": seed, "settings": {"seed": seed}}
    return row | {"before": 0.25, "after": 0.75, "steps_to_target": None, "train_s": 10.0} | figures


@pytest.mark.slow
def test_a_variant_is_trained_once_and_its_result_kept(script, tmp_path, capsys):
    out, figure = tmp_path / "results.jsonl", tmp_path / "figure.svg"
    sets = [part for text in TINY for part in ("--set", text)]
    arguments = ["--only", "rloo", "--seeds", "1", "--steps", "2", *sets, "--out", str(out)]
    assert script.main([*arguments, "--figure", str(figure)]) == 0
    (row,) = script.read_rows(out)
    assert (row["variant"], row["settings"]["advantage.estimator"]) == ("estimator/rloo", "rloo")
    assert [step for step, _ in row["accuracy"]] == [0, 1, 2]
    assert row["train_s"] > 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[2].startswith("| `rloo` |")
    assert ">rloo</text>" in figure.read_text("utf-8")
    assert script.main(arguments) == 0
    assert len(script.read_rows(out)) == 1
    assert capsys.readouterr().out == printed


def test_every_name_of_the_schema_is_a_variant(script):
    names = list(script.variants())
    assert {"estimator/grpo", "loss/ppo_clip"} <= set(names)
    assert len(names) == len(set(names)) == len(ESTIMATORS) + len(LOSSES)
    assert set(script.VARIANT_SETTINGS) <= set(names)


def test_the_settings_of_every_variant_are_a_valid_configuration(script):
    for name in list(script.variants()):
        settings = script.settings_of(name, 2, {"run.steps": 7})
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        config = load_config(None, overrides, environ={}).config
        kind, _, algorithm = name.partition("/")
        expected = (algorithm, "ppo_clip", 32) if kind == "estimator" else ("grpo", algorithm, 16)
        update = config.update
        assert (config.advantage.estimator, update.loss, update.mini_batch_size) == expected
        assert (config.seed, config.run.steps, config.optimizer.learning_rate) == (2, 7, 5e-4)


def test_the_variants_with_a_teacher_are_valid_configurations(script, load_script, tmp_path):
    """Those of `distillation.py`, which runs them as this script does, with its student of half the width."""
    taught = load_script("distillation")
    for name in (*taught.VARIANTS, *taught.HALF):
        settings = taught.settings_of(name, 2, tmp_path / "teacher", 7)
        config = load_config(
            None, [f"{key}={json.dumps(x)}" for key, x in settings.items()], environ={}
        ).config
        assert (config.seed, config.run.steps, config.eval.every_steps) == (2, 7, 5)
        assert (config.distill.teacher is None) == (name == "GRPO")
        assert (config.model.path == str(tmp_path / "teacher-half-2")) == (name in taught.HALF)
    assert settings["distill.top_k"] == 8
    assert taught.settings_of(name, 2, tmp_path / "teacher")["run.steps"] == 40
    taught.write_student(tmp_path / "student", 2)
    written = json.loads((tmp_path / "student" / "config.json").read_text())
    assert (written["hidden_size"], written["intermediate_size"], written["head_dim"]) == (64, 192, 32)


def test_settings_added_last_win(script):
    settings = script.settings_of("estimator/gae", 0, {"critic_optimizer.learning_rate": 1e-4})
    assert settings["critic_optimizer.learning_rate"] == 1e-4
    assert settings == json.loads(json.dumps(settings)) == yaml.safe_load(json.dumps(settings))


def test_variants_are_chosen_by_pattern(script):
    names = ["estimator/grpo", "estimator/gpg", "loss/gpg", "loss/gspo"]
    assert script.select(names, None) == names
    assert script.select(names, ["gpg"]) == ["estimator/gpg", "loss/gpg"]
    assert script.select(names, ["loss/g*", "grpo"]) == ["estimator/grpo", "loss/gpg", "loss/gspo"]
    with pytest.raises(SystemExit, match=r"must match a variant, got gppo; there are estimator/grpo, "):
        script.select(names, ["gspo", "gppo"])


def test_the_first_evaluation_at_the_target_counts(script):
    assert script.steps_to(0.9, [[0, 0.2], [10, 0.9], [20, 0.85], [30, 0.95]]) == 10
    assert script.steps_to(0.9, [[0, 0.2], [10, 0.899]]) is None
    assert script.steps_to(0.9, [[0, 1.0], [10, 0.5]]) == 0


def test_figures_of_a_run(script):
    """A row of the warm start, of steps with and without evaluation, and one whose accuracy is null."""
    metrics = [
        {"step": 0, "eval/accuracy_strict": 0.205, "time/eval_s": 3.0},
        {"step": 1, "time/step_s": 9.5, "time/compile_s": 8.0},
        {"step": 2, "time/step_s": 1.25, "time/compile_s": 0.5, "eval/accuracy_strict": 0.91},
        {"step": 3, "time/step_s": 1.5, "time/compile_s": 0.0, "eval/accuracy_strict": None},
        {"step": 4, "time/step_s": 1.25, "time/compile_s": 0.0, "eval/accuracy_strict": 0.88},
    ]
    assert script.figures(metrics) == {
        "before": 0.205,
        "after": 0.88,
        "steps_to_target": 2,
        "train_s": 5.0,
        "compile_s": 8.5,
        "accuracy": [[0, 0.205], [2, 0.91], [4, 0.88]],
    }
    with pytest.raises(ValueError, match="an evaluation before and one after training"):
        script.figures(metrics[:2])


def test_an_interrupted_line_is_skipped_and_replaced(script, tmp_path):
    path = tmp_path / "results.jsonl"
    assert script.read_rows(path) == []
    script.append(path, {"seed": 0})
    with path.open("a") as file:
        file.write('{"seed": 1, "sett')
    assert script.read_rows(path) == [{"seed": 0}]
    script.append(path, {"seed": 2})
    assert script.read_rows(path) == [{"seed": 0}, {"seed": 2}]
    path.write_text('broken\n{"seed": 0}\n')
    with pytest.raises(SystemExit, match=r"results\.jsonl:1 must be one JSON object"):
        script.read_rows(path)


def test_the_last_result_with_the_wanted_settings_is_taken(script):
    wanted = [("loss/gspo", {"seed": seed}) for seed in (0, 1, 2)]
    rows = [
        {"variant": "loss/gspo", "settings": {"seed": 1}, "error": "out of memory"},
        {"variant": "loss/gmpo", "settings": {"seed": 0}},
        {"variant": "loss/gspo", "settings": {"seed": 0, "run.steps": 3}},
        {"variant": "loss/gspo", "settings": {"seed": 1}, "after": 0.5},
        {"variant": "loss/gspo", "settings": {"seed": 0}, "after": 0.25},
    ]
    assert script.latest(rows, wanted) == [rows[4], rows[3]]


def test_only_what_is_missing_or_failed_is_run(script, monkeypatch, tmp_path):
    ran = []

    def run(name, seed, settings):
        ran.append((name, seed))
        row = {**result(name, seed), "settings": settings, "wall_s": 1.0}
        return {**row, "error": "no memory"} if len(ran) == 2 else row

    monkeypatch.setattr(script, "run", run)
    arguments = ["--only", "gspo", "rloo", "--seeds", "2", "--steps", "3", "--out", str(tmp_path / "out")]
    assert script.main(arguments) == 1
    assert ran == [("estimator/rloo", 0), ("loss/gspo", 0), ("estimator/rloo", 1), ("loss/gspo", 1)]
    assert script.main(arguments) == 0
    assert ran[4:] == [("loss/gspo", 0)]
    assert script.main([*arguments, "--set", "update.kl_coef=0.1"]) == 0
    assert len(ran) == 9


def test_the_table_shows_means_every_seed_and_failures(script):
    rows = [
        result("estimator/grpo", 0, before=0.2, after=0.9, steps_to_target=60, train_s=100.4),
        result("estimator/grpo", 1, before=0.3, after=0.8, train_s=130.0),
        {"variant": "estimator/grpo", "error": "no memory"},
        {"variant": "estimator/gae", "error": "no memory"},
        result("loss/gspo", 0),
    ]
    assert script.table("estimator", "Estimators", rows).splitlines()[2:] == [
        "| `grpo` | 0.250 | 0.850 | 0.900, 0.800, failed | 60, –, – | 115 |",
        "| `gae` | – | – | failed | – | – |",
    ]
