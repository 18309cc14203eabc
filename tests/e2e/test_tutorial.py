"""The two tutorials are what they do: docs/tutorial.md, and the notebook examples/people.ipynb.

The blocks of the page are saved and run in their order, in an empty folder.

A block after "`NAME`:" is a file. A block `bash` is run; the block `text` after it is what it prints. A block
without a language is shown only. If the output has changed, the failure names a page with the new one.
"""

import copy
import json
import os
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
from test_readme import ROOT

from quatrain.config.load import load_config
from quatrain.loop.train import dry_run
from quatrain.run.metrics import read_metrics

PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "examples" / "people.ipynb"
BLOCK = re.compile(r"(?:`(?P<file>\w+\.\w+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
PORT = "8000"
SAFELY = "set -e -o pipefail; trap 'kill $(jobs -p) 2>&- || true' EXIT\n"
"""What goes before the commands of a block: the first that fails ends it, and what it left running."""
ACCURACY = "eval/accuracy_lenient"
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
NEEDS_TORCH = "ask.py"
PROGRESS = re.compile(r"(start|[a-z ]+(?= \d))(?: \d+/\d+)? \| ")
LEFT_OUT = "…\n"
HOME = "/home/me/people"
VARYING = {
    rf"{PROGRESS.pattern}.*": r"\1 …",
    r"\d+\.\d+": "0.0",
    r"advantage \S+": "advantage …",
    r"(?<=: )/.*(?=/runs/)": "FOLDER",
}
"""What differs between machines: how often progress is printed and what it says, measured numbers, paths."""


def blocks():
    """(file or None, language, text) of the page's blocks."""
    return [match.group("file", "language", "text") for match in BLOCK.finditer(PAGE.read_text("utf-8"))]


def shortened(output):
    """`output` with the last of several lines of progress of one phase, after an ellipsis."""

    def phase(line):
        return match[1] if (match := PROGRESS.match(line)) else None

    kept = []
    for name, lines in groupby(output.splitlines(keepends=True), key=phase):
        lines = list(lines)
        kept += lines if name is None or len(lines) == 1 else [LEFT_OUT, lines[-1]]
    return "".join(kept)


def form(output):
    """`output` without what differs between machines."""
    text = output.replace(LEFT_OUT, "")
    for pattern, same in VARYING.items():
        text = re.sub(pattern, same, text)
    return text


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which the page was followed, and the page with what its commands printed there."""
    folder = tmp_path_factory.mktemp("people")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUATRAIN_")}
    environ |= {
        "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}",
        "no_proxy": "127.0.0.1",
        **OFFLINE,
    }
    page, port = PAGE.read_text("utf-8"), free_port()
    for file, language, text in blocks():
        if file is not None:
            (folder / file).write_text(text, "utf-8")
        elif language == "bash":
            command = SAFELY + text.replace(PORT, port)
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=1000,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}"
            output = done.stdout.replace(port, PORT).replace(str(folder), HOME)
            shown = f"```bash\n{text}```\n\n```text\n"
            before, after = page.split(shown)
            page = before + shown + shortened(output) + after[after.index("```") :]
    return folder, page


def test_every_block_has_a_role():
    found = blocks()
    assert len(found) == PAGE.read_text("utf-8").count("```") / 2
    languages = [language for file, language, _ in found if file is None]
    assert set(languages) == {"", "bash", "text"}
    runs = [language for language in languages if language]
    assert runs == ["bash", "text"] * (len(runs) // 2)


def test_the_files_of_the_page_pass_the_dry_run(tmp_path, monkeypatch):
    """The quick form of what follows: no model is trained, and the first command prints what is shown."""
    monkeypatch.chdir(tmp_path)
    for file, _, text in blocks():
        if file is not None:
            Path(file).write_text(text, "utf-8")
    done = subprocess.run([sys.executable, "make_people.py"], capture_output=True, text=True, check=True)
    for said in (*done.stdout.splitlines(), Path("train.jsonl").read_text("utf-8").splitlines()[0]):
        assert f"{said}\n" in PAGE.read_text("utf-8")
    plan, warnings = dry_run(load_config(Path("people.yaml"), [], environ={}))
    assert f"\n{plan.splitlines()[0]}\n```" in PAGE.read_text("utf-8")
    assert warnings == []


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(followed):
    folder, page = followed
    new = folder / "tutorial.md"
    new.write_text(page, "utf-8")
    assert form(page) == form(PAGE.read_text("utf-8")), f"the page with the new output: {new}"


@pytest.mark.slow
def test_the_model_has_learned_the_task(followed):
    folder, _ = followed
    rows = read_metrics(folder / "runs" / "first" / "metrics.jsonl")
    assert rows[0][ACCURACY] <= 0.2
    assert rows[-1][ACCURACY] >= 0.8
    assert rows[-1]["eval/reward/is_json"] >= 0.95
    answer = json.loads((folder / "answer.json").read_text("utf-8"))
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("torch"), reason="transformers computes with torch, which is not installed")
def test_transformers_loads_the_export(followed):
    folder, page = followed
    done = subprocess.run(
        [sys.executable, NEEDS_TORCH], cwd=folder, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == '{"name": "Eva", "age": 33}'
    assert done.stdout in page


def printed(cell):
    """What a cell of a notebook printed, and its value as text."""
    texts = [each["text"] for each in cell.outputs if each.output_type == "stream"]
    values = [each["data"]["text/plain"] for each in cell.outputs if each.output_type == "execute_result"]
    return form("".join(texts)) + "".join(values)


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    why = "`make test-slow` installs what runs notebooks"
    nbformat = pytest.importorskip("nbformat", reason=why)
    nbclient = pytest.importorskip("nbclient", reason=why)
    for name in [name for name in os.environ if name.startswith("QUATRAIN_")]:
        monkeypatch.delenv(name)
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # of ipywidgets
    shown = nbformat.read(NOTEBOOK, as_version=4)
    notebook = copy.deepcopy(shown)
    client = nbclient.NotebookClient(notebook, timeout=1200, record_timing=False, coalesce_streams=True)
    client.execute(cwd=tmp_path)
    for output in [output for cell in notebook.cells for output in cell.get("outputs", ())]:
        if output.output_type == "stream":
            output["text"] = shortened(output["text"]).replace(str(tmp_path), HOME)
    new = tmp_path / NOTEBOOK.name
    nbformat.write(notebook, new)
    found, expected = (
        [printed(cell) for cell in each.cells if "outputs" in cell] for each in (notebook, shown)
    )
    assert found == expected, f"the notebook with the new output: {new}"
    [metrics] = tmp_path.rglob("metrics.jsonl")
    before, *_, after = [row for row in read_metrics(metrics) if ACCURACY in row]
    assert before[ACCURACY] <= 0.3
    assert after[ACCURACY] >= 0.9
