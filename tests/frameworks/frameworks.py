"""The server, the environments and the checks of the frameworks (`make test-hubs`)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from calling_model import call, save_calling_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HUBS = ROOT / ".hubs"
PROGRAMS = HERE / "programs"
MODEL = "small"
ANSWERS = (
    "Two and three make five: begin with 2, go up by one to 3, once more: 4, finally 5, which is that sum.",
    "It's 5.",
)
ENDLESS_WORD, ENDLESS = "SING", "la "
BEGIN_S, CHECKS_S = 300, 1200
_ADDED = (('{"a": 2', ', "b": 3}'), ('{"b": 4', ', "a": -1}'))


def pieces(text: str) -> tuple[str, ...]:
    """A text in pieces of a word each."""
    words = text.split(" ")
    return (*(f"{word} " for word in words[:-1]), words[-1])


def save_model(folder: Path) -> Path:
    """The model of the checks: it calls `add`, says one of ANSWERS, or sings."""
    calls = {tuple(call("add", *arguments)): 1.0 for arguments in _ADDED}
    texts = {pieces(text): 1.0 for text in ANSWERS}
    begun = {'"': ["a"], "{": [('"a": 7, ', '"b": 8}}\n</tool_call>')]}
    sings = {"asked": {ENDLESS_WORD: (ENDLESS, ENDLESS)}}
    return save_calling_model(folder, calls, texts, begun=begun, calls_at_first=0.9999, **sings)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served(place: Path, model: Path, port: int):
    """The address of `quatrain serve` with `model`, in a process of its own."""
    command = [sys.executable, "-m", "quatrain", "serve", "--port", str(port), "--name", MODEL]
    command += ["--set", f"model.path={model}", "--set", "rollout.max_concurrency=8"]
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + BEGIN_S
    with (
        (place / "server.log").open("wb") as log,
        subprocess.Popen(command, cwd=place, stdout=log, stderr=log) as process,
    ):
        try:
            while not _answers(f"{url}/health"):
                assert process.poll() is None, (place / "server.log").read_text()
                assert time.monotonic() < until, (place / "server.log").read_text()
                time.sleep(0.3)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status == 200
    except OSError:
        return False


def environment(place: Path) -> dict[str, str]:
    """Of a program: no key of this machine, no home folder with settings, nothing from the network."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "HOME": str(place),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(place / "hf"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "DSPY_CACHEDIR": str(place / "dspy"),
        "INSPECT_LOG_DIR": str(place / "logs"),
        "QUATRAIN_API_KEY": "none",
    }


def checked(place: Path, url: str, model: Path, name: str, python: str, checks: list[str]) -> dict[str, dict]:
    """What the program of a framework found: by check, its `value`, or its `error`."""
    place.mkdir()
    command = [HUBS / python / "bin" / "python", PROGRAMS / f"with_{name}.py", url, MODEL, *checks]
    own = environment(place) | {"MODEL_FOLDER": str(model)}
    with (place / "out.log").open("wb") as log:
        done = subprocess.run(
            command, cwd=place, env=own, stdout=subprocess.PIPE, stderr=log, timeout=CHECKS_S
        )
    said = done.stdout.decode()
    assert done.returncode == 0, said + (place / "out.log").read_text()[-4000:]
    return json.loads(said.rstrip().rpartition("\n")[2])
