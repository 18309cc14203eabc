"""The line between process 0 and each other process: who has arrived, who has failed, who has left.

Opened before JAX's runtime starts, on the port that runtime then takes over, because the runtime names
neither a process that never arrives nor one that fails in Python. `hosts.py` alone uses it.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ATTEMPT_S = 5.0
PAUSE_S = 0.2
# What a process that has heard the end of the others needs to end itself.
FAREWELL_S = 5.0
LONGEST_MESSAGE = 500
LONGEST_MESSAGE_BYTES = 2**16
HEADER_BYTES = 4

# Exit status of a process that ended because another one had failed.
ANOTHER_FAILED = 3

OnFailure = Callable[[int, str], None]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(
            f"a coordinator's address is HOST:PORT, as 10.0.0.2:8476; got {address!r}; give the address of "
            "process 0 and a port that is free there"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def call_roll(address: str, num_processes: int, timeout_s: float) -> dict[int, socket.socket]:
    """Process 0: a line to each of the other processes, once all have arrived.

    Raises TimeoutError naming those that are missing when the patience of the first ends, ValueError where
    two have one id or another number of processes, and OSError where it cannot listen; the others raise it
    too.
    """
    started = time.monotonic()
    deadline = started + timeout_s
    lines: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as arrived:
        server = arrived.enter_context(_listen(address))
        try:
            while len(lines) < num_processes - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                line, hello = _accept(server)
                if hello is not None:
                    arrived.enter_context(line)
                    lines[_checked(hello, num_processes, lines, line)] = line
                    deadline = min(deadline, time.monotonic() + hello["patience_s"])
        except TimeoutError:
            missing = set(range(1, num_processes)) - lines.keys()
            late = (
                f"{_named(missing)} of {num_processes} did not arrive at {address} within "
                f"{time.monotonic() - started:.0f} s; see what became of them, or raise "
                "distributed.start_timeout_s"
            )
            _send_away(server, lines, {"late": late})
            raise TimeoutError(late) from None
        except ValueError as wrong:
            _send_away(server, lines, {"wrong": str(wrong)})
            raise
        arrived.pop_all()
        server.close()
    _send_all(lines, {"go": True})
    return lines


def answer_roll(address: str, num_processes: int, process_id: int, timeout_s: float) -> socket.socket:
    """Any other process: its line to process 0, once all have arrived.

    Raises TimeoutError where process 0 cannot be reached, and what process 0 raises.
    """
    deadline = time.monotonic() + timeout_s
    line = _connect(address, process_id, timeout_s)
    patience_s = max(deadline - time.monotonic(), 0.001)
    _send(line, {"process_id": process_id, "num_processes": num_processes, "patience_s": patience_s})
    line.settimeout(patience_s + FAREWELL_S)
    try:
        answer = _receive(line)
    except OSError:
        answer = None
    if answer is None or not answer.keys() & {"go", "late", "wrong"}:
        line.close()
        raise TimeoutError(
            f"process {process_id} reached {address}, but no process 0 that is starting answers there; end "
            "the run that is under way or choose another port, then start all processes again"
        )
    if "go" not in answer:
        line.close()
        raise TimeoutError(answer["late"]) if "late" in answer else ValueError(answer["wrong"])
    return line


class Lines:
    """The open lines of one process: to all others in process 0, to process 0 in each other.

    A thread of its own reads them. `on_failure` is called in it, once, with the id of a process that failed
    or died and with what is known of it; process 0 passes the news on first.
    """

    def __init__(
        self,
        process_id: int,
        lines: Mapping[int, socket.socket],
        on_failure: OnFailure,
        *,
        silence_s: float,
    ):
        self._process_id, self._on_failure = process_id, on_failure
        self._lines = dict(lines)
        self._left: set[int] = set()
        self._changed = threading.Condition()
        self._over = False
        for line in self._lines.values():
            line.settimeout(None)
            _keep_alive(line, silence_s)
        self._thread = threading.Thread(target=self._read, name="roll call", daemon=True)
        self._thread.start()

    def fail(self, message: str) -> None:
        """Tells the others that this process has failed, and waits until they have heard it."""
        self._spread(self._process_id, message)

    def leave(self, timeout_s: float) -> None:
        """Returns once every process has called it; raises TimeoutError naming those that did not."""
        deadline = time.monotonic() + timeout_s
        if self._process_id != 0:
            _send(self._lines[0], {"done": True})
        with self._changed:
            everyone = self._changed.wait_for(
                lambda: self._left >= self._lines.keys(), max(deadline - time.monotonic(), 0)
            )
            missing = self._lines.keys() - self._left
            if everyone:
                self._over = True
        if not everyone:
            raise TimeoutError(
                f"{_named(missing)} had not finished {timeout_s:g} s after process {self._process_id}; see "
                "what became of them, or raise distributed.shutdown_timeout_s"
            )
        if self._process_id == 0:
            _send_all(self._lines, {"done": True})

    def close(self) -> None:
        """Ends the lines, and the thread that reads them."""
        self._over = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # the other end may have gone
                line.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for line in self._lines.values():
            line.close()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._heard(key.data):
                        selector.unregister(key.fileobj)

    def _heard(self, process: int) -> bool:
        """Reads one message of `process`; False where its line is to be read no more."""
        try:
            message = _receive(self._lines[process])
            silent = "ended without a word: see its output (killed, out of memory, or its host is gone)"
        except OSError as error:
            message, silent = None, f"is gone: {error.strerror or error}"
        if message is not None and "failed" in message:
            self._report(message.get("process", process), message["failed"])
        if message is not None and "done" in message:
            with self._changed:
                self._left.add(process)
                self._changed.notify_all()
            return self._process_id == 0
        if message is None and process not in self._left and not self._over:
            self._report(process, silent)
        return False

    def _report(self, process: int, message: str) -> None:
        if self._process_id == 0:
            self._spread(process, message)
        self._on_failure(process, message)

    def _spread(self, process: int, message: str) -> None:
        """Sends the news over every line but that of `process`, and waits until each has hung up."""
        self._over = True
        others = {peer: line for peer, line in self._lines.items() if peer != process}
        _send_all(others, {"failed": message[:LONGEST_MESSAGE], "process": process})
        if self._process_id != 0:
            return
        deadline = time.monotonic() + FAREWELL_S
        for line in others.values():
            with contextlib.suppress(OSError):
                line.settimeout(max(deadline - time.monotonic(), 0.001))
                while line.recv(LONGEST_MESSAGE_BYTES):
                    pass


def _named(processes: Iterable[int]) -> str:
    ids = sorted(processes)
    return f"process{'es' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise OSError(
            f"process 0 listens for the others on port {port}, and cannot: {error.strerror}; end what uses "
            "the port, or choose another"
        ) from None


def _accept(server: socket.socket) -> tuple[socket.socket, dict[str, Any] | None]:
    """The next that connects and what it says; None where that is no process of ours."""
    line, _ = server.accept()
    line.settimeout(ATTEMPT_S)
    try:
        hello = _receive(line)
    except OSError:
        hello = None
    if hello is None or hello.keys() != {"process_id", "num_processes", "patience_s"}:
        line.close()
        return line, None
    return line, hello


def _send_away(server: socket.socket, lines: Mapping[int, socket.socket], answer: Mapping[str, Any]) -> None:
    """Answers those that have arrived, and those that have connected, but were not listened to yet."""
    _send_all(lines, answer)
    server.settimeout(0.001)
    with contextlib.suppress(OSError):
        while True:
            line, _ = _accept(server)
            with line:
                _send(line, answer)


def _checked(
    hello: Mapping[str, Any], num_processes: int, lines: Mapping[int, socket.socket], line: socket.socket
) -> int:
    """The id of the process that says `hello` on `line`; raises ValueError, and says so on `line`."""
    process: int = hello["process_id"]
    wrong = None
    if hello["num_processes"] != num_processes:
        wrong = (
            f"all processes are started with one number of processes; process 0 was with {num_processes}, "
            f"process {process} with {hello['num_processes']}; start all with the same"
        )
    elif process == 0 or process in lines:
        wrong = f"each process has an id of its own; two came as process {process}; start each once"
    if wrong is not None:
        _send(line, {"wrong": wrong})
        raise ValueError(wrong)
    return process


def _connect(address: str, process_id: int, timeout_s: float) -> socket.socket:
    host, port = split_address(address)
    started = time.monotonic()
    while True:
        left_s = started + timeout_s - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(min(left_s, ATTEMPT_S), 0.001))
        except OSError as error:
            reason = error.strerror or str(error)
        if left_s < PAUSE_S:
            raise TimeoutError(
                f"process {process_id} could not reach the coordinator at {address} within {timeout_s:g} s "
                f"({reason}); start process 0 there, let its port through, or raise "
                "distributed.start_timeout_s"
            )
        time.sleep(PAUSE_S)


def _keep_alive(line: socket.socket, silence_s: float) -> None:
    """Breaks the line where the other end's host is silent, a little before `silence_s` have passed."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, math.floor(silence_s / 5))
    for option, value in (("TCP_KEEPIDLE", every_s), ("TCP_KEEPINTVL", every_s), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _send(line: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends one message; a line that is broken is the reader's to report."""
    content = json.dumps(message).encode()
    with contextlib.suppress(OSError):
        line.sendall(len(content).to_bytes(HEADER_BYTES) + content)


def _send_all(lines: Mapping[int, socket.socket], message: Mapping[str, Any]) -> None:
    for line in lines.values():
        _send(line, message)


def _receive(line: socket.socket) -> dict[str, Any] | None:
    """One message; None at the end of the line, or where something else than a message came."""
    header = _exactly(line, HEADER_BYTES)
    num_bytes = int.from_bytes(header or b"")
    content = _exactly(line, num_bytes) if 0 < num_bytes <= LONGEST_MESSAGE_BYTES else None
    try:
        message = json.loads(content) if content else None
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _exactly(line: socket.socket, num_bytes: int) -> bytes | None:
    content = b""
    while len(content) < num_bytes:
        part = line.recv(num_bytes - len(content))
        if not part:
            return None
        content += part
    return content
