"""The thread of the device: turns, order, and whom a failure, a cancellation and an end touch."""

import itertools
import random
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future, wait

import pytest
from jax.errors import JaxRuntimeError

from quatrain.serve.tinker.calls import Refused
from quatrain.serve.tinker.worker import Worker
from quatrain.types.sampler import ServiceFailed

WAIT_S = 60.0


class FakeSamplers:
    """Samplers whose requests, which are numbers, take so many rounds."""

    def __init__(self, log):
        self.log, self.tickets = log, itertools.count()
        self.requests, self.cancelled, self.owners = {}, [], {}

    def key(self, owner):
        self.owners[key := len(self.owners)] = owner
        return key

    @property
    def waiting(self):
        keys = dict.fromkeys(key for key, _, _ in self.requests.values())
        return [(self.owners[key], key) for key in keys]

    def start(self, key, sample, done):
        if isinstance(sample, Exception):
            raise sample
        self.requests[ticket := next(self.tickets)] = [key, sample, done]
        return ticket

    def cancel(self, ticket):
        self.cancelled.append(ticket)
        del self.requests[ticket]

    def round(self, key):
        self.log.append(f"{self.owners[key]}*")
        for ticket, request in list(self.requests.items()):
            if request[0] != key:
                continue
            if request[1] == "broken":
                raise MemoryError("no memory on the device")
            request[1] -= 1
            if request[1] == 0:
                del self.requests[ticket]
                request[2](f"of {self.owners[key]}")


class Setting:
    """A worker with fake samplers; `log` has who had a unit. In `held`, it does nothing but wait."""

    def __init__(self):
        self.log = []
        self.samplers = FakeSamplers(self.log)
        self.worker = Worker(self.samplers)
        self.gate = threading.Event()

    def hold(self):
        """Returns once the worker waits in a unit, until `gate` is set."""
        inside = threading.Event()
        self.gate.clear()
        held = self.worker.call("gate", lambda: inside.set() or self.gate.wait(WAIT_S))
        assert inside.wait(WAIT_S)
        return held

    def units(self, owner, count, result=None, on_unit=lambda number: None):
        """A job of so many units."""

        def generator():
            for number in range(count):
                self.log.append(owner)
                on_unit(number)
                if number + 1 < count:
                    yield
            return result

        return generator


@pytest.fixture
def setting():
    made = Setting()
    yield made
    made.gate.set()
    assert made.worker.close(WAIT_S)


def test_owners_take_turns_of_a_unit(setting):
    setting.hold()
    futures = [setting.worker.submit(owner, setting.units(owner, 3, owner)) for owner in "abc"]
    assert [setting.worker.num_waiting(owner) for owner in "abcd"] == [1, 1, 1, 0]
    setting.gate.set()
    assert [future.result(WAIT_S) for future in futures] == ["a", "b", "c"]
    assert "".join(setting.log) == "abcabcabc"


def test_jobs_of_an_owner_run_one_after_the_other(setting):
    setting.hold()
    names = ["a1", "a2", "a3"]
    futures = [setting.worker.submit("a", setting.units(name, 2, name)) for name in names]
    other = setting.worker.submit("b", setting.units("b", 2))
    assert setting.worker.num_waiting("a") == 3
    setting.gate.set()
    assert [future.result(WAIT_S) for future in futures] == names
    other.result(WAIT_S)
    assert setting.log == ["a1", "b", "a1", "b", "a2", "a2", "a3", "a3"]


def test_a_job_of_ten_thousand_units_delays_others_by_one(setting):
    """Whoever comes during a unit has the next one, before the owner of that unit has another."""
    small = []

    def on_unit(number):
        if number % 1000 == 500:
            small.append(setting.worker.submit("small", setting.units(f"small{number}", 1)))

    big = setting.worker.submit("big", setting.units("big", 10_000, on_unit=on_unit))
    big.result(WAIT_S)
    assert len(small) == 10
    assert setting.log.count("big") == 10_000
    for number in range(500, 10_000, 1000):
        at = setting.log.index(f"small{number}")
        assert setting.log[:at].count("big") == number + 1
    assert all(future.done() for future in small)


