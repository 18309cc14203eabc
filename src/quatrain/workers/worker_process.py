"""Worker processes for users' code: how they are started, asked, heard, limited and ended.

Data flow: `pool.py` -> `WorkerProcess.call` -> a pickle to `worker_script.py` -> a line of JSON -> the future
of the call. The two processes share a socket and a pipe, and nothing with other workers, so that a worker can
be killed at any moment; libraries for process pools are not used, because their workers share a queue and its
locks, which a worker that is killed may hold.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quatrain.config.secrets import redact
from quatrain.workers.descendants import end_descendants, is_stopped
from quatrain.workers.faults import Fault
from quatrain.workers.loop_thread import running_future
from quatrain.workers.worker_script import LOAD_TIMEOUT_S, SIZE_BYTES

PAUSE_S = 0.1
"""Seconds between two looks whether a process with calls has ended."""
PING_S = 0.5
"""Seconds without a reply after which a process with calls is asked whether it still answers."""
GRACE_S = 1.0
"""Seconds that a process gets to end after it has closed its socket."""
LONGEST_OUTPUT = 16384
"""Bytes of what was printed that are passed on at a time, in whole lines; the rest is counted."""
_READ_BYTES = 65536
_SCRIPT = Path(__file__).with_name("worker_script.py")
_PACKAGE = Path(__file__).parents[1]

Kind = Literal["timeout", "crash", "memory", "exit", "refused", "error"]


@dataclass(frozen=True)
class Failure:
    """Why a call has no result.

    `timeout`: it took too long. `crash`: a signal ended its process. `exit`: it left with `sys.exit` or
    `os._exit`. `memory`: it exceeded the memory limit. `refused`: its process cannot load what it needs.
    `error`: it raised another exception. The process goes on after an `error` alone.
    """

    kind: Kind
    detail: str


NO_REPLY = Failure("crash", "its process sent a reply that is none")
"""Of a process in which users' code wrote into the socket: nothing that comes from it can be believed."""


def not_started(error: Exception) -> Failure:
    """The failure of calls of a process that the system does not start."""
    return Failure("crash", f"its process could not be started: {error}")


@dataclass(eq=False)
class _OpenCall:
    future: Future[Any]
    what: str
    limit_s: float
    cpu_s: float
    late: Failure
    limit: asyncio.TimerHandle


