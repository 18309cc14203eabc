"""A training server as a child process, and programs of the real client against it (`make test-tinker`)."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / ".tinker" / "bin" / "python"
PROGRAMS = Path(__file__).parent / "programs"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
KEY = "tml-local"
START_S = 300


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """`quatrain serve --train` in a folder of its own, which it may be killed in and started again."""

    def __init__(self, place, *settings, model="builtin:tiny"):
        self.place, self.model = place, model
        self.settings = (f"model.path={model}", f"tinker.state={place / 'state'}", *settings)
        self.port, self.process = free_port(), None
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        words = [word for setting in self.settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "quatrain", "serve", "--train", "--port", str(self.port), *words]
        self.log = (self.place / "server.log").open("ab")
        self.process = subprocess.Popen(
            command, cwd=self.place, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.said, until = "", time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < until, self.output()
            time.sleep(0.3)
        self.base = self.get("get_server_capabilities")["supported_models"][0]["model_name"]
        return self

    def _answers(self):
        try:
            return self.get("healthz")["status"] == "ok"
        except OSError:
            return False

    def get(self, path):
        asked = urllib.request.Request(f"{self.url}/api/v1/{path}", headers={"X-API-Key": KEY})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)

    def output(self):
        """What the server has said: on stdout, then on stderr."""
        while select.select([self.process.stdout], [], [], 0)[0] and (line := self.process.stdout.readline()):
            self.said += line
        return f"{self.said}\n{(self.place / 'server.log').read_text()[-4000:]}"

    def memory_mb(self):
        """Resident memory of the server: (now, the most so far)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return tuple(int(re.search(rf"{key}:\s+(\d+) kB", status)[1]) // 1024 for key in ("VmRSS", "VmHWM"))

    def kill(self, sent=signal.SIGKILL):
        self.process.send_signal(sent)
        self.process.wait(60)
        self.process.stdout.close()
        self.log.close()

    def environment(self, place):
        """Of a program: no other key, no home folder with another, nothing from the network."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        return kept | {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": KEY,
            "TINKER_COOKBOOK_RUNS_DIR": str(place / "runs"),
            "MODEL": self.base,
            "HOME": str(place),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(place / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }


@contextmanager
def served(place, *settings, **options):
    """A `Server` while the block runs; says what it took at the end."""
    began = time.monotonic()
    server = Server(place, *settings, **options).start()
    ready = time.monotonic()
    try:
        yield server
        assert server.process.poll() is None, server.output()
        now, most = server.memory_mb()
        print(
            f"\n{place.name}: server ready after {ready - began:.1f} s, used for "
            f"{time.monotonic() - ready:.1f} s, resident {now} MB, at most {most} MB"
        )
    finally:
        if server.process.poll() is None:
            server.kill(signal.SIGTERM)


def start_program(server, words, place, environment=None, **options):
    """A child process of the client's environment; its output is in `place`/out.log as well."""
    place.mkdir(exist_ok=True, parents=True)
    with (place / "out.log").open("ab") as out:
        return subprocess.Popen(
            [CLIENT, "-X", "faulthandler", *map(str, words)],
            cwd=place,
            env=server.environment(place) | (environment or {}),
            stdout=out,
            stderr=subprocess.STDOUT,
            **options,
        )


def finished(process, place, timeout=1800):
    """What a program of `programs/` said on its last line, as JSON; it must have ended well."""
    try:
        code = process.wait(timeout)
    finally:
        if process.poll() is None:
            process.kill()
    output = (place / "out.log").read_text()
    assert code == 0, output[-6000:]
    last = output.rstrip().rpartition("\n")[2]
    return json.loads(last) if last.startswith(("{", "[")) else None


def run_program(server, name, place, *words, environment=None, timeout=1800):
    words = [PROGRAMS / f"{name}.py", *words]
    return finished(start_program(server, words, place, environment), place, timeout)


def run_recipe(server, name, place, *words, timeout=1800, **environment):
    """A recipe of the cookbook, its tokens recorded in `place`/tokens.jsonl: the metrics of its steps."""
    words = [PROGRAMS / "recorded.py", f"tinker_cookbook.recipes.{name}", f"log_path={place / 'log'}", *words]
    finished(start_program(server, words, place, environment), place, timeout)
    return metrics_of(place)


def metrics_of(place):
    lines = (place / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
