import socket
import time

import jax
import numpy as np
import pytest

from quatrain.cluster import processes as hosts
from quatrain.cluster.processes import (
    abandon,
    assert_same,
    gather_objects,
    initialize,
    is_main_process,
    joined,
    num_processes,
    shutdown,
)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.setattr(hosts, "detect", lambda environ: None)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_single_process_is_the_main_one():
    assert is_main_process()
    assert num_processes() == 1


def test_only_process_0_is_the_main_one(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert not is_main_process()


def test_one_process_stays_alone():
    initialize()
    initialize("127.0.0.1:1", 1, 0)
    assert not joined()
    shutdown()
    abandon("nobody hears it")
    assert gather_objects({"a": [1, None]}) == [{"a": [1, None]}]
    assert_same("configuration", {"seed": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h:1", None, None), r"must be given together; got only --coordinator h:1; give all three, or none"),
        (("h:1", 2, None), r"got only --coordinator h:1 and --num-processes 2;"),
        ((None, None, 0), r"got only --process-id 0;"),
        (("h", 2, 0), r"a coordinator's address must be HOST:PORT, such as 10\.0\.0\.2:8476; got 'h';"),
        (("h:0", 2, 0), r"HOST:PORT.*got 'h:0'"),
        (("h:x", 2, 0), r"HOST:PORT.*got 'h:x'"),
        ((":8476", 2, 0), r"HOST:PORT.*got ':8476'"),
        (("h:1", 0, 0), r"got --num-processes 0 and --process-id 0; give each process its own id"),
        (("h:1", 2, 2), r"got --num-processes 2 and --process-id 2;"),
        (("h:1", 2, -1), r"got --num-processes 2 and --process-id -1;"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize(*arguments)


def test_a_coordinator_that_is_not_reached_is_named(port):
    with pytest.raises(TimeoutError) as error:
        initialize(f"127.0.0.1:{port}", 2, 1, start_timeout_s=1)
    assert str(error.value) == (
        f"process 1 could not reach the coordinator at 127.0.0.1:{port} within 1 s (Connection refused); "
        "start process 0 on that host, open the port in its firewall, or raise distributed.start_timeout_s"
    )


def test_a_process_that_does_not_arrive_is_named(port):
    with pytest.raises(TimeoutError) as error:
        initialize(f"127.0.0.1:{port}", 3, 0, start_timeout_s=1)
    assert str(error.value) == (
        f"processes 1, 2 of 3 did not connect to 127.0.0.1:{port} within 1 s; check the output of "
        "these processes, or raise distributed.start_timeout_s"
    )
    assert not joined()


def test_a_port_in_use_is_named(port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(OSError, match=f"port {port} for the other processes, and cannot"),
    ):
        initialize(f"127.0.0.1:{port}", 2, 0, start_timeout_s=1)


class Two:
    """`process_allgather` as two processes see it: what this one gives, with another before it."""

    def __init__(self, monkeypatch, other):
        monkeypatch.setattr(hosts, "joined", lambda: True)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        self.rows = iter((other, None))
        monkeypatch.setattr(hosts.multihost_utils, "process_allgather", self.gather)
        self.other = np.frombuffer(other, np.uint8)

    def gather(self, mine):
        if mine.dtype == np.int32:
            return np.stack([mine, np.array([self.other.size], np.int32)])
        assert mine.size == max(mine.size, self.other.size)
        return np.stack([mine, np.pad(self.other, (0, mine.size - self.other.size))])


def test_objects_come_in_the_order_of_processes_whatever_that_of_devices(monkeypatch):
    Two(monkeypatch, b'[0, {"text": "' + b"x" * 100 + b'"}]')
    assert gather_objects("é") == [{"text": "x" * 100}, "é"]


def test_different_values_are_named_with_their_processes(monkeypatch):
    Two(monkeypatch, b'[0, {"seed": 1, "run.name": "a", "extra": null}]')
    with pytest.raises(ValueError, match="all processes need the same configuration") as error:
        assert_same("configuration", {"seed": 2, "run.name": "a", "stop": ["#" * 200]})
    assert str(error.value) == (
        "all processes need the same configuration: extra is null in process 0, missing in process 1; "
        "seed is 1 in process 0, 2 in process 1; "
        f'stop is missing in process 0, ["{"#" * 77}… in process 1; start all with the same'
    )


def test_equal_values_are_the_same(monkeypatch):
    Two(monkeypatch, b'[0, {"stop": ["a"], "top_p": 0.5}]')
    assert_same("configuration", {"top_p": 0.5, "stop": ["a"]})


def test_an_error_waits_for_news_only_with_others(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    hosts.wait_for_failure_message()
    assert slept == []