class WorkerProcess:
    """A process of `worker_script.py` and its calls without a reply.

    It is made and used in the thread of `loop` alone, which must live as long as the process: one may end
    with the thread that started it. With it ends what it has started (`descendants.py`).

    Args:
        what: what `ps` shows of it.
        settings: what `worker_script.py` reads first; `memory_mb` is MiB of private memory, or None;
            `python` the interpreter, if it is another than this one.
        on_output: called with what the last call was of, and what was printed.
        answer_s: seconds in which it must answer at any time, also when its calls have no limit.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        what: str,
        settings: Mapping[str, Any],
        on_output: Callable[[str, str], None],
        answer_s: float | None = None,
    ):
        self.failure: Failure | None = None
        """How it ended; None as long as it may be called."""
        self.is_retired = False
        """Whether it gets nothing new: it ends after what it has."""
        self._loop, self._what, self._on_output = loop, what, on_output
        self._answer_s = answer_s
        self._requests, self._received = bytearray(), b""
        self._calls: dict[int, _OpenCall] = {}
        self._num_calls = 0
        self._loaded: set[str] = set()
        self._worker: int | None = None
        """The process below its guard (`descendants.py`), when it has said so."""
        self._no_more = self._is_closed = False
        self._pinged = True  # not asked before its first reply: to load has a limit of its own
        self._heard = time.monotonic()
        self._next_look: asyncio.TimerHandle | None = None
        self._printed_what, self._context = what, copy_context()
        self._output, self._omitted_bytes = b"", 0
        try:
            self._start(settings)
        except (OSError, RuntimeError) as error:  # the system has no more processes, for instance
            self.failure = not_started(error)

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
        """Asks the process for something; `future` gets the reply, a `Fault` or a `Failure`, as its result.

        Args:
            what: what the call is of, for `on_output`.
            limit_s: the seconds after which the process is killed; all its calls are failures then.
            cpu_s: the seconds of the processor after which `worker_script.py` has a signal end the process.
            late: the failure's text after a timeout.
            loads: the time begins when the process says that it has loaded `what`, which may take
                LOAD_TIMEOUT_S, unless it was loaded before.
        """
        future = future or running_future()
        if self.failure is not None:
            # A crash whatever ended it: this call has neither taken long nor used memory.
            future.set_result(Failure("crash", self.failure.detail))
            return future
        self._num_calls += 1
        timeout = Failure("timeout", late or f"it took longer than {limit_s:g} s")
        # An import may take minutes where a call takes milliseconds: one limit for both would be none.
        if loads and what not in self._loaded:
            loading = Failure("timeout", f"it took longer than {LOAD_TIMEOUT_S:g} s to load")
            limit = self._loop.call_later(LOAD_TIMEOUT_S, self.kill, loading)
        else:
            limit = self._loop.call_later(limit_s, self.kill, timeout)
        self._calls[self._num_calls] = _OpenCall(future, what, limit_s, cpu_s, timeout, limit)
        self._context, self._printed_what = copy_context(), what or self._what
        self._send((self._num_calls, operation, *arguments))
        if self._next_look is None:
            self._next_look = self._loop.call_later(PAUSE_S, self._look)
        return future

    def hear(self, news: Mapping[str, Any]) -> None:
        """Called with a line that answers no call."""

    def let_end(self, within_s: float) -> None:
        """Sends nothing more, upon which the process ends; it is killed after `within_s` seconds."""
        if not self._no_more and self.failure is None:
            self._no_more = True
            self._write()
            self._loop.call_later(within_s, self.kill)

    def kill(self, failure: Failure | None = None) -> None:
        """Ends the process and what it has started; its calls get this failure, or how it ended by itself."""
        if self.failure is not None:
            return
        # Before the guard, which keeps them together: once it is gone, what it had adopted belongs to init,
        # and nothing leads to it any more.
        end_descendants(self._popen.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)  # a number that is taken until its status is read
        status = self._popen.wait()
        self.failure = failure or self._how_ended(status)
        try:
            self._pass_output()
        finally:
            self._loop.remove_writer(self._socket)
            for file in (self._socket, self._printed):
                self._loop.remove_reader(file)
                file.close()
            self._settle(self.failure, *self._calls)

    def has_ended(self, *, or_stopped: bool = False) -> bool:
        """Whether the process has ended (or was stopped), without reading its status."""
        if self.failure is not None:
            return True
        if or_stopped and self._worker is not None and is_stopped(self._worker):
            return True
        events = os.WEXITED | (os.WSTOPPED if or_stopped else 0)
        with suppress(ChildProcessError):  # somebody else has read its status
            # Unread (WNOWAIT), because its number is taken as long as nobody has read the status: `kill`
            # could else end a process of others that has got the same number.
            return os.waitid(os.P_PID, self._popen.pid, events | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def _start(self, settings: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as stack:
            stack.callback(ours.close)
            # -P: the script's folder is not added to the import path. -u: what is printed before a crash is
            # not lost. A session of its own: a keyboard interrupt does not reach it, and where it has no
            # guard it ends with its process group.
            python = settings.get("python") or sys.executable
            command = [python, "-P", "-u", "-X", "faulthandler", str(_SCRIPT), str(theirs.fileno())]
            self._popen = subprocess.Popen(
                [*command, self._what],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # A user's function that imports JAX must not take memory of the accelerator. Sets of texts
                # have the same order in all processes, so that what is drawn from them can be drawn again.
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"},
            )
            stack.pop_all()
        assert self._popen.stdout is not None
        self._socket, self._printed = ours, self._popen.stdout
        self._socket.setblocking(False)
        os.set_blocking(self._printed.fileno(), False)
        self._loop.add_reader(self._socket, self._receive)
        self._loop.add_reader(self._printed, self._read_output)
        # Another interpreter has packages of its own, and of ours this one alone.
        path = {"package": str(_PACKAGE)} if settings.get("python") else {"path": sys.path}
        self._send({**settings, "parent": os.getpid(), **path})

    def _send(self, message: Any) -> None:
        pickled = pickle.dumps(message)
        self._requests += len(pickled).to_bytes(SIZE_BYTES) + pickled
        self._write()

    def _write(self) -> None:
        """Sends of the requests what the socket takes, and the rest when it takes more.

        It never waits: a process that does not read would hold up all others of this loop, and their limits.
        """
        try:
            while self._requests:
                del self._requests[: self._socket.send(self._requests)]
            if self._no_more:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return self._loop.add_writer(self._socket, self._write)
        except OSError:  # the process has ended, which is seen elsewhere
            self._requests.clear()
        self._loop.remove_writer(self._socket)
        return None

    def _receive(self) -> None:
        """Reads what was sent, and settles the calls that are answered."""
        while not (self._is_closed or self.failure):
            try:
                part = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                part = b""
            if not part:  # it ends, or is killed
                self._is_closed = True
                self._loop.remove_reader(self._socket)
                self._loop.call_later(
                    GRACE_S, self.kill, Failure("crash", "its process closed its connection")
                )
                self._look()
                return
            *lines, self._received = (self._received + part).split(b"\n")
            try:
                for line in lines:
                    self._take(json.loads(line))
            except (ValueError, LookupError, TypeError, RecursionError):  # users' code wrote into the socket
                # From here on replies could be taken for those of other calls.
                self.kill(NO_REPLY)
        return None

    def _take(self, reply: Mapping[str, Any]) -> None:
        """Settles the call that a line answers."""
        number = reply["call"]
        if "process" in reply:  # its first words, before it loads
            self._worker = int(reply["process"])
            return None
        self._heard, self._pinged = time.monotonic(), False
        if "died" in reply:  # the process goes on as another
            return self._settle(self._how_ended(reply["died"]), *self._calls)
        if number is None:
            return self.hear(reply)
        call = self._calls[number]
        if "loaded" in reply:
            self._loaded.add(call.what)
            call.limit.cancel()
            call.limit = self._loop.call_later(call.limit_s, self.kill, call.late)
            return None
        outcome = reply.get("value")
        if "fault" in reply:
            text, kind, detail = reply["fault"]
            outcome = Fault(text, kind, detail)
        elif "kind" in reply:
            outcome = Failure(reply["kind"], reply["detail"])
            if outcome.kind != "error":
                return self.kill(outcome)  # what it left behind would harm the next call
        return self._settle(outcome, number)

    def _settle(self, outcome: Any, *numbers: int) -> None:
        calls = [self._calls.pop(number) for number in numbers]
        try:
            self._pass_output()  # before the future: whoever waits for it may end the log
        finally:  # also if the log cannot be written
            for call in calls:
                call.limit.cancel()
                call.future.set_result(outcome)

    def _look(self) -> None:
        """Looks, as long as it has calls or is to end, whether it has ended and whether it answers."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        # Its end is looked for, and not told by the socket alone: what it has forked may hold the other end
        # open after it.
        if self.has_ended():
            self._receive()  # its last words
            return self.kill()
        # A ping rather than a limit for each call: a call may wait for a server as long as it likes, but the
        # thread that reads requests answers at once, unless the interpreter as a whole hangs.
        silent_s = time.monotonic() - self._heard
        if self._answer_s and silent_s > PING_S and self._calls and not (self._pinged or self._no_more):
            self._pinged = True
            late = f"its process did not answer for {self._answer_s:g} s, and was ended"
            self.call("ping", limit_s=self._answer_s, late=late)
        if self._calls or self._is_closed:
            pause_s = PAUSE_S / 10 if self._is_closed else PAUSE_S
            self._next_look = self._loop.call_later(pause_s, self._look)
        return None

    def _how_ended(self, status: int) -> Failure:
        """The failure of its calls if its process, or the one that serves, has this exit status."""
        if status >= 0:
            return Failure("exit", f"its process exited with status {status}")
        # SIGPROF is what the call itself asked for only if it had a limit: users' profilers send it too.
        cpu_s = max((call.cpu_s for call in self._calls.values()), default=0.0)
        if status == -signal.SIGPROF and cpu_s:
            return Failure("timeout", f"it took more than {cpu_s:g} s of the processor")
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"{-status}"
        return Failure("crash", f"its process was ended by signal {name}")

    def _read_output(self) -> None:
        """Reads what was printed, as far as it is there."""
        with suppress(BlockingIOError):
            for _ in range(16):  # a process may print faster than it is read
                part = os.read(self._printed.fileno(), _READ_BYTES)
                if not part:
                    self._loop.remove_reader(self._printed)
                    return
                kept = part[: LONGEST_OUTPUT - len(self._output)]
                self._output += kept
                self._omitted_bytes += len(part) - len(kept)

    def _pass_output(self) -> None:
        """Passes on what was printed since this was last called."""
        if not self._printed.closed:
            self._read_output()
        if self._omitted_bytes:  # a part of a line may be part of a secret, which cannot be redacted
            lines = self._output[: self._output.rfind(b"\n") + 1]
            self._omitted_bytes += len(self._output) - len(lines)
            self._output = lines + f"({self._omitted_bytes} more bytes are left out)".encode()
        text = self._output.decode(errors="backslashreplace").rstrip()
        self._output, self._omitted_bytes = b"", 0
        if text:
            self._context.run(self._on_output, self._printed_what, text)


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
