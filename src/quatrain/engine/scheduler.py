"""The scheduler: assigns samples to slots and prompts to rows of the prompt cache.

Plain Python, called by `session.py`. Submitted groups wait in a queue. `admit` assigns rows of the prompt
cache to as many groups as the free slots can take, `fill` assigns their samples to slots, `finish` frees a
slot, and `take` returns finished groups. A group keeps its row until its last sample is finished, so it may
have more samples than there are slots.

A sample whose episode may go on after this turn is suspended: `suspend` frees its slot and makes it a group
of its own, with a row for its keys and values if one is free. `resume` queues it again; `drop` forgets it. A
suspended group whose row another group needs loses it, and is queued like a new one when it is resumed.

All replicas of the sampler have the same number of slots and of rows, and a sample stays on the replica that
it was assigned to. While more sequences wait than there are free slots, a group is assigned to one replica,
unless it has more samples than a replica has slots. Once all remaining sequences fit into the slots, groups
are split if that balances the replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from quatrain.ops.shape_buckets import power_of_two, round_up

_T = TypeVar("_T")
FEWEST_SLOTS = 4
"""A decode step of one slot takes about as long as of four, so smaller batches are not worth compiling."""


@dataclass
class _Part:
    """The samples of a group on one replica: those waiting for a slot, and the number of unfinished ones."""

    row: int
    waiting: deque[int]
    unfinished: int


@dataclass
class _Group:
    """A group: `waiting` samples are not assigned to a replica yet; `parts` are keyed by replica.

    `resumed`: whether it is a sample that was suspended.
    """

    ticket: int
    waiting: deque[int]
    unfinished: int
    resumed: bool = False
    parts: dict[int, _Part] = field(default_factory=dict)


@dataclass(frozen=True)
class Occupant:
    """The sample in a slot: number `sample` of group `ticket`; `row` of the prompt cache holds its prompt."""

    ticket: int
    sample: int
    row: int


@dataclass
class Scheduler:
    """Runs at most `max_slots` sequences at once on each of `num_replicas` replicas.

    Tickets number the groups from 0 in the order of submission. `slots[i]` is the sample that runs in slot i,
    and `rows[i]` is the ticket of the group whose prompt is in row i; the entries of replica 0 come first,
    then those of replica 1, and so on. Only `resize` changes the numbers of slots and rows. `varying`: the
    demand changes all the time, so that the number of slots is a power of two or `max_slots`. The queued
    group `barred`, and those behind it, are not admitted.
    """

    max_slots: int
    num_replicas: int = 1
    slots: list[Occupant | None] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)
    varying: bool = False
    barred: int | None = None

    def __post_init__(self) -> None:
        self._queue: deque[_Group] = deque()
        self._open: dict[int, _Group] = {}
        self._suspended: dict[int, None] = {}
        self._finished: dict[int, None] = {}
        self._next_ticket = 0

    def submit(self, num_samples: int) -> int:
        """Queues a group of `num_samples` >= 1 samples and returns its ticket."""
        assert num_samples > 0
        group = _Group(self._next_ticket, deque(range(num_samples)), num_samples)
        self._next_ticket += 1
        self._queue.append(group)
        self._open[group.ticket] = group
        return group.ticket

    def admit(self) -> list[tuple[int, int]]:
        """Assigns rows to groups from the head of the queue, enough to fill the free slots: [(ticket, row)].

        A group that is split over replicas gets a row on each of them.
        """
        admitted = []
        for group, replica, count in list(self._assignments(self.num_slots)):
            if replica not in group.parts:
                row = self._free_row(replica)
                row = self._lent_row(replica) if row is None else row
                if row is None:
                    break
                self._give_row(group, row)
                admitted.append((group.ticket, row))
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
        waiting = [self._waiting_on(replica) for replica in range(self.num_replicas)]
        for slot, occupant in enumerate(self.slots):
            part = None if occupant else next(waiting[slot // self.num_slots], None)
            if part is not None:
                ticket, here = part
                placed = Occupant(ticket, here.waiting.popleft(), here.row)
                self.slots[slot] = placed
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

    def suspend(self, slot: int) -> tuple[int, int | None]:
        """Frees `slot` and holds its sample as a group of one: (its ticket, its row or None).

        The row of the sample's prompt, if no other sample uses it; else a free one, and None without one.
        """
        occupant = self.slots[slot]
        assert occupant is not None
        self.finish(slot)
        own_row = self.rows[occupant.row] is None
        return self._suspend(occupant.row if own_row else self._free_row(slot // self.num_slots))

    def suspend_waiting(self, ticket: int, sample: int) -> int:
        """Holds a sample without a slot as a group of one; its ticket.

        It has the row of its prompt if no other sample uses it, else none.
        """
        parts = self._open[ticket].parts.values()
        own = next((part.row for part in parts if sample in part.waiting), None)
        self.finish_waiting(ticket, sample)
        return self._suspend(own if own is not None and self.rows[own] is None else None)[0]

    def resume(self, ticket: int) -> bool:
        """The suspended sample waits for a slot on the replica that holds its row; whether it still has one.

        If not, it is queued before the groups that have no row yet, and after the one that has: the row of
        that group becomes free only when all its samples are assigned.
        """
        del self._suspended[ticket]
        group = self._open[ticket]
        for part in group.parts.values():
            part.waiting.append(0)
            part.unfinished = 1
            return True
        group.waiting.append(0)
        self._queue.insert(sum(queued.resumed or bool(queued.parts) for queued in self._queue), group)
        return False

    def row(self, ticket: int) -> int:
        """The row of a resumed sample that still has one."""
        [part] = self._open[ticket].parts.values()
        return part.row

    def drop(self, ticket: int) -> None:
        """Forgets a suspended sample, whose episode has ended."""
        del self._suspended[ticket]
        for part in self._open.pop(ticket).parts.values():
            self.rows[part.row] = None

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
    def num_rows(self) -> int:
        """The number of rows per replica."""
        return len(self.rows) // self.num_replicas

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
    def num_suspended(self) -> int:
        """Samples that are suspended."""
        return len(self._suspended)

    @property
    def demand(self) -> int:
        """Unfinished samples: those in slots, all that wait, and suspended ones."""
        return sum(self.loads()) + sum(len(group.waiting) for group in self._queue) + len(self._suspended)

    @property
    def queued(self) -> list[int]:
        """Tickets of groups with samples that are not assigned to a replica yet, in order."""
        return [group.ticket for group in self._queue]

    @property
    def in_memory(self) -> set[int]:
        """Tickets of groups that have rows or may get them now."""
        return {ticket for ticket in self.rows if ticket is not None} | {g.ticket for g in self._admissible()}

    def wanted_slots(self) -> int:
        """The number of slots per replica for the current demand; few if only a few sequences remain.

        Each change copies the cache: the number grows when more sequences could run, and shrinks by powers of
        two. It is at most `max_slots`, unless more are in use.
        """
        in_use = self._in_use(self.slots)
        demand = max(min(max(self._fair_share(), *self.loads()), self.max_slots), *in_use)
        if demand > self.num_slots and not self.varying:
            wanted = round_up(demand, minimum=1)
        else:
            wanted = max(FEWEST_SLOTS, power_of_two(demand))
            wanted = wanted if self.varying else min(wanted, self.num_slots)
        return min(wanted, max(self.max_slots, *in_use))

    def wanted_rows(self, num_slots: int) -> int:
        """Rows per replica that are enough to fill `num_slots` slots: a power of two, never fewer than now.

        At most one row per slot, unless more rows are in use.
        """
        in_use = self._in_use(self.rows)
        needed = list(in_use)
        for group, replica, _ in self._assignments(num_slots):
            needed[replica] += replica not in group.parts
        rows = max(power_of_two(max(*needed, 1)), self.num_rows)
        return min(rows, max(num_slots, *in_use))

    def resize(self, num_slots: int, num_rows: int) -> tuple[list[int], list[int]]:
        """Changes the numbers of slots and rows per replica; entries in use move to the front.

        Returns, for each new slot and each new row, the old index on its replica; 0 for unused entries.
        """
        rows_before = self.num_rows
        from_slots, self.slots = self._compacted(self.slots, num_slots)
        from_rows, self.rows = self._compacted(self.rows, num_rows)
        moved = {}
        for row, (ticket, old) in enumerate(zip(self.rows, from_rows, strict=True)):
            if ticket is not None:
                replica = row // num_rows
                moved[replica * rows_before + old] = row
                self._open[ticket].parts[replica].row = row
        self.slots = [who and Occupant(who.ticket, who.sample, moved[who.row]) for who in self.slots]
        return from_slots, from_rows

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
        room = [most - load for load in loads]
        for group in self._admissible():
            left = len(group.waiting)
            while left:
                replica = max(range(self.num_replicas), key=room.__getitem__)
                if room[replica] <= 0:
                    return
                count = min(left, room[replica] if all_fit else num_slots)
                yield group, replica, count
                room[replica] -= count
                left -= count

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
        return -(-(sum(self.loads()) + waiting + len(self._suspended)) // self.num_replicas)

    def _on_replica(self, items: list[_T], replica: int) -> list[_T]:
        """The entries of `items` (slots or rows) of one replica."""
        size = len(items) // self.num_replicas
        return items[replica * size : (replica + 1) * size]

    def _in_use(self, items: list[Any]) -> list[int]:
        """The number of slots or rows in use on each replica."""
        each = [self._on_replica(items, replica) for replica in range(self.num_replicas)]
        return [len(here) - here.count(None) for here in each]

    def _suspend(self, row: int | None) -> tuple[int, int | None]:
        group = _Group(self._next_ticket, deque(), 1, resumed=True)
        self._next_ticket += 1
        self._open[group.ticket] = group
        self._suspended[group.ticket] = None
        if row is not None:
            self._give_row(group, row)
        return group.ticket, row

    def _give_row(self, group: _Group, row: int) -> None:
        self.rows[row] = group.ticket
        group.parts[row // self.num_rows] = _Part(row, deque(), 0)

    def _free_row(self, replica: int) -> int | None:
        """A row of `replica` that is not in use."""
        rows = self._on_replica(self.rows, replica)
        return replica * self.num_rows + rows.index(None) if None in rows else None

    def _lent_row(self, replica: int) -> int | None:
        """The row on `replica` of the sample that is suspended the longest, which loses it."""
        for ticket in self._suspended:
            part = self._open[ticket].parts.pop(replica, None)
            if part is not None:
                return part.row
        return None

    def _waiting_on(self, replica: int) -> Iterator[tuple[int, _Part]]:
        """(ticket, part) for each sample that waits for a slot on `replica`, oldest group first."""
        for ticket in sorted(self._open):
            part = self._open[ticket].parts.get(replica)
            for _ in range(len(part.waiting) if part else 0):
                assert part is not None
                yield ticket, part

    def _unqueue_if_assigned(self, group: _Group) -> None:
        """Removes `group` from the queue once all its samples are assigned to replicas."""
        if not group.waiting:
            self._queue.remove(group)
            self._release(group)

    def _release(self, group: _Group) -> None:
        """Once all samples of `group` are assigned, frees its rows on replicas without unfinished samples."""
        done = [] if group.waiting else [r for r, part in group.parts.items() if not part.unfinished]
        for replica in done:
            self.rows[group.parts.pop(replica).row] = None

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
