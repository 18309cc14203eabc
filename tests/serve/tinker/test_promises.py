"""Promises: begun once and in order, whatever comes when; kept as said; waited for without threads."""

import asyncio
import random
import threading
import time
from concurrent.futures import CancelledError, Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.serve.tinker.calls import Refused
from quatrain.serve.tinker.promises import JSON_BYTES, Lane, Promises, UnknownPromise, then
from quatrain.types.sampler import ServiceFailed

SOON_S = 5.0
"""Seconds within which what wakes at once has come, on a busy machine; waits are longer."""
LONG_S = 60.0


def done(result):
    future = Future()
    future.set_result(result)
    return future


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def fetched(promises, promise, key="k", timeout_s=0.0):
    return asyncio.run(promises.retrieve(promise.request_id, key, timeout_s))


def told(promises, cursor=0, timeout_s=0.0, owner="s", group="g", retrieved=()):
    """The ids that were completed, with "!" after those that failed, and the next cursor."""
    states, cursor = asyncio.run(promises.completed(owner, group, cursor, timeout_s, retrieved))
    assert all(set(each) == {"state", "request_id"} for each in states)
    return [each["request_id"] + "!" * (each["state"] == "failed") for each in states], cursor


@st.composite
def arrivals(draw):
    """The ids 1 to n in any order, some of them repeated, at any place after their first."""
    ids = draw(st.permutations(range(1, draw(st.integers(1, 12)) + 1)))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(ids) - 1))
        ids.insert(draw(st.integers(at + 1, len(ids))), ids[at])
    return ids


@given(arrivals(), st.sets(st.integers(1, 12)))
def test_requests_begin_in_the_order_of_their_ids(ids, failing):
    """Whatever order they come in, each once, as soon as all before it came; also past one that fails."""
    lane, begun, futures = Lane(), [], {}

    def begin(seq_id, place):
        begun.append(seq_id)
        if seq_id in failing:
            raise Refused(f"no {seq_id}")
        running[seq_id] = Future(), place
        return running[seq_id][0]

    running = {}
    for place, seq_id in enumerate(ids):
        future = lane.offer(seq_id, lambda seq_id=seq_id, place=place: begin(seq_id, place))
        if seq_id not in failing or seq_id not in begun:  # else it may be done, and is not begun again
            assert futures.setdefault(seq_id, future) is future
        come = set(ids[: place + 1])
        complete = next(n for n in range(len(ids) + 1) if n + 1 not in come)
        assert begun == list(range(1, complete + 1))
        assert lane.num_held == len(come) - complete
    for future, place in running.values():
        future.set_result(place)
    for seq_id, future in futures.items():
        if seq_id not in failing:
            assert future.result() == ids.index(seq_id)  # what came first was begun


