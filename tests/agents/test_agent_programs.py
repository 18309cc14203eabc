"""Programs as agents (`command: …`), without a policy: what they print, and what is left of them."""

import asyncio
import pickle
import sys
import time
from dataclasses import asdict

import pytest

from quatrain.episodes.child import Client, _played, loaded
from quatrain.workers.faults import Fault

CLIENT = Client(
    "http://x/v1", "key", "small", "http://x/untrained/v1", seed=1, step=2, sample=3, greedy=False
)


@pytest.fixture
def run_program(tmp_path):
    """run_program(text, timeout_s): what a program of Python gave, as an agent."""

    def run(text, timeout_s=20.0):
        path = tmp_path / "program.py"
        path.write_text(text)
        agent = loaded(f"command: {sys.executable} {path}", {})
        episode = pickle.dumps({"client": asdict(CLIENT), "row": {"answer": "4"}})
        return asyncio.run(_played(lambda: None, agent, episode, timeout_s))

    return run


def test_what_a_program_prints_beside_its_reward_is_printed(run_program, capsys):
    """The fault: what it wrote to standard error was lost where it ended well."""
    text = "import sys\nprint('began')\nprint('a warning', file=sys.stderr)\nprint('{\"reward\": 0.5}')\n"
    assert run_program(text) == {"reward": 0.5, "metrics": {}}
    assert capsys.readouterr().out.splitlines() == ["began", "a warning"]
    assert run_program("print('no reward')") == {"reward": None, "metrics": {}}
    assert capsys.readouterr().out == "no reward\n"


def test_a_program_that_fails_shows_what_it_printed(run_program, capsys):
    """The fault: its standard output was lost, where many programs write their errors."""
    text = "import sys\nprint('maximum context length')\nprint('left', file=sys.stderr)\nsys.exit(3)\n"
    with pytest.raises(Fault, match="ended with status 3") as error:
        run_program(text)
    assert error.value.detail == "maximum context length\nleft"
    assert capsys.readouterr().out == "maximum context length\nleft\n"


@pytest.mark.parametrize(
    ("spec", "why"), [("command: ", "no program"), ("command: sh 'a", "No closing quot")]
)
def test_a_command_that_is_none_is_refused_once(spec, why):
    """The fault: one without a program was a TypeError of asyncio's in each episode."""
    with pytest.raises(ValueError, match=f"must be a program and its arguments.*{why}"):
        loaded(spec, {})


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_program_that_takes_too_long_leaves_nothing_behind(run_program, tmp_path, capsys):
    """The faults: the programs that it had started went on, and what it had printed was lost."""
    mark = tmp_path / "child"
    text = (
        "import subprocess, sys, time\nprint('began', flush=True)\n"
        f"child = subprocess.Popen(['sleep', '1000'])\nopen({str(mark)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(Fault, match="took longer"):
        run_program(text, timeout_s=2.0)
    assert capsys.readouterr().out == "began\n"
    child = int(mark.read_text())
    deadline = time.monotonic() + 5
    while _lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(child)


def _lives(process):
    try:
        with open(f"/proc/{process}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
