"""The line between process 0 and the others, its processes being threads here."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quatrain.cluster import roll_call
from quatrain.cluster.roll_call import Lines, answer_roll, call_roll


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
    """One end of the lines, which notes what it hears of the others."""

    def __init__(self, process_id, lines):
        self.news, self.heard = [], threading.Event()
        self.lines = Lines(process_id, lines, self.note, silence_s=60)

    def note(self, process, message):
        self.news.append((process, message))
        for line in self.lines._lines.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # as at the end of a process
        self.heard.set()


@pytest.fixture
def three(address, pool):
    others = [pool.submit(answer_roll, address, 3, i, 10) for i in (1, 2)]
    processes = [Process(0, call_roll(address, 3, 10))]
    processes += [Process(i, {0: other.result(10)}) for i, other in enumerate(others, start=1)]
    yield processes
    for process in processes:
        process.lines.close()


def test_all_leave_together(three, pool):
    first = [pool.submit(process.lines.leave, 10) for process in three[:2]]
    assert not any(leaving.done() for leaving in first)
    three[2].lines.leave(10)
    assert [leaving.result(10) for leaving in first] == [None, None]
    assert [process.news for process in three] == [[], [], []]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_reaches_all_others(three, failing):
    three[failing].lines.fail("failed: boom")
    three[failing].lines.close()
    for process in three[:failing] + three[failing + 1 :]:
        assert process.heard.wait(10)
        assert process.news == [(failing, "failed: boom")]
    assert three[failing].news == []


def test_a_process_that_ends_without_a_word_is_named_to_all(three):
    three[1].lines._over = True
    three[1].lines._lines[0].shutdown(socket.SHUT_RDWR)
    for process in (three[0], three[2]):
        assert process.heard.wait(10)
        ((who, message),) = process.news
        assert who == 1
        assert message.startswith("ended without a word")


def test_a_process_that_has_come_to_the_end_may_go(three, pool):
    going = pool.submit(three[1].lines.leave, 0.5)
    with three[0].lines._changed:
        assert three[0].lines._changed.wait_for(lambda: 1 in three[0].lines._left, 10)
    three[1].lines._lines[0].shutdown(socket.SHUT_RDWR)
    staying = pool.submit(three[2].lines.leave, 10)
    three[0].lines.leave(10)
    staying.result(10)
    assert [three[0].news, three[2].news] == [[], []]
    assert isinstance(going.exception(10), TimeoutError)


@pytest.mark.parametrize(
    ("waits", "text"),
    [(0, "processes 1, 2 had not finished 0.1 s after process 0"), (1, "process 0 had not finished 0.1 s")],
)
def test_those_that_do_not_come_to_the_end_are_named(three, waits, text):
    with pytest.raises(TimeoutError, match=text):
        three[waits].lines.leave(0.1)


def test_the_others_hear_who_is_missing(address, pool):
    calling = pool.submit(call_roll, address, 3, 1.0)
    with pytest.raises(TimeoutError, match="process 2 of 3 did not arrive"):
        answer_roll(address, 3, 1, 10)
    with pytest.raises(TimeoutError, match="process 2 of 3 did not arrive"):
        calling.result(10)


def test_the_least_patient_process_decides(address, pool):
    calling = pool.submit(call_roll, address, 3, 60)
    with pytest.raises(TimeoutError, match="process 2 of 3 did not arrive"):
        answer_roll(address, 3, 1, 0.5)
    with pytest.raises(TimeoutError, match="process 2 of 3"):
        calling.result(10)


@pytest.mark.parametrize(
    ("num_processes", "process_id", "message"),
    [
        (3, 1, "two came as process 1; start each once"),
        (3, 0, "two came as process 0; start each once"),
        (2, 2, "process 0 was with 3, process 2 with 2; start all with the same"),
    ],
)
def test_processes_that_do_not_belong_together_all_hear_why(
    address, pool, monkeypatch, num_processes, process_id, message
):
    connected = _counted(monkeypatch, "_connect")
    calling = pool.submit(call_roll, address, 3, 10)
    first = pool.submit(answer_roll, address, 3, 1, 10)
    assert connected.acquire(timeout=10)
    with pytest.raises(TimeoutError):
        first.result(0.2)
    second = pool.submit(answer_roll, address, num_processes, process_id, 10)
    for each in (calling, first, second):
        with pytest.raises(ValueError, match=message):
            each.result(10)


def test_one_that_has_not_been_listened_to_yet_hears_why_too(address, pool, monkeypatch):
    connected, both = _counted(monkeypatch, "_connect"), threading.Event()
    accept = roll_call._accept
    monkeypatch.setattr(roll_call, "_accept", lambda server: (both.wait(10), accept(server))[1])
    calling = pool.submit(call_roll, address, 3, 10)
    wrong = pool.submit(answer_roll, address, 3, 0, 10)
    assert connected.acquire(timeout=10)
    waiting = pool.submit(answer_roll, address, 3, 1, 10)
    assert connected.acquire(timeout=10)
    both.set()
    for each in (calling, wrong, waiting):
        with pytest.raises(ValueError, match="two came as process 0"):
            each.result(10)


def _counted(monkeypatch, name):
    """Can be acquired once for each call of the function that has returned."""
    function, returned = getattr(roll_call, name), threading.Semaphore(0)

    def counting(*arguments):
        result = function(*arguments)
        returned.release()
        return result

    monkeypatch.setattr(roll_call, name, counting)
    return returned


def test_a_stranger_is_ignored(address, pool):
    calling = pool.submit(call_roll, address, 2, 10)
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
    with answer_roll(address, 2, 1, 10):
        lines = calling.result(10)
        assert lines.keys() == {1}
        lines[1].close()


def test_a_run_that_is_under_way_is_no_coordinator(address, pool):
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server:

        def greet():
            line, _ = server.accept()
            with line:
                line.sendall(b"\0\0\x12\4\0\0\0\0\0")

        pool.submit(greet)
        with pytest.raises(TimeoutError, match="no process 0 that is starting answers there"):
            answer_roll(address, 2, 1, 2)
