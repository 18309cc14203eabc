"""The runs that show what the examples of episodes learn."""

import json
import sys
from pathlib import Path

import pytest

from quatrain.config.load import load_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script(load_script):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield load_script("episode_examples")
    sys.modules.pop("algorithms", None)


def test_every_variant_is_a_valid_configuration(script):
    for name, variant in script.VARIANTS.items():
        settings = [f"{key}={json.dumps(value)}" for key, value in variant.settings.items()]
        config = load_config(script.EXAMPLES / variant.config, settings, environ={}).config
        assert config.rollout.has_episodes == (name != "without the tool")


def test_figures_and_their_table(script):
    metrics = [
        {"step": 0, "eval/reward": 0.25},
        {"step": 1, "reward/mean": 0.5, "episode/turns/mean": 1.5, "time/step_s": 2.0},
        {"step": 2, "reward/mean": 0.7, "episode/turns/mean": 2.0, "time/step_s": 1.5, "eval/reward": 1.0},
    ]
    found = script.figures(metrics, "eval/reward")
    assert found == {
        "evaluations": [[0, 0.25], [2, 1.0]],
        "rewards": [[1, 0.5], [2, 0.7]],
        "turns": [[1, 1.5], [2, 2.0]],
        "train_s": 3.5,
    }
    worse = {**found, "evaluations": [[0, 0.25], [2, 0.5]], "turns": []}
    rows = [{"variant": "game", **found}, {"variant": "game", **worse}]
    assert script.table(rows).splitlines()[2:] == ["| game | 0.25 | 0.75 | 1.00, 0.50 | 0.60 | 0.60 | 1.75 |"]


def test_what_is_in_the_file_is_not_run_again(script, monkeypatch, tmp_path, capsys):
    ran = []

    def run(name, seed, more):
        ran.append((name, seed))
        row = {"variant": name, "seed": seed, "set": list(more), "wall_s": 1.0}
        done = {"evaluations": [[0, 0.0], [1, 1.0]], "rewards": [[1, 1.0]], "turns": [], "train_s": 1.0}
        return {**row, "error": "no memory"} if len(ran) == 1 else row | done

    monkeypatch.setattr(script, "run", run)
    out, figure = tmp_path / "out.jsonl", tmp_path / "figure.svg"
    arguments = ["--only", "game", "--seeds", "2", "--out", str(out), "--figure", str(figure)]
    assert script.main(arguments) == 1
    assert script.main(arguments) == 0
    assert ran == [("game", 0), ("game", 1), ("game", 0)]
    assert "| game | 0.00 | 1.00 | 1.00, 1.00 |" in capsys.readouterr().out
    assert ">game</text>" in figure.read_text("utf-8")
