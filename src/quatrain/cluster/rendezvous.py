"""TCP connections between process 0 and each other process, which report missing and failed processes.

They are opened before JAX's runtime starts, on the port that the runtime takes over afterwards, because that
runtime names neither a process that never connects nor one that fails in Python. Only `processes.py` uses
this module. `process_messages.py` has the messages and the proof that whoever sends one knows the token of
the run; whoever cannot give it, or sends a message of another form, is refused, and the log says so.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from quatrain.cluster import process_messages
from quatrain.cluster.process_messages import receive, seconds_until, send
from quatrain.cluster.start_thread import start_thread
from quatrain.cluster.stop import Agreement

TOKEN = "QUATRAIN_CLUSTER_TOKEN"
"""The environment variable with the secret that the processes of a run share."""
ATTEMPT_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 0.2
DELIVERY_TIMEOUT_S = 5.0
"""Time for a message to reach the other processes, and for these to end."""
LONGEST_MESSAGE = 500
ANOTHER_FAILED = 3
"""Exit status of a process that ended because another process had failed."""

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
    ip = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if is_loopback(ip):
        # Debian's /etc/hosts has the host's own name at 127.0.1.1, where no other host could connect.
        ip = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _listen(address: str) -> socket.socket:
    named, port = split_address(address)
    try:
        host, _ = split_address(bind_address(address))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        raise OSError(
            f"process 0 must listen on {named}, port {port} for the other processes, and cannot: "
            f"{error.strerror}; give an address of the host of process 0, and a port that no other program "
            "uses"
        ) from None
    if host in ("::", "0.0.0.0"):
        logger.warning(
            "process 0 listens on all addresses of its host, because %s is one there that no other host can "
            "reach; to listen on one, give its IP address as that of the coordinator",
            named,
        )
    return server


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
    connected: list[tuple[socket.socket, Mapping[str, Any]]] = []
    peers: dict[int, socket.socket] = {}

    def answer(message: Mapping[str, Any], connection: socket.socket, hello: Mapping[str, Any]) -> None:
        """Sends a message, with the proof that process 0 knows the token too."""
        proof = process_messages.proof(token, "main", hello["challenge"], message)
        send({**message, "proof": proof}, connection)

    with contextlib.ExitStack() as arrived:
        server = arrived.enter_context(_listen(address))
        try:
            # One after the other: who waits is in the queue of the socket, and each is read for a bounded
            # time.
            while missing := set(range(1, num_processes)) - peers.keys():
                server.settimeout(seconds_until(deadline))
                try:
                    peer = _accept(server, token)
                except TimeoutError:
                    raise TimeoutError(
                        f"{_named(missing)} of {num_processes} did not connect to {address} within "
                        f"{time.monotonic() - started:.0f} s; check the output of these processes, or raise "
                        "distributed.start_timeout_s"
                    ) from None
                if peer is not None:
                    connection, hello = peer
                    arrived.enter_context(connection)
                    connected.append(peer)
                    peers[_valid_id(hello, num_processes, peers)] = connection
                    # The least patient decides: it would leave, and the others wait for it in vain.
                    deadline = min(deadline, time.monotonic() + hello["timeout_s"])
        except (TimeoutError, ValueError) as error:
            reason = {"late" if isinstance(error, TimeoutError) else "wrong": str(error)}
            for peer in connected:
                answer(reason, *peer)
            # Those in the queue hear it too; else they would wait for all their time, and blame the network.
            server.settimeout(0.001)
            with contextlib.suppress(OSError):
                while True:
                    if (late := _accept(server, token)) is not None:
                        with late[0]:
                            answer(reason, *late)
            raise
        arrived.pop_all()
        server.close()  # before anybody goes on: JAX's runtime binds the same port
    for peer in connected:
        answer({"go": True}, *peer)
    return peers


def _accept(server: socket.socket, token: str) -> tuple[socket.socket, Mapping[str, Any]] | None:
    """The next process that connects and knows the token, with its hello; None for one that is refused."""
    try:
        connection, (host, *_) = server.accept()
    except ConnectionError:  # it has gone again
        return None
    deadline = time.monotonic() + ATTEMPT_TIMEOUT_S
    connection.settimeout(ATTEMPT_TIMEOUT_S)
    # New for each connection: a proof that was overheard on another is none here.
    challenge = secrets.token_hex()
    send({"challenge": challenge}, connection)
    problem = f"sent no first message of a process, or does not have the same {TOKEN}"
    try:
        received = receive(connection, deadline)
    except OSError as error:
        received, problem = None, error.strerror or str(error)
    if hello := process_messages.proven(received, token, "process", challenge, process_messages.HELLO):
        return connection, hello
    logger.warning("a connection to process 0 from %s was refused: it %s", host, problem)
    connection.close()
    return None


def _valid_id(hello: Mapping[str, Any], num_processes: int, known: Container[int]) -> int:
    """The id of the process that says `hello`; raises ValueError if it does not belong to the run."""
    process: int = hello["process_id"]
    if hello["num_processes"] != num_processes:
        raise ValueError(
            f"all processes must be started with the same number of processes; process 0 has {num_processes},"
            f" process {process} has {hello['num_processes']}; start all with the same"
        )
    if process >= num_processes:
        raise ValueError(
            f"process ids must be below the number of processes, {num_processes}; one process has the id "
            f"{process}; give each process its own id"
        )
    if process == 0 or process in known:
        raise ValueError(
            f"each process must have a unique id; two have the id {process}; start each process once"
        )
    return process


def connect_to_main(
    address: str, num_processes: int, process_id: int, timeout_s: float, token: str = ""
) -> socket.socket:
    """Called in every process but 0: its connection to process 0, once all processes have connected.

    Raises TimeoutError if process 0 cannot be reached or has another `token`, and the errors of
    `accept_processes`.
    """
    # Longer than the time of process 0 by DELIVERY_TIMEOUT_S, so that its reason arrives before this one's
    # own.
    deadline = time.monotonic() + timeout_s
    connection = _connect(address, process_id, timeout_s)
    hello: dict[str, Any] = {
        "process_id": process_id,
        "num_processes": num_processes,
        "timeout_s": seconds_until(deadline),
        "challenge": secrets.token_hex(),
    }
    answer: Mapping[str, Any] = {}
    with contextlib.suppress(OSError):
        asked = receive(connection, deadline + DELIVERY_TIMEOUT_S)
        if process_messages.has_form(asked, {"challenge"}):  # else it is no process 0
            proof = process_messages.proof(token, "process", asked["challenge"], hello)
            send({**hello, "proof": proof}, connection)
            received = receive(connection, deadline + DELIVERY_TIMEOUT_S)
            # Process 0 proves it too: whoever listens on its port could else send this process off.
            known = process_messages.proven(
                received, token, "main", hello["challenge"], *process_messages.ANSWERS
            )
            answer = known or {}
    if "go" in answer:
        return connection
    connection.close()
    if "wrong" in answer:
        raise ValueError(answer["wrong"])
    raise TimeoutError(
        answer.get("late")
        or f"process {process_id} reached {address}, but no starting process 0 answered that has the same "
        f"{TOKEN}; set it to the same value in all processes, end the run that uses this port or choose "
        "another port, then start all processes again"
    )


def _connect(address: str, process_id: int, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = seconds_until(deadline)
        try:
            return socket.create_connection(split_address(address), timeout=min(left_s, ATTEMPT_TIMEOUT_S))
        except OSError as error:
            reason = error.strerror or str(error)
        if left_s < RETRY_INTERVAL_S:
            raise TimeoutError(
                f"process {process_id} could not reach the coordinator at {address} within {timeout_s:g} s "
                f"({reason}); start process 0 on that host, open the port in its firewall, or raise "
                "distributed.start_timeout_s"
            )
        time.sleep(RETRY_INTERVAL_S)


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
        on_failure: Callable[[int, str], None],
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
            send=lambda message: send(message, *self._connections.values()),
        )
        for connection in self._connections.values():
            connection.settimeout(None)
            # So that a connection to an unreachable host fails before `silence_s` are over.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            every_s = max(1, math.floor(silence_s / 5))
            for option, value in (("TCP_KEEPIDLE", every_s), ("TCP_KEEPINTVL", every_s), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, option):  # these options do not exist on every operating system
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._thread = start_thread(self._read, name="rendezvous")

    def fail(self, message: str) -> None:
        """Tells the other processes that this one has failed, and waits until they have received it."""
        self._tell_all_but(self._process_id, message)

    def leave(self, timeout_s: float) -> None:
        """Returns once all processes have called it; raises TimeoutError naming those that have not."""
        if self._process_id != 0:
            send({"done": True}, self._connections[0])
        with self._changed:
            self._over |= self._changed.wait_for(lambda: self._left >= self._connections.keys(), timeout_s)
            missing = self._connections.keys() - self._left
        if missing:
            raise TimeoutError(
                f"{_named(missing)} had not finished {timeout_s:g} s after process {self._process_id}; check "
                "the output of these processes, or raise distributed.shutdown_timeout_s"
            )
        if self._process_id == 0:
            send({"done": True}, *self._connections.values())

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
                # One message of each that has any, so that none that sends much holds up the others'
                # failures.
                for key, _ in selector.select():
                    if not self._handle_message(key.data):
                        selector.unregister(key.fileobj)

    def _handle_message(self, process: int) -> bool:
        """Reads and handles one message from `process`; False if its connection should not be read again."""
        silent = "ended without an error message: check its output (killed, out of memory, or host failure)"
        try:
            message = receive(self._connections[process])
        except OSError as error:
            message, silent = None, f"lost its connection: {error.strerror or error}"
        if message is None:
            # A connection that closes after "done", or when all is over, is no failure.
            if process not in self._left and not self._over:
                self._report_failure(process, silent)
            return False
        if not process_messages.has_form(message, *process_messages.MESSAGES):
            logger.warning("process %d sent a message of an unknown form, which is ignored", process)
            return True
        if "failed" in message:
            self._report_failure(message["process"], message["failed"])
            return False
        if "done" in message:
            with self._changed:
                self._left.add(process)
                self._changed.notify_all()
            return self._process_id == 0
        self.agreement.receive(process, message)
        return True

    def _report_failure(self, process: int, message: str) -> None:
        if self._process_id == 0:  # the others are connected to it alone
            self._tell_all_but(process, message)
        self._on_failure(process, message)

    def _tell_all_but(self, process: int, message: str) -> None:
        """Tells all peers but `process` that it failed; process 0 waits until each has disconnected."""
        self._over = True
        others = [connection for peer, connection in self._connections.items() if peer != process]
        send({"failed": message[:LONGEST_MESSAGE], "process": process}, *others)
        # Process 0 ends last: with its end JAX's runtime ends the others, before they have said why.
        deadline = time.monotonic() + DELIVERY_TIMEOUT_S
        for connection in others if self._process_id == 0 else ():
            with contextlib.suppress(OSError):
                connection.settimeout(seconds_until(deadline))
                while connection.recv(process_messages.LONGEST_MESSAGE_BYTES):
                    pass


def _named(processes: Iterable[int]) -> str:
    ids = sorted(processes)
    return f"process{'es' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