def test_each_of_eight_owners_has_its_fair_share(setting):
    """However many jobs and samplers it has: while all have work, no two differ by more than a unit."""
    setting.hold()
    futures = []
    for number, owner in enumerate("abcdefgh"):
        for _ in range(number + 1):  # the last has 8 jobs and 8 samplers
            futures.append(setting.worker.submit(owner, setting.units(owner, 40 // (number + 1))))
            futures.append(setting.worker.sample(owner, setting.samplers.key(owner), 5))
    setting.gate.set()
    wait(futures, WAIT_S)
    shares = Counter()
    for unit in setting.log[: 8 * 40]:
        shares[unit[0]] += 1
        assert max(shares.values()) - min(shares[owner] for owner in "abcdefgh") <= 1
    assert len(shares) == 8


def test_jobs_and_samplers_of_an_owner_take_turns(setting):
    """A program that samples while it trains does not wait for the end of either."""
    setting.hold()
    keys = [setting.samplers.key("a"), setting.samplers.key("a")]
    futures = [
        setting.worker.submit("a", setting.units("a", 3)),
        setting.worker.submit("b", setting.units("b", 6)),
    ]
    futures += [setting.worker.sample("a", key, 2) for key in keys]
    assert setting.worker.num_waiting("a") == 3
    setting.gate.set()
    assert [future.result(WAIT_S) for future in futures] == [None, None, "of a", "of a"]
    assert setting.log == ["a", "b", "a*", "b", "a*", "b", "a", "b", "a*", "b", "a*", "b", "a"]


def test_a_unit_ends_once_what_it_yields_is_computed(setting):
    """JAX returns before: a job would queue all its units, and others wait for them; errors come then too."""

    class Lazy:
        def block_until_ready(self):
            setting.log.append("a is computed")

    class Broken:
        def block_until_ready(self):
            raise RuntimeError("out of memory")

    def units(array):
        def generator():
            for _ in range(2):
                setting.log.append("a begins")
                try:
                    yield {"sums": array()}
                except RuntimeError as error:
                    raise RuntimeError(f"void: {error}") from error

        return generator

    setting.hold()
    futures = [setting.worker.submit("a", units(Lazy)), setting.worker.submit("b", setting.units("b", 2))]
    broken = setting.worker.submit("a", units(Broken))
    setting.gate.set()
    wait(futures, WAIT_S)
    assert setting.log[:6] == ["a begins", "a is computed", "b", "a begins", "a is computed", "b"]
    with pytest.raises(RuntimeError, match="void: out of memory"):
        broken.result(WAIT_S)


def test_all_units_run_in_one_thread(setting):
    threads = set()
    ran = [lambda number: threads.add(threading.get_ident())]
    futures = [setting.worker.submit(owner, setting.units(owner, 3, on_unit=ran[0])) for owner in "ab"]
    futures.append(setting.worker.call("c", lambda: threads.add(threading.get_ident())))
    wait(futures, WAIT_S)
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_the_error_of_a_job_is_its_own(setting):
    """Raised in a unit, by the maker of the units, by a call, or as a request to a sampler starts."""

    def fails(number):
        if number == 1:
            raise RuntimeError("broken")

    def no_units():
        raise Refused("no such model")

    def scarce():
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

    setting.hold()
    key = setting.samplers.key("a")
    failing = [
        setting.worker.submit("a", setting.units("a", 3, on_unit=fails)),
        setting.worker.submit("a", no_units),
        setting.worker.call("a", lambda: 1 / 0),
        setting.worker.sample("a", key, Refused("too long")),
        setting.worker.submit("a", scarce),
    ]
    good = [
        setting.worker.call("a", lambda: "next"),
        setting.worker.sample("a", key, 3),
        setting.worker.submit("b", setting.units("b", 9, "others")),
    ]
    setting.gate.set()
    errors = [
        (RuntimeError, "broken"),
        (Refused, "model"),
        (ZeroDivisionError, "division"),
        (Refused, "too long"),
        (JaxRuntimeError, "allocate"),
    ]
    for future, (kind, message) in zip(failing, errors, strict=True):
        with pytest.raises(kind, match=message):
            future.result(WAIT_S)
    assert [future.result(WAIT_S) for future in good] == ["next", "of a", "others"]
    assert setting.worker.error is None
    assert setting.log.count("a") == 2


def test_a_failure_of_the_device_is_told_to_all(setting, caplog):
    """To jobs that run and wait, samples that run and wait, and all that comes; jobs end as on close."""
    closed = []

    def runs():
        try:
            yield
            yield
        finally:
            closed.append("job")

    setting.hold()
    futures = [
        setting.worker.submit("a", runs),
        setting.worker.submit("a", setting.units("a", 1)),
        setting.worker.sample("b", setting.samplers.key("b"), 99),
        setting.worker.sample("c", setting.samplers.key("c"), "broken"),
    ]
    setting.gate.set()
    wait(futures, WAIT_S)
    futures += [
        setting.worker.submit("d", runs),
        setting.worker.sample("b", 0, 1),
        setting.worker.call("e", dict),
    ]
    for future in futures:
        with pytest.raises(ServiceFailed, match="the device failed: MemoryError: no memory on the device"):
            future.result(0)
    assert "MemoryError" in setting.worker.error
    assert closed == ["job"]
    assert caplog.records[0].exc_info
    assert setting.worker.close(WAIT_S)
    assert [setting.worker.num_waiting(owner) for owner in "abcde"] == [0] * 5


def test_a_job_that_finds_the_device_failed_ends_the_worker(setting):
    """Catches a server that says it is well although each further unit fails as this one."""

    def fails(number):
        if number == 1:
            raise JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access")

    setting.hold()
    found = setting.worker.submit("a", setting.units("a", 3, on_unit=fails))
    after = setting.worker.submit("a", setting.units("a", 1))
    setting.gate.set()
    with pytest.raises(JaxRuntimeError, match="ILLEGAL"):
        found.result(WAIT_S)
    with pytest.raises(ServiceFailed, match="the device failed: JaxRuntimeError: INTERNAL"):
        after.result(WAIT_S)
    assert setting.worker.close(WAIT_S)
    assert "ILLEGAL" in setting.worker.error


def test_closing_ends_after_the_unit_that_runs(setting):
    closed = []

    def runs():
        try:
            yield setting.gate.wait(WAIT_S)
            setting.log.append("a unit too many")
        finally:
            closed.append("job")

    futures = [
        setting.worker.submit("a", runs),
        setting.worker.submit("a", setting.units("a", 1)),
        setting.worker.sample("b", setting.samplers.key("b"), 9),
    ]
    while setting.worker.num_waiting("a") == 2 and not futures[0].running():
        time.sleep(0.001)
    assert not setting.worker.close(0.05)
    late = setting.worker.call("c", lambda: setting.log.append("late"))
    setting.gate.set()
    assert setting.worker.close(WAIT_S)
    for future in (*futures, late):
        with pytest.raises(ServiceFailed, match="closed"):
            future.result(0)
    assert closed == ["job"]
    assert "a unit too many" not in setting.log
    assert "late" not in setting.log
    assert setting.worker.error == "the server was closed before this was done"


def test_a_worker_may_be_closed_by_its_own_thread():
    worker = Worker(FakeSamplers([]))
    assert worker.call("a", worker.close).result(WAIT_S) is False
    assert worker.close(WAIT_S)


def test_a_request_that_is_cancelled_frees_its_slots(setting):
    """Started: its ticket is cancelled before the next unit. Not started: it never is."""
    key = setting.samplers.key("a")
    started = setting.worker.sample("a", key, 10**9)
    while not setting.samplers.requests:
        time.sleep(0.001)
    setting.hold()
    waits, other = setting.worker.sample("a", key, 10**9), setting.worker.sample("a", key, 2)
    assert started.cancel()
    assert waits.cancel()
    assert setting.worker.num_waiting("a") == 1
    setting.log.clear()
    setting.gate.set()
    assert other.result(WAIT_S) == "of a"
    assert setting.samplers.cancelled == [0]
    assert not setting.samplers.requests
    assert setting.log == ["a*", "a*"]
    assert next(setting.samplers.tickets) == 2
    assert not setting.worker._sampling
    assert not other.cancel()


def test_an_outcome_after_the_cancellation_is_dropped(setting):
    """A round may end what was cancelled during it; the thread must not fail by it."""
    key, inside, last = setting.samplers.key("a"), threading.Event(), threading.Event()
    round_ = setting.samplers.round

    def slow(key):
        inside.set()
        assert last.wait(WAIT_S)
        round_(key)

    setting.samplers.round = slow
    future = setting.worker.sample("a", key, 1)
    assert inside.wait(WAIT_S)
    assert future.cancel()
    last.set()
    assert setting.worker.call("b", lambda: "goes on").result(WAIT_S) == "goes on"
    assert setting.samplers.cancelled == []
    assert setting.worker.error is None


def test_a_job_that_is_cancelled_before_it_begins_never_does(setting):
    setting.hold()
    futures = [setting.worker.submit("a", setting.units(f"a{number}", 1)) for number in range(3)]
    assert futures[1].cancel()
    setting.gate.set()
    wait([futures[0], futures[2]], WAIT_S)
    assert setting.worker.close(WAIT_S)
    assert setting.log == ["a0", "a2"]
    assert setting.worker.num_waiting("a") == 0


def test_what_a_session_leaves_behind_is_dropped(setting):
    """Its job ends between two units; what waits is cancelled; what comes after, and others', is done."""
    closed, inside = [], threading.Event()

    def runs():
        try:
            inside.set()
            yield setting.gate.wait(WAIT_S)
            setting.log.append("a unit too many")
        finally:
            closed.append("job")

    key, others_key = setting.samplers.key("a"), setting.samplers.key("b")
    running = setting.worker.submit("a", runs)
    assert inside.wait(WAIT_S)
    waits = setting.worker.submit("a", setting.units("a", 1))
    sample = setting.worker.sample("a", key, 10**9)
    others = [
        setting.worker.submit("b", setting.units("b", 2, "b")),
        setting.worker.sample("b", others_key, 2),
    ]
    setting.worker.forget("a")
    clean_up = setting.worker.call("a", lambda: "closed its models")
    setting.gate.set()
    assert clean_up.result(WAIT_S) == "closed its models"
    assert [future.result(WAIT_S) for future in others] == ["b", "of b"]
    with pytest.raises(Refused, match="the session has ended"):
        running.result(WAIT_S)
    assert waits.cancelled()
    assert sample.cancelled()
    assert closed == ["job"]
    assert not {"a", "a*", "a unit too many"} & set(setting.log)
    setting.worker.forget("unknown")
    assert setting.worker.close(WAIT_S)
    assert setting.worker.num_waiting("a") == 0
    assert not setting.worker._open


def test_a_job_that_ends_as_it_is_forgotten_takes_no_other_with_it(setting):
    """What was submitted since is at the same place of its owner's."""
    inside, later = threading.Event(), []

    def last_unit():
        inside.set()
        assert setting.gate.wait(WAIT_S)
        return "ended"

    ends = setting.worker.call("a", last_unit)
    assert inside.wait(WAIT_S)
    setting.worker.forget("a")
    later.append(setting.worker.call("a", lambda: "later"))
    setting.gate.set()
    assert ends.result(WAIT_S) == "ended"
    assert later[0].result(WAIT_S) == "later"


def test_what_is_submitted_after_a_cancellation_is_done_after_it(setting):
    """Also where both come as the thread takes in what came before: here, as it starts a request."""
    key, others, looks = setting.samplers.key("a"), setting.samplers.key("c"), []
    first = setting.worker.sample("a", key, 10**9)
    while not setting.samplers.requests:
        time.sleep(0.001)
    start = setting.samplers.start

    def cancels(*args):
        assert first.cancel()
        looks.append(setting.worker.call("b", lambda: list(setting.samplers.cancelled)))
        return start(*args)

    setting.samplers.start = cancels
    second = setting.worker.sample("c", others, 1)
    assert second.result(WAIT_S) == "of c"
    assert looks[0].result(WAIT_S) == [0]


def test_a_session_that_is_forgotten_while_it_samples_frees_its_slots(setting):
    key = setting.samplers.key("a")
    future = setting.worker.sample("a", key, 10**9)
    while not setting.samplers.requests:
        time.sleep(0.001)
    setting.worker.forget("a")
    assert setting.worker.call("b", lambda: dict(setting.samplers.requests)).result(WAIT_S) == {}
    with pytest.raises(CancelledError):
        future.result(0)


def test_threads_that_submit_cancel_and_forget_at_once_leave_nothing_undone(setting):
    """Every future ends; an owner's jobs run in the order in which they were submitted."""
    ran, futures = {owner: [] for owner in range(4)}, []
    keys = [setting.samplers.key(str(owner)) for owner in range(4)]

    def use(owner):
        random_ = random.Random(owner)
        for number in range(300):
            kind = random_.random()
            units = setting.units(
                "u", random_.randint(1, 4), on_unit=lambda _, at=number: ran[owner].append(at)
            )
            future = (
                setting.worker.sample(str(owner), keys[owner], random_.randint(1, 4))
                if kind < 0.4
                else setting.worker.submit(str(owner), units)
            )
            futures.append(future)
            if random_.random() < 0.2:
                random_.choice(futures[-20:]).cancel()
            if random_.random() < 0.01:
                setting.worker.forget(str(owner))

    threads = [threading.Thread(target=use, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + WAIT_S
    while not all(future.done() for future in futures):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert setting.worker.error is None
    assert all(ran[owner] == sorted(ran[owner]) and len(ran[owner]) > 10 for owner in range(4))
    assert setting.worker.call("end", lambda: len(setting.samplers.requests)).result(WAIT_S) == 0
    assert setting.worker.close(WAIT_S)
    assert not setting.worker._open
    errors = {type(future.exception()) for future in futures if not future.cancelled()}
    assert errors <= {type(None), Refused}


def test_an_outcome_may_come_as_a_request_starts():
    """A sampler that answers at once gives its ticket too late to be used, which must not matter."""
    log = []

    class AtOnce(FakeSamplers):
        def start(self, key, sample, done):
            done("at once")
            return 7

    worker = Worker(AtOnce(log))
    future: Future = worker.sample("a", 0, 1)
    assert future.result(WAIT_S) == "at once"
    assert worker.close(WAIT_S)
