import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quatrain.engine.scheduler import Scheduler

STEPS = 8
LARGEST_GROUP = 12


class FakeModel:
    """Decodes samples of given lengths in a scheduler, STEPS tokens a round; a length of 1 needs no slot."""

    def __init__(self, max_slots: int, num_replicas: int = 1):
        self.scheduler = Scheduler(max_slots, num_replicas)
        self.lengths: dict[tuple[int, int], int] = {}
        self.tokens: dict[tuple[int, int], int] = {}
        self.slot_steps = self.useful_steps = 0
        self.sizes: set[tuple[int, int]] = set()
        self.prefills: list[tuple[int, int]] = []

    def submit(self, lengths: list[int]) -> int:
        ticket = self.scheduler.submit(len(lengths))
        self.lengths |= {(ticket, sample): length for sample, length in enumerate(lengths)}
        return ticket

    def take(self, tickets: list[int]) -> list[int]:
        """Those that are finished, which are taken."""
        finished = [ticket for ticket in tickets if self.scheduler.is_finished(ticket)]
        for ticket in finished:
            self.scheduler.take(ticket)
        return finished

    def round(self, most: int | None = None) -> None:
        scheduler = self.scheduler
        slots = scheduler.wanted_slots()
        prefix_slots = scheduler.wanted_prefix_slots(slots)
        if (slots, prefix_slots) != (scheduler.num_slots, scheduler.num_prefix_slots):
            self._resize(slots, prefix_slots)
        while admitted := scheduler.admit():
            assert all(scheduler.prefix_slots[prefix_slot] == ticket for ticket, prefix_slot in admitted)
            for ticket, prefix_slot in admitted:
                self.prefills.append((ticket, prefix_slot // scheduler.num_prefix_slots))
                new = [key for key in self.lengths if key[0] == ticket and key not in self.tokens]
                for key in new:
                    self.tokens[key] = 1
                    if self.lengths[key] == 1:
                        scheduler.finish_waiting(*key)
        for slot, who in scheduler.fill():
            assert scheduler.slots[slot] == who
            assert scheduler.prefix_slots[who.prefix_slot] == who.ticket
            assert who.prefix_slot // scheduler.num_prefix_slots == slot // scheduler.num_slots
            assert self.tokens[who.ticket, who.sample] == 1
        if most is None:
            self._check_that_slots_are_used()
        assert scheduler.num_slots <= (most or scheduler.max_slots)
        self._decode()

    def _check_that_slots_are_used(self) -> None:
        scheduler = self.scheduler
        capacity = scheduler.max_slots * scheduler.num_replicas
        # A group stays on its replica, so those of another may wait, fewer than a group each.
        elsewhere = 0 if scheduler.num_replicas == 1 else scheduler.num_replicas * LARGEST_GROUP
        if scheduler.demand >= capacity + elsewhere:
            assert scheduler.num_live == capacity or self._waits_for_a_prefix_slot(), "a slot stays empty"
        elif scheduler.num_replicas == 1:
            assert scheduler.num_live == scheduler.demand or None not in scheduler.prefix_slots, (
                "a slot stays empty"
            )

    def _waits_for_a_prefix_slot(self) -> bool:
        """Whether a replica with a free slot has no free prefix slot: samples that ended at once had taken
        one."""
        size, max_slots = self.scheduler.num_prefix_slots, self.scheduler.max_slots
        prefix_slots = [
            self.scheduler.prefix_slots[first : first + size]
            for first in range(0, len(self.scheduler.prefix_slots), size)
        ]
        return any(
            live < max_slots and None not in own for live, own in zip(self.live(), prefix_slots, strict=True)
        )

    def live(self) -> list[int]:
        """Slots in use on each replica."""
        scheduler = self.scheduler
        used = [who is not None for who in scheduler.slots]
        size = scheduler.num_slots
        return [sum(used[first : first + size]) for first in range(0, len(used), size or 1)]

    def _resize(self, slots: int, prefix_slots: int) -> None:
        scheduler = self.scheduler
        old_slots, old_prefix_slots = list(scheduler.slots), list(scheduler.prefix_slots)
        before = scheduler.num_slots, scheduler.num_prefix_slots
        from_slots, from_prefix_slots = scheduler.resize((slots,), prefix_slots)
        self.sizes.add((slots, prefix_slots))
        for i, (new, old) in enumerate(zip(scheduler.slots, from_slots, strict=True)):
            was = old_slots[i // slots * before[0] + old] if new else None
            assert not new or (was and (was.ticket, was.sample) == (new.ticket, new.sample))
        for i, (ticket, old) in enumerate(zip(scheduler.prefix_slots, from_prefix_slots, strict=True)):
            assert ticket is None or old_prefix_slots[i // prefix_slots * before[1] + old] == ticket
        for who in filter(None, scheduler.slots):
            assert scheduler.prefix_slots[who.prefix_slot] == who.ticket

    def _decode(self) -> None:
        scheduler = self.scheduler
        left = {
            slot: self.lengths[who.ticket, who.sample] - self.tokens[who.ticket, who.sample]
            for slot, who in enumerate(scheduler.slots)
            if who
        }
        steps = min(STEPS, max(left.values(), default=0))
        self.slot_steps += steps * len(scheduler.slots)
        for slot, tokens in left.items():
            who = scheduler.slots[slot]
            done = min(steps, tokens)
            self.tokens[who.ticket, who.sample] += done
            self.useful_steps += done
            if done == tokens:
                scheduler.finish(slot)


LENGTHS = st.integers(1, 40)


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.lists(LENGTHS, min_size=1, max_size=LARGEST_GROUP), max_size=14),
    max_slots=st.integers(1, 20),
    num_replicas=st.integers(1, 5),
    late=st.integers(0, 5),
)
@example(
    groups=[
        [1, 1, 2],
        [2] * 12,
        [1] * 3,
        [1] * 2,
        [9, 5],
        [36, 1, 40, 1, 40, 3, *[1] * 6],
        [1] * 12,
        [1] * 7,
    ],
    max_slots=5,
    num_replicas=3,
    late=0,
)
def test_every_group_finishes_once_and_slots_are_refilled(groups, max_slots, num_replicas, late):
    model = FakeModel(max_slots, num_replicas)
    first, rest = groups[: len(groups) - late], groups[len(groups) - late :]
    tickets = [model.submit(lengths) for lengths in first]
    bound = sum(math.ceil(length / STEPS) for lengths in groups for length in lengths) + len(groups) + 1
    rounds, taken = 0, []
    while model.scheduler.num_unfinished or rest:
        if rest and (rounds % 2 or not model.scheduler.num_unfinished):
            tickets.append(model.submit(rest.pop(0)))
        model.round()
        rounds += 1
        assert rounds <= bound
        if rounds % 3 == 0:
            taken += model.take(tickets)
    taken += model.take(tickets)
    assert sorted(taken) == tickets == list(range(len(groups)))
    assert model.tokens == model.lengths
    assert model.scheduler.num_live == model.scheduler.num_finished == 0


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=14),
    num_replicas=st.integers(1, 8),
    spare=st.integers(0, 4),
)
def test_replicas_get_equally_many_sequences_where_all_fit(sizes, num_replicas, spare):
    model = FakeModel(-(-sum(sizes) // num_replicas) + spare, num_replicas)
    for size in sizes:
        model.submit([100] * size)
    model.round()
    assert sum(model.live()) == sum(sizes)
    assert max(model.live()) == -(-sum(sizes) // num_replicas)
    assert len(model.prefills) < len(sizes) + num_replicas * 2


def test_groups_stay_whole_where_replicas_divide_them():
    model = FakeModel(16, 4)
    for _ in range(8):
        model.submit([100] * 8)
    model.round()
    assert model.live() == [16] * 4
    assert model.prefills == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 0), (5, 1), (6, 2), (7, 3)]


def test_no_prompt_is_computed_twice_while_more_wait_than_there_is_room_for():
    model = FakeModel(8, 4)
    draw = random.Random(0)
    for _ in range(40):
        model.submit([draw.randint(2, 60) for _ in range(6)])
    while model.scheduler.demand > 8 * 4:
        model.round()
    tickets = [ticket for ticket, _ in model.prefills]
    assert len(set(tickets)) == len(tickets) > 30


def test_a_large_group_is_spread_over_replicas_that_are_free():
    model = FakeModel(2, 4)
    for _ in range(5):
        model.submit([STEPS + 1] * 16)
    rounds = 0
    while model.scheduler.num_unfinished:
        model.round()
        rounds += 1
    assert rounds == 5 * 16 // (2 * 4)


def test_fewer_slots_are_allowed_than_are_in_use():
    """As when a longer prompt needs a larger cache: those that run go on, and are not replaced."""
    model = FakeModel(16)
    model.submit([100] * 16)
    model.round()
    model.scheduler.max_slots = 6
    model.submit([20] * 6)
    while model.scheduler.num_unfinished:
        model.round(most=16)
    assert model.tokens == model.lengths


def test_a_group_is_finished_with_its_last_sample_until_it_is_taken():
    model = FakeModel(6)
    tickets = [model.submit(lengths) for lengths in ([30, 30], [2, 2], [3, 3])]
    model.round()
    assert model.scheduler.num_finished == 2
    assert model.take(tickets) == [1, 2]
    while model.scheduler.num_unfinished:
        model.round()
    assert model.take(tickets) == [0]
    assert model.take(tickets) == []


def test_a_group_larger_than_the_slots_keeps_its_prefix_slot():
    model = FakeModel(4)
    model.submit([10] * 9)
    model.submit([10])
    prefix_slots = set()
    while 0 in model.scheduler.prefix_slots or not model.tokens:
        model.round()
        prefix_slots |= {who.prefix_slot for who in model.scheduler.slots if who and who.ticket == 0}
    assert len(prefix_slots) == 1
    assert all(model.tokens[0, sample] == 10 for sample in range(9))


def test_stragglers_run_on_fewer_slots():
    model = FakeModel(32)
    for i in range(4):
        model.submit([200 if i == 0 and j == 0 else 9 for j in range(8)])
    while model.scheduler.num_unfinished:
        model.round()
    assert model.sizes == {(32, 4), (4, 4)}
    assert model.slot_steps < 8 * 32 + 200 * 4


def test_sizes_come_from_a_ladder():
    sizes = set()
    draw = random.Random(0)
    for _ in range(40):
        model = FakeModel(48)
        for _ in range(draw.randint(1, 20)):
            model.submit([min(int(draw.lognormvariate(4, 1)) + 1, 512) for _ in range(8)])
        while model.scheduler.num_unfinished:
            model.round()
        sizes |= model.sizes
    assert {slots for slots, _ in sizes} <= {4, 8, 16, 32, 24, 40, 48}
    assert {prefix_slots for _, prefix_slots in sizes} <= {1, 2, 4, 8, 16, 32, 48}
    assert len(sizes) <= 20


def test_little_decode_is_wasted_on_lognormal_lengths():
    """Median 64, sigma 1, at most 512 tokens, 256 sequences in 32 slots; a batch at a time wastes 3 / 4."""
    draw = random.Random(1)
    lengths = [min(max(int(draw.lognormvariate(math.log(64), 1.0)), 1), 512) for _ in range(256)]
    model = FakeModel(32)
    for first in range(0, 256, 8):
        model.submit(lengths[first : first + 8])
    while model.scheduler.num_unfinished:
        model.round()
    batches = [lengths[first : first + 32] for first in range(0, 256, 32)]
    assert sum(lengths) / sum(32 * max(batch) for batch in batches) < 0.4
    assert model.useful_steps == sum(lengths) - 256
    assert 1 - model.useful_steps / model.slot_steps < 0.1


def _running(scheduler):
    return [(who.ticket, who.sample) for who in scheduler.slots if who]


def _queued(scheduler):
    return [(queued.ticket, queued.num_waiting, list(queued.begun)) for queued in scheduler.queued]


def test_only_a_prefix_slot_that_nobody_needs_now_is_taken():
    """A queued group whose samples on one replica have all ended, while others of it run on another."""
    scheduler = Scheduler(2, 2)
    scheduler.resize((2,), 2)
    scheduler.submit(5)
    assert scheduler.admit() == [(0, 0), (0, 2)]
    scheduler.fill()
    assert (_running(scheduler), _queued(scheduler)) == ([(0, 0), (0, 1), (0, 2), (0, 3)], [(0, 1, [])])
    assert not scheduler.free_a_prefix_slot()
    scheduler.finish(0)
    assert not scheduler.free_a_prefix_slot()
    scheduler.finish(1)
    assert scheduler.free_a_prefix_slot()
    assert scheduler.prefix_slots == [None, None, 0, None]
    assert scheduler.admit() == [(0, 0)]  # the prompt is computed again


def test_a_preempted_sample_comes_before_new_groups_and_gives_up_what_nobody_else_needs():
    scheduler = Scheduler(3)
    scheduler.resize((3,), 3)
    for samples in (2, 1, 1):
        scheduler.submit(samples)
    scheduler.admit()
    scheduler.fill()
    assert _running(scheduler) == [(0, 0), (0, 1), (1, 0)]
    scheduler.preempt(1, 0)
    scheduler.preempt(0, 0)
    assert scheduler.prefix_slots == [0, None, None]  # the other sample of group 0 runs
    assert _queued(scheduler) == [(0, 1, [0]), (1, 1, [0]), (2, 1, [])]
    assert (scheduler.has_begun(0), scheduler.has_begun(2)) == (True, False)
    scheduler.preempt(0, 1)
    assert scheduler.prefix_slots == [None] * 3
    assert [entry[0] for entry in _queued(scheduler)][2] == 2
    scheduler.admit()
    scheduler.fill()
    assert sorted(_running(scheduler)) == [(0, 0), (0, 1), (1, 0)]
    scheduler.cancel(1)
    scheduler.cancel(2)
    assert (scheduler.is_finished(1), scheduler.is_finished(2), _queued(scheduler)) == (True, True, [])


def test_what_is_barred_and_what_is_behind_it_waits():
    scheduler = Scheduler(8)
    scheduler.resize((8,), 8)
    for samples in (2, 2, 2):
        scheduler.submit(samples)
    scheduler.barred = 1
    assert [ticket for ticket, _ in scheduler.admit()] == [0]
    assert scheduler.wanted_slots() == 4
    scheduler.barred = None
    scheduler.max_loads = [5]
    assert [ticket for ticket, _ in scheduler.admit()] == [1, 2]
    assert [entry[:2] for entry in _queued(scheduler)] == [(2, 1)]  # one of its two samples has room


@pytest.mark.parametrize(("at_once", "ends", "least"), [(32, 1.0, 0.95), (8, 0.5, 0.9)])
def test_turns_go_home_as_long_as_no_replica_has_much_more_to_do(at_once, ends, least):
    """The context of a turn was computed again on three of four replicas; with nothing but homes, a beginning
    that all share would bring all turns to one."""
    rng, scheduler, lives_on = random.Random(2), Scheduler(16, 4), {}
    of, left_of, turns, went_home = {}, {}, 0, 0
    scheduler.home = lambda ticket: lives_on.get(of[ticket], 0)
    waiting = [(session, 8) for session in range(32)]
    while waiting or scheduler.num_unfinished:
        rng.shuffle(waiting)
        for session, left in waiting[:at_once]:
            ticket = scheduler.submit(1)
            of[ticket], left_of[ticket] = session, left
        waiting = waiting[at_once:]
        scheduler.resize((16,), 16)
        scheduler.admit()
        for slot, who in scheduler.fill():
            replica, home = slot // scheduler.num_slots, lives_on.get(of[who.ticket])
            if home is not None:
                turns, went_home = turns + 1, went_home + (replica == home)
            lives_on[of[who.ticket]] = replica
        loads = scheduler.loads()
        assert max(loads) <= 1.25 * sum(loads) / 4 + 2
        for slot, who in enumerate(scheduler.slots):
            if who is not None and rng.random() < ends:
                scheduler.finish(slot)
                if left_of[who.ticket] > 1:
                    waiting.append((of[who.ticket], left_of[who.ticket] - 1))
    assert turns == 32 * 7
    assert went_home >= least * turns
