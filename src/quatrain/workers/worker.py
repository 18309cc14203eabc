"""A child process that calls users' functions by their specs; what a function does ends this process at most.

`pool.py` runs it as a script. It reads pickled requests from a socket and writes one line of JSON for
each. What functions print goes to its standard output and error, which the pool reads. It imports neither JAX
nor numpy.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
LONGEST_DETAIL = 4000
TRACE_BEFORE_S = 0.05
"""Seconds before the time limit at which the process prints where it is."""


def failure(error: BaseException) -> tuple[Literal["memory", "exit", "error"], str]:
    """The kind of a failure, and the end of its traceback."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)  # frees what they hold, which formatting needs
    detail = _last_lines("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, MemoryError):
        return "memory", detail
    return "exit" if isinstance(error, SystemExit) else "error", detail


def _last_lines(text: str) -> str:
    """At most LONGEST_DETAIL characters, without a part of a line: part of a secret cannot be redacted."""
    if len(text) <= LONGEST_DETAIL:
        return text
    return text[-LONGEST_DETAIL:].partition("\n")[2] or f"an error message of {len(text)} characters"


class _Functions:
    """The functions that were loaded, by their specs."""

    def __init__(self, what: str, convert: str | None, prepare: str | None, args: Mapping[str, Any]):
        from quatrain.workers.user_code import find_function

        self._find, self._args = (lambda spec: find_function(spec, {}, what)), args
        self._convert: Callable[[Any], Any] = self._find(convert) if convert else lambda value: value
        self._prepare: Callable[..., Any] = self._find(prepare) if prepare else lambda f, spec, args: f
        self._loaded: dict[str, Callable[..., Any]] = {}

    def load(self, spec: str) -> Any:
        """Imports the function `spec`: {"parameters": …}, or {"refused": …} if there is no such function."""
        from quatrain.workers.user_code import parameters_of

        try:
            self._loaded[spec] = self._prepare(self._find(spec), spec, self._args.get(spec, {}))
        except ValueError as error:
            return {"refused": str(error)}
        return {"parameters": parameters_of(self._loaded[spec])}

    def call(self, spec: str, pickled: bytes) -> Any:
        """What the function `spec` returns for these arguments, converted to values that JSON has."""
        return self._convert(self._loaded[spec](**pickle.loads(pickled)))


def main() -> None:
    """Answers requests until the socket is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    requests = connection.makefile("rb")
    settings = pickle.load(requests)
    sys.argv, sys.path = [""], settings["path"]
    from quatrain.workers.entry import enter

    enter(settings)
    functions = _Functions(*(settings[name] for name in ("what", "convert", "prepare", "args")))
    home, output = os.open(".", os.O_RDONLY), os.dup(STANDARD_OUTPUT)
    while True:
        _tidy(home, output)
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        connection.sendall(_answer(functions, request).encode() + b"\n")
        del request


def _answer(functions: _Functions, request: tuple[Any, ...]) -> str:
    """The reply to a request: JSON of {"value": …} or {"kind": …, "detail": …}."""
    process = os.getpid()
    operation, timeout_s, *arguments = request
    faulthandler.dump_traceback_later(max(timeout_s - TRACE_BEFORE_S, timeout_s / 2), file=STANDARD_ERROR)
    try:
        value = functions.load(*arguments) if operation == "load" else functions.call(*arguments)
        line = json.dumps({"value": value})
    except BaseException as error:
        kind, detail = failure(error)
        line = json.dumps({"kind": kind, "detail": detail})
    if os.getpid() != process:  # a function forked, and its child came back
        os._exit(0)
    faulthandler.cancel_dump_traceback_later()
    return line


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
