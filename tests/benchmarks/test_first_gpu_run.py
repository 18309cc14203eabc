"""The script for the first run on a GPU, with tiny shapes where there is none."""

import json

import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("first_gpu_run")


def items(out):
    return {path.stem: json.loads(path.read_text("utf-8")) for path in out.glob("*.json")}


def test_an_item_that_fails_hangs_or_crashes_is_told_and_the_others_run(script, tmp_path, monkeypatch):
    """The processes run `--item`, which is replaced here by small programs."""
    programs = {
        "limits": "raise SystemExit(3)",
        "kernels": "import time; print('here', flush=True); time.sleep(60)",
        "sampling": "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text("
        '\'{"item": "sampling", "status": "done", "figures": {"plain ms": 0.12345678}}\')',
    }
    start, ended = script.subprocess.Popen, []

    def instead(command, **options):
        name = command[-1]
        ended.append(name)
        return start([script.sys.executable, "-c", programs[name], str(tmp_path / f"{name}.json")], **options)

    monkeypatch.setattr(script.subprocess, "Popen", instead)
    hanging = script.replace(script.ITEMS["kernels"], limit_s=2)
    monkeypatch.setitem(script.ITEMS, "kernels", hanging)
    only = [argument for name in programs for argument in ("--only", name)]
    assert script.main(["--out", str(tmp_path), *only]) == 1
    assert ended == ["limits", "kernels", "sampling"]
    assert (tmp_path / "table.txt").read_text("utf-8").splitlines() == [
        "limits: failed: ended with status 3: ",
        "kernels: failed: not done in 2 s",
        "sampling: done",
        "    plain ms  0.1235",
    ]


def test_an_unknown_item_is_refused(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path), "--only", "speed"])
    assert "--only must match an item; items are limits, kernels" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run_has_every_item(script, tmp_path):
    assert script.main(["--out", str(tmp_path), "--small", "--model", "builtin:tiny", "--steps", "3"]) == 0
    found = items(tmp_path)
    assert set(script.ITEMS) <= set(found)
    assert {name: found[name]["status"] for name in script.ITEMS} == dict.fromkeys(script.ITEMS, "done")
    figures = {name: report["figures"] for name, report in found.items() if "figures" in report}
    assert figures["kernels"]["cudnn tiny"] == "needs a GPU, and JAX uses the platform cpu"
    assert figures["attention"]["xla tiny with backward ms"] > 0
    assert figures["attention"]["xla tiny line"] == [1, 256]
    assert figures["train"]["steps"] == 1
    assert figures["train"]["update TFLOP/s"] > 0
    assert figures["head"]["tiny tile 4096 x 32768 ms"] > 0
