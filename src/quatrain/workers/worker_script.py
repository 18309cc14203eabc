"""A process that runs users' code; what the code does ends this process at most.

`worker_process.py` runs this file as a script. It reads pickles from a socket, each after its length: the
settings, then requests (number, operation, arguments). It writes lines of JSON, which name the request that
they answer. What the code prints goes to its standard output and error, which `worker_process.py` reads. It
imports neither JAX nor numpy.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
LONGEST_DETAIL = 4000
SIZE_BYTES = 8
"""Bytes in which a request says how long it is."""
LOAD_TIMEOUT_S = 120.0
"""Time limit of importing the module of a user's function or class."""
TRACE_BEFORE_S = 0.05
"""Seconds before the time limit at which the process prints where it is."""


class Connection:
    """The requests that come, and the replies to them; any thread may reply."""

    def __init__(self, number: int):
        self._socket = socket.socket(fileno=number)
        self._lock = threading.Lock()
        self.number, self.process = number, os.getpid()

    def request(self) -> tuple[Any, ...]:
        """The next request; raises EOFError if no more will come."""
        request: tuple[Any, ...] = pickle.loads(self._read(int.from_bytes(self._read(SIZE_BYTES))))
        return request

    def _read(self, num_bytes: int) -> bytes:
        """So many bytes, and none beyond them, which a fork of this process would read again."""
        parts = []
        while num_bytes:
            part = self._socket.recv(num_bytes, socket.MSG_WAITALL)  # a signal may end it early
            if not part:
                raise EOFError
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def reply(self, number: int | None, **reply: Any) -> None:
        """Answers the request `number`; raises TypeError or ValueError for what JSON does not have."""
        # JSON, because who reads it is the run: a pickle could run there what a model wrote here.
        line = json.dumps({"call": number, **reply}).encode() + b"\n"
        self.end_if_forked()
        with self._lock:
            self._socket.sendall(line)

    def requests(self) -> Iterator[tuple[Any, ...]]:
        """(reply, operation, *arguments) of each request, until no more can come; pings are answered here."""
        with contextlib.suppress(EOFError):
            while True:
                number, operation, *arguments = self.request()
                if operation == "ping":  # whether this process can run at all
                    self.reply(number, value={})
                else:
                    yield partial(self.reply, number), operation, *arguments

    def end_if_forked(self) -> None:
        """Ends a process that a user's code forked, and that has come back."""
        if os.getpid() != self.process:
            os._exit(0)


