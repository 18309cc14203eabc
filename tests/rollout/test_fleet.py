"""A fleet of workers: batches as from one engine, whatever happens to the workers."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from fake_workers import Workers, lost, sample
from fleets import closing
from rollouts import fleet_rollouts

from quatrain.rollout import supervisor
from quatrain.rollout.fleet import OneWorker
from quatrain.rollout.group_table import GroupFailed
from quatrain.rollout.publish import InMemory
from quatrain.rollout.rollouts import Rollouts
from quatrain.rollout.supervisor import WorkersLost
from quatrain.rollout.worker import FinishedGroup, GroupSpec, WorkerRefused
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

SAMPLING = Sampling(n=2, max_new_tokens=5)
PARAMS = {"embed": jnp.ones((2, 3)), "norm": jnp.ones(3), "layers": []}
PROMPTS = [
    Prompt(40 + i, np.arange(1, 3 + i, dtype=np.int32), f"prompt {i}", {"answer": i}) for i in range(9)
]
LIMIT_S = 30
"""A test that takes longer hangs."""


class Tokenizer:
    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


def fleet_of(workers, timeout_s=5.0, **options):
    fleet = fleet_rollouts(
        workers.factories,
        InMemory(),
        sampling=SAMPLING,
        tokenizer=Tokenizer(),
        dtype="float32",
        timeout_s=timeout_s,
        **options,
    )
    return closing(fleet, LIMIT_S)


def texts(prompts=PROMPTS, step=3, sampling=SAMPLING):
    """The completions that a batch must have."""
    specs = [GroupSpec(0, prompt, step, sampling) for prompt in prompts]
    return [" ".join(map(str, sample(spec, i, 0)[1].tokens)) for spec in specs for i in range(sampling.n)]


def generate(fleet, version=7, **options):
    fleet.sync_weights(PARAMS, version)
    return fleet.generate(PROMPTS, step=3, **options)


def after(count, what):
    """A fault that does `what` in the first call of `take` after `count` finished groups."""

    def fault(worker, doing):
        if doing == "take" and worker.taken == count and worker.groups:
            return what(worker)

    return fault


def in_call(name, what):
    def fault(worker, doing):
        if doing == name:
            return what(worker)

    return fault


def value(batch, name):
    return batch.metrics[name].result()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_batch_is_that_of_one_engine_in_the_order_of_the_prompts(count):
    workers = Workers(count)
    with fleet_of(workers) as fleet:
        batch = generate(fleet)
    assert list(batch.completions) == texts()
    assert batch.group_ids.tolist() == [p.group_id for p in PROMPTS for _ in range(2)]
    assert batch.columns["answer"] == tuple(i for i in range(9) for _ in range(2))
    assert set(batch.policy_version[batch.completion_mask].tolist()) == {7}
    assert value(batch, "fleet/alive") == count
    assert value(batch, "fleet/restarts") == value(batch, "fleet/retried_groups") == 0
    assert 0 < value(batch, "fleet/busy_fraction") <= 1
    assert sum(worker.taken for worker in workers.made) == 9
    assert all(worker.closed.is_set() for worker in workers.made)


def test_workers_have_groups_for_their_slots_and_one_more():
    workers = Workers(2, num_slots=4)
    with fleet_of(workers) as fleet:
        generate(fleet)
    assert max(worker.most for worker in workers.made) <= 3


def test_a_worker_of_any_number_of_slots_gets_its_share():
    workers = Workers(1, num_slots=None)
    with fleet_of(workers) as fleet:
        generate(fleet)
    assert workers.made[0].most == 9


@pytest.mark.parametrize("doing", ["start", "load", "submit", "take"])
def test_a_worker_that_dies_costs_no_group(doing):
    workers = Workers(2, {0: in_call(doing, lambda worker: lost())})
    with fleet_of(workers) as fleet:
        batch = generate(fleet)
        while len(workers.made) < 3:
            time.sleep(0.01)
    assert list(batch.completions) == texts()


def test_what_a_lost_worker_had_is_given_out_again_and_counted():
    workers = Workers(2, {0: after(1, lambda worker: lost())})
    with fleet_of(workers) as fleet:
        batch = generate(fleet)
        assert list(batch.completions) == texts()
        assert value(batch, "fleet/retried_groups") > 0
        assert value(batch, "fleet/restarts") == 1
        again = generate(fleet, version=8)
    assert value(again, "fleet/retried_groups") == 0
    assert workers.made[0].closed.wait(5)


@pytest.mark.parametrize("doing", ["start", "load", "submit", "take"])
def test_a_call_that_does_not_return_is_given_up_at_its_deadline(doing, caplog):
    free = threading.Event()
    workers = Workers(1, {0: in_call(doing, lambda worker: free.wait(LIMIT_S) and None)})
    began = time.monotonic()
    with fleet_of(workers, timeout_s=0.3) as fleet:
        batch = generate(fleet)
        assert time.monotonic() - began < 5
        assert list(batch.completions) == texts()
        free.set()  # what the thread left behind brings now is not taken
        time.sleep(0.1)
        assert list(generate(fleet, version=8).completions) == texts()
    assert "no answer for" in caplog.text
    assert ("loading weights" in caplog.text) == (doing == "load")


def test_a_slow_worker_gets_fewer_groups():
    workers = Workers(2, {0: in_call("take", lambda worker: time.sleep(0.1))})
    with fleet_of(workers) as fleet:
        batch = generate(fleet)
    assert list(batch.completions) == texts()
    assert workers.made[0].taken < workers.made[1].taken


MANY = [Prompt(i, np.arange(1, 4, dtype=np.int32), f"prompt {i}", {}) for i in range(48)]


def test_a_slow_worker_without_a_number_of_slots_does_not_hold_up_a_batch():
    """Of 48 groups, the part of a worker nine times slower than one other is 5; an equal part is 24."""
    faults = {i: in_call("take", lambda worker, s=s: time.sleep(s)) for i, s in ((0, 0.1), (1, 0.01))}
    workers = Workers(2, faults, num_slots=None)
    taken, most = [], []
    with fleet_of(workers) as fleet:
        fleet.sampler.wait_for_start()
        for version in (1, 2):
            fleet.sync_weights(PARAMS, version)
            batch = fleet.generate(MANY, step=3)
            assert list(batch.completions) == texts(MANY)
            slow, fast = sorted(workers.made, key=lambda worker: worker.name)
            taken.append(slow.taken)
            most.append((slow.most, fast.most))
            slow.most = fast.most = 0
    assert taken[0] <= 8
    assert taken[1] - taken[0] <= 9
    assert most[0][0] <= 6
    assert most[1][0] <= 8
    assert all(fast > 1 for _, fast in most)


def test_without_a_number_of_slots_no_worker_gets_all_groups_that_another_may_take():
    with fleet_of(workers := Workers(3, num_slots=None)) as fleet:
        fleet.sampler.wait_for_start()
        generate(fleet)
    assert max(worker.most for worker in workers.made) <= 4


@pytest.mark.parametrize("number", [0, 1])
def test_groups_for_one_worker_are_sampled_by_that_worker(number):
    workers = Workers(2, {number: after(1, lambda worker: lost())})
    workers.factories = [
        lambda i=i, make=make: (setattr(worker := make(), "place", i), worker)[1]
        for i, make in enumerate(workers.factories)
    ]
    with fleet_of(workers) as fleet:
        fleet.sampler.wait_for_start()
        fleet.sync_weights(PARAMS, 7)
        own = Rollouts(OneWorker(fleet.sampler, number), Tokenizer(), SAMPLING)
        assert list(own.generate(PROMPTS, step=3).completions) == texts()
        assert {worker.place for worker in workers.made if worker.taken} == {number}
        assert list(generate(fleet).completions) == texts()


def test_a_worker_with_other_weights_than_those_asked_for_is_started_again(caplog):
    def keep_old_weights(worker):
        worker.load = lambda weights, version, timeout_s: version - 1

    workers = Workers(1, {0: in_call("start", keep_old_weights)})
    with fleet_of(workers) as fleet:
        assert list(generate(fleet).completions) == texts()
    assert "it has weights of version 6 after it was to load version 7" in caplog.text


def test_a_group_of_other_weights_is_refused_and_counted():
    stale = after(2, lambda worker: [worker.finished(worker.groups[0], version=6)])
    workers = Workers(2, {0: stale})
    with fleet_of(workers) as fleet:
        batch = generate(fleet)
    assert list(batch.completions) == texts()
    assert value(batch, "fleet/stale_groups") == 1
    assert set(batch.policy_version[batch.completion_mask].tolist()) == {7}


def failing(worker, doing):
    if doing == "take" and worker.groups and worker.groups[0].prompt.group_id == 44:
        return [FinishedGroup(worker.groups.pop(0).number, error="ZeroDivisionError: in its environment")]


def deadly(worker, doing):
    if doing == "take" and any(spec.prompt.group_id == 44 for spec in worker.groups):
        lost("the process was killed")


@pytest.mark.parametrize("fault", [failing, deadly])
def test_a_poisoned_group_is_named_after_its_retries_and_others_finish(fault):
    workers = Workers(2, {"all": fault})
    with fleet_of(workers) as fleet:
        fleet.sync_weights(PARAMS, 7)
        good = fleet.submit(PROMPTS[:4] + PROMPTS[5:], step=3)
        bad = fleet.submit(PROMPTS[4:5], step=3)
        with pytest.raises(GroupFailed, match=r"group 44 of step 3 failed 4 times.*prompt 4.*mend it"):
            fleet.wait(bad)
        del good
    error = "ZeroDivisionError" if fault is failing else "the process was killed"
    with fleet_of(Workers(2, {"all": fault}), retries=0) as fleet, pytest.raises(GroupFailed, match=error):
        generate(fleet)


def test_without_workers_for_too_long_the_error_has_the_last_of_each():
    workers = Workers(2, {"all": in_call("start", lambda worker: lost(f"no route to {worker.name}"))})
    began = time.monotonic()
    with fleet_of(workers, timeout_s=1) as fleet, pytest.raises(WorkersLost) as caught:
        generate(fleet)
    assert time.monotonic() - began < 10
    for part in ("alive for 1 s", "worker 0: no route to fake", "worker 1: no route to fake", "resume"):
        assert part in str(caught.value)


def test_workers_that_start_and_never_load_end_the_run(monkeypatch):
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.05)
    workers = Workers(2, {"all": in_call("load", lambda worker: lost("cannot read the weights"))})
    began = time.monotonic()
    with fleet_of(workers, timeout_s=0.5) as fleet:
        fleet.sampler.wait_for_start()
        with pytest.raises(WorkersLost, match="cannot read the weights"):
            generate(fleet)
    assert time.monotonic() - began < 10


def test_workers_whose_loads_hang_in_turn_end_the_run(monkeypatch):
    """One of them has always started, and none ever samples."""
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.05)
    free = threading.Event()

    def fault(worker, doing):
        if doing == "start":
            time.sleep({"fake 1": 0.2, "fake 2": 0.4}.get(worker.name, 0.0))
        if doing == "load":
            free.wait(LIMIT_S)

    workers = Workers(3, {"all": fault})
    began = time.monotonic()
    with fleet_of(workers, timeout_s=0.6) as fleet, pytest.raises(WorkersLost, match=r"no answer for 0\.6 s"):
        generate(fleet)
    free.set()
    assert time.monotonic() - began < 10


def test_the_start_waits_for_each_worker():
    slow = in_call("start", lambda worker: time.sleep(0.3))
    first = in_call("start", lambda worker: lost("still loading"))
    with fleet_of(Workers(3, {0: first, 1: slow})) as fleet:
        fleet.sampler.wait_for_start()
        assert len(fleet.sampler.workers) == 3
        assert list(generate(fleet).completions) == texts()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_worker_that_does_not_start_is_an_error_although_others_have(hangs, caplog):
    asleep = threading.Event()

    def fail():
        if hangs:
            asleep.wait(20)
        lost("no route to host")

    workers = Workers(2)
    workers.factories = [workers.factories[0], fail]
    began = time.monotonic()
    with (
        fleet_of(workers, timeout_s=0.5) as fleet,
        pytest.raises(ValueError, match=r"1 of 2 did not within .* \(0.5 s\).*worker 1: no") as caught,
    ):
        fleet.sampler.wait_for_start()
    asleep.set()
    assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)
    assert "worker 0" not in str(caught.value)
    assert "groups are given to others" not in caplog.text
    assert "was lost" not in caplog.text
    assert "rollout worker 1 has not started: " in caplog.text


def test_a_worker_that_refuses_the_run_at_its_start_ends_it():
    def refuse(worker):
        raise WorkerRefused("another vocabulary")

    workers = Workers(2, {1: in_call("start", refuse)})
    with fleet_of(workers) as fleet, pytest.raises(WorkerRefused, match="another vocabulary"):
        fleet.sampler.wait_for_start()


def test_a_worker_that_refuses_the_run_ends_it_at_once():
    def refuse(worker):
        raise WorkerRefused("the server returns no log-probabilities")

    with (
        fleet_of(Workers(2, {1: in_call("load", refuse)})) as fleet,
        pytest.raises(WorkerRefused, match="no log"),
    ):
        generate(fleet)


def test_a_worker_that_was_given_up_does_not_end_the_run_by_what_it_is_refused(caplog):
    """Catches a slow send of weights that ends the run: the next worker has taken the server over, so the
    server refuses what the one that was given up still sends."""
    refused, loading = threading.Event(), threading.Event()

    def slow(worker):
        assert loading.wait(LIMIT_S)
        refused.set()
        raise WorkerRefused("another sender has begun")

    def next_one(worker):
        loading.set()
        assert refused.wait(LIMIT_S)
        time.sleep(0.1)  # the other's thread ends meanwhile

    workers = Workers(1, {0: in_call("load", slow), 1: in_call("load", next_one)})
    with fleet_of(workers, timeout_s=0.5) as fleet:
        assert list(generate(fleet).completions) == texts()
    assert "no answer for 0.5 s while loading weights" in caplog.text


def test_a_worker_that_forgets_its_groups_is_started_again(caplog):
    workers = Workers(1, {0: after(1, lambda worker: worker.groups.clear())})
    with fleet_of(workers) as fleet:
        assert list(generate(fleet).completions) == texts()
    assert "idle and has not returned the groups" in caplog.text


def test_a_group_with_other_samples_than_asked_for_is_given_to_a_new_worker(caplog):
    def short(worker):
        spec = worker.groups[0]
        return [FinishedGroup(spec.number, worker.finished(spec).samples[:1])]

    workers = Workers(1, {0: after(0, short)})
    with fleet_of(workers) as fleet:
        assert list(generate(fleet).completions) == texts()
    assert "returned 1 samples of group 0, which has 2" in caplog.text


def test_a_group_that_comes_twice_counts_once(caplog):
    twice = after(0, lambda worker: [worker.finished(worker.groups[0])] * 2)
    with fleet_of(Workers(1, {0: twice})) as fleet:
        assert list(generate(fleet).completions) == texts()
    assert "returned group 0, which it does not have" in caplog.text


def test_each_version_is_loaded_once_by_each_worker_before_its_groups():
    workers = Workers(3)
    with fleet_of(workers) as fleet:
        fleet.sampler.wait_for_start()
        for version in (1, 2):
            batch = generate(fleet, version)
            assert set(batch.policy_version[batch.completion_mask].tolist()) == {version}
            end = time.monotonic() + 10
            while any(
                worker.version != version for worker in workers.made
            ):  # one without a group may be late
                assert time.monotonic() < end
                time.sleep(0.01)
    assert [[version for _, version in worker.loaded] for worker in workers.made] == [[1, 2]] * 3


def test_placed_weights_are_copies():
    workers = Workers(1)
    with fleet_of(workers) as fleet:
        placed = fleet.copy_weights(PARAMS)
        assert not np.shares_memory(placed.tree["embed"], np.asarray(PARAMS["embed"]))
        fleet.sync_weights(placed, 4)
        fleet.generate(PROMPTS)
    np.testing.assert_array_equal(workers.made[0].loaded[0][0]["embed"], np.ones((2, 3)))


def test_new_weights_must_wait_for_the_groups_in_flight():
    with fleet_of(Workers(1, {0: in_call("take", lambda worker: time.sleep(0.2))})) as fleet:
        fleet.sync_weights(PARAMS, 1)
        ticket = fleet.submit(PROMPTS)
        with pytest.raises(ValueError, match="9 groups are in flight"):
            fleet.sync_weights(PARAMS, 2)
        fleet.wait(ticket)
        fleet.sync_weights(PARAMS, 2)
        assert set(fleet.generate(PROMPTS).policy_version.ravel().tolist()) <= {-1, 2}


def test_a_version_is_published_once():
    """An evaluation and the next step sample from the same weights; none is discarded that is in use."""
    published, discarded = [], []

    class Store(InMemory):
        def publish(self, weights, version):
            published.append(version)
            return version

        def discard(self, handle):
            discarded.append(handle)

    workers = Workers(1)
    with closing(
        fleet_rollouts(
            workers.factories, Store(), sampling=SAMPLING, tokenizer=Tokenizer(), dtype="float32", timeout_s=5
        ),
        LIMIT_S,
    ) as fleet:
        for version in (0, 0, 0, 2, 2, 4):
            assert list(generate(fleet, version).completions) == texts()
    assert published == [0, 2, 4]
    assert discarded == [0]
    assert [version for _, version in workers.made[0].loaded] == [0, 2, 4]


def test_tickets_may_be_waited_for_in_any_order_and_once():
    with fleet_of(Workers(2)) as fleet:
        fleet.sync_weights(PARAMS, 1)
        first, second = fleet.submit(PROMPTS[:4], step=3), fleet.submit(PROMPTS[4:], step=3)
        assert list(fleet.wait(second).completions) == texts(PROMPTS[4:])
        assert list(fleet.wait(first).completions) == texts(PROMPTS[:4])
        with pytest.raises(ValueError, match="can be waited for once"):
            fleet.wait(first)
        assert len(fleet.generate([]).completions) == 0


def test_the_greedy_baseline_is_sampled_too():
    with fleet_of(Workers(2), greedy_baseline=True) as fleet:
        batch = generate(fleet)
    greedy = Sampling(n=1, max_new_tokens=5, temperature=0.0)
    assert list(batch.baseline.completions) == texts(sampling=greedy)


def test_progress_counts_completions():
    seen = []
    slow = in_call("take", lambda worker: time.sleep(0.05))
    with fleet_of(Workers(1, {0: slow}), on_progress=seen.append) as fleet:
        generate(fleet)
    assert seen[0].total == 18
    assert 0 < max(each.completions for each in seen) < 18


def test_a_fleet_that_is_closed_ends_the_wait():
    hanging = in_call("take", lambda worker: time.sleep(0.2) or [])
    with fleet_of(Workers(1, {0: hanging})) as fleet:
        threading.Timer(0.3, fleet.close).start()
        with pytest.raises(RuntimeError, match="closed while turns were in flight"):
            generate(fleet)


def test_an_evaluation_keeps_few_samples_in_flight():
    workers = Workers(2)
    with fleet_of(workers) as fleet:
        fleet.sync_weights(PARAMS, 7)
        running, most, start = [], [], fleet.sampler.start

        def started(requests, listener):
            def listen(number, progress):
                running.pop()
                listener(number, progress)

            running.extend([1] * sum(each.sampling.n for each in requests))
            most.append(len(running))
            return start(requests, listen)

        fleet.sampler.start = started
        parts = [[prompt] for prompt in PROMPTS] * 2
        batches = list(fleet.generate_each(parts, sampling=SAMPLING, at_once=2 * SAMPLING.n))
    assert [list(batch.completions) for batch in batches] == [texts(part, 0) for part in parts]
    assert max(most) == 2 * SAMPLING.n
