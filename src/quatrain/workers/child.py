"""A child process for work that must not take this process's time or memory: it limits itself.

`reward/math/grader.py` compares expressions in one, `data/tokenizer.py` renders chat templates in another.
The child runs a script, which reads a JSON value from each line of its standard input and writes a JSON value
in reply. The script sets its own limits; when it exceeds one, the child ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class ChildError(Exception):
    """The child gave no reply: it exceeded its time (`late`), ended otherwise, or could not be started."""

    def __init__(self, message: str, *, late: bool = False):
        super().__init__(message)
        self.late = late


class Child:
    """The child process of one script; started on first use, and again after it has ended.

    It answers one request at a time, of any thread.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def ask(self, request: Any) -> Any:
        """The child's reply to `request`; both are JSON values. Raises ChildError if there is none."""
        with self._lock:
            try:
                if self._process is None:
                    self._process = self._start()
                reply = _exchange(self._process, json.dumps(request))
                if reply:
                    return json.loads(reply)
            except (OSError, ValueError) as error:  # the process did not start, or its reply is incomplete
                self.close()
                raise ChildError(str(error)) from error
            except BaseException:  # an unread reply must not be taken for the reply to the next request
                self.close()
                raise
            status = self.close()
            raise ChildError(f"its process ended with exit status {status}", late=status == -signal.SIGPROF)

    def close(self) -> int:
        """Ends the process, if there is one, and returns its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        # Closing the pipes makes the child end. If it has ended by itself, closing raises BrokenPipeError.
        with contextlib.suppress(BrokenPipeError), process:
            pass
        return process.returncode

    def _start(self) -> subprocess.Popen[str]:
        # -P: the script's folder is not added to the import path.
        command = [sys.executable, "-P", str(self._script)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )


def _exchange(process: subprocess.Popen[str], line: str) -> str:
    """The child's reply to one line; empty if the child has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(line, file=process.stdin, flush=True)
    except BrokenPipeError:
        return ""
    return process.stdout.readline()
