"""TCP connections between process 0 and each other process, which report missing and failed processes.

They are opened before JAX's runtime starts, on the port that the runtime takes over afterwards. They are
needed because JAX's runtime names neither a process that never connects nor one that fails in Python. Only
`processes.py` uses this module.
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

from quatrain.cluster.stop import Agreement

ATTEMPT_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 0.2
# Time for a message to reach the other processes, and for these to end.
DELIVERY_TIMEOUT_S = 5.0
LONGEST_MESSAGE = 500
LONGEST_MESSAGE_BYTES = 2**16
HEADER_BYTES = 4

# Exit status of a process that ended because another process had failed.
ANOTHER_FAILED = 3

OnFailure = Callable[[int, str], None]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(
            f"a coordinator's address must be HOST:PORT, such as 10.0.0.2:8476; got {address!r}; give the "
            "address of process 0 and a port that is free on its host"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that can be reached from this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def accept_processes(address: str, num_processes: int, timeout_s: float) -> dict[int, socket.socket]:
    """Called in process 0: waits until all other processes have connected; returns their connections by id.

    Raises TimeoutError naming the missing processes when the shortest timeout of any process has passed,
    ValueError if two processes have the same id or disagree about the number of processes, and OSError if
    process 0 cannot listen on the port. The processes that have connected raise the same TimeoutError or
    ValueError.
    """
    started = time.monotonic()
    deadline = started + timeout_s
    connections: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as arrived:
        server = arrived.enter_context(_listen(address))
        try:
            while len(connections) < num_processes - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                connection, hello = _accept(server)
                if hello is not None:
                    arrived.enter_context(connection)
                    connections[_validated_id(hello, num_processes, connections, connection)] = connection
                    deadline = min(deadline, time.monotonic() + hello["timeout_s"])
        except TimeoutError:
            missing = set(range(1, num_processes)) - connections.keys()
            late = (
                f"{_named(missing)} of {num_processes} did not connect to {address} within "
                f"{time.monotonic() - started:.0f} s; check the output of these processes, or raise "
                "distributed.start_timeout_s"
            )
            _send_to_all_connected(server, connections, {"late": late})
            raise TimeoutError(late) from None
        except ValueError as wrong:
            _send_to_all_connected(server, connections, {"wrong": str(wrong)})
            raise
        arrived.pop_all()
        server.close()
    _send_all(connections, {"go": True})
    return connections


def connect_to_main(address: str, num_processes: int, process_id: int, timeout_s: float) -> socket.socket:
    """Called in every process but 0: its connection to process 0, once all processes have connected.

    Raises TimeoutError if process 0 cannot be reached, and the errors of `accept_processes`.
    """
    deadline = time.monotonic() + timeout_s
    connection = _connect(address, process_id, timeout_s)
    remaining_s = max(deadline - time.monotonic(), 0.001)
    _send(connection, {"process_id": process_id, "num_processes": num_processes, "timeout_s": remaining_s})
    connection.settimeout(remaining_s + DELIVERY_TIMEOUT_S)
    try:
        answer = _receive(connection)
    except OSError:
        answer = None
    if answer is None or not answer.keys() & {"go", "late", "wrong"}:
        connection.close()
        raise TimeoutError(
            f"process {process_id} reached {address}, but no starting process 0 answered; end the run that "
            "uses this port or choose another port, then start all processes again"
        )
    if "go" not in answer:
        connection.close()
        raise TimeoutError(answer["late"]) if "late" in answer else ValueError(answer["wrong"])
    return connection


class Connections:
    """The open connections of one process: process 0 has one to each other process, the others one to it.

    A background thread reads them. If a process fails or dies, process 0 forwards the message to the others,
    and the thread calls `on_failure` once with the id of that process and a description of the failure. The
    connections carry the messages of the `agreement` on where to stop, too.
    """

    def __init__(
        self,
        process_id: int,
        connections: Mapping[int, socket.socket],
        on_failure: OnFailure,
        *,
        silence_s: float,
    ):
        self._process_id, self._on_failure = process_id, on_failure
        self._connections = dict(connections)
        self._left: set[int] = set()
        self._changed = threading.Condition()
        self._over = False
        self.agreement = Agreement(
            leads=process_id == 0,
            peers=len(self._connections),
            send=lambda message: _send_all(self._connections, message),
        )
        for connection in self._connections.values():
            connection.settimeout(None)
            _keep_alive(connection, silence_s)
        self._thread = threading.Thread(target=self._read, name="rendezvous", daemon=True)
        self._thread.start()

    def fail(self, message: str) -> None:
        """Tells the other processes that this one has failed, and waits until they have received it."""
        self._broadcast_failure(self._process_id, message)

    def leave(self, timeout_s: float) -> None:
        """Returns once all processes have called it; raises TimeoutError naming those that have not."""
        deadline = time.monotonic() + timeout_s
        if self._process_id != 0:
            _send(self._connections[0], {"done": True})
        with self._changed:
            everyone = self._changed.wait_for(
                lambda: self._left >= self._connections.keys(), max(deadline - time.monotonic(), 0)
            )
            missing = self._connections.keys() - self._left
            if everyone:
                self._over = True
        if not everyone:
            raise TimeoutError(
                f"{_named(missing)} had not finished {timeout_s:g} s after process {self._process_id}; check "
                "the output of these processes, or raise distributed.shutdown_timeout_s"
            )
        if self._process_id == 0:
            _send_all(self._connections, {"done": True})

    def close(self) -> None:
        """Closes the connections and ends the thread that reads them."""
        self._over = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # the peer may have closed it already
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._handle_message(key.data):
                        selector.unregister(key.fileobj)

    def _handle_message(self, process: int) -> bool:
        """Reads and handles one message from `process`; False if its connection should not be read again."""
        try:
            message = _receive(self._connections[process])
            silent = (
                "ended without an error message: check its output (killed, out of memory, or host failure)"
            )
        except OSError as error:
            message, silent = None, f"lost its connection: {error.strerror or error}"
        if message is not None and self.agreement.receive(process, message):
            return True
        if message is not None and "failed" in message:
            self._report_failure(message.get("process", process), message["failed"])
        if message is not None and "done" in message:
            with self._changed:
                self._left.add(process)
                self._changed.notify_all()
            return self._process_id == 0
        if message is None and process not in self._left and not self._over:
            self._report_failure(process, silent)
        return False

    def _report_failure(self, process: int, message: str) -> None:
        if self._process_id == 0:
            self._broadcast_failure(process, message)
        self._on_failure(process, message)

    def _broadcast_failure(self, process: int, message: str) -> None:
        """Tells all peers but `process` that it failed; process 0 waits until each has disconnected."""
        self._over = True
        others = {peer: connection for peer, connection in self._connections.items() if peer != process}
        _send_all(others, {"failed": message[:LONGEST_MESSAGE], "process": process})
        if self._process_id != 0:
            return
        deadline = time.monotonic() + DELIVERY_TIMEOUT_S
        for connection in others.values():
            with contextlib.suppress(OSError):
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                while connection.recv(LONGEST_MESSAGE_BYTES):
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
            f"process 0 must listen on port {port} for the other processes, and cannot: {error.strerror}; "
            "end the program that uses the port, or choose another port"
        ) from None


def _accept(server: socket.socket) -> tuple[socket.socket, dict[str, Any] | None]:
    """The next connection and its first message; None as message if the peer is not a quatrain process."""
    connection, _ = server.accept()
    connection.settimeout(ATTEMPT_TIMEOUT_S)
    try:
        hello = _receive(connection)
    except OSError:
        hello = None
    if hello is None or hello.keys() != {"process_id", "num_processes", "timeout_s"}:
        connection.close()
        return connection, None
    return connection, hello


def _send_to_all_connected(
    server: socket.socket, connections: Mapping[int, socket.socket], answer: Mapping[str, Any]
) -> None:
    """Sends `answer` to all connected processes, including those whose connection was not accepted yet."""
    _send_all(connections, answer)
    server.settimeout(0.001)
    with contextlib.suppress(OSError):
        while True:
            connection, _ = _accept(server)
            with connection:
                _send(connection, answer)


def _validated_id(
    hello: Mapping[str, Any],
    num_processes: int,
    connections: Mapping[int, socket.socket],
    connection: socket.socket,
) -> int:
    """The valid id in `hello`, a peer's first message; otherwise tells the peer and raises ValueError."""
    process: int = hello["process_id"]
    wrong = None
    if hello["num_processes"] != num_processes:
        wrong = (
            "all processes must be started with the same number of processes; process 0 has "
            f"{num_processes}, process {process} has {hello['num_processes']}; start all with the same"
        )
    elif process == 0 or process in connections:
        wrong = f"each process must have a unique id; two have the id {process}; start each process once"
    if wrong is not None:
        _send(connection, {"wrong": wrong})
        raise ValueError(wrong)
    return process


