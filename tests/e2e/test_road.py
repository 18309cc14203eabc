"""The road of docs/supervised.md: its files are taken by their commands, and it arrives."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_tutorial import BLOCK, OFFLINE
from test_tutorial import PAGE as TUTORIAL

import quatrain
from quatrain.loop.train import dry_run
from quatrain.run.metrics import read_metrics

PAGE = TUTORIAL.with_name("supervised.md")
TASKS = {"chat.yaml": "sft", "pairs.yaml": "dpo", "judge.yaml": "rm", "rl.yaml": "rl"}


def blocks(page):
    """(file or None, language, text) of a page's blocks."""
    return [match.group("file", "language", "text") for match in BLOCK.finditer(page.read_text("utf-8"))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One with the files of the page and the data that they name."""
    monkeypatch.chdir(tmp_path)
    for page in (TUTORIAL, PAGE):
        for file, _, text in blocks(page):
            if file is not None:
                Path(file).write_text(text, "utf-8")
    for script in ("make_people.py", "make_pairs.py"):
        subprocess.run([sys.executable, script], check=True, capture_output=True)
    return tmp_path


def test_the_files_of_the_page_pass_the_dry_run(folder):
    """A key of the page that its command refuses or does not have, and columns that it does not take."""
    steps = {}
    for file, task in TASKS.items():
        if task == "rl":  # its reward model is made on the way
            Path(file).write_text(Path(file).read_text().replace("model:runs/judge/final", "people.py:exact"))
        resolved = quatrain.load_config(Path(file), ["model.path=builtin:tiny"], environ={}, task=task)
        plan, warnings = dry_run(resolved)
        assert warnings == []
        steps[task] = int(plan.split()[0])
    assert steps == {"sft": 141, "dpo": 47, "rm": 188, "rl": 20}


@pytest.mark.slow
def test_the_road_arrives(folder):
    """Held-out accuracy is 0 after supervised training, and most answers are right at either end."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", **OFFLINE}
    shutil.rmtree("runs", ignore_errors=True)
    for _, language, text in blocks(PAGE):
        if language == "bash":
            subprocess.run(["bash", "-ec", text], env=environ, check=True, timeout=1500)

    def last(run, name):
        return [row[name] for row in read_metrics(folder / "runs" / run / "metrics.jsonl") if name in row][-1]

    assert last("chat", "eval/loss") < 0.2
    assert last("better", "eval/accuracy") > 0.9
    assert last("better", "eval/accuracy_lenient") > 0.6
    assert last("judge", "eval/accuracy") > 0.8
    assert last("taught", "eval/accuracy_lenient") > 0.6