def failure(error: BaseException) -> tuple[Literal["memory", "exit", "error"], str]:
    """The kind of a failure, and the end of its traceback."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # frees what they hold, which formatting needs
    detail = "".join(traceback.format_exception(error)).rstrip()
    if len(detail) > LONGEST_DETAIL:  # without a part of a line: part of a secret cannot be redacted
        last_lines = detail[-LONGEST_DETAIL:].partition("\n")[2]
        detail = last_lines or f"an error message of {len(detail)} characters"
    if isinstance(error, MemoryError):
        return "memory", detail
    return "exit" if isinstance(error, SystemExit) else "error", detail


def main() -> None:
    """Answers requests until no more can come."""
    connection = Connection(int(sys.argv[1]))
    settings: Mapping[str, Any] = connection.request()  # type: ignore[assignment]
    sys.argv, sys.path = [""], settings.get("path") or [*sys.path, ""]
    if "package" in settings:
        _import_from(Path(settings["package"]))
    parent = settings["parent"]
    # Users' code may start programs. The one function that is forked for is the library's, and starts none.
    if settings.get("fork") is None:
        from quatrain.workers.descendants import guarded

        parent = guarded(parent, connection.number)
        connection.process = os.getpid()
        connection.reply(None, process=connection.process)
    _enter({**settings, "parent": parent})  # after the fork of the guard: limits are not the guard's
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    (_serve_host if "host" in settings else _serve_functions)(connection, settings)
    os._exit(0)  # whatever hangs in a thread


def _import_from(folder: Path) -> None:
    """Imports the package in `folder`, without what stands beside it."""
    place = [str(folder)]
    spec = spec_from_file_location(folder.name, folder / "__init__.py", submodule_search_locations=place)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[folder.name] = module_from_spec(spec)
    spec.loader.exec_module(module)


def _enter(settings: Mapping[str, Any]) -> None:
    """Makes this process a worker of its `parent`: it ends with it, and not by what stops a run.

    Signals that stop a run may come to all its processes; the run ends its workers when it ends. They are
    ignored by a handler, not SIG_IGN, which the programs that a function starts would inherit.
    """
    from quatrain.cluster.launcher import end_with_parent

    end_with_parent(settings["parent"])
    stops = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in stops}
    os.register_at_fork(after_in_child=lambda: [signal.signal(*each) for each in before.items()])
    with contextlib.suppress(OSError):  # the kernel ends it first if memory is scarce; Linux has this file
        Path("/proc/self/oom_score_adj").write_text("1000")
    if settings["memory_mb"] is not None:  # RLIMIT_AS would also count what libraries only reserve
        limit, hard = settings["memory_mb"] << 20, resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Functions:
    """The functions that were loaded, by their specs."""

    def __init__(self, connection: Connection, settings: Mapping[str, Any]):
        from quatrain.workers.user_code import find_function

        self._connection, self._args = connection, settings["args"]
        self._find = lambda spec: find_function(spec, {}, settings["what"])
        convert, prepare = settings["convert"], settings["prepare"]
        self._convert: Callable[[Any], Any] = self._find(convert) if convert else lambda value: value
        self._prepare: Callable[..., Any] = self._find(prepare) if prepare else lambda f, spec, args: f
        self._loaded: dict[str, Callable[..., Any]] = {}
        self._told: set[str] = set()

    def load(self, number: int, spec: str) -> None:
        """Imports the function `spec`: {"parameters": …}, or {"refused": …} if there is no such function."""
        from quatrain.workers.user_code import parameters_of

        try:
            self.find(spec)
        except ValueError as error:
            return self._connection.reply(number, value={"refused": str(error)})
        return self._connection.reply(number, value={"parameters": parameters_of(self._loaded[spec])})

    def find(self, spec: str) -> None:
        """Imports the function `spec`, unless it was; raises ValueError if there is no such function."""
        if spec not in self._loaded:
            faulthandler.dump_traceback_later(LOAD_TIMEOUT_S - TRACE_BEFORE_S, file=STANDARD_ERROR)
            self._loaded[spec] = self._prepare(self._find(spec), spec, self._args.get(spec, {}))
            faulthandler.cancel_dump_traceback_later()  # a fork would wait for its thread

    def call(self, number: int, timeout_s: float, cpu_s: float, spec: str, pickled: bytes) -> None:
        """Replies what the function `spec` returns for these arguments, converted to values that JSON has.

        After `cpu_s` seconds of the processor a signal ends this process, even in C code; 0: it does not.
        """
        if spec not in self._told:
            try:
                self.find(spec)
            except ValueError as error:  # it was there when it was loaded first
                return self._connection.reply(number, kind="error", detail=str(error))
            self._connection.reply(number, loaded=True)  # its time begins
            self._told.add(spec)  # told apart from loaded: `load` has imported it without saying so
        # A signal ends C code too, which a thread that prints where it is does not; and it counts this
        # process's own time, so that a busy machine makes no verdict a timeout.
        if cpu_s:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
        else:
            trace_s = max(timeout_s - TRACE_BEFORE_S, timeout_s / 2)
            faulthandler.dump_traceback_later(trace_s, file=STANDARD_ERROR)
        value = self._convert(self._loaded[spec](**pickle.loads(pickled)))
        return self._connection.reply(number, value=value)


def _serve_functions(connection: Connection, settings: Mapping[str, Any]) -> None:
    """Calls functions, one after the other."""
    functions = _Functions(connection, settings)
    if settings["fork"] is not None:
        functions.find(settings["fork"])
        _fork_while_killed(connection, settings)
    home, output = os.open(".", os.O_RDONLY), os.dup(STANDARD_OUTPUT)
    while True:
        _tidy(home, output)
        try:
            number, operation, *arguments = connection.request()
        except EOFError:
            return
        try:
            (functions.load if operation == "load" else functions.call)(number, *arguments)
        except BaseException as error:  # sys.exit of a function must be told, and end nothing here
            kind, detail = failure(error)
            connection.reply(number, kind=kind, detail=detail)
        connection.end_if_forked()  # else a fork would go on to read the requests of this process
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        del arguments


def _serve_host(connection: Connection, settings: Mapping[str, Any]) -> None:
    """Has `settings["host"]` load users' code, and what that returns serve it until no more can come.

    The first request is to load it, which has a time limit of its own.
    """
    from quatrain.workers.faults import format_error
    from quatrain.workers.user_code import find_function

    number, _ = connection.request()
    try:
        serve = find_function(settings["host"], {}, "host")(settings)
    except BaseException as error:  # of the user's module
        text = str(error) if isinstance(error, ValueError) else format_error(error)
        return connection.reply(number, kind="refused", detail=text)
    connection.reply(number, value={})
    return serve(connection)  # what it starts in threads may hang: the process leaves by os._exit


def _fork_while_killed(connection: Connection, settings: Mapping[str, Any]) -> None:
    """Returns in a process that was forked from this one; if a signal ends that, in another."""
    server = os.getpid()
    while process := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status >= 0:
            os._exit(status)
        connection.reply(None, died=status)
    connection.process = os.getpid()
    _enter({**settings, "parent": server})


def _tidy(home: int, output: int) -> None:
    """Takes back what a call may have left for the next: a timer, another folder, closed or other streams."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.fchdir(home)
    for name, number in (("stdout", STANDARD_OUTPUT), ("stderr", STANDARD_ERROR)):
        os.dup2(output, number)
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, stream)


if __name__ == "__main__":
    main()
