"""Which sample runs in which slot, and which prompt is kept in which row of the prompt cache.

Plain Python, driven by `session.py`: groups wait in a queue; `admit` gives a row to as many as the free slots
can take, `fill` puts their samples into slots, `finish` frees a slot, and `take` hands out finished groups. A
group holds its row until its last sample is done, so it may have more samples than there are slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quatrain.ops.ladder import round_up

FEWEST_SLOTS = 4
"""A decode step of one slot costs about what one of four does: a narrower batch is not worth compiling."""


@dataclass
class _Group:
    ticket: int
    waiting: deque[int]
    unfinished: int
    row: int | None = None


@dataclass(frozen=True)
class Occupant:
    """Sample number `sample` of the group `ticket`, whose prompt is in `row` of the prompt cache."""

    ticket: int
    sample: int
    row: int


@dataclass
class Scheduler:
    """At most `max_slots` sequences at once; sizes change by `resize` alone.

    Tickets count from 0 in the order of submission. `slots[i]` is who runs in slot i, `rows[i]` the ticket of
    the prompt in row i.
    """

    max_slots: int
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
        return group.ticket

    def admit(self) -> list[tuple[int, int]]:
        """Groups from the head of the queue that get a row now: enough to fill the slots; (ticket, row)."""
        admitted = []
        wanted = self.slots.count(None) - sum(len(group.waiting) for group in self._open.values())
        free_rows = deque(row for row, ticket in enumerate(self.rows) if ticket is None)
        while wanted > 0 and self._queue and free_rows:
            group = self._queue.popleft()
            group.row = free_rows.popleft()
            self.rows[group.row] = group.ticket
            self._open[group.ticket] = group
            admitted.append((group.ticket, group.row))
            wanted -= len(group.waiting)
        return admitted

    def finish_waiting(self, ticket: int, sample: int) -> None:
        """A sample ended before it needed a slot: its first token, which the prompt gives, was its last."""
        group = self._open[ticket]
        group.waiting.remove(sample)
        self._one_less(group)

    def fill(self) -> list[tuple[int, Occupant]]:
        """Waiting samples of admitted groups into free slots, oldest first: (slot, who)."""
        waiting = self._waiting()
        filled = []
        for slot, occupant in enumerate(self.slots):
            if occupant is not None:
                continue
            group = next(waiting, None)
            if group is None:
                break
            assert group.row is not None
            placed = Occupant(group.ticket, group.waiting.popleft(), group.row)
            self.slots[slot] = placed
            filled.append((slot, placed))
        return filled

    def finish(self, slot: int) -> None:
        """The sequence in `slot` is complete."""
        occupant = self.slots[slot]
        assert occupant is not None
        self.slots[slot] = None
        self._one_less(self._open[occupant.ticket])

    def take(self, count: int) -> list[int]:
        """Up to `count` finished groups, those submitted first first."""
        taken = sorted(self._finished)[:count]
        for ticket in taken:
            del self._finished[ticket]
        return taken

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
        return len(self._queue) + len(self._open)

    @property
    def demand(self) -> int:
        """Sequences that run or could run now."""
        waiting = sum(len(group.waiting) for group in (*self._queue, *self._open.values()))
        return self.num_live + waiting

    def wanted_slots(self) -> int:
        """The number of slots that suits the demand: few for the last stragglers, `max_slots` at most.

        Changes only where that is worth a copy of the cache: up when more could run, down by powers of two.
        """
        demand = min(self.demand, self.max_slots)
        if demand > len(self.slots):
            return min(round_up(demand, minimum=1), self.max_slots)
        return min(max(FEWEST_SLOTS, _power_of_two(demand)), len(self.slots))

    def wanted_rows(self, num_slots: int) -> int:
        """Rows that let `num_slots` slots be filled: those there are or twice as many, at most one a slot.

        More than there are slots only where the rows of more groups are in use.
        """
        in_use = sum(ticket is not None for ticket in self.rows)
        free_slots = num_slots - self.num_live - sum(len(group.waiting) for group in self._open.values())
        needed = in_use
        for group in self._queue:
            if free_slots <= 0:
                break
            needed += 1
            free_slots -= len(group.waiting)
        rows = max(_power_of_two(max(needed, 1)), len(self.rows))
        return min(rows, max(num_slots, in_use))

    def resize(self, num_slots: int, num_rows: int) -> tuple[list[int], list[int]]:
        """Go to other sizes, what is in use first; for each new slot and row, the old one (0: none)."""
        slots = [i for i, occupant in enumerate(self.slots) if occupant is not None]
        rows = [i for i, ticket in enumerate(self.rows) if ticket is not None]
        assert len(slots) <= num_slots
        assert len(rows) <= num_rows
        moved = {old: new for new, old in enumerate(rows)}
        for group in self._open.values():
            assert group.row is not None
            group.row = moved[group.row]
        occupants = [self.slots[i] for i in slots]
        self.slots = [Occupant(o.ticket, o.sample, moved[o.row]) for o in occupants if o is not None]
        self.slots += [None] * (num_slots - len(slots))
        self.rows = [self.rows[i] for i in rows] + [None] * (num_rows - len(rows))
        return slots + [0] * (num_slots - len(slots)), rows + [0] * (num_rows - len(rows))

    def _waiting(self) -> Iterator[_Group]:
        """The group of each waiting sample, oldest first."""
        for ticket in sorted(self._open):
            for _ in range(len(self._open[ticket].waiting)):
                yield self._open[ticket]

    def _one_less(self, group: _Group) -> None:
        group.unfinished -= 1
        if group.unfinished:
            return
        assert group.row is not None
        self.rows[group.row] = None
        del self._open[group.ticket]
        self._finished[group.ticket] = None


def _power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