def test_threads_that_offer_at_once_begin_in_order():
    """A lane that lets go of its lock between the choice of the next and its begin mixes them up."""
    for seed in range(20):
        lane, begun = Lane(), []
        ids = random.Random(seed).sample(range(1, 65), 64)

        def offer(part, lane=lane, begun=begun):
            for seq_id in part:
                lane.offer(seq_id, lambda seq_id=seq_id: begun.append(seq_id) or done(seq_id))

        threads = [threading.Thread(target=offer, args=(ids[n::8],)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert begun == list(range(1, 65))


def test_a_repeated_request_gets_the_first_ones_future_until_that_is_done():
    lane, running, begun = Lane(), Future(), []
    first = lane.offer(1, lambda: begun.append(1) or running)
    held = lane.offer(3, lambda: begun.append(3) or done("c"))
    assert lane.offer(1, lambda: begun.append("again")) is first
    assert lane.offer(3, lambda: begun.append("again")) is held
    running.set_result("a")
    assert first.result() == "a"
    for late in (1, 0, -1):
        with pytest.raises(Refused, match=f"1, 2, 3, …, each once; got {late}, where 2 is next"):
            lane.offer(late, lambda: begun.append("again")).result(0)
    assert begun == [1]


def test_a_request_of_a_model_cannot_be_cancelled():
    """What comes after it was computed for a model that has had it: its place can't become empty."""
    lane, running = Lane(), Future()
    future, held = lane.offer(1, lambda: running), lane.offer(3, lambda: done(3))
    assert not future.cancel()
    assert not held.cancel()
    running.cancel()  # its session was forgotten
    with pytest.raises(CancelledError):
        future.result(0)


def test_a_closed_lane_fails_what_it_holds_and_what_comes():
    lane, running = Lane(), Future()
    first, held = lane.offer(1, lambda: running), lane.offer(3, lambda: done(3))
    lane.close("the session has ended")
    for future in (held, lane.offer(2, lambda: done(2)), lane.offer(3, lambda: done(3))):
        with pytest.raises(Refused, match="the session has ended"):
            future.result(0)
    assert lane.num_held == 0
    running.set_result("still")  # what has begun goes on
    assert first.result(0) == "still"


def test_then_passes_on_results_errors_and_cancellation():
    assert then(done(3), str).result(0) == "3"
    with pytest.raises(ZeroDivisionError):
        then(done(0), lambda number: 1 / number).result(0)
    inner = Future()
    outer = then(inner, str)
    inner.set_exception(Refused("no"))
    with pytest.raises(Refused, match="no"):
        outer.result(0)
    inner = Future()
    assert then(inner, str).cancel()
    assert inner.cancelled()
    inner = Future()
    outer = then(inner, str)
    inner.cancel()
    with pytest.raises(CancelledError):
        outer.result(0)


def test_a_name_has_one_promise_for_each_key():
    """The same for a repeated request; another key that names the same must not get its result."""
    promises, begun = Promises(), []

    def begin():
        begun.append(1)
        return done(b"x")

    first = promises.begin(("m", 1), "k", begin, owner="s")
    assert promises.begin(("m", 1), "k", begin, owner="s") is first
    assert len(begun) == 1
    others = [
        promises.begin(("m", 2), "k", begin, owner="s"),
        promises.begin(("m", 1), "other", begin, owner="t"),
    ]
    assert len({each.request_id for each in (first, *others)}) == 3 == len(begun)
    assert fetched(promises, first) == b"x"


def test_a_name_that_several_threads_begin_at_once_is_begun_once():
    promises, begun, got = Promises(), [], []
    barrier = threading.Barrier(16)

    def begin():
        begun.append(1)
        time.sleep(0.05)  # the others come while it begins
        return done(b"x")

    def ask():
        barrier.wait()
        got.append(promises.begin("name", "k", begin, owner="s"))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 1
    assert len(set(got)) == 1
    assert fetched(promises, got[0]) == b"x"


@pytest.mark.parametrize(
    ("error", "expected", "logged"),
    [
        (Refused("rank must be 8"), {"error": "rank must be 8", "category": "user"}, False),
        (ValueError("no room"), {"error": "no room", "category": "user"}, False),
        (RuntimeError("bug"), {"error": "RuntimeError: bug", "category": "server"}, True),
        (ServiceFailed("it is down"), {"error": "ServiceFailed: it is down", "category": "server"}, False),
    ],
)
def test_an_error_is_a_failed_promise(error, expected, logged, caplog):
    """Raised as it begins or later; faults of the server are logged with their place, those of users not."""
    promises = Promises()

    def raise_it():
        raise error

    failed = Future()
    failed.set_exception(error)
    for name, begin in enumerate((raise_it, lambda: failed)):
        promise = promises.begin(name, "k", begin, owner="s", group="g")
        assert fetched(promises, promise) == expected
        assert told(promises, cursor=name) == ([promise.request_id + "!"], name + 1)
    assert bool(caplog.records) == logged


def test_a_result_of_another_type_is_a_fault_that_is_told():
    promises = Promises()
    promise = promises.begin("a", "k", lambda: done(["no bytes"]), owner="s")
    assert fetched(promises, promise)["category"] == "server"


def test_unknown_ids_and_those_of_other_keys_look_the_same():
    promises = Promises()
    promise = promises.begin("a", "k", lambda: done(b"x"), owner="s")
    messages = set()
    for request_id, key in ((promise.request_id, "other"), ("f" * 32, "k")):
        for ask in (
            lambda *at: asyncio.run(promises.retrieve(*at, 0)),
            promises.cancel,
        ):
            with pytest.raises(UnknownPromise, match="600 s after") as raised:
                ask(request_id, key)
            messages.add(str(raised.value).replace(request_id, "ID"))
    assert len(messages) == 1


def test_those_who_wait_wake_at_once_without_threads():
    """300 polls of one promise and of its group, in two event loops; none leaves anything behind."""
    promises, running = Promises(), Future()
    promise = promises.begin("a", "k", lambda: running, owner="s", group="g")
    results = []

    async def wait():
        polls = [promises.retrieve(promise.request_id, "k", LONG_S) for _ in range(100)]
        polls += [promises.completed("s", "g", 0, LONG_S) for _ in range(50)]
        results.extend(await asyncio.gather(*polls))

    loops = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(2)]
    num_threads = threading.active_count()
    began = time.monotonic()
    for loop in loops:
        loop.start()
    while len(promise.bell) < 200 or len(promise.group.bell) < 100:
        time.sleep(0.01)
        assert time.monotonic() - began < LONG_S / 2
    assert threading.active_count() <= num_threads + 2
    began = time.monotonic()
    running.set_result(b"x")
    for loop in loops:
        loop.join()
    assert time.monotonic() - began < SOON_S
    assert results.count(b"x") == 200
    assert results.count(([{"state": "finished", "request_id": promise.request_id}], 1)) == 100
    assert not promise.bell
    assert not promise.group.bell


def test_a_poll_ends_after_its_time_and_leaves_nothing_behind():
    """Also where the client has left; what comes later is told to the next poll."""
    promises, running = Promises(), Future()
    promise = promises.begin("a", "k", lambda: running, owner="s", group="g")
    began = time.monotonic()
    assert fetched(promises, promise, timeout_s=0.05) is None
    assert told(promises, timeout_s=0.05) == ([], 0)
    assert time.monotonic() - began >= 0.1

    async def leave():
        polls = [
            asyncio.create_task(promises.retrieve(promise.request_id, "k", LONG_S)),
            asyncio.create_task(promises.completed("s", "g", 0, LONG_S)),
        ]
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        for poll in polls:
            poll.cancel()
        running.set_result({"path": "p"})  # before those who leave have stopped listening
        await asyncio.gather(*polls, return_exceptions=True)

    faults = []
    asyncio.run(leave())
    assert faults == []
    assert not promise.bell
    assert not promise.group.bell
    assert fetched(promises, promise) == {"path": "p"}


def test_a_result_is_kept_for_ten_minutes_after_it_was_last_fetched():
    promises, clock, begun = Promises(clock=(clock := Clock())), clock, []

    def begin():
        begun.append(1)
        return done(b"x" * 10)

    promise = promises.begin("a", "k", begin, owner="s", group="g")
    other = promises.begin("never fetched", "k", begin, owner="s")
    clock.now += 3600
    assert fetched(promises, promise) == b"x" * 10
    clock.now += 599
    assert fetched(promises, promise) == b"x" * 10
    clock.now += 599
    assert promises.begin("a", "k", begin, owner="s") is promise
    clock.now += 2
    with pytest.raises(UnknownPromise):
        fetched(promises, promise)
    assert told(promises) == ([], 1)
    assert promises.num_bytes == 10
    assert fetched(promises, other) == b"x" * 10
    assert promises.begin("a", "k", begin, owner="s") is not promise
    assert len(begun) == 3


def test_each_result_has_a_time_of_its_own():
    """One that is fetched again and again must not keep the others; a name ends with its result."""
    promises = Promises(clock=(clock := Clock()))
    often, once = (promises.begin(n, "k", lambda: done(b"x"), owner="s") for n in (1, 2))
    for promise in (often, once):
        fetched(promises, promise)
    clock.now += 500
    fetched(promises, often)
    clock.now += 101
    assert promises.begin(2, "k", lambda: done(b"y"), owner="s") is not once
    assert promises.begin(1, "k", lambda: done(b"y"), owner="s") is often


def test_results_that_clients_have_go_first_where_room_is_needed():
    """The longest fetched first; what a client may still ask for stays, and the session is told to wait."""
    promises = Promises(most_bytes=100)
    made = [promises.begin(n, "k", lambda: done(b"x" * 30), owner="s", group="g") for n in range(3)]
    for promise in made:
        assert fetched(promises, promise) == b"x" * 30
    assert told(promises, retrieved=[made[1].request_id, "unknown"])[1] == 3
    assert told(promises, 3, retrieved=[made[0].request_id])[1] == 3
    told(promises, owner="another", retrieved=[made[2].request_id])  # which is not its own
    assert all(fetched(promises, each) for each in made)
    assert promises.num_bytes == 90
    assert not promises.is_full("s")
    promises.begin("b", "k", lambda: done(b"x" * 30), owner="s")
    assert promises.num_bytes == 90
    assert not promises.is_full("s")
    with pytest.raises(UnknownPromise):
        fetched(promises, made[1])
    promises.begin("c", "k", lambda: done(b"x" * 60), owner="s")
    with pytest.raises(UnknownPromise):
        fetched(promises, made[0])
    assert fetched(promises, made[2])
    assert promises.num_bytes == 120
    assert promises.is_full("s")


def test_what_was_fetched_a_minute_ago_goes_where_room_is_needed():
    """Training clients do not say what they have: a limit on results would keep them waiting ten minutes."""
    clock = Clock()
    promises = Promises(most_bytes=100, clock=clock)
    made = [promises.begin(n, "k", lambda: done(b"x" * 40), owner="s") for n in range(3)]
    for each in made[:2]:
        fetched(promises, each)
    clock.now += 59
    assert promises.is_full("s")
    fetched(promises, made[1])
    clock.now += 2
    assert not promises.is_full("s")
    assert promises.num_bytes == 80
    assert fetched(promises, made[1])
    assert fetched(promises, made[2])
    clock.now += 61
    assert not promises.is_full("s")
    assert promises.num_bytes == 80


def test_a_session_whose_requests_never_end_does_not_stop_others():
    promises = Promises()
    futures = [Future() for _ in range(4)]
    for number, each in enumerate(futures):
        owner = "hoards" if number < 3 else "other"
        promises.begin(number, "k", lambda each=each: each, owner=owner, body_bytes=10)

    def crowded(*limits):
        return [name for name in ("hoards", "other", "new") if promises.is_crowded(name, *limits)]

    assert crowded(5, 41) == []
    assert crowded(4, 41) == crowded(5, 40) == ["hoards"]
    assert crowded(2, 41) == crowded(5, 20) == ["hoards", "other"]
    futures[0].set_result(b"")
    assert crowded(4, 40) == []
    assert crowded(3, 41) == crowded(5, 30) == ["hoards"]
    promises.forget("hoards")
    assert crowded(2, 11) == []
    assert crowded(1, 11) == crowded(2, 10) == ["other"]


def test_what_runs_cannot_be_acknowledged():
    """A client that names what it can't have must not make a result vanish before it was fetched."""
    promises, running = Promises(most_bytes=10), Future()
    promise = promises.begin("a", "k", lambda: running, owner="s", group="g")
    told(promises, retrieved=[promise.request_id])
    running.set_result(b"x" * 20)
    assert fetched(promises, promise) == b"x" * 20


def test_a_session_that_fetches_nothing_does_not_stop_others():
    promises = Promises(most_bytes=100)
    promises.begin("a", "k", lambda: done(b"x" * 101), owner="hoards")
    assert promises.is_full("hoards")
    assert not promises.is_full("new")
    promises.begin("b", "k", lambda: done(b"x" * 49), owner="other")
    assert promises.is_full("hoards")
    assert not promises.is_full("other")
    promises.begin("c", "k", lambda: done(b"x"), owner="other")  # which has its half now
    assert promises.is_full("other")
    assert not promises.is_full("new")
    last = promises.begin("d", "k", lambda: done(b"x" * 60), owner="new")
    fetched(promises, last)
    told(promises, owner="new", retrieved=[last.request_id])  # it makes room for the others
    assert not promises.is_full("new")
    promises.forget("hoards")
    assert not promises.is_full("other")
    assert promises.num_bytes == 50


def test_json_counts_too():
    promises = Promises()
    promises.begin("a", "k", lambda: done({"path": "p"}), owner="s")
    assert promises.num_bytes == JSON_BYTES


def test_cursors_tell_what_was_completed_since():
    """In the order of completion; again if the answer was lost; not what the cursor says was seen."""
    promises, futures = Promises(), [Future() for _ in range(4)]
    ids = [promises.begin(n, "k", lambda n=n: futures[n], owner="s", group="g").request_id for n in range(4)]
    promises.begin("other", "k", lambda: done(b""), owner="s", group="another")
    promises.begin("none", "k", lambda: done(b""), owner="s")
    assert told(promises) == ([], 0)
    futures[2].set_result(b"x")
    futures[0].set_exception(Refused("no"))
    assert told(promises) == ([ids[2], ids[0] + "!"], 2) == told(promises)
    assert told(promises, cursor=1) == ([ids[0] + "!"], 2)
    futures[3].set_result(b"")
    assert told(promises, cursor=2) == ([ids[3]], 3)
    assert told(promises, cursor=3) == ([], 3)
    futures[1].set_result({"a": 1})
    began = time.monotonic()
    assert told(promises, cursor=3, timeout_s=LONG_S) == ([ids[1]], 4)
    assert time.monotonic() - began < SOON_S  # what is there needs no waiting
    # A cursor that this server never gave is of one before it: nothing must be hidden by it.
    assert told(promises, cursor=17, timeout_s=LONG_S) == ([ids[1]], 4)


def test_cancelling_ends_the_work_and_fails_the_promise():
    promises, running = Promises(), Future()
    promise = promises.begin("a", "k", lambda: running, owner="s", group="g")
    promises.cancel(promise.request_id, "k")
    assert running.cancelled()
    assert promises.num_running == 0
    assert fetched(promises, promise) == {"error": "the request was cancelled", "category": "user"}
    assert told(promises) == ([promise.request_id + "!"], 1)
    finished = promises.begin("b", "k", lambda: done(b"x"), owner="s")
    promises.cancel(finished.request_id, "k")
    assert fetched(promises, finished) == b"x"


def test_what_is_cancelled_while_it_begins_ends_too():
    promises, running = Promises(), Future()

    def begin():
        [promise] = promises._promises.values()
        promises.cancel(promise.request_id, "k")
        return running

    promises.begin("a", "k", begin, owner="s")
    assert running.cancelled()


def test_what_cannot_be_cancelled_is_waited_for_as_before():
    """Else each poll of it would return at once, and the client would ask without end."""
    promises, lane, running = Promises(), Lane(), Future()
    promise = promises.begin("a", "k", lambda: lane.offer(1, lambda: running), owner="s")
    promises.cancel(promise.request_id, "k")
    began = time.monotonic()
    assert fetched(promises, promise, timeout_s=0.1) is None
    assert time.monotonic() - began >= 0.1
    running.set_result(b"x")
    assert fetched(promises, promise) == b"x"


def test_a_session_that_has_ended_leaves_nothing_behind():
    """What runs is cancelled, who waits is woken, what comes later is dropped; others keep theirs."""
    promises, running, deaf, others = Promises(), Future(), Future(), Future()
    deaf.set_running_or_notify_cancel()
    waited = promises.begin("a", "k", lambda: running, owner="s", group="g")
    promises.begin("b", "k", lambda: deaf, owner="s", group="g")
    has = promises.begin("c", "k", lambda: done(b"x" * 10), owner="s")
    kept = promises.begin("a", "l", lambda: others, owner="t")
    fetched(promises, has)
    assert promises.num_running == 3

    async def wait():
        polls = [
            asyncio.create_task(promises.retrieve(waited.request_id, "k", LONG_S)),
            asyncio.create_task(promises.completed("s", "g", 0, LONG_S)),
        ]
        await asyncio.sleep(0.05)
        threading.Thread(target=promises.forget, args=("s",)).start()
        return await asyncio.gather(*polls, return_exceptions=True)

    began = time.monotonic()
    unknown, completions = asyncio.run(wait())
    assert time.monotonic() - began < SOON_S
    assert isinstance(unknown, UnknownPromise)
    assert completions == ([], 0)
    assert running.cancelled()
    deaf.set_result(b"x" * 20)
    assert (promises.num_running, promises.num_bytes) == (1, 0)  # that of the other session
    assert not promises.is_full("s")
    with pytest.raises(UnknownPromise):
        fetched(promises, has)
    others.set_result(b"y")
    assert fetched(promises, kept, key="l") == b"y"
    again = promises.begin("a", "k", lambda: done(b"z"), owner="s")  # nothing of the name is left either
    assert fetched(promises, again) == b"z"
    promises.forget("unknown")


def test_threads_that_begin_fetch_and_forget_at_once_lose_nothing():
    """8 threads; each result is its own, and in the end all counts are 0."""
    promises, wrong = Promises(most_bytes=200), []

    def use(number):
        owner, random_ = f"s{number % 4}", random.Random(number)
        for n in range(40):
            running, name = Future(), (number, n)
            promise = promises.begin(name, "k", lambda running=running: running, owner=owner, group="g")
            setter = threading.Timer(0.0, _set, (running, n))
            setter.start()
            try:
                result = fetched(promises, promise, timeout_s=LONG_S)
                if result != b"%d" % n and result.get("category") != "user":
                    wrong.append((name, result))
                told(promises, n, owner=owner, retrieved=[promise.request_id])
            except UnknownPromise:
                pass
            if random_.random() < 0.05:
                promises.forget(owner)
            setter.join()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for number in range(4):
        promises.forget(f"s{number}")
    assert promises.num_bytes == 0
    assert not (promises._promises)
    assert not (promises._named)
    assert not (promises._fetched)
    assert not (promises._acknowledged)


def _set(future, number):
    if future.set_running_or_notify_cancel():
        future.set_result(b"%d" % number)
