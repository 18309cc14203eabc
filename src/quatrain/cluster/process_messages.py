"""The messages between the processes of a run while they meet, work and part (`rendezvous.py`).

A message is a JSON object behind its length:

    process 0 -> process: challenge
    process -> process 0: process_id, num_processes, timeout_s, challenge; proof
    process 0 -> process: go when all have connected, else late or wrong; proof
    then, both ways:      stop, passed, last (`stop.Agreement`); failed and process; done

The proof is an HMAC of the challenge and the message under the token of the run. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

LONGEST_TIMEOUT_S = 1e9
"""The longest timeout that a process may name: about 30 years."""
LONGEST_MESSAGE_BYTES = 2**16
HEADER_BYTES = 4

FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("challenge", "late", "wrong", "failed"), lambda value: isinstance(value, str)),
    **dict.fromkeys(
        ("process_id", "num_processes", "process", "passed", "last"),
        lambda value: type(value) is int and 0 <= value < 2**63,
    ),
    **dict.fromkeys(("go", "done"), lambda value: value is True),
    "timeout_s": lambda value: type(value) in (int, float) and 0 < value <= LONGEST_TIMEOUT_S,
    "stop": lambda value: type(value) is int and value in set(signal.Signals),
}
"""What each field of a message must be."""
HELLO = {"process_id", "num_processes", "timeout_s", "challenge"}
ANSWERS = {"go"}, {"late"}, {"wrong"}
MESSAGES = {"stop"}, {"passed"}, {"last"}, {"failed", "process"}, {"done"}


def has_form(message: Mapping[str, Any] | None, *forms: set[str]) -> TypeGuard[Mapping[str, Any]]:
    """Whether `message` has exactly the fields of one of `forms`, and each is what it must be."""
    return (
        message is not None
        and message.keys() in forms
        and all(FIELDS[name](value) for name, value in message.items())
    )


def proof(token: str, role: str, challenge: str, message: Mapping[str, Any]) -> str:
    """Shows to whoever knows `token` and sent `challenge` that `message` comes from one who knows it."""
    return hmac.new(os.fsencode(token), json.dumps([role, challenge, message]).encode(), "sha256").hexdigest()


def proven(
    received: Mapping[str, Any] | None, token: str, role: str, challenge: str, *forms: set[str]
) -> dict[str, Any] | None:
    """The message `received` without its proof; None if it has none of `forms`, or another proof."""
    message = dict(received or {})
    shown = message.pop("proof", None)
    if not has_form(message, *forms) or not isinstance(shown, str):
        return None
    # The role is part of it: a proof of a process, sent back to it, is none of process 0.
    expected = proof(token, role, challenge, message)
    return message if hmac.compare_digest(ascii(shown), ascii(expected)) else None


def send(message: Mapping[str, Any], *connections: socket.socket) -> None:
    """Sends one message; a broken connection is ignored here, because the reading thread reports it."""
    content = json.dumps(message).encode()
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(len(content).to_bytes(HEADER_BYTES) + content)


def receive(connection: socket.socket, deadline: float = math.inf) -> dict[str, Any] | None:
    """One message, empty if it is no JSON object; None if the connection was closed.

    Raises OSError for a message of an impossible length, and if it is not there by `deadline`.
    """
    # The deadline is that of the whole message: one that comes byte by byte would renew a timeout for each.
    header = _exactly(connection, HEADER_BYTES, deadline)
    if header is None:
        return None
    num_bytes = int.from_bytes(header)
    if not 0 < num_bytes <= LONGEST_MESSAGE_BYTES:  # before memory is taken for it
        raise OSError(f"sent a message of {num_bytes} bytes; one has 1 to {LONGEST_MESSAGE_BYTES}")
    content = _exactly(connection, num_bytes, deadline)
    if content is None:
        return None
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _exactly(connection: socket.socket, num_bytes: int, deadline: float) -> bytes | None:
    content = b""
    while len(content) < num_bytes:
        if deadline < math.inf:
            connection.settimeout(seconds_until(deadline))
        part = connection.recv(num_bytes - len(content))
        if not part:
            return None
        content += part
    return content


def seconds_until(deadline: float) -> float:
    """A timeout for a socket: above 0, which would mean that it never waits."""
    return max(deadline - time.monotonic(), 0.001)
