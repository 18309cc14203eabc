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
    left = '{"item": "kernels", "error": "it did not end", "figures": {"xla tiny": "works"}}'
    programs = {
        "limits": "raise SystemExit(3)",
        "kernels": "import pathlib, sys, time\n"
        f"pathlib.Path(sys.argv[-1]).write_text({left!r}); time.sleep(60)",
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
        "    xla tiny  works",
        "sampling: done",
        "    plain ms  0.1235",
    ]


def test_an_unknown_item_is_refused(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--out", str(tmp_path), "--only", "speed"])
    assert "--only must match an item; items are limits, kernels" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run_has_every_item(script, tmp_path):
    """Items of kernels of a GPU are not possible where there is none, and say so."""
    assert script.main(["--out", str(tmp_path), "--small", "--steps", "3"]) == 0
    found = items(tmp_path)
    assert set(script.ITEMS) <= set(found)
    on_a_gpu = {name for name in script.ITEMS if name.endswith(("-cudnn", "-tokamax"))}
    wanted = {name: "not possible" if name in on_a_gpu else "done" for name in script.ITEMS}
    assert {name: found[name]["status"] for name in script.ITEMS} == wanted
    figures = {name: report["figures"] for name, report in found.items() if "figures" in report}
    assert figures["kernels"]["cudnn tiny"] == "needs a GPU, and JAX uses the platform cpu"
    assert figures["attention-xla"]["tiny with backward ms"] > 0
    assert figures["attention-xla"]["tiny line"] == [1, 256]
    assert figures["train"]["steps"] == 1
    assert figures["train"]["update TFLOP/s"] > 0
    assert figures["head"]["tiny tile 4096 x 32768 ms"] > 0


def test_the_run_ends_after_its_seconds_and_says_which_items_found_no_time(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "in_a_process", lambda name, run, arguments, left_s: False)
    assert script.main(["--out", str(tmp_path), "--only", "limits", "--seconds", "0"]) == 1
    assert items(tmp_path)["limits"]["error"] == "no time was left to begin it"


def test_figures_are_written_one_by_one(script, tmp_path):
    """Else an item at its limit has measured for nothing."""
    report = script.Report(tmp_path, "head")
    report["plain ms"] = 1.5
    report |= {"other ms": 2.5}
    assert items(tmp_path)["head"]["figures"] == {"plain ms": 1.5, "other ms": 2.5}
    assert items(tmp_path)["head"]["error"] == script.NOT_ENDED
