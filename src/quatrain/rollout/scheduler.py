"""Which sample runs in which slot, and which prompt is kept in which row of the prompt cache.

Plain Python, driven by `session.py`: groups wait in a queue; `admit` gives a row to as many as the free slots
can take, `fill` puts their samples into slots, `finish` frees a slot, and `take` hands out finished groups. A
group holds its row until its last sample is done, so it may have more samples than there are slots.

Each replica of the sampler has slots and rows of its own, equally many, and a sample stays on the replica
that it was given to. While more sequences wait than there are slots, groups stay whole, but for those larger
than the slots of a replica; when the rest has room at once, groups are split where that makes the replicas
even.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quatrain.ops.ladder import round_up

_T = TypeVar("_T")
FEWEST_SLOTS = 4
"""A decode step of one slot costs about what one of four does: a narrower batch is not worth compiling."""


@dataclass
class _Part:
    """The samples of a group that one replica has: those that wait for a slot, and all that are not done."""

    row: int
    waiting: deque[int]
    unfinished: int


@dataclass
class _Group:
    """`waiting` samples have no replica yet; `parts` are by replica."""

    ticket: int
    waiting: deque[int]
    unfinished: int
    parts: dict[int, _Part] = field(default_factory=dict)


@dataclass(frozen=True)
class Occupant:
    """Sample number `sample` of the group `ticket`, whose prompt is in `row` of the prompt cache."""

    ticket: int
    sample: int
    row: int


@dataclass
class Scheduler:
    """At most `max_slots` sequences at once on each of `num_replicas`; sizes change by `resize` alone.

    Tickets count from 0 in the order of submission. `slots[i]` is who runs in slot i, `rows[i]` the ticket of
    the prompt in row i; those of replica 0 come first, then those of replica 1, and so on.
    """

    max_slots: int
    num_replicas: int = 1
    slots: list[Occupant | None] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue: deque[_Group] = deque()
        self._open: dict[int, _Group] = {}
        self._finished: dict[int, None] = {}
        self._next_ticket = 0

    def submit(self, num_samples: int) -> int:
        """Queue a group of `num_samples` >= 1; its ticket."""
        assert num_samples > 0
        group = _Group(self._next_ticket, deque(range(num_samples)), num_samples)
        self._next_ticket += 1
        self._queue.append(group)
        self._open[group.ticket] = group
        return group.ticket

    def admit(self) -> list[tuple[int, int]]:
        """Groups from the head of the queue that get a row now: enough to fill the slots; (ticket, row).

        A group that is split gets a row on each replica it goes to.
        """
        admitted = []
        for group, replica, count in list(self._shares(self.num_slots)):
            if replica not in group.parts:
                rows = self._of(self.rows, replica)
                if None not in rows:
                    break
                row = replica * self.num_rows + rows.index(None)
                self.rows[row] = group.ticket
                group.parts[replica] = _Part(row, deque(), 0)
                admitted.append((group.ticket, row))
            part = group.parts[replica]
            part.waiting.extend(group.waiting.popleft() for _ in range(count))
            part.unfinished += count
            self._unqueue_where_placed(group)
        return admitted

    def finish_waiting(self, ticket: int, sample: int) -> None:
        """A sample ended before it needed a slot: its first token, which the prompt gives, was its last."""
        group = self._open[ticket]
        for replica, part in group.parts.items():
            if sample in part.waiting:
                part.waiting.remove(sample)
                return self._one_less(group, replica)
        group.waiting.remove(sample)
        self._unqueue_where_placed(group)
        self._one_less(group, None)

    def fill(self) -> list[tuple[int, Occupant]]:
        """Waiting samples of admitted groups into free slots, oldest first: (slot, who)."""
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

    def finish(self, slot: int) -> None:
        """The sequence in `slot` is complete."""
        occupant = self.slots[slot]
        assert occupant is not None
        self.slots[slot] = None
        self._one_less(self._open[occupant.ticket], slot // self.num_slots)

    def take(self, count: int) -> list[int]:
        """Up to `count` finished groups, those submitted first first."""
        taken = sorted(self._finished)[:count]
        for ticket in taken:
            del self._finished[ticket]
        return taken

    @property
    def num_slots(self) -> int:
        """Slots of a replica."""
        return len(self.slots) // self.num_replicas

    @property
    def num_rows(self) -> int:
        """Rows of a replica."""
        return len(self.rows) // self.num_replicas

    @property
    def num_finished(self) -> int:
        """Finished groups that nobody has taken."""
        return len(self._finished)

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return len(self.slots) - self.slots.count(None)

    @property
    def num_unfinished(self) -> int:
        """Groups queued or with samples to go."""
        return len(self._open)

    @property
    def demand(self) -> int:
        """Sequences that run or could run now."""
        return sum(self._loads()) + sum(len(group.waiting) for group in self._queue)

    def wanted_slots(self) -> int:
        """The number of slots of a replica that suits the demand: few for the last stragglers.

        Changes only where that is worth a copy of the cache: up when more could run, down by powers of two.
        """
        in_use = self._in_use(self.slots)
        demand = max(min(max(self._fair_share(), *self._loads()), self.max_slots), *in_use)
        if demand > self.num_slots:
            return min(round_up(demand, minimum=1), max(self.max_slots, demand))
        return min(max(FEWEST_SLOTS, _power_of_two(demand)), self.num_slots)

    def wanted_rows(self, num_slots: int) -> int:
        """Rows that let `num_slots` slots of each replica be filled: those there are or twice as many.

        At most one a slot; more than there are slots only where the rows of more groups are in use.
        """
        in_use = self._in_use(self.rows)
        needed = list(in_use)
        for group, replica, _ in self._shares(num_slots):
            needed[replica] += replica not in group.parts
        rows = max(_power_of_two(max(*needed, 1)), self.num_rows)
        return min(rows, max(num_slots, *in_use))

    def resize(self, num_slots: int, num_rows: int) -> tuple[list[int], list[int]]:
        """Go to other sizes, what is in use first.

        For each new slot and row, the old one it comes from, counted on its replica (0: none).
        """
        rows_before = self.num_rows
        from_slots, self.slots = self._moved(self.slots, num_slots)
        from_rows, self.rows = self._moved(self.rows, num_rows)
        moved = {}
        for row, (ticket, old) in enumerate(zip(self.rows, from_rows, strict=True)):
            if ticket is not None:
                replica = row // num_rows
                moved[replica * rows_before + old] = row
                self._open[ticket].parts[replica].row = row
        self.slots = [who and Occupant(who.ticket, who.sample, moved[who.row]) for who in self.slots]
        return from_slots, from_rows

    def _moved(self, items: list[_T | None], size: int) -> tuple[list[int], list[_T | None]]:
        """The items of each replica that are not None, then None, `size` in all; and where each was."""
        origins: list[int] = []
        result: list[_T | None] = []
        for replica in range(self.num_replicas):
            here = self._of(items, replica)
            used = [i for i, item in enumerate(here) if item is not None]
            assert len(used) <= size
            origins += used + [0] * (size - len(used))
            result += [here[i] for i in used] + [None] * (size - len(used))
        return origins, result

    def _shares(self, num_slots: int) -> Iterator[tuple[_Group, int, int]]:
        """Where queued samples go if each replica has `num_slots` slots: (group, replica, how many)."""
        loads, fair = self._loads(), self._fair_share()
        all_fit = fair <= num_slots
        most = fair if all_fit else num_slots
        room = [most - load for load in loads]
        for group in self._queue:
            left = len(group.waiting)
            while left:
                replica = max(range(self.num_replicas), key=room.__getitem__)
                if room[replica] <= 0:
                    return
                count = min(left, room[replica] if all_fit else num_slots)
                yield group, replica, count
                room[replica] -= count
                left -= count

    def _loads(self) -> list[int]:
        """Sequences of each replica that run, or wait there for a slot."""
        loads = self._in_use(self.slots)
        for group in self._open.values():
            for replica, part in group.parts.items():
                loads[replica] += len(part.waiting)
        return loads

    def _fair_share(self) -> int:
        """Sequences of a replica if all had equally many."""
        return -(-self.demand // self.num_replicas)

    def _of(self, items: list[_T], replica: int) -> list[_T]:
        """The slots or rows of one replica."""
        size = len(items) // self.num_replicas
        return items[replica * size : (replica + 1) * size]

    def _in_use(self, items: list[Any]) -> list[int]:
        """How many slots or rows of each replica are taken."""
        each = [self._of(items, replica) for replica in range(self.num_replicas)]
        return [len(here) - here.count(None) for here in each]

    def _waiting_on(self, replica: int) -> Iterator[tuple[int, _Part]]:
        """The ticket and part of each sample that waits on `replica`, oldest first."""
        for ticket in sorted(self._open):
            part = self._open[ticket].parts.get(replica)
            for _ in range(len(part.waiting) if part else 0):
                assert part is not None
                yield ticket, part

    def _unqueue_where_placed(self, group: _Group) -> None:
        if not group.waiting:
            self._queue.remove(group)
            self._release(group)

    def _release(self, group: _Group) -> None:
        """Free the rows of replicas that are done with `group`, once none of its samples waits for one."""
        done = [] if group.waiting else [r for r, part in group.parts.items() if not part.unfinished]
        for replica in done:
            self.rows[group.parts.pop(replica).row] = None

    def _one_less(self, group: _Group, replica: int | None) -> None:
        """A sample of `group` is done, on `replica` where it was on one."""
        if replica is not None:
            part = group.parts[replica]
            part.unfinished -= 1
            self._release(group)
        group.unfinished -= 1
        if not group.unfinished:
            del self._open[group.ticket]
            self._finished[group.ticket] = None


def _power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
