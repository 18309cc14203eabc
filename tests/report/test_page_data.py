import json
import os
import socket

import pytest
from page_runs import make_run, write_rows

from quatrain.report.page_data import (
    columns,
    config_rows,
    described,
    differing,
    distinct_names,
    run_data,
    run_stamp,
)
from quatrain.run.run_dir import find_run


def by_key(rows):
    return {row["key"]: row for row in rows}


def test_runs_of_the_same_name_are_told_apart_by_their_parents(tmp_path):
    first, second, third = (tmp_path / name for name in ("a/run", "b/run", "b/other"))
    assert distinct_names([first, third]) == ["run", "other"]
    assert distinct_names([first, second, third]) == ["a/run", "b/run", "b/other"]
    assert distinct_names([first, first]) == ["run", "run"]


def test_a_run_is_a_folder_or_a_name(tmp_path, monkeypatch):
    folder = make_run(tmp_path)
    assert find_run(str(folder), tmp_path / "elsewhere") == folder
    assert find_run("first", tmp_path) == folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"got 'empty'; runs in .*: first$"):
        find_run("empty", tmp_path)


def test_metrics_become_columns_with_the_steps_that_are_not_finite():
    rows = [{"step": 1, "a": 0.12345678}, {"step": 3, "a": None, "b": 2.0, "non_finite": ["a"]}]
    assert columns(rows) == {
        "steps": [1, 3],
        "metrics": {"a": [0.123457, None], "b": [None, 2.0]},
        "non_finite": {"a": [3]},
    }


def test_a_value_has_its_layer_and_its_default(tmp_path):
    rows = by_key(run_data(make_run(tmp_path))["config"])
    assert rows["rollout.n"]["layer"] == "quickstart"
    assert rows["rollout.stop"] == {
        "key": "rollout.stop",
        "value": ["a # b", "c"],
        "layer": "file a.yaml",
        "default": [],
        "changed": True,
        "derived": False,
    }
    assert rows["rollout.max_new_tokens"]["changed"] is False
    assert rows["update.micro_batch_size"]["derived"] is True
    assert rows["update.micro_batch_size"]["changed"] is False
    mine = rows["reward.functions.mine.py:f # g"]
    assert (mine["value"], mine["layer"]) == (0.5, "environment QUATRAIN__REWARD__FUNCTIONS")
    assert mine["default"] == "not set"
    assert rows["gone.key"]["default"] == "not set"


def test_a_default_entry_that_the_run_left_out_is_shown():
    rows = by_key(config_rows("reward:\n  functions:\n    mine: 1.0  # --set\n"))
    assert rows["reward.functions.correct"]["value"] == "not set"
    assert rows["reward.functions.correct"]["changed"] is True


def test_every_layer_of_a_written_configuration_is_found(monkeypatch):
    from quatrain.config.dump import dump_yaml
    from quatrain.config.load import load_config

    resolved = load_config(None, ["rollout.n=3", "rollout.stop=['#', \"a: b\"]"], {})
    rows = by_key(config_rows(dump_yaml(resolved)))
    assert {key: row["layer"] for key, row in rows.items() if row["layer"]} == resolved.provenance


def test_keys_that_differ_between_runs():
    one = [{"key": "a", "value": 1}, {"key": "b", "value": [2]}]
    two = [{"key": "a", "value": 1}, {"key": "b", "value": [3]}, {"key": "c", "value": None}]
    assert differing([one, two]) == [
        {"key": "b", "values": [[2], [3]]},
        {"key": "c", "values": ["not set", None]},
    ]


def test_known_metrics_are_described():
    found = described(["reward/mean", "reward/mine/mean", "brand/new"])
    assert list(found) == ["reward/mean", "reward/mine/mean"]
    assert found["reward/mine/mean"][0] == "reward"


def test_a_killed_run_has_half_a_line(tmp_path):
    folder = make_run(tmp_path)
    (folder / "final").rmdir()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    with (folder / "hints.jsonl").open("a") as file:
        file.write('{"step": 4, "hi')
    data = run_data(folder)
    assert data["state"] == "not finished"
    assert data["step"] == 3
    assert data["steps"] == [0, 1, 2, 3]
    assert data["notes"] == [
        "lines of metrics.jsonl that hold no whole row, skipped: 1",
        "a damaged line of hints.jsonl was skipped",
    ]


def test_a_run_that_is_being_written_is_running(tmp_path):
    folder = make_run(tmp_path)
    owner = {"host": socket.gethostname(), "process": os.getpid(), "since": "now"}
    (folder / ".lock.json").write_text(json.dumps(owner))
    assert run_data(folder)["state"] == "running"
    assert run_data(folder, ended=True)["state"] == "finished"
    (folder / ".lock.json").write_text(json.dumps(owner | {"host": "another"}))
    assert run_data(folder)["state"] == "finished"


def test_a_run_that_was_resumed_for_more_steps_and_killed_is_not_finished(tmp_path):
    folder = make_run(tmp_path)
    config = (folder / "config.yaml").read_text()
    assert "steps: 3" in config
    (folder / "config.yaml").write_text(config.replace("steps: 3", "steps: 5"))
    assert (folder / "final").is_dir()
    assert run_data(folder)["state"] == "not finished"


def test_missing_and_damaged_files_cost_a_note(tmp_path):
    write_rows(tmp_path / "bare" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    data = run_data(tmp_path / "bare")
    assert (data["plan"], data["hints"], data["config"]) == (None, [], [])
    assert data["notes"] == ["the run has no config.yaml"]

    folder = make_run(tmp_path)
    (folder / "config.yaml").write_text("a: [")
    (folder / "plan.json").write_text("[1]")
    (folder / "run.json").write_text('{"starts": [{}]}')
    data = run_data(folder)
    assert (data["plan"], data["config"], data["starts"]) == (None, [], [])
    assert [note.split(" could")[0] for note in data["notes"]] == ["config.yaml", "plan.json", "run.json"]


def test_what_made_a_run_is_shown_of_each_start(tmp_path):
    folder = make_run(tmp_path)
    first, resumed = map(dict, run_data(folder)["starts"])
    assert first == {
        "started": "2026-01-02T03:04:05+0000, after step 0",
        "command": "quatrain train first.yaml",
        "working folder": "/home/me",
        "versions": "python 3.11.7, quatrain 0.1.0",
        "commit of quatrain": "0123abcd, 2 files changed",
        "devices": "1 cpu in 1 process",
        "copy of /home/me/rewards.py": "code/rewards.py",
        "ended": "with step 2",
    }
    assert resumed["changed: run.steps"] == "2 before, 3 now"
    assert resumed["ended"] == "with an error or a signal, or not yet"
    before = run_stamp(folder)
    (folder / "run.json").unlink()
    assert run_data(folder)["starts"] == []
    assert run_stamp(folder) != before


def test_the_plan_is_rows_with_unit_and_reason(tmp_path):
    plan = run_data(make_run(tmp_path))["plan"]
    assert plan["rows"][0] == {"key": "prompts_per_step", "value": 4, "unit": "prompts", "why": ""}
    assert plan["warnings"] == ["odd"]
