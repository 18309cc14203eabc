"""The connection between process 0 and the others, its processes being threads here."""

import contextlib
import json
import math
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quatrain.cluster import process_messages, rendezvous
from quatrain.cluster.rendezvous import Connections, accept_processes, connect_to_main
from quatrain.cluster.stop import Stopped


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Process:
    """One end of the connections, which notes what it hears of the others."""

    def __init__(self, process_id, connections):
        self.news, self.heard = [], threading.Event()
        self.connections = Connections(process_id, connections, self.note, silence_s=60)

    def note(self, process, message):
        self.news.append((process, message))
        for connection in self.connections._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # as at the end of a process
        self.heard.set()


@pytest.fixture
def three(address, pool):
    others = [pool.submit(connect_to_main, address, 3, i, 10) for i in (1, 2)]
    processes = [Process(0, accept_processes(address, 3, 10))]
    processes += [Process(i, {0: other.result(10)}) for i, other in enumerate(others, start=1)]
    yield processes
    for process in processes:
        process.connections.close()


def test_all_leave_together(three, pool):
    first = [pool.submit(process.connections.leave, 10) for process in three[:2]]
    assert not any(leaving.done() for leaving in first)
    three[2].connections.leave(10)
    assert [leaving.result(10) for leaving in first] == [None, None]
    assert [process.news for process in three] == [[], [], []]


@pytest.mark.parametrize("asking", [0, 1, 2])
def test_all_stop_at_one_border_when_one_asks(three, pool, asking):
    def passed(index):
        for i in range(10_000):
            if (index, i) == (asking, 50):
                three[index].connections.agreement.ask(signal.SIGTERM)
            try:
                three[index].connections.agreement.safe_point()
            except Stopped as stopped:
                return i, stopped.status
            time.sleep(0.0005 * index)
        return None

    stops = list(pool.map(passed, range(3)))
    assert stops[0] is not None
    assert len(set(stops)) == 1
    assert stops[0][1] == 143


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_reaches_all_others(three, failing):
    three[failing].connections.fail("failed: boom")
    three[failing].connections.close()
    for process in three[:failing] + three[failing + 1 :]:
        assert process.heard.wait(10)
        assert process.news == [(failing, "failed: boom")]
    assert three[failing].news == []


def test_a_process_that_ends_without_a_word_is_named_to_all(three):
    three[1].connections._over = True
    three[1].connections._connections[0].shutdown(socket.SHUT_RDWR)
    for process in (three[0], three[2]):
        assert process.heard.wait(10)
        ((who, message),) = process.news
        assert who == 1
        assert message.startswith("ended without an error message")


def test_a_process_that_has_come_to_the_end_may_go(three, pool):
    going = pool.submit(three[1].connections.leave, 0.5)
    with three[0].connections._changed:
        assert three[0].connections._changed.wait_for(lambda: 1 in three[0].connections._left, 10)
    three[1].connections._connections[0].shutdown(socket.SHUT_RDWR)
    staying = pool.submit(three[2].connections.leave, 10)
    three[0].connections.leave(10)
    staying.result(10)
    assert [three[0].news, three[2].news] == [[], []]
    assert isinstance(going.exception(10), TimeoutError)


@pytest.mark.parametrize(
    ("waits", "text"),
    [(0, "processes 1, 2 had not finished 0.1 s after process 0"), (1, "process 0 had not finished 0.1 s")],
)
def test_those_that_do_not_come_to_the_end_are_named(three, waits, text):
    with pytest.raises(TimeoutError, match=text):
        three[waits].connections.leave(0.1)


def test_the_others_hear_who_is_missing(address, pool):
    calling = pool.submit(accept_processes, address, 3, 1.0)
    with pytest.raises(TimeoutError, match="process 2 of 3 did not connect"):
        connect_to_main(address, 3, 1, 10)
    with pytest.raises(TimeoutError, match="process 2 of 3 did not connect"):
        calling.result(10)


def test_the_least_patient_process_decides(address, pool):
    calling = pool.submit(accept_processes, address, 3, 60)
    with pytest.raises(TimeoutError, match="process 2 of 3 did not connect"):
        connect_to_main(address, 3, 1, 0.5)
    with pytest.raises(TimeoutError, match="process 2 of 3"):
        calling.result(10)


@pytest.mark.parametrize(
    ("num_processes", "process_id", "message"),
    [
        (3, 1, "two have the id 1; start each process once"),
        (3, 0, "two have the id 0; start each process once"),
        (2, 2, "process 0 has 3, process 2 has 2; start all with the same"),
    ],
)
def test_processes_that_do_not_belong_together_all_hear_why(
    address, pool, monkeypatch, num_processes, process_id, message
):
    connected = _counted(monkeypatch, "_connect")
    calling = pool.submit(accept_processes, address, 3, 10)
    first = pool.submit(connect_to_main, address, 3, 1, 10)
    assert connected.acquire(timeout=10)
    with pytest.raises(TimeoutError):
        first.result(0.2)
    second = pool.submit(connect_to_main, address, num_processes, process_id, 10)
    for each in (calling, first, second):
        with pytest.raises(ValueError, match=message):
            each.result(10)


