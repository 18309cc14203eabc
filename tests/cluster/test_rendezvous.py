"""The connection between process 0 and the others, its processes being threads here."""

import contextlib
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quatrain.cluster import rendezvous
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
                three[index].connections.agreement.border()
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
    monkeypatch.setattr(rendezvous, "_accept", lambda server: (both.wait(10), accept(server))[1])
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


def test_a_stranger_is_ignored(address, pool):
    calling = pool.submit(accept_processes, address, 2, 10)
    host, port = address.split(":")
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5[1,2]", b"\0\0\0\2{}", b""):
        while True:
            try:
                stranger = socket.create_connection((host, int(port)), timeout=10)
                break
            except ConnectionRefusedError:
                continue
        with stranger:
            stranger.sendall(text)
    with connect_to_main(address, 2, 1, 10):
        connections = calling.result(10)
        assert connections.keys() == {1}
        connections[1].close()


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