def _connect(address: str, process_id: int, timeout_s: float) -> socket.socket:
    host, port = split_address(address)
    started = time.monotonic()
    while True:
        left_s = started + timeout_s - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(min(left_s, ATTEMPT_TIMEOUT_S), 0.001))
        except OSError as error:
            reason = error.strerror or str(error)
        if left_s < RETRY_INTERVAL_S:
            raise TimeoutError(
                f"process {process_id} could not reach the coordinator at {address} within {timeout_s:g} s "
                f"({reason}); start process 0 on that host, open the port in its firewall, or raise "
                "distributed.start_timeout_s"
            )
        time.sleep(RETRY_INTERVAL_S)


def _keep_alive(connection: socket.socket, silence_s: float) -> None:
    """Sets TCP keep-alive so that a connection to an unreachable host fails before `silence_s` are over."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, math.floor(silence_s / 5))
    for option, value in (("TCP_KEEPIDLE", every_s), ("TCP_KEEPINTVL", every_s), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # these options do not exist on every operating system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends one message; a broken connection is ignored here, because the reading thread reports it."""
    content = json.dumps(message).encode()
    with contextlib.suppress(OSError):
        connection.sendall(len(content).to_bytes(HEADER_BYTES) + content)


def _send_all(connections: Mapping[int, socket.socket], message: Mapping[str, Any]) -> None:
    for connection in connections.values():
        _send(connection, message)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """One message; None if the connection was closed or the received bytes are not a message."""
    header = _exactly(connection, HEADER_BYTES)
    num_bytes = int.from_bytes(header or b"")
    content = _exactly(connection, num_bytes) if 0 < num_bytes <= LONGEST_MESSAGE_BYTES else None
    try:
        message = json.loads(content) if content else None
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    content = b""
    while len(content) < num_bytes:
        part = connection.recv(num_bytes - len(content))
        if not part:
            return None
        content += part
    return content
