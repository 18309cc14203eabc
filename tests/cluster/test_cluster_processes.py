import json
import math
import socket
import time

import jax
import numpy as np
import pytest

from quatrain.cluster import processes as hosts
from quatrain.cluster.processes import (
    abandon,
    assert_same,
    decided_by_main,
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


def test_over_a_network_processes_need_a_token(monkeypatch):
    monkeypatch.delenv("QUATRAIN_CLUSTER_TOKEN", raising=False)
    for process in (0, 1):
        with pytest.raises(
            ValueError, match=r"10\.0\.0\.2:8476 is not .* QUATRAIN_CLUSTER_TOKEN is not set; set"
        ):
            initialize("10.0.0.2:8476", 2, process)


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
    """The collectives as two processes see them: this one, and another before it that gives `other`."""

    def __init__(self, monkeypatch, other):
        monkeypatch.setattr(hosts, "joined", lambda: True)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(hosts.multihost_utils, "process_allgather", self.gather)
        monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", self.broadcast)
        self.other, self.begun, self.lengths = other, None, []

    def gather(self, mine):
        """Rows in another order than that of the processes."""
        return np.stack([mine, self.theirs(mine.nbytes, [0, len(self.other)])])

    def broadcast(self, mine):
        assert not mine.any()
        return self.theirs(mine.nbytes, [len(self.other)])

    def theirs(self, num_bytes, head):
        if self.begun is None:
            self.begun = 0
            return np.array(head, np.uint64).view(np.uint32)
        piece = self.other[self.begun : self.begun + num_bytes]
        self.begun += num_bytes
        self.lengths.append(num_bytes)
        return np.frombuffer(piece.ljust(num_bytes, b"\0"), np.uint32)


@pytest.mark.parametrize(("most", "lengths"), [(1 << 26, [1024]), (512, [256] * 3)])
def test_objects_come_in_the_order_of_processes_whatever_that_of_devices(monkeypatch, most, lengths):
    monkeypatch.setattr(hosts, "MOST_BYTES", most)
    two = Two(monkeypatch, b'{"text": "' + b"x" * 600 + b'"}')
    assert gather_objects("é") == [{"text": "x" * 600}, "é"]
    assert two.lengths == lengths


def test_a_decision_comes_in_pieces_that_do_not_depend_on_the_number_of_processes(monkeypatch):
    monkeypatch.setattr(hosts, "MOST_BYTES", 512)
    two = Two(monkeypatch, json.dumps(["x" * 1400, -0.0, 2**70, True, None]).encode())
    decided = decided_by_main(lambda: pytest.fail("the main process alone decides"))
    assert decided == ["x" * 1400, 0.0, 2**70, True, None]
    assert math.copysign(1, decided[1]) == -1
    assert two.lengths == [512, 512, 512]


@pytest.mark.parametrize("size", [0, 1, 2**31 - 1, 2**31, 2**32, 2**33 + 12345, 2**63])
def test_sizes_are_exchanged_in_64_bits(size):
    words = hosts._words_of(7, size)
    assert words.dtype == np.uint32
    assert hosts._numbers_in(words) == [7, size]


def test_pieces_of_more_than_2_gib_cover_all_bytes():
    size, most = 2**31 + 5, 1 << 26
    pieces = list(hosts._pieces(size, most))
    assert [begin for begin, _ in pieces] == [i * most for i in range(33)]
    assert {length for _, length in pieces} == {most, hosts.LEAST_BYTES}
    assert list(hosts._pieces(0, most)) == []
    assert list(hosts._pieces(1000, 700)) == [(0, 512), (512, 512)]
    assert list(hosts._pieces(300, 1)) == [(0, 256), (256, 256)]


def test_different_values_are_named_with_their_processes(monkeypatch):
    Two(monkeypatch, b'{"seed": 1, "run.name": "a", "extra": null}')
    with pytest.raises(ValueError, match="all processes need the same configuration") as error:
        assert_same("configuration", {"seed": 2, "run.name": "a", "stop": ["#" * 200]})
    assert str(error.value) == (
        "all processes need the same configuration: extra is null in process 0, missing in process 1; "
        "seed is 1 in process 0, 2 in process 1; "
        f'stop is missing in process 0, ["{"#" * 77}… in process 1; start all with the same'
    )


def test_equal_values_are_the_same(monkeypatch):
    Two(monkeypatch, b'{"stop": ["a"], "top_p": 0.5}')
    assert_same("configuration", {"top_p": 0.5, "stop": ["a"]})


def test_an_error_waits_for_news_only_with_others(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    hosts.wait_for_failure_message()
    assert slept == []
