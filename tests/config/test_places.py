from pathlib import Path

import pytest

from quatrain.config.load import load_config
from quatrain.config.places import HUB_ID, local_path


@pytest.mark.parametrize("name", ["owner/name", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_hub_ids(name):
    assert HUB_ID.fullmatch(name)


@pytest.mark.parametrize("name", ["name", "../name", "./name", "/owner/name", "~/name", "a/b/c", "a/.b"])
def test_paths_are_no_hub_ids(name):
    assert not HUB_ID.fullmatch(name)


def test_the_home_folder_is_filled_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path("~/a.jsonl") == Path("/home/me/a.jsonl")
    assert local_path("a/~b") == Path("a/~b")
    assert local_path("~no-such-user-here/a") == Path("~no-such-user-here/a")


def test_paths_beside_a_configuration_are_found_from_any_folder(tmp_path, monkeypatch):
    """Catches examples that run from one folder alone, and a file of the working directory passed over."""
    folder, elsewhere = tmp_path / "examples", tmp_path / "elsewhere"
    for name in ("rows.jsonl", "part-1.jsonl", "mine.py", "both.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    elsewhere.mkdir()
    (elsewhere / "both.py").touch()
    (folder / "a.yaml").write_text(
        "data: {train: [rows.jsonl, part-*.jsonl], eval: {x: rows.jsonl, y: gone.jsonl}}\n"
        "model: {path: org/model}\n"
        "rollout: {tools: [mine.py:f, both.py:f], sampler: mine.py:S}\n"
        "reward: {functions: {mine.py:f: 1.0, correct: 0.5, package.module:f: 1.0}}\n"
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(folder / "a.yaml", [], {}, trains=False).config
    assert config.data.train == (f"{folder}/rows.jsonl", f"{folder}/part-*.jsonl")
    assert config.data.eval == {"x": f"{folder}/rows.jsonl", "y": "gone.jsonl"}
    assert config.model.path == "org/model"
    assert config.rollout.tools == (f"{folder}/mine.py:f", "both.py:f")
    assert config.rollout.sampler == f"{folder}/mine.py:S"
    assert [*config.reward.functions] == [f"{folder}/mine.py:f", "correct", "package.module:f"]
    monkeypatch.chdir(folder)
    assert load_config(folder / "a.yaml", [], {}, trains=False).config.data.train[0] == "rows.jsonl"
