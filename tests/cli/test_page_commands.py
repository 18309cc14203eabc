"""The `quatrain …` commands of the README and of the pages are executed, as they stand, in a folder that has
what they name; sizes come from the environment, and a built-in model stands in for models on the Hub.

Commands that need no run are executed in this process, the others (`slow`) each in a process of its own.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from itertools import takewhile

import pytest
from test_readme import PAGES, ROOT, blocks, commands, task, translations

from quatrain.cli import main as cli

SIZES = {
    "DATA__BATCH_SIZE": "2",
    "ROLLOUT__N": "2",
    "ROLLOUT__MAX_NEW_TOKENS": "4",
    "UPDATE__MINI_BATCH_SIZE": "2",
    "SFT__STEPS": "0",
    "EVAL__NUM_PROMPTS": "2",
    "EVAL__FINAL_NUM_PROMPTS": "2",
    "EVAL__EVERY_STEPS": "10",
}
OF_ROLLOUTS = ("DATA__BATCH_SIZE", "ROLLOUT__N", "UPDATE__MINI_BATCH_SIZE", "SFT__STEPS")
"""Sizes that commands of given data refuse, or have under another name."""
ON_GSM8K = {
    "MODEL__PATH": "builtin:tiny",
    "DATA__TRAIN": "train.jsonl",
    "DATA__EVAL": "test.jsonl",
    "DATA__SYSTEM_PROMPT": "Be brief.",
    "DATA__MAX_PROMPT_LENGTH": "64",
    "SFT__DATA": "demonstrations.jsonl",
}
NEEDS = {
    "model:judge": "a reward model; tests/e2e/test_reward_model.py trains with one",
    "--coordinator": "two hosts; tests/multihost runs several processes",
    "path=Qwen/": "the Hub; tests/models loads models from local folders and GGUF files",
    "rollout.workers": "the extra `ray`; tests/slow/test_ray_workers.py trains with workers",
    "rollout.servers": "servers; tests/serve and tests/vllm train with some",
    "quatrain serve": "clients, until it is stopped; tests/serve asks its server",
    "--serve": "a reader, until it is stopped; tests/report asks its server",
    "OWNER/NAME": "an account on the Hub; tests/loop pushes to one in its place",
    "--fit": "the Hub; tests/plan/test_fit.py searches, and tests/test_readme.py compares what is shown",
    "gs://": "a bucket; tests/buckets keeps checkpoints in some",
    "teacher=models/": "another model; tests/e2e/test_distill_run.py learns from one",
    "teacher=http": "a server; tests/serve/test_server_teacher.py learns from one",
    "agent_python=hub/": "the packages of a hub; tests/hubs plays its environments",
    "ep: 4": "a model with experts; tests/equivalence/test_routed_meshes.py trains some",
    "tinker-state/": "the state of a training server; tests/loop/test_export.py exports from one",
    "people.yaml": "the files of the tutorial; tests/e2e/test_tutorial.py follows the page",
    **dict.fromkeys(
        ("chat.yaml", "pairs.yaml", "judge.yaml", "rl.yaml", "pairs.jsonl"),
        "the files of docs/supervised.md; tests/e2e/test_road.py follows the page",
    ),
}
"""Part of a command that is not executed -> what it needs, and what is tested in its place."""
SHELL = ("|", "&", ">", "2>")
"""What ends the arguments of a command."""
QUICK = ("config", "convert", "plan")
ALL = list(dict.fromkeys(shlex.join(words) for page in PAGES for words in commands(page)))


NAMES = ("my-run", "first", "second", "warm", "quick-warm")
"""Of the runs that the pages speak of."""


def arguments(command):
    """The words after `quatrain`."""
    return list(takewhile(lambda word: word not in SHELL, shlex.split(command)[1:]))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the pages speak of."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("CONFIG.yaml", "my.yaml"):
        shutil.copy(ROOT / "src" / "quatrain" / "config" / "quickstart.yaml", folder / name)
    theirs = {name: text for name, _, text, _ in translations()}
    theirs["prefs.yaml"] = (ROOT / "tests" / "config" / "theirs" / "trl_dpo.yaml").read_text("utf-8")
    for name, text in (task() | theirs).items():
        (folder / name).write_text(text * 4 if name.endswith(".jsonl") else text, "utf-8")
    environment, *_ = blocks(ROOT / "docs" / "episodes.md", "python")
    (folder / "second_chance.py").write_text(environment, "utf-8")
    subprocess.run([sys.executable, "examples/calculator.py"], cwd=folder, check=True)
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(4)]
    for name, extra in (("train", {}), ("test", {}), ("demonstrations", {"completion": "1"})):
        lines = [json.dumps(row | extra) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    return folder


@pytest.fixture(scope="module")
def place_with_runs(place):
    """And a run of 50 steps under each of the names of runs."""
    done = quatrain(place, ["train", "--set", "run.name=my-run"], RUN__STEPS="50")
    assert done.returncode == 0, done.stderr
    for name in NAMES[1:]:
        shutil.copytree(place / "runs" / "my-run", place / "runs" / name)
    return place


def quatrain(folder, arguments, devices=1, **settings):
    """`quatrain ARGUMENTS` in `folder`, in a process of its own; a setting of None is none."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("QUATRAIN_", "WANDB_"))},
        **{f"QUATRAIN__{k}": value for k, value in (SIZES | settings).items() if value is not None},
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "HOME": str(folder),
    }
    command = [sys.executable, "-m", "quatrain", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("command", [c for c in ALL if c.split()[1] in QUICK and "--fit" not in c])
def test_a_command_that_needs_no_run(place, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(tmp_path))
    if "configs/" in command and "--params" in command:
        monkeypatch.setenv("QUATRAIN__MODEL__PATH", "builtin:tiny")
    monkeypatch.setattr(sys, "argv", ["quatrain", *arguments(command)])
    status = 0
    try:
        cli.main()
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert shown.out


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in ALL if c.split()[1] not in QUICK or "--fit" in c])
def test_a_command_that_trains_or_reads_a_run(place_with_runs, tmp_path, command):
    for part, reason in NEEDS.items():
        if part in command:
            pytest.skip(f"needs {reason}")
    folder = tmp_path / "place"
    shutil.copytree(place_with_runs, folder, symlinks=True)
    new_name = next((name for name in NAMES if f"run.name={name}" in shlex.split(command)), None)
    if new_name is not None:
        shutil.rmtree(folder / "runs" / new_name)
    settings = dict(ON_GSM8K) if "configs/" in command and "quickstart" not in command else {}
    if "sums.yaml" in command:
        settings["MODEL__PATH"] = "builtin:tiny"
    if (task := shlex.split(command)[1]) in ("sft", "dpo", "rm"):
        settings |= dict.fromkeys(OF_ROLLOUTS)
        settings |= {f"{task.upper()}__STEPS": "2", f"{task.upper()}__BATCH_SIZE": "2"}
    else:
        settings["RUN__STEPS"] = "51" if "--resume" in command else "1"
    devices = 8 if "placement.train" in command or "mesh={" in command else 1
    done = quatrain(folder, arguments(command), devices, **settings)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (folder / "runs").iterdir()}
    if " --resume " in f" {command} ":
        steps = list((folder / "runs").glob("*/checkpoints/51"))
        assert len(steps) == 1
    elif shlex.split(command)[1] in ("train", "sft") and "--print-config" not in command:
        (new,) = names - (set(NAMES) - {new_name})
        assert list((folder / "runs" / new / "final").glob("model*.safetensors"))


def test_every_command_that_is_not_executed_says_what_it_needs():
    for part in NEEDS:
        assert any(part in command for command in ALL), f"no page has {part} any more"
