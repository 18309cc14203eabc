"""The script of what a GPU has to show of pictures, with tiny shapes where there is none."""

import json

import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("first_gpu_pictures")


def test_an_unknown_item_is_refused(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path), "--only", "speed"])
    assert "--only must match an item; items are tower-smolvlm2-256m" in capsys.readouterr().err


def test_an_item_that_fails_is_told_and_the_others_run(script, tmp_path, monkeypatch, capsys):
    def failing(run, figures):
        figures["half"] = 1
        raise RuntimeError("features must be the same twice")

    items = {"first": failing, "second": lambda run, figures: figures.update(rate=2.5)}
    monkeypatch.setattr(script, "ITEMS", items)
    assert script.main(["--out", str(tmp_path)]) == 1
    first, second = (json.loads((tmp_path / f"{name}.json").read_text("utf-8")) for name in items)
    assert (first["status"], first["figures"]) == ("failed", {"half": 1})
    assert (second["status"], second["figures"]) == ("done", {"rate": 2.5})
    table = (tmp_path / "table.txt").read_text("utf-8")
    assert table == capsys.readouterr().out
    assert "first: failed: RuntimeError: features must be the same twice" in table


def test_the_shapes_are_those_that_are_published(script):
    """Parameters of the towers, their projectors included, in millions."""
    from quatrain.models.params import num_params

    found = {}
    for name in script.TOWERS:
        arch = script.architecture(name, small=False)
        without = script.replace(arch, vision=None)
        found[name] = round((num_params(arch) - num_params(without)) / 1e6)
    assert found == {"smolvlm2-256m": 94, "qwen2.5-vl-7b": 677, "qwen3-vl-4b": 415}


@pytest.mark.slow
def test_a_small_run_has_every_item(script, tmp_path):
    """The item of a real model says that it needs one."""
    assert script.main(["--out", str(tmp_path), "--small"]) == 0
    reports = {path.stem: json.loads(path.read_text("utf-8")) for path in tmp_path.glob("*.json")}
    assert {name: report["status"] for name, report in reports.items()} == dict.fromkeys(
        script.ITEMS, "done"
    ) | {"train": "not possible"}
    assert reports["tower-qwen3-vl-4b"]["figures"]["features are the same twice"] is True