def test_one_that_has_not_been_listened_to_yet_hears_why_too(address, pool, monkeypatch):
    connected, both = _counted(monkeypatch, "_connect"), threading.Event()
    accept = rendezvous._accept
    monkeypatch.setattr(rendezvous, "_accept", lambda *given: (both.wait(10), accept(*given))[1])
    calling = pool.submit(accept_processes, address, 3, 10)
    wrong = pool.submit(connect_to_main, address, 3, 0, 10)
    assert connected.acquire(timeout=10)
    waiting = pool.submit(connect_to_main, address, 3, 1, 10)
    assert connected.acquire(timeout=10)
    both.set()
    for each in (calling, wrong, waiting):
        with pytest.raises(ValueError, match="two have the id 0"):
            each.result(10)


def _counted(monkeypatch, name):
    """Can be acquired once for each call of the function that has returned."""
    function, returned = getattr(rendezvous, name), threading.Semaphore(0)

    def counting(*arguments):
        result = function(*arguments)
        returned.release()
        return result

    monkeypatch.setattr(rendezvous, name, counting)
    return returned


def test_a_process_id_that_is_too_high_is_told_to_all(address, pool):
    calling = pool.submit(accept_processes, address, 2, 10)
    for each in (pool.submit(connect_to_main, address, 2, 7, 10), calling):
        with pytest.raises(ValueError, match="below the number of processes, 2; one process has the id 7"):
            each.result(10)


def connected(address):
    """A connection to process 0, and the challenge that it sends."""
    host, port = address.split(":")
    while True:
        try:
            stranger = socket.create_connection((host, int(port)), timeout=10)
            return stranger, process_messages.receive(stranger)["challenge"]
        except ConnectionRefusedError:
            continue


def framed(content):
    return len(content).to_bytes(4) + content


HELLO = {"process_id": 1, "num_processes": 2, "timeout_s": 10.0, "challenge": "c"}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        b"\0\0",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff{}",
        framed(b"[1,2]"),
        framed(b"{}"),
        framed(b"\xff\xfe"),
        framed(b"[" * 60_000),
        framed(b'{"timeout_s": ' + b"9" * 10_000 + b"}"),
        {"timeout_s": "x"},
        {"timeout_s": None},
        {"timeout_s": True},
        {"timeout_s": math.nan},
        {"timeout_s": math.inf},
        {"timeout_s": -1},
        {"timeout_s": 0},
        {"timeout_s": 10**400},
        {"process_id": "1"},
        {"process_id": 1.0},
        {"process_id": True},
        {"process_id": -1},
        {"process_id": [1]},
        {"num_processes": "2"},
        {"num_processes": None},
        {"challenge": 1},
        {"more": 1},
        {"proof": None},
        {"proof": "0" * 64},
        {"proof": "\ud800é"},
        {"proof": 1},
        "without proof",
        "another token",
        "another challenge",
    ],
    ids=lambda sent: str(sent)[:40],
)
def test_a_connection_of_another_form_is_refused_and_logged(address, pool, sent, caplog):
    calling = pool.submit(accept_processes, address, 2, 20, "the token")
    stranger, challenge = connected(address)
    with stranger:
        if not isinstance(sent, bytes):
            hello = {**HELLO, **(sent if isinstance(sent, dict) else {})}
            token = "another" if sent == "another token" else "the token"
            challenge = "0" if sent == "another challenge" else challenge
            proof = process_messages.proof(token, "process", challenge, hello)
            hello = hello if sent == "without proof" else {"proof": proof, **hello}
            sent = framed(json.dumps(hello).encode())
        with contextlib.suppress(OSError):  # it may be refused before all is sent
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    with connect_to_main(address, 2, 1, 10, "the token"):
        connections = calling.result(10)
        assert connections.keys() == {1}
        connections[1].close()
    assert "a connection to process 0 from 127.0.0.1 was refused: it sent " in caplog.text


def test_one_that_sends_slowly_does_not_hold_up_the_others(address, pool, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "ATTEMPT_TIMEOUT_S", 0.3)
    calling = pool.submit(accept_processes, address, 2, 10)
    stranger, _ = connected(address)
    process = pool.submit(connect_to_main, address, 2, 1, 10)
    with stranger, contextlib.suppress(OSError):
        for byte in framed(b" " * 50):
            stranger.sendall(bytes([byte]))
            time.sleep(0.1)
    for connection in (process.result(10), calling.result(10)[1]):
        connection.close()
    assert "was refused: it timed out" in caplog.text


