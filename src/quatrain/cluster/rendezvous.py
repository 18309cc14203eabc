"""TCP connections between process 0 and each other process, which report missing and failed processes.

They are opened before JAX's runtime starts, on the port that the runtime takes over afterwards. They are
needed because JAX's runtime names neither a process that never connects nor one that fails in Python. Only
`processes.py` uses this module.

Each end proves to the other that it knows the token of the run: it answers a random challenge with an HMAC.
Whoever cannot, and whoever sends a message of another form, is refused, and the log says so. The connections
are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import math
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from quatrain.cluster.stop import Agreement
from quatrain.cluster.threads import start_thread

TOKEN = "QUATRAIN_CLUSTER_TOKEN"
"""The environment variable with the secret that the processes of a run share."""
ATTEMPT_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 0.2
# Time for a message to reach the other processes, and for these to end.
DELIVERY_TIMEOUT_S = 5.0
LONGEST_MESSAGE = 500
LONGEST_MESSAGE_BYTES = 2**16
HEADER_BYTES = 4

# Exit status of a process that ended because another process had failed.
ANOTHER_FAILED = 3

# Longest timeout that a process may name: about 30 years.
LONGEST_TIMEOUT_S = 1e9
OnFailure = Callable[[int, str], None]

logger = logging.getLogger(__name__)


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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind_address(address: str) -> str:
    """HOST:PORT on which process 0 listens: the IP address of `address`, and no other of its host.

    All addresses of the host if a name means a loopback address there, as in many files /etc/hosts, because
    other hosts could not reach that. Raises OSError if the name is not known.
    """
    host, port = split_address(address)
    if is_loopback(host):
        return address
    try:
        found: str = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
    except OSError as error:
        raise _cannot_listen(address, error) from None
    if is_loopback(found):
        found = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


@dataclass(frozen=True)
class _Peer:
    """A process that has connected to process 0 and knows the token."""

    connection: socket.socket
    hello: Mapping[str, Any]
    token: str

    def answer(self, message: Mapping[str, Any]) -> None:
        """Sends a message, with the proof that process 0 knows the token too."""
        proof = _proof(self.token, "main", self.hello["challenge"], message)
        _send(self.connection, {**message, "proof": proof})


def accept_processes(
    address: str, num_processes: int, timeout_s: float, token: str = ""
) -> dict[int, socket.socket]:
    """Called in process 0: waits until all other processes have connected; returns their connections by id.

    Connections of others than the processes of the run, which know the `token`, are refused. Raises
    TimeoutError naming the missing processes when the shortest timeout of any process has passed, ValueError
    if two processes have the same id or disagree about the number of processes, and OSError if process 0
    cannot listen on the address. The processes that have connected raise the same TimeoutError or ValueError.
    """
    started = time.monotonic()
    deadline = started + timeout_s
    peers: dict[int, _Peer] = {}
    with contextlib.ExitStack() as arrived:
        server = arrived.enter_context(_listen(address))
        try:
            while len(peers) < num_processes - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                peer = _accept(server, token)
                if peer is not None:
                    arrived.enter_context(peer.connection)
                    peers[_validated_id(peer, num_processes, peers)] = peer
                    deadline = min(deadline, time.monotonic() + peer.hello["timeout_s"])
        except TimeoutError:
            missing = set(range(1, num_processes)) - peers.keys()
            late = (
                f"{_named(missing)} of {num_processes} did not connect to {address} within "
                f"{time.monotonic() - started:.0f} s; check the output of these processes, or raise "
                "distributed.start_timeout_s"
            )
            _answer_all_connected(server, peers, {"late": late}, token)
            raise TimeoutError(late) from None
        except ValueError as wrong:
            _answer_all_connected(server, peers, {"wrong": str(wrong)}, token)
            raise
        arrived.pop_all()
        server.close()
    for peer in peers.values():
        peer.answer({"go": True})
    return {process: peer.connection for process, peer in peers.items()}


def connect_to_main(
    address: str, num_processes: int, process_id: int, timeout_s: float, token: str = ""
) -> socket.socket:
    """Called in every process but 0: its connection to process 0, once all processes have connected.

    Raises TimeoutError if process 0 cannot be reached or has another `token`, and the errors of
    `accept_processes`.
    """
    deadline = time.monotonic() + timeout_s
    connection = _connect(address, process_id, timeout_s)
    remaining_s = max(deadline - time.monotonic(), 0.001)
    hello = {"process_id": process_id, "num_processes": num_processes, "timeout_s": remaining_s}
    answer = _introduced(connection, hello, token, deadline + DELIVERY_TIMEOUT_S)
    if answer is None:
        connection.close()
        raise TimeoutError(
            f"process {process_id} reached {address}, but no starting process 0 answered that has the same "
            f"{TOKEN}; set it to the same value in all processes, end the run that uses this port or choose "
            "another port, then start all processes again"
        )
    if "go" not in answer:
        connection.close()
        raise TimeoutError(answer["late"]) if "late" in answer else ValueError(answer["wrong"])
    return connection


def _introduced(
    connection: socket.socket, hello: Mapping[str, Any], token: str, deadline: float
) -> dict[str, Any] | None:
    """The answer of process 0 to a process that says `hello`; None if it is no process 0 of this run."""
    own = secrets.token_hex()
    hello = {**hello, "challenge": own}
    try:
        asked = _receive(connection, deadline)
        if not _has_form(asked, {"challenge": _is_text}):
            return None
        _send(connection, {**hello, "proof": _proof(token, "process", asked["challenge"], hello)})
        answer = _receive(connection, deadline) or {}
    except OSError:
        return None
    proof = answer.pop("proof", None)
    known = any(_has_form(answer, form) for form in ANSWERS)
    return answer if known and _proves(proof, token, "main", own, answer) else None


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
        self._thread = start_thread(self._read, name="rendezvous")

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
        if message is not None and not any(_has_form(message, form) for form in MESSAGES):
            logger.warning("process %d sent a message of an unknown form, which is ignored", process)
            return True
        if message is not None and self.agreement.receive(process, message):
            return True
        if message is not None and "failed" in message:
            self._report_failure(message["process"], message["failed"])
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
    host, port = split_address(bind_address(address))
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        raise _cannot_listen(address, error) from None
    if host in ("::", "0.0.0.0"):
        logger.warning(
            "process 0 listens on all addresses of its host, because %s is one there that no other host can "
            "reach; to listen on one, give its IP address as that of the coordinator",
            split_address(address)[0],
        )
    return server


def _cannot_listen(address: str, error: OSError) -> OSError:
    host, port = split_address(address)
    return OSError(
        f"process 0 must listen on {host}, port {port} for the other processes, and cannot: "
        f"{error.strerror}; give an address of the host of process 0, and a port that no other program uses"
    )


def _accept(server: socket.socket, token: str) -> _Peer | None:
    """The next process that connects; None for a connection that is refused."""
    try:
        connection, (host, *_) = server.accept()
    except ConnectionError:  # it has gone again
        return None
    deadline = time.monotonic() + ATTEMPT_TIMEOUT_S
    connection.settimeout(ATTEMPT_TIMEOUT_S)
    challenge = secrets.token_hex()
    _send(connection, {"challenge": challenge})
    try:
        hello = _receive(connection, deadline)
        problem = "sent no message of a process"
    except OSError as error:
        hello, problem = None, error.strerror or str(error)
    proof = hello.pop("proof", None) if hello else None
    if hello and _has_form(hello, HELLO) and _proves(proof, token, "process", challenge, hello):
        return _Peer(connection, hello, token)
    if hello:
        problem = f"sent a first message of another form, or does not have the same {TOKEN}"
    logger.warning("a connection to process 0 from %s was refused: it %s", host, problem)
    connection.close()
    return None


def _answer_all_connected(
    server: socket.socket, peers: Mapping[int, _Peer], answer: Mapping[str, Any], token: str
) -> None:
    """Sends `answer` to all connected processes, including those whose connection was not accepted yet."""
    for peer in peers.values():
        peer.answer(answer)
    server.settimeout(0.001)
    with contextlib.suppress(OSError):
        while True:
            late = _accept(server, token)
            if late is not None:
                with late.connection:
                    late.answer(answer)


def _validated_id(peer: _Peer, num_processes: int, peers: Mapping[int, _Peer]) -> int:
    """The valid id of `peer`; otherwise tells the peer and raises ValueError."""
    hello = peer.hello
    process: int = hello["process_id"]
    wrong = None
    if hello["num_processes"] != num_processes:
        wrong = (
            "all processes must be started with the same number of processes; process 0 has "
            f"{num_processes}, process {process} has {hello['num_processes']}; start all with the same"
        )
    elif process >= num_processes:
        wrong = (
            f"process ids must be below the number of processes, {num_processes}; one process has the id "
            f"{process}; give each process its own id"
        )
    elif process == 0 or process in peers:
        wrong = f"each process must have a unique id; two have the id {process}; start each process once"
    if wrong is not None:
        peer.answer({"wrong": wrong})
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


def _receive(connection: socket.socket, deadline: float = math.inf) -> dict[str, Any] | None:
    """One message, empty if it is no JSON object; None if the connection was closed.

    Raises OSError for a message of an impossible length, and if it is not there by `deadline`.
    """
    header = _exactly(connection, HEADER_BYTES, deadline)
    if header is None:
        return None
    num_bytes = int.from_bytes(header)
    if not 0 < num_bytes <= LONGEST_MESSAGE_BYTES:
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
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(num_bytes - len(content))
        if not part:
            return None
        content += part
    return content


def _proof(token: str, role: str, challenge: str, message: Mapping[str, Any]) -> str:
    """Shows to whoever knows `token` and sent `challenge` that `message` comes from one who knows it."""
    return hmac.new(os.fsencode(token), json.dumps([role, challenge, message]).encode(), "sha256").hexdigest()


def _proves(proof: object, token: str, role: str, challenge: str, message: Mapping[str, Any]) -> bool:
    expected = _proof(token, role, challenge, message)
    return isinstance(proof, str) and hmac.compare_digest(ascii(proof), ascii(expected))


Form = Mapping[str, Callable[[Any], bool]]
"""The fields of a message, and what each must be."""


def _has_form(message: Mapping[str, Any] | None, form: Form) -> TypeGuard[Mapping[str, Any]]:
    return (
        message is not None
        and message.keys() == form.keys()
        and all(is_valid(message[name]) for name, is_valid in form.items())
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_timeout(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= LONGEST_TIMEOUT_S  # type: ignore[operator]


def _is_signal(value: object) -> bool:
    return type(value) is int and value in set(signal.Signals)


def _is_true(value: object) -> bool:
    return value is True


HELLO: Form = {
    "process_id": _is_count,
    "num_processes": _is_count,
    "timeout_s": _is_timeout,
    "challenge": _is_text,
}
ANSWERS: tuple[Form, ...] = ({"go": _is_true}, {"late": _is_text}, {"wrong": _is_text})
MESSAGES: tuple[Form, ...] = (
    {"stop": _is_signal},
    {"passed": _is_count},
    {"last": _is_count},
    {"failed": _is_text, "process": _is_count},
    {"done": _is_true},
)
