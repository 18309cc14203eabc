"""Worker processes for users' code: how they are started, heard, read and ended.

`pool.py` runs reward functions in them, `environments/environment_workers.py` environments. The process
that starts a worker has its `WorkerProcess`; the worker's script begins with `entry.enter`. The two
share a socket and a pipe, and nothing with other workers, so that a worker can be killed at any moment.
"""

from __future__ import annotations

import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from quatrain.config.secrets import redact

LOAD_TIMEOUT_S = 120.0
"""Time limit of importing the module of a user's function or class."""
PAUSE_S = 0.1
"""Seconds between two looks whether a process has ended."""
GRACE_S = 1.0
"""Seconds that a process gets to end after it has closed its socket."""
LONGEST_OUTPUT = 16384
"""Bytes of what was printed that are passed on at a time, in whole lines; the rest is counted."""
_READ_BYTES = 65536


class WorkerProcess:
    """The process of a worker's script, with its socket and the pipe of what it prints.

    Args:
        script: the worker's script, which reads pickles from the socket whose number is its argument, first
            `opening`, and writes lines.
        opening: what the script is told first; `path` (of imports) and `parent` are added for `enter`, which
            also reads `memory_bytes`.
    """

    def __init__(self, script: Path, opening: Mapping[str, Any]):
        self._socket, theirs = socket.socketpair()
        with theirs:
            # -P: the script's folder is not added to the import path. -u: what is printed before a crash is
            # not lost. A session of its own: a keyboard interrupt does not reach it, and it ends with its
            # children.
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-u", "-X", "faulthandler", str(script), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # A user's function that imports JAX must not take memory of the accelerator.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        assert self._popen.stdout is not None
        self._printed = self._popen.stdout
        os.set_blocking(self._printed.fileno(), False)
        self.received = b""
        """What was read of the socket beyond the last line."""
        self._output, self._omitted_bytes = b"", 0
        self._opening = pickle.dumps({**opening, "parent": os.getpid(), "path": sys.path})

    def send(self, message: bytes, timeout_s: float | None) -> None:
        """Sends bytes to the script; raises TimeoutError, and OSError if the process has ended."""
        message, self._opening = self._opening + message, b""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(message)

    def send_no_more(self) -> None:
        """Ends what the script reads."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def line(self, deadline: float) -> bytes:
        """The next line that the process sends; empty if it ends before. Raises TimeoutError at the deadline.

        `deadline` is a time of `time.monotonic()`. Reads what was printed meanwhile.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._printed, selectors.EVENT_READ)
            while b"\n" not in self.received:
                # Children of the process may keep the socket open, so its end is looked for.
                left, ended = deadline - time.monotonic(), self.ended()
                wait_s = 0 if ended else max(0, min(left, PAUSE_S))
                ready = {key.fileobj for key, _ in selector.select(wait_s)}
                if self._printed in ready and not self.read_output():
                    selector.unregister(self._printed)
                if self._socket in ready:
                    part = self._socket.recv(_READ_BYTES)
                    if not part:
                        return b""
                    self.received += part
                elif ended:
                    return b""
                if left <= 0 and b"\n" not in self.received:
                    raise TimeoutError
        line, _, self.received = self.received.partition(b"\n")
        return line + b"\n"

    def read_output(self) -> bool:
        """Reads what was printed, as far as it is there; False at its end."""
        with suppress(BlockingIOError):
            for _ in range(16):  # a process may print faster than it is read
                part = os.read(self._printed.fileno(), _READ_BYTES)
                if not part:
                    return False
                kept = part[: LONGEST_OUTPUT - len(self._output)]
                self._output += kept
                self._omitted_bytes += len(part) - len(kept)
        return True

    def taken_output(self) -> str:
        """What was printed since this was last called."""
        if self._omitted_bytes:  # a part of a line may be part of a secret, which cannot be redacted
            lines = self._output[: self._output.rfind(b"\n") + 1]
            self._omitted_bytes += len(self._output) - len(lines)
            self._output = lines + f"({self._omitted_bytes} more bytes are left out)".encode()
        text = self._output.decode(errors="backslashreplace").rstrip()
        self._output, self._omitted_bytes = b"", 0
        return text

    def death(self) -> tuple[Literal["crash", "exit"], str]:
        """How the process ended, which closed its socket; its children are killed.

        "exit" for an exit status, "crash" for a signal, with words for a message.
        """
        deadline = time.monotonic() + GRACE_S
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(PAUSE_S / 10)
        alive = not self.ended()
        self.kill()
        status = self._popen.wait()
        if alive:
            return "crash", "its process closed its connection"
        if status >= 0:
            return "exit", f"its process exited with status {status}"
        return "crash", f"its process was ended by {_signal_name(-status)}"

    def ended(self, *, or_stopped: bool = False) -> bool:
        """Whether the process has ended (or was stopped); its number stays taken until its status is read."""
        if self._popen.returncode is not None:
            return True
        events = os.WEXITED | (os.WSTOPPED if or_stopped else 0)
        with suppress(ChildProcessError):  # somebody else has read its status
            return os.waitid(os.P_PID, self._popen.pid, events | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def kill(self) -> None:
        """Kills the process and its children, unless its status was read before."""
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills the process and its children, and frees what belongs to it."""
        self.kill()
        self._popen.wait()
        self.read_output()
        self._printed.close()
        self._socket.close()


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return f"signal {signal.Signals(number).name}"
    return f"signal {number}"


def pickled(columns: Mapping[str, Any], reader: str) -> bytes:
    """The pickle of data columns, for `reader`; raises ValueError for a value that cannot be copied."""
    try:
        return pickle.dumps(columns)
    except Exception as error:
        raise ValueError(
            f"the columns of the data must hold values that can be copied for {reader} (numbers, "
            f"strings, lists, mappings); they do not: {type(error).__name__}: {error}; change the data"
        ) from error


def log_output(logger: logging.Logger, what: str, text: str) -> None:
    """Writes what `what` printed to the run's log; to standard error if nothing logs that much."""
    message = f"{what} printed: {text}"
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", message, extra={"only_in_file": True})
    else:
        print(redact(message, os.environ), file=sys.stderr)