@pytest.mark.parametrize(("main", "process"), [("a", "b"), ("a", ""), ("", "b")])
def test_processes_with_another_token_are_no_part_of_the_run(address, pool, main, process):
    calling = pool.submit(accept_processes, address, 2, 10, main)
    with pytest.raises(TimeoutError, match="has the same QUATRAIN_CLUSTER_TOKEN; set it to the same value"):
        connect_to_main(address, 2, 1, 10, process)
    with connect_to_main(address, 2, 1, 10, main):
        calling.result(10)[1].close()


@pytest.mark.parametrize(
    "answer",
    [{"go": True}, {"go": True, "proof": "0" * 64}, {"late": 1}, {"wrong": "x", "proof": None}, {"go": 1}],
)
def test_a_process_goes_only_on_with_a_process_0_that_knows_the_token(address, pool, answer):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:

        def pretend():
            connection, _ = server.accept()
            with connection:
                process_messages.send({"challenge": "c"}, connection)
                hello = process_messages.receive(connection)
                proof = process_messages.proof("a", "main", hello["challenge"], answer)
                process_messages.send({"proof": proof, **answer} if "late" in answer else answer, connection)

        pool.submit(pretend)
        with pytest.raises(TimeoutError, match="no starting process 0 answered"):
            connect_to_main(address, 2, 1, 2, "a")


@pytest.mark.parametrize(
    "message",
    [
        {"stop": "x"},
        {"stop": 999},
        {"stop": True},
        {"passed": "x"},
        {"passed": -1},
        {"last": None},
        {"failed": 1, "process": 1},
        {"failed": "x", "process": "1"},
        {"failed": "x"},
        {"done": 1},
        {"hello": 1},
        {},
        [1],
        "text",
    ],
    ids=str,
)
def test_a_message_of_another_form_is_ignored_and_logged(three, pool, message, caplog):
    content = json.dumps(message).encode()
    three[1].connections._connections[0].sendall(framed(content))
    three[0].connections._connections[2].sendall(framed(content))
    leaving = list(pool.map(lambda process: process.connections.leave(10), three))
    assert leaving == [None, None, None]
    assert [process.news for process in three] == [[], [], []]
    for sender in (0, 1):
        assert f"process {sender} sent a message of an unknown form, which is ignored" in caplog.text


def test_a_message_of_an_impossible_length_is_the_failure_of_its_process(three):
    three[1].connections._over = True
    three[1].connections._connections[0].sendall(b"\xff" * 8)
    assert three[2].heard.wait(10)
    assert three[2].news == [
        (1, "lost its connection: sent a message of 4294967295 bytes; one has 1 to 65536")
    ]


def test_process_0_listens_on_the_address_of_the_coordinator_alone(pool, address):
    port = address.split(":")[1]
    calling = pool.submit(accept_processes, f"127.0.0.2:{port}", 2, 10)
    connected(f"127.0.0.2:{port}")[0].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), timeout=10)
    with connect_to_main(f"127.0.0.2:{port}", 2, 1, 10):
        calling.result(10)[1].close()


@pytest.mark.parametrize(
    ("host", "found", "listens"),
    [
        ("127.0.0.2", None, "127.0.0.2"),
        ("localhost", None, "localhost"),
        ("[::1]", None, "[::1]"),
        ("10.0.0.2", "10.0.0.2", "10.0.0.2"),
        ("node1", "10.0.0.7", "10.0.0.7"),
        ("node1", "fd00::7", "[fd00::7]"),
        ("127.example.com", "10.0.0.8", "10.0.0.8"),
        ("debian", "127.0.1.1", "[::]"),
    ],
)
def test_the_address_that_a_coordinators_name_means(monkeypatch, host, found, listens):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: [(0, 0, 0, "", (found, 5))])
    assert rendezvous.bind_address(f"{host}:5") == f"{listens}:5"


def test_an_address_of_another_host_is_named(address):
    port = address.split(":")[1]
    with pytest.raises(
        OSError, match=rf"listen on 203\.0\.113\.77, port {port} .*; give an address of the host"
    ):
        accept_processes(f"203.0.113.77:{port}", 2, 1, "token")
    with pytest.raises(OSError, match=r"listen on no-host\.invalid, port .* and cannot: "):
        accept_processes(f"no-host.invalid:{port}", 2, 1, "token")


def test_a_run_that_is_under_way_is_no_coordinator(address, pool):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:

        def greet():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\0\0\x12\4\0\0\0\0\0")

        pool.submit(greet)
        with pytest.raises(TimeoutError, match="no starting process 0 answered"):
            connect_to_main(address, 2, 1, 2)
