"""A worker process that runs environments in threads; what an environment does ends this process at most.

`environment_workers.py` runs it as a script. It reads pickled requests (operation, episode, argument)
from a socket, and writes lines of JSON: {"episode": …} with a `value` or a `fault`, and {"hangs": …} when a
call takes too long. When no more requests can come, it closes the environments that are being closed, and
ends.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from quatrain.environments.environment_threads import InThreads
    from quatrain.environments.load_environment import Environments


def main() -> None:
    """Answers requests until the socket is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    requests = connection.makefile("rb")
    opening = pickle.load(requests)
    sys.argv, sys.path = [""], opening["path"]
    from quatrain.workers.entry import enter

    enter(opening)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    _serve(_Replies(connection), requests, opening)
    os._exit(0)  # whatever hangs in a thread


class _Replies:
    """Writes lines to the socket, from any thread."""

    def __init__(self, connection: socket.socket):
        self._connection, self._lock, self._process = connection, threading.Lock(), os.getpid()

    def send(self, reply: Mapping[str, Any]) -> None:
        line = json.dumps(reply, default=_plain).encode() + b"\n"
        if os.getpid() != self._process:  # an environment forked, and its child came back
            os._exit(0)
        with self._lock:
            self._connection.sendall(line)

    def settle(self, episode: int, future: Future[Any]) -> None:
        """Sends the result or the fault of a call."""
        from quatrain.environments.environment import told

        fault = future.exception()
        if fault is not None:
            self.send({"episode": episode, "fault": fault.args})
            return
        try:
            self.send({"episode": episode, "value": future.result()})
        except (TypeError, ValueError, RecursionError) as error:
            text = f"an environment in a worker must return what JSON can have: {told(error)}; correct it"
            self.send({"episode": episode, "fault": (text, "invalid", "")})


def _serve(replies: _Replies, requests: BinaryIO, opening: Mapping[str, Any]) -> None:
    from quatrain.environments.environment import told
    from quatrain.environments.environment_threads import InThreads

    try:
        environments = _load(opening["specs"])
    except BaseException as error:  # includes SystemExit of a function that makes environments
        text = str(error) if isinstance(error, ValueError) else told(error)
        replies.send({"refused": text})
        return
    calls = InThreads(environments, opening["timeout_s"], partial(replies.send, {"hangs": True}))
    replies.send({"ready": True})
    while True:
        try:
            operation, episode, argument = pickle.load(requests)
        except EOFError:
            break
        _do(calls, replies, operation, episode, argument)
    calls.drain()


def _load(specs: str | list[str]) -> Environments:
    from quatrain.environments.load_environment import load_environment, load_tools

    return load_environment(specs) if isinstance(specs, str) else load_tools(specs)


def _do(calls: InThreads, replies: _Replies, operation: str, episode: int, argument: Any) -> None:
    """Begins what is asked for."""
    from quatrain.environments.environment import EnvironmentFault, faultless

    future: Future[Any]
    match operation:
        case "ping":
            return replies.send({"ready": True})
        case "abandon":
            return calls.abandon(episode)
        case "begin":
            try:
                columns = faultless("copying the columns", partial(pickle.loads, argument))
            except EnvironmentFault as fault:
                return replies.send({"episode": episode, "fault": fault.args})
            future = calls.begin(episode, columns)
        case "step":
            future = calls.step(episode, argument)
        case "end":
            future = calls.end(episode)
    future.add_done_callback(partial(replies.settle, episode))
    return None


def _plain(value: Any) -> Any:
    """For values that JSON does not have: a mapping as an object, a turn as a list."""
    return dict(value) if isinstance(value, Mapping) else [value.messages, value.reward, value.done]


if __name__ == "__main__":
    main()
