"""Runs inputs through `fuzz_targets.py`, and says what became of each.

Used by the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WALL_LIMIT_S = 60.0
"""Seconds after which an input that waits, without using the processor, counts as hung."""
LONGEST_MESSAGE = 4_000
"""Characters that an error message may have."""


@dataclass(frozen=True)
class Case:
    """An input: the content of each of its files, by name, and the target that reads them."""

    target: str
    files: dict[str, bytes]


@dataclass(frozen=True)
class Outcome:
    """What became of an input.

    `kind` is `read`, `refused`, `traceback`, `long message`, `killed` (by a limit) or `hung`.
    """

    kind: str
    detail: str = ""

    @property
    def good(self) -> bool:
        """Whether the input was read, or refused with one clear error."""
        return self.kind in ("read", "refused")


class Worker:
    """The process with limits; one input at a time. A process that ended is replaced for the next input."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, case: Case) -> Outcome:
        """What becomes of `case`."""
        with tempfile.TemporaryDirectory(prefix="quatrain-fuzz-") as folder:
            for name, content in case.files.items():
                (Path(folder) / name).write_bytes(content)
            return self._ask([case.target, folder])

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError), process:
                process.kill()

    def _ask(self, request: list[Any]) -> Outcome:
        if self._process is None:
            self._process = _start()
        process = self._process
        assert process.stdin is not None
        print(json.dumps(request), file=process.stdin, flush=True)
        reply = _line(process, WALL_LIMIT_S)
        if reply is None:
            self.close()
            return Outcome("hung", f"no reply in {WALL_LIMIT_S} s")
        if not reply:
            status = process.wait()
            self.close()
            late = status == -signal.SIGPROF
            return Outcome("killed", "time limit" if late else f"status {status}")
        error, printed, message = json.loads(reply)
        if error is None:
            return Outcome("read")
        if not printed:
            return Outcome("traceback", f"{error}: {message[:LONGEST_MESSAGE]}")
        if len(message) > LONGEST_MESSAGE:
            return Outcome("long message", f"{len(message)} characters: {message[:400]}")
        return Outcome("refused", message)


def _start() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fuzz_targets.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("FUZZ_STDERR") else subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        bufsize=1,
    )
    assert _line(process, 300.0) == "ready\n", "the process of the fuzz targets did not start"
    return process


def _line(process: subprocess.Popen[str], timeout_s: float) -> str | None:
    """A line of the process; empty if it has ended, None if it says nothing in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    return process.stdout.readline() if ready else None
