"""The scheduler: assigns samples to slots and prompts to prefix slots.

Plain Python, called by `session.py`. Submitted groups wait in a queue. `admit` assigns prefix slots to as
many groups as the free slots can take, `fill` assigns their samples to slots, `finish` frees a slot, and
`take` returns finished groups. A group keeps its prefix slot until its last sample is finished, so it may
have more samples than there are slots.

`preempt` takes the slot of a sample for which there is no memory left: the sample is queued again, before
groups that have not begun. What it has sampled is kept by the caller.

All replicas of the sampler have the same number of slots and of prefix slots, and a sample stays on the
replica that it was assigned to. While more sequences wait than there are free slots, a group is assigned to
one replica, unless it has more samples than a replica has slots. Once all remaining sequences fit into the
slots, groups are split if that balances the replicas."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, takewhile
from typing import Any, NamedTuple, TypeVar

from quatrain.ops.shape_buckets import power_of_four, power_of_two, round_up

_T = TypeVar("_T")
FEWEST_SLOTS = 4
"""A decode step of one slot takes about as long as of four, so smaller batches are not worth compiling."""

BUSY = 1.25
"""A group goes to its home as long as that has not this many times the samples of a replica in the mean."""
SPARSE = 8
"""With a varying demand, slots become fewer where there are so many times as many as are needed."""
LATELY = 16
"""Of so many times that nothing was left to do, the greatest demand before each is remembered."""


@dataclass
class _Part:
    """The samples of a group on one replica: those waiting for a slot, and the number of unfinished ones."""

    prefix_slot: int
    waiting: deque[int]
    unfinished: int


@dataclass
class _Group:
    """A group: `waiting` samples are not assigned to a replica yet; `parts` are keyed by replica.

    `begun`: whether samples that wait were preempted, so that they come before new groups.
    """

    ticket: int
    waiting: deque[int]
    unfinished: int
    begun: bool = False
    parts: dict[int, _Part] = field(default_factory=dict)


@dataclass(frozen=True)
class Occupant:
    """The sample in a slot: number `sample` of group `ticket`; `prefix_slot` of the prompt cache holds its
    prompt."""

    ticket: int
    sample: int
    prefix_slot: int


class Queued(NamedTuple):
    """A group in the queue, of which `num_waiting` samples wait; `begun`: these, if they may have tokens."""

    ticket: int
    num_waiting: int
    begun: Sequence[int]


@dataclass
class Scheduler:
    """Runs at most `max_slots` sequences at once on each of `num_replicas` replicas.

    Tickets number the groups from 0 in the order of submission. `slots[i]` is the sample that runs in slot i,
    and `prefix_slots[i]` is the ticket of the group whose prompt is in prefix slot i; the entries of replica
    0 come first, then those of replica 1, and so on. Only `resize` changes the numbers of slots and prefix
    slots. `varying`: the demand changes all the time, so that the number of slots is a power of four
    or `max_slots`. The queued group `barred`, and those behind it, are not admitted.

    The slots of a replica are those of its rings, one after another: `rings[i]` slots of ring i. A sample has
    a slot of the ring that `ring_of` says, by ticket and sample. `max_loads`: the most samples that may be
    assigned to each replica, if they are fewer than its slots. `home`: the replica on which a group, by its
    ticket, has the least to compute, if there is one."""

    max_slots: int
    num_replicas: int = 1
    slots: list[Occupant | None] = field(default_factory=list)
    prefix_slots: list[int | None] = field(default_factory=list)
    varying: bool = False
    barred: int | None = None
    rings: tuple[int, ...] = ()
    ring_of: Callable[[int, int], int] = lambda ticket, sample: 0
    home: Callable[[int], int | None] = lambda ticket: None
    max_loads: Sequence[int] | None = None
    num_apart: int = 0
    """Slots of the last ring, if that is for samples of a kind alone: others cannot have them."""

    def __post_init__(self) -> None:
        self._queue: deque[_Group] = deque()
        self._open: dict[int, _Group] = {}
        self._finished: dict[int, None] = {}
        self._next_ticket = 0
        self._peak, self._peaks = 0, deque[int]([0], maxlen=LATELY)

    def submit(self, num_samples: int) -> int:
        """Queues a group of `num_samples` >= 1 samples and returns its ticket."""
        assert num_samples > 0
        group = _Group(self._next_ticket, deque(range(num_samples)), num_samples)
        self._next_ticket += 1
        self._queue.append(group)
        self._open[group.ticket] = group
        return group.ticket

    def admit(self) -> list[tuple[int, int]]:
        """Assigns prefix slots to groups from the head of the queue, enough to fill the free slots: [(ticket,
        prefix slot)].

        A group that is split over replicas gets a prefix slot on each of them.
        """
        admitted = []
        # A list: assigning takes groups out of the queue that is walked.
        for group, replica, count in list(self._assignments(self.num_slots)):
            if replica not in group.parts:
                prefix_slot = self._free_prefix_slot(replica)
                prefix_slot = self._evicted_prefix_slot(replica) if prefix_slot is None else prefix_slot
                if prefix_slot is None:
                    break
                self._give_prefix_slot(group, prefix_slot)
                admitted.append((group.ticket, prefix_slot))
            part = group.parts[replica]
            part.waiting.extend(group.waiting.popleft() for _ in range(count))
            part.unfinished += count
            self._unqueue_if_assigned(group)
        return admitted

    def finish_waiting(self, ticket: int, sample: int) -> None:
        """Finishes a sample without a slot, because its first token, from the prefill, was also its last."""
        group = self._open[ticket]
        for replica, part in group.parts.items():
            if sample in part.waiting:
                part.waiting.remove(sample)
                return self._count_finished(group, replica)
        group.waiting.remove(sample)
        self._unqueue_if_assigned(group)
        self._count_finished(group, None)

    def fill(self) -> list[tuple[int, Occupant]]:
        """Assigns waiting samples of admitted groups to free slots, oldest group first: [(slot, sample)]."""
        filled = []
        for replica in range(self.num_replicas):
            rings = enumerate(self.ring_slots(replica))
            free = {ring: deque(slot for slot in slots if self.slots[slot] is None) for ring, slots in rings}
            for ticket, part in self._waiting_on(replica):
                if not any(free.values()):
                    break
                for sample in list(part.waiting):
                    if slots := free.get(self.ring_of(ticket, sample)):
                        part.waiting.remove(sample)
                        slot = slots.popleft()
                        self.slots[slot] = placed = Occupant(ticket, sample, part.prefix_slot)
                        filled.append((slot, placed))
        return filled

    def cancel(self, ticket: int) -> None:
        """Finishes what is unfinished of a group of one sample."""
        taken = [slot for slot, occupant in enumerate(self.slots) if occupant and occupant.ticket == ticket]
        if taken:
            self.finish(taken[0])
        elif not self.is_finished(ticket):
            self.finish_waiting(ticket, 0)

    def finish(self, slot: int) -> None:
        """Frees `slot`, whose sample is finished."""
        occupant = self.slots[slot]
        assert occupant is not None
        self.slots[slot] = None
        self._count_finished(self._open[occupant.ticket], slot // self.num_slots)

    def preempt(self, ticket: int, sample: int) -> None:
        """Queues a sample again that runs, or that waits for a slot on its replica.

        Its group keeps the prefix slot there as long as other samples of it need it."""
        group, who = self._open[ticket], (ticket, sample)
        running = [slot for slot, o in enumerate(self.slots) if o and (o.ticket, o.sample) == who]
        if running:
            replica = running[0] // self.num_slots
            self.slots[running[0]] = None
        else:
            replica = next(r for r, part in group.parts.items() if sample in part.waiting)
            group.parts[replica].waiting.remove(sample)
        group.parts[replica].unfinished -= 1
        if not group.parts[replica].unfinished:
            self._free_part(group, replica)
        if group in self._queue:
            self._queue.remove(group)
        group.waiting.append(sample)
        self._queue_begun(group)

    def free_a_prefix_slot(self) -> bool:
        """Frees a prefix slot that no running or waiting sample needs now; whether there was one."""
        return any(self._evicted_prefix_slot(replica) is not None for replica in range(self.num_replicas))

    def has_begun(self, ticket: int) -> bool:
        """Whether the unfinished group has samples that were preempted."""
        return self._open[ticket].begun

    def is_finished(self, ticket: int) -> bool:
        """Whether all samples of the group are finished, and it was not taken yet."""
        return ticket in self._finished

    def take(self, ticket: int) -> None:
        """Forgets a finished group."""
        del self._finished[ticket]

    @property
    def num_slots(self) -> int:
        """The number of slots per replica."""
        return len(self.slots) // self.num_replicas

    @property
    def num_prefix_slots(self) -> int:
        """The number of prefix slots per replica."""
        return len(self.prefix_slots) // self.num_replicas

    @property
    def num_finished(self) -> int:
        """Finished groups that were not taken yet."""
        return len(self._finished)

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return len(self.slots) - self.slots.count(None)

    @property
    def num_unfinished(self) -> int:
        """Groups with unfinished samples, queued ones included."""
        return len(self._open)

    @property
    def unfinished(self) -> Iterable[int]:
        """Tickets of groups with unfinished samples."""
        return self._open.keys()

    @property
    def demand(self) -> int:
        """Unfinished samples: those in slots, and all that wait."""
        return sum(self.loads()) + sum(len(group.waiting) for group in self._queue)

    @property
    def first_queued(self) -> int | None:
        """The ticket of the group at the head of the queue."""
        return self._queue[0].ticket if self._queue else None

    @property
    def queued(self) -> list[Queued]:
        """The groups with samples that are not assigned to a replica yet, in order."""
        return [Queued(g.ticket, len(g.waiting), g.waiting if g.begun else ()) for g in self._queue]

    @property
    def placed(self) -> list[tuple[int, int]]:
        """(ticket, sample) of samples that run, or that wait for a slot on a replica."""
        running = [(who.ticket, who.sample) for who in self.slots if who is not None]
        parts = ((group.ticket, part) for group in self._open.values() for part in group.parts.values())
        return running + [(ticket, sample) for ticket, part in parts for sample in part.waiting]

    @property
    def most_in_use(self) -> tuple[int, int]:
        """(slots, prefix slots) in use on the replica that has the most of them."""
        return max(self._in_use(self.slots)), max(self._in_use(self.prefix_slots))

    def wanted_slots(self) -> int:
        """The number of slots per replica for the current demand; few if only a few sequences remain.

        Each change copies the cache: the number grows when more sequences could run, and shrinks by powers of
        two. With a `varying` demand it is a power of four, and shrinks once only few slots are in use. It is
        at most `max_slots`, unless more are in use.
        """
        in_use = self._in_use(self.slots)
        demand = max(min(max(self._fair_share(), *self.loads()), self.max_slots), *in_use)
        if self.varying:
            wanted = self._slots_of_requests(demand)
        elif demand > self.num_slots:
            wanted = round_up(demand, minimum=1)
        else:
            wanted = min(max(FEWEST_SLOTS, power_of_two(demand)), self.num_slots)
        return min(wanted, max(self.max_slots, *in_use))

    def _slots_of_requests(self, demand: int) -> int:
        """A power of four for a varying demand: as many as lately where there are too few, else those there
        are, or the next fewer where these are many times too many. So few pairs of sizes follow each other,
        each of which compiles programs."""
        now, self._peak = self.num_slots - self.num_apart, max(self._peak, demand)
        if demand > now:
            return max(FEWEST_SLOTS, power_of_four(max(self._peak, *self._peaks)))
        return min(max(FEWEST_SLOTS, power_of_four(now) // 4), now) if now >= SPARSE * demand else now

    def wanted_prefix_slots(self, num_slots: int) -> int:
        """Prefix slots per replica, enough to fill `num_slots` slots: a power of two, never fewer than now.

        At most one prefix slot per slot, unless more prefix slots are in use; with a `varying` demand, as
        many: each pair of numbers is a program.
        """
        in_use = self._in_use(self.prefix_slots)
        if self.varying:
            return max(num_slots, *in_use)
        needed = list(in_use)
        for group, replica, _ in self._assignments(num_slots):
            needed[replica] += replica not in group.parts
        prefix_slots = max(power_of_two(max(*needed, 1)), self.num_prefix_slots)
        return min(prefix_slots, max(num_slots, *in_use))

    def ring_slots(self, replica: int) -> list[range]:
        """The slots of each ring of a replica."""
        ends = list(accumulate(self.rings, initial=replica * self.num_slots))
        return [range(first, end) for first, end in pairwise(ends)]

    def place(self, slot: int) -> tuple[int, int]:
        """(ring, slot of the ring) of a slot, on its replica."""
        here, ends = slot % self.num_slots, list(accumulate(self.rings))
        ring = bisect_right(ends, here)
        return ring, here - ends[ring] + self.rings[ring]

    @property
    def misplaced(self) -> bool:
        """Whether a sample runs in another ring than `ring_of` says."""
        running = ((slot, who) for slot, who in enumerate(self.slots) if who is not None)
        return any(self.place(slot)[0] != self.ring_of(who.ticket, who.sample) for slot, who in running)

    def resize(self, rings: Sequence[int], num_prefix_slots: int) -> tuple[list[int], list[int]]:
        """Changes the numbers of slots per ring and of prefix slots, and moves samples to their rings.

        Entries in use move to the front where the number changes. Returns, for each new slot and each new
        prefix slot, the old index on its replica; for unused slots -1, for unused prefix slots 0."""
        if not rings:
            # Without rings nothing is left to do: one span of demand has ended.
            self._peaks.append(self._peak)
            self._peak = self.num_apart = 0
        prefix_slots_before = self.num_prefix_slots
        from_slots = self._resize_rings(tuple(rings))
        if num_prefix_slots == prefix_slots_before:
            from_prefix_slots = [*range(num_prefix_slots)] * self.num_replicas
        else:
            from_prefix_slots, self.prefix_slots = self._compacted(self.prefix_slots, num_prefix_slots)
        moved = {}
        for prefix_slot, (ticket, old) in enumerate(zip(self.prefix_slots, from_prefix_slots, strict=True)):
            if ticket is not None:
                replica = prefix_slot // num_prefix_slots
                moved[replica * prefix_slots_before + old] = prefix_slot
                self._open[ticket].parts[replica].prefix_slot = prefix_slot
        self.slots = [who and Occupant(who.ticket, who.sample, moved[who.prefix_slot]) for who in self.slots]
        return from_slots, from_prefix_slots

    def _resize_rings(self, rings: tuple[int, ...]) -> list[int]:
        """The old index on its replica of each new slot, -1 for unused ones."""
        origins: list[int] = []
        slots: list[Occupant | None] = []
        for replica in range(self.num_replicas):
            first, old = replica * self.num_slots, self.ring_slots(replica)
            stay: list[dict[int, None]] = [{} for _ in rings]
            come: list[dict[int, None]] = [{} for _ in rings]
            for i, slot in ((i, slot) for i, ring in enumerate(old) for slot in ring):
                if (who := self.slots[slot]) is not None:
                    ring = self.ring_of(who.ticket, who.sample)
                    (stay if ring == i else come)[ring][slot] = None
            for i, size in enumerate(rings):
                # Where a ring keeps its size, samples keep their slots, so that the cache is not copied.
                if i < len(old) and len(old[i]) == size:
                    new = [slot if slot in stay[i] else None for slot in old[i]]
                else:
                    new = [*stay[i], *[None] * (size - len(stay[i]))]
                for slot in come[i]:
                    new[new.index(None)] = slot
                assert len(new) == size
                origins += [-1 if slot is None else slot - first for slot in new]
                slots += [None if slot is None else self.slots[slot] for slot in new]
        self.rings, self.slots = rings, slots
        return origins

    def _compacted(self, items: list[_T | None], size: int) -> tuple[list[int], list[_T | None]]:
        """(old index of each new item, new items): per replica, the items in use, then None up to `size`."""
        origins: list[int] = []
        result: list[_T | None] = []
        for replica in range(self.num_replicas):
            here = self._on_replica(items, replica)
            used = [i for i, item in enumerate(here) if item is not None]
            assert len(used) <= size
            origins += used + [0] * (size - len(used))
            result += [here[i] for i in used] + [None] * (size - len(used))
        return origins, result

    def _assignments(self, num_slots: int) -> Iterator[tuple[_Group, int, int]]:
        """The assignment of queued samples to replicas with `num_slots` slots: (group, replica, count)."""
        loads, fair = self.loads(), self._fair_share()
        all_fit = fair <= num_slots
        most = fair if all_fit else num_slots
        limits = [num_slots] * self.num_replicas
        if self.max_loads is not None:
            limits = [min(num_slots, limit) for limit in self.max_loads]
        room = [min(most, limit) - load for limit, load in zip(limits, loads, strict=True)]
        for group in self._admissible():
            left = len(group.waiting)
            while left:
                # The emptiest, of equals the first: every process of a run must choose the same.
                replica = max(range(self.num_replicas), key=room.__getitem__)
                # Nobody overtakes: smaller groups behind would keep a large one waiting for ever.
                if room[replica] <= 0:
                    return
                # Preempted samples are assigned only where they run at once: sizes are chosen for that.
                count = min(left, room[replica] if all_fit or group.begun else num_slots)
                if (home := self._home_of(group.ticket, loads, limits)) is not None:
                    replica, count = home, min(left, limits[home] - loads[home])
                yield group, replica, count
                room[replica] -= count
                loads[replica] += count
                left -= count

    def _home_of(self, ticket: int, loads: Sequence[int], limits: Sequence[int]) -> int | None:
        """The group's home, if it has room and hardly more samples than others."""
        home = self.home(ticket) if self.num_replicas > 1 else None
        # The replica with a beginning that all contexts share would otherwise get all the work.
        if home is None or loads[home] >= min(limits[home], BUSY * sum(loads) / len(loads) + 1):
            return None
        return home

    def _admissible(self) -> Iterator[_Group]:
        """The queued groups before the one that is barred."""
        return takewhile(lambda group: group.ticket != self.barred, self._queue)

    def loads(self) -> list[int]:
        """Samples of each replica that run or wait for a slot there."""
        loads = self._in_use(self.slots)
        for group in self._open.values():
            for replica, part in group.parts.items():
                loads[replica] += len(part.waiting)
        return loads

    def _fair_share(self) -> int:
        """Samples per replica if all replicas had equally many of those not barred, rounded up."""
        waiting = sum(len(group.waiting) for group in self._admissible())
        return -(-(sum(self.loads()) + waiting) // self.num_replicas)

    def _on_replica(self, items: list[_T], replica: int) -> list[_T]:
        """The entries of `items` (slots or prefix slots) of one replica."""
        size = len(items) // self.num_replicas
        return items[replica * size : (replica + 1) * size]

    def _in_use(self, items: list[Any]) -> list[int]:
        """The number of slots or prefix slots in use on each replica."""
        each = [self._on_replica(items, replica) for replica in range(self.num_replicas)]
        return [len(here) - here.count(None) for here in each]

    def _queue_begun(self, group: _Group) -> None:
        """Queues a group before new ones, and after those that hold prefix slots while they are queued."""
        group.begun = True
        before = sum(bool(q.parts) if group.parts else q.begun or bool(q.parts) for q in self._queue)
        self._queue.insert(before, group)

    def _give_prefix_slot(self, group: _Group, prefix_slot: int) -> None:
        self.prefix_slots[prefix_slot] = group.ticket
        group.parts[prefix_slot // self.num_prefix_slots] = _Part(prefix_slot, deque(), 0)

    def _free_prefix_slot(self, replica: int) -> int | None:
        """A prefix slot of `replica` that is not in use."""
        prefix_slots = self._on_replica(self.prefix_slots, replica)
        return replica * self.num_prefix_slots + prefix_slots.index(None) if None in prefix_slots else None

    def _evicted_prefix_slot(self, replica: int) -> int | None:
        """A prefix slot on `replica` that no running or waiting sample needs now, and that its group loses.

        Its group has other samples in the queue, and ended all that it had on this replica."""
        # Its prompt can be computed again; one that runs or waits for a slot is read at the next step.
        for group in self._queue:
            part = group.parts.get(replica)
            if part is not None and not part.unfinished:
                self._free_part(group, replica)
                return part.prefix_slot
        return None

    def _waiting_on(self, replica: int) -> Iterator[tuple[int, _Part]]:
        """(ticket, part) of the groups with samples that wait for a slot on `replica`, oldest first."""
        # By ticket, not by when they were admitted: all processes fill slots alike, and old groups end first.
        for ticket in sorted(self._open):
            part = self._open[ticket].parts.get(replica)
            if part is not None and part.waiting:
                yield ticket, part

    def _unqueue_if_assigned(self, group: _Group) -> None:
        """Removes `group` from the queue once all its samples are assigned to replicas."""
        if not group.waiting:
            self._queue.remove(group)
            self._release(group)

    def _release(self, group: _Group) -> None:
        """Once all samples of `group` are assigned, frees its prefix slots on replicas without unfinished
        samples."""
        done = [] if group.waiting else [r for r, part in group.parts.items() if not part.unfinished]
        for replica in done:
            self._free_part(group, replica)

    def _free_part(self, group: _Group, replica: int) -> None:
        self.prefix_slots[group.parts.pop(replica).prefix_slot] = None

    def _count_finished(self, group: _Group, replica: int | None) -> None:
        """Counts a finished sample of `group`; `replica` is None if it was not assigned to one."""
        if replica is not None:
            part = group.parts[replica]
            part.unfinished -= 1
            self._release(group)
        group.unfinished -= 1
        if not group.unfinished:
            del self._open[group.ticket]
            self._finished[group.ticket] = None
