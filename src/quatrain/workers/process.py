"""Worker processes for users' code: how they are started, asked, heard, limited and ended.

Data flow: `pool.py` (functions) or `environments/environment_workers.py` -> `WorkerProcess.call` -> a pickle
to `worker.py` -> a line of JSON -> the future of the call. The two processes share a socket and a pipe, and
nothing with other workers, so that a worker can be killed at any moment; libraries for process pools are not
used, because their workers share a queue and its locks, which a worker that is killed may hold.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quatrain.config.secrets import redact
from quatrain.workers.entry import LOAD_TIMEOUT_S
from quatrain.workers.worker import SIZE_BYTES

PAUSE_S = 0.1
"""Seconds between two looks whether a process with calls has ended."""
PING_S = 0.5
"""Seconds without a reply after which a process with calls is asked whether it still answers."""
GRACE_S = 1.0
"""Seconds that a process gets to end after it has closed its socket."""
LONGEST_OUTPUT = 16384
"""Bytes of what was printed that are passed on at a time, in whole lines; the rest is counted."""
_READ_BYTES = 65536
_SCRIPT = Path(__file__).with_name("worker.py")

Kind = Literal["timeout", "crash", "memory", "exit", "error"]


@dataclass(frozen=True)
class Failure:
    """Why a call has no result.

    `timeout`: it took too long. `crash`: a signal ended its process. `exit`: it left with `sys.exit` or
    `os._exit`. `memory`: it exceeded the memory limit. `error`: it raised another exception.
    """

    kind: Kind
    detail: str


@dataclass(eq=False)
class _Call:
    future: Future[Any]
    what: str
    limit_s: float
    cpu_s: float
    late: str
    until: float
    """When the process is killed, in seconds of `time.monotonic`."""


class WorkerProcess:
    """A process of `worker.py` and its calls without a reply.

    The thread of `pool.Processes` starts it and attends to it; any thread may call and kill it.

    Args:
        what: what `ps` shows of it.
        settings: what `worker.py` reads first; `memory_mb` is MiB of private memory, or None.
        on_output: called with what the last call was of, and what was printed.
        on_news: called with lines that answer no call.
        answer_s: seconds in which it must answer at any time, also when its calls have no limit.
        lock: guards the fields, and is the pool's.
        wake: called when something is to be done (True), or waited for (False), in the pool's thread.
    """

    def __init__(
        self,
        what: str,
        settings: Mapping[str, Any],
        on_output: Callable[[str, str], None],
        on_news: Callable[[Mapping[str, Any]], None] = lambda news: None,
        answer_s: float | None = None,
        *,
        lock: threading.RLock,
        wake: Callable[[WorkerProcess, bool], None],
    ):
        self.failure: Failure | None = None
        """How it ended, or why it is being ended; None as long as it may be called."""
        self.is_over = False
        self._lock, self._wake, self._what, self._settings = lock, wake, what, settings
        self._on_output, self._on_news, self._answer_s = on_output, on_news, answer_s
        self._popen: subprocess.Popen[bytes] | None = None
        self._requests, self._received = bytearray(), b""
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._loaded: set[str] = set()
        self._no_more = self._is_closed = self._pinged = False
        self._kill_at = math.inf  # after it has closed its socket, or its last request was sent
        self._looked = self._heard = time.monotonic()
        self._printed_what, self._context = what, copy_context()
        self._output, self._omitted_bytes = b"", 0

    @property
    def is_idle(self) -> bool:
        """Whether it has no call."""
        return not self._calls

    def call(
        self,
        operation: str,
        *arguments: Any,
        future: Future[Any] | None = None,
        what: str = "",
        limit_s: float = math.inf,
        cpu_s: float = 0.0,
        late: str | None = None,
        loads: bool = False,
    ) -> Future[Any]:
        """Asks the process for something; `future` gets the reply or a `Failure`.

        Args:
            what: what the call is of, for `on_output`.
            limit_s: the seconds after which the process is killed; all its calls are failures then.
            cpu_s: the seconds of the processor after which `worker.py` has a signal end the process.
            late: the failure's text after a timeout.
            loads: the time begins when the process says that it has loaded `what`, which may take
                LOAD_TIMEOUT_S, unless it was loaded before.
        """
        future = future or running_future()
        with self._lock:
            failure = self.failure
            if failure is None:
                self._num_calls += 1
                until = time.monotonic() + (LOAD_TIMEOUT_S if loads and what not in self._loaded else limit_s)
                late = late or f"it took longer than {limit_s:g} s"
                self._calls[self._num_calls] = _Call(future, what, limit_s, cpu_s, late, until)
                self._context, self._printed_what = copy_context(), what or self._what
                self._requests += _message((self._num_calls, operation, *arguments))
                self._send()
                self._wake(self, self._popen is None or bool(self._requests))
        if failure is not None:
            future.set_result(Failure("crash", failure.detail))
        return future

    def let_end(self, within_s: float) -> None:
        """Sends nothing more, upon which the process ends; it is killed after `within_s` seconds."""
        with self._lock:
            if not self._no_more:
                self._no_more, self._kill_at = True, time.monotonic() + within_s
                self._wake(self, True)

    def kill(self, failure: Failure) -> None:
        """Kills the process; its calls get this failure, unless it has another."""
        with self._lock:
            self.failure = self.failure or failure
            self._kill_group()
            self._wake(self, True)

    def has_ended(self, *, or_stopped: bool = False) -> bool:
        """Whether the process has ended (or was stopped); its number stays taken until its status is read."""
        if self._popen is None:
            return self.is_over
        if self._popen.returncode is not None:
            return True
        events = os.WEXITED | (os.WSTOPPED if or_stopped else 0)
        with suppress(ChildProcessError):  # somebody else has read its status
            return os.waitid(os.P_PID, self._popen.pid, events | os.WNOHANG | os.WNOWAIT) is not None
        return True

    # The pool's thread alone calls what follows.

    def due(self) -> float:
        """When it must be attended to, if nothing comes from it before."""
        if self._popen is None or self.failure is not None:
            return 0.0
        if not self._calls and self._kill_at == math.inf:
            return math.inf
        pause_s = PAUSE_S / 10 if self._is_closed else PAUSE_S
        return min([self._looked + pause_s, *(call.until for call in self._calls.values())])

    def attend(self, selector: selectors.BaseSelector) -> None:
        """Starts the process, sends and reads what it can without waiting, and ends it if it must."""
        if self._popen is None and self.failure is None:
            try:
                self._start(selector)
            except OSError as error:  # the system has no more processes, for instance
                self.failure = not_started(error)
        if self._popen is None:
            self.is_over = True
            return self.settle_all()
        has_ended = self.has_ended()  # before reading, so that its last words are read
        try:
            self._receive(selector)
        except (ValueError, LookupError, TypeError, RecursionError):  # users' code wrote into the socket
            self.failure = self.failure or Failure("crash", "its process sent a reply that is none")
        self._looked = now = time.monotonic()
        with self._lock:
            self._send()
            late = next((call.late for call in self._calls.values() if call.until <= now), None)
        if late is not None:
            self.failure = self.failure or Failure("timeout", late)
        if has_ended or self.failure is not None or now > self._kill_at:
            return self._end(selector, has_ended)
        quiet = self._calls and not self._pinged and not self._no_more and now > self._heard + PING_S
        if self._answer_s is not None and quiet:
            self._pinged = True
            text = f"its process did not answer for {self._answer_s:g} s, and was ended"
            self.call("ping", limit_s=self._answer_s, late=text)
        if not self._is_closed:
            writes = selectors.EVENT_WRITE if self._requests else 0
            selector.modify(self._socket, selectors.EVENT_READ | writes, self)
        return None

    def _start(self, selector: selectors.BaseSelector) -> None:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as stack:
            stack.callback(ours.close)
            # -P: the script's folder is not added to the import path. -u: what is printed before a crash is
            # not lost. A session of its own: a keyboard interrupt does not reach it, and it ends with its
            # children.
            command = [sys.executable, "-P", "-u", "-X", "faulthandler", str(_SCRIPT), str(theirs.fileno())]
            popen = subprocess.Popen(
                [*command, self._what],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # A user's function that imports JAX must not take memory of the accelerator.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
            stack.pop_all()
        assert popen.stdout is not None
        self._socket, self._printed = ours, popen.stdout
        self._socket.setblocking(False)
        os.set_blocking(self._printed.fileno(), False)
        selector.register(self._socket, selectors.EVENT_READ, self)
        selector.register(self._printed, selectors.EVENT_READ, self)
        with self._lock:
            self._requests[:0] = _message({**self._settings, "parent": os.getpid(), "path": sys.path})
            self._popen = popen

    def _send(self) -> None:
        """Sends of the requests what the socket takes."""
        if self._popen is None or self.is_over:
            return
        try:
            while self._requests:
                del self._requests[: self._socket.send(self._requests)]
            if self._no_more:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:  # the process has ended, which is seen elsewhere
            self._requests.clear()

    def _receive(self, selector: selectors.BaseSelector) -> None:
        """Reads what was printed and sent, and settles the calls that are answered."""
        if not self._read_output():
            with suppress(KeyError):
                selector.unregister(self._printed)
        while not self._is_closed:
            try:
                part = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:  # it ends, or is killed
                self._is_closed, self._kill_at = True, time.monotonic() + GRACE_S
                selector.unregister(self._socket)
            *lines, self._received = (self._received + part).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, reply: Mapping[str, Any]) -> None:
        """Settles the call that a line answers."""
        self._heard, self._pinged = time.monotonic(), False
        number = reply["call"]
        if "died" in reply:  # the process goes on as another
            self._pass_output()
            return self.settle_all(self._how_ended(reply["died"]))
        if number is None:
            return self._on_news(reply)
        with self._lock:
            call = self._calls[number]
            if "loaded" in reply:
                self._loaded.add(call.what)
                call.until = self._heard + call.limit_s
                return None
            outcome = Failure(reply["kind"], reply["detail"]) if "kind" in reply else reply["value"]
            if isinstance(outcome, Failure) and outcome.kind != "error":
                self.failure = outcome  # what it left behind would harm the next call
            del self._calls[number]
        self._pass_output()
        call.future.set_result(outcome)
        return None

    def _end(self, selector: selectors.BaseSelector, has_ended: bool) -> None:
        """Kills the process and its children, frees what belongs to it, and settles its calls."""
        assert self._popen is not None, "it was started"
        self._kill_group()
        status = self._popen.wait()
        closed = Failure("crash", "its process closed its connection")
        with self._lock:
            self.failure = self.failure or (self._how_ended(status) if has_ended else closed)
            self.is_over = True
        self._pass_output()
        for file in (self._socket, self._printed):
            with suppress(KeyError):
                selector.unregister(file)
            file.close()
        self.settle_all()

    def settle_all(self, failure: Failure | None = None) -> None:
        """Gives all calls a failure, that of the process unless another is given."""
        with self._lock:
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.future.set_result(failure or self.failure)

    def _how_ended(self, status: int) -> Failure:
        """The failure of its calls if its process, or the one that serves, has this exit status."""
        if status >= 0:
            return Failure("exit", f"its process exited with status {status}")
        cpu_s = max((call.cpu_s for call in self._calls.values()), default=0.0)
        if status == -signal.SIGPROF and cpu_s:
            return Failure("timeout", f"it took more than {cpu_s:g} s of the processor")
        return Failure("crash", f"its process was ended by {_signal_name(-status)}")

    def _kill_group(self) -> None:
        """Kills the process and its children, unless its status was read before."""
        if self._popen is not None and self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def _read_output(self) -> bool:
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

    def _pass_output(self) -> None:
        """Passes on what was printed since this was last called."""
        self._read_output()
        if self._omitted_bytes:  # a part of a line may be part of a secret, which cannot be redacted
            lines = self._output[: self._output.rfind(b"\n") + 1]
            self._omitted_bytes += len(self._output) - len(lines)
            self._output = lines + f"({self._omitted_bytes} more bytes are left out)".encode()
        text = self._output.decode(errors="backslashreplace").rstrip()
        self._output, self._omitted_bytes = b"", 0
        if text:
            self._context.run(self._on_output, self._printed_what, text)


def running_future() -> Future[Any]:
    """A future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _message(content: Any) -> bytes:
    pickled = pickle.dumps(content)
    return len(pickled).to_bytes(SIZE_BYTES) + pickled


def not_started(error: Exception) -> Failure:
    """The failure of calls of a process that the system does not start."""
    return Failure("crash", f"its process could not be started: {error}")


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
