"""Decides before each round which samples run in it, and the sizes of the KV cache that they need.

Plain Python, called by `session.py`. Samples are admitted by the lengths that they have, not by those that
they may reach. If the next call does not fit into the memory any more, those with the fewest tokens are
preempted: they wait without keys and values, and are computed again when there is room.

All slots are in one ring of positions, as long as the longest sequence, where all sequences fit into it.
Elsewhere there are up to three, of RING_POSITIONS and of the longest; a sequence moves to the next one when
its ring is full, and short sequences do not take the memory of long ones. Sequences with a grammar have a
ring of their own behind these, as they take their steps one by one.

All decisions depend on lengths, tickets and the memory alone, never on time: a run and its repetition, and
all processes of a run, decide the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from quatrain.engine.cache import CacheShape, Ring, Room
from quatrain.engine.decode import TOKENS_PER_CALL
from quatrain.engine.groups import Group
from quatrain.engine.scheduler import FEWEST_SLOTS, SPARSE, Queued, Scheduler
from quatrain.ops.shape_buckets import power_of_four, power_of_two, round_down, round_up

RING_POSITIONS = 2048, 8192
"""Positions of the rings before the last."""
MARGIN = 8
"""Into several rings, samples are admitted while each has room for an eighth more positions than it needs.

With more room, fewer run; with less, more are preempted and computed again (`benchmarks/decode.py`)."""

MANY_TIMES = 16
"""A session of requests gives positions up where it has so many times as many as it needs."""


class _Need(NamedTuple):
    """What samples need of the cache: the most of each.

    `context`: tokens in a prefix slot. `used`: tokens of a turn in a slot, before the next call. `limit`:
    tokens that a completion may have.
    """

    context: int = 1
    used: int = 0
    limit: int = 1

    def and_(self, *others: _Need) -> _Need:
        """What these and others need."""
        return _Need(*map(max, zip(self, *others, strict=True)))


@dataclass
class Admission:
    """Admits samples of `groups`, by ticket, to the slots of `scheduler`, as far as `room` suffices.

    At most `most_slots` run at once on each replica; None: as many as fit. A group has up to `group_size`
    samples. Completions have up to `max_new_tokens`; None: as many as their groups say.
    """

    scheduler: Scheduler
    room: Room
    groups: Mapping[int, Group]
    group_size: int
    most_slots: int | None
    max_new_tokens: int | None
    ring_positions: tuple[int, ...] = RING_POSITIONS
    tokens_per_call: int = TOKENS_PER_CALL
    """The most tokens that a decode call gives a sample."""
    num_preempted: int = 0

    def __post_init__(self) -> None:
        self.shape = CacheShape((), 0, self.room.context(1))
        """The sizes of this round."""
        self._bounds: tuple[int, ...] = (0,)
        self._has_apart = False
        """Whether the last of the bounds is that of sequences with a grammar."""
        self.scheduler.ring_of = self.ring_of

    def next_shape(self) -> CacheShape:
        """The sizes of the next round; preempts samples that do not fit, and bars those that must wait."""
        # Nobody new counts before it is known what those that run need.
        self.scheduler.barred = self.scheduler.first_queued
        self._choose_rings()
        self._preempt()
        self.shape = self._sizes(self._admit()) if len(self._bounds) == 1 else self._sizes_in_rings()
        is_there = self._has_apart and len(self.shape.rings) == len(self._bounds)
        self.scheduler.num_apart = self.shape.rings[-1].slots if is_there else 0
        return self.shape

    def ring_of(self, ticket: int, sample: int) -> int:
        """The ring for the next call of a sample; past all rings if none is long enough in this round."""
        positions, rings = self._positions(ticket, sample), self.shape.rings
        ring = len(self._bounds) - 1 if self._is_apart(ticket) else bisect_left(self._bounds, positions)
        return ring if ring < len(rings) and positions <= rings[ring].positions else len(rings)

    def _is_apart(self, ticket: int) -> bool:
        return self.groups[ticket].is_constrained

    def _positions(self, ticket: int, sample: int) -> int:
        """Positions of a slot that a sample needs in the next call."""
        group = self.groups[ticket]
        return self._at_most(max(group.turn_length(sample) - 1, 0) + self.tokens_per_call, group)

    def _at_most(self, positions: int, group: Group) -> int:
        """No more than the longest ring has, nor than the group's own limit needs: where others with more
        tokens wait for room, rings are no longer than those need that run."""
        return min(positions, self._bounds[-1], group.limit)

    def _choose_rings(self) -> None:
        """One ring, if all that are unfinished fit into it, else several; grammars have one more."""
        unfinished = (self.groups[ticket].limit for ticket in self.scheduler.unfinished)
        limit = self.max_new_tokens or max(unfinished, default=1)
        longest = self.room.ring(limit, limit)
        shorter = [positions for positions in self.ring_positions if positions < longest]
        if shorter:
            together = self._together(self._needed(), self.scheduler.queued)
            shorter = [] if self._fitting(together) >= self._wanted() else shorter
        self._has_apart = any(map(self._is_apart, self.scheduler.unfinished))
        # As long as the longest of the others: of two equal bounds, `bisect_left` finds the first.
        self._bounds = (*shorter, longest, *[longest][: self._has_apart])

    def _wanted(self) -> int:
        """Slots of a replica for all that are unfinished; one may run more than its share of them."""
        demand = -(-self.scheduler.demand // self.scheduler.num_replicas)
        wanted = demand if self.most_slots is None else min(demand, self.most_slots)
        return max(wanted, self.scheduler.most_in_use[0])

    def _preempt(self) -> None:
        """Until the next call of those that run fits: at last the sample with the most tokens alone."""
        scheduler, need = self.scheduler, self._needed()
        slots, prefix_slots = scheduler.most_in_use
        while not self.room.fits(self._least(slots, prefix_slots, need)):
            # A context that nobody reads now is given up before a sample that runs: less is computed again.
            if not scheduler.free_a_prefix_slot():
                placed = sorted(scheduler.placed, key=self._by_tokens)
                assert len(placed) > 1, "`Session` accepts no sequence that does not fit alone"
                if len(self._bounds) > 1:
                    running = {(who.ticket, who.sample) for who in scheduler.slots if who is not None}
                    given_up = [who for who in placed if who in running or len(running) < 2][:1]
                else:
                    # As few numbers of slots as possible, each of which is a program: on to the next one.
                    given_up = self._beyond(round_down(slots - 1)) if slots > 1 else placed[:1]
                for who in given_up:
                    scheduler.preempt(*who)
                    self.num_preempted += 1
            slots, prefix_slots = scheduler.most_in_use
            need = self._needed()

    def _requeue_another(self, who: tuple[int, int]) -> bool:
        """Preempts the sample with the fewest tokens beside `who`; whether there is another."""
        another = min((w for w in self.scheduler.placed if w != who), key=self._by_tokens, default=None)
        if another is not None:
            self.scheduler.preempt(*another)
            self.num_preempted += 1
        return another is not None

    def _beyond(self, slots: int) -> list[tuple[int, int]]:
        """The samples to preempt so that so many run on each replica."""
        scheduler, given_up = self.scheduler, []
        for first in range(0, len(scheduler.slots), scheduler.num_slots):
            here = (who for who in scheduler.slots[first : first + scheduler.num_slots] if who is not None)
            running = sorted(((who.ticket, who.sample) for who in here), key=self._by_tokens)
            given_up += running[: max(len(running) - slots, 0)]
        return given_up

    def _by_tokens(self, who: tuple[int, int]) -> tuple[int, int, int]:
        """The order of preemption: the fewest tokens first, of equally many the youngest."""
        ticket, sample = who
        return len(self.groups[ticket].completions[sample].tokens), -ticket, -sample

    def _admit(self) -> _Need:
        """Decides up to which queued group samples may get slots, and how many; what all of these need.

        A queued sample that is longer than those before it, so that fewer would fit than these are, waits,
        with all behind it, until others have ended.
        """
        scheduler, replicas = self.scheduler, self.scheduler.num_replicas
        loads, queued = scheduler.loads(), scheduler.queued
        need = self._needed()
        fitting, together = self._fitting(need), self._together(need, queued)
        most = self.most_slots
        scheduler.barred = None
        # The usual case, in which all fit: who waits need not be looked at one by one.
        if (fit := self._fitting(together)) >= self._wanted():
            need, fitting = together, fit
        else:
            count = sum(loads)
            for waiting in queued:
                longer = need.and_(self._need(waiting.ticket, waiting.begun))
                fewer = fitting if longer == need else self._fitting(longer)
                if max(loads) > fewer or (fewer < fitting and count >= fewer * replicas):
                    scheduler.barred = waiting.ticket
                    break
                need, fitting = longer, fewer
                count += waiting.num_waiting
            if not any(loads) and queued and scheduler.barred == queued[0].ticket:
                freed = scheduler.free_a_prefix_slot()
                assert freed, "`Session` accepts no sequence that does not fit alone"
                return self._admit()
        scheduler.max_slots = fitting if most is None else min(fitting, most)
        slots, prefix_slots = scheduler.most_in_use
        slots = max(slots, min(max(loads), 1))
        if slots > scheduler.max_slots:  # those that run go on, if possible in the slots that there are
            sizes = (n for n in (scheduler.num_slots, round_up(slots, minimum=1)) if n >= slots)
            fits = (n for n in sizes if self.room.fits(self._least(n, prefix_slots, need)))
            scheduler.max_slots = next(fits, slots)
        return need

    def _together(self, need: _Need, queued: Sequence[Queued]) -> _Need:
        """What those with this need and all that are queued need."""
        groups = [self.groups[waiting.ticket] for waiting in queued]
        context = max((len(group.context) for group in groups), default=1)
        limit = self.max_new_tokens or max((group.limit for group in groups), default=1)
        begun = (self._need(waiting.ticket, waiting.begun) for waiting in queued if waiting.begun)
        return need.and_(_Need(context, 0, limit), *begun)

    def _needed(self) -> _Need:
        """What those need that are not queued."""
        used: dict[int, list[int]] = {}
        for ticket, sample in self.scheduler.placed:
            used.setdefault(ticket, []).append(sample)
        tickets = {ticket for ticket in self.scheduler.prefix_slots if ticket is not None}
        return _Need().and_(*(self._need(ticket, used.get(ticket, ())) for ticket in tickets))

    def _need(self, ticket: int, samples: Iterable[int]) -> _Need:
        group = self.groups[ticket]
        used = max((group.turn_length(index) - 1 for index in samples), default=0)
        return _Need(len(group.context), max(used, 0), self.max_new_tokens or group.limit)

    def _ring(self, need: _Need, calls: int = 1) -> int:
        """Positions of a slot for the next call; of `calls` times as many tokens."""
        return self.room.ring(calls * (need.used + self.tokens_per_call), need.limit)

    def _least(self, slots: int, prefix_slots: int, need: _Need) -> CacheShape:
        """The sizes for so many that run."""
        slots = max(slots, 1)
        rings: tuple[Ring, ...] = (Ring(slots, self._ring(need)),)
        if len(self._bounds) > 1:
            rings = self._running(margin=False).rings
            slots = sum(ring.slots for ring in rings)
        return CacheShape(rings, max(prefix_slots, 1), self.room.context(need.context))

    def _fitting(self, need: _Need) -> int:
        """Slots of a replica for samples with this need, with room for twice as many tokens of each.

        Without that room, most would be preempted soon. At least as many as fit with the longest completions.
        """
        context, in_use = self.room.context(need.context), self.scheduler.most_in_use[1]
        ring, longest = self._ring(need, 2), self.room.ring(need.limit, need.limit)

        def fits(slots: int, prefix_slots: int, positions: int) -> bool:
            return self.room.fits(CacheShape((Ring(slots, positions),), max(prefix_slots, in_use), context))

        least = self.room.fitting(context + longest)
        # `fitting` counts sequences alone, not prefix slots of others that are in use.
        while least and not fits(least, least, longest):
            least -= 1
        slots = round_down(self.room.slots(ring))
        while slots > least:
            groups = power_of_two(-(-slots // self.group_size))
            if fits(slots, min(groups, slots), ring):
                return slots
            slots = round_down(slots - 1)
        return least

    def _sizes(self, need: _Need) -> CacheShape:
        """The sizes for the samples that may run now, in one ring."""
        slots = self.scheduler.wanted_slots()
        self.scheduler.max_loads = None
        return self._with_prompts((Ring(slots, self._kept_positions(slots, need)),), need)

    def _kept_positions(self, slots: int, need: _Need) -> int:
        """Positions of a slot: in a session of requests those of the round before, if they are enough, not
        too many, and fit; the length of what requests ask for changes all the time."""
        positions, before = self._ring(need), self.shape.rings
        before = before[: len(before) - (self.scheduler.num_apart > 0)]
        if self.max_new_tokens is not None or len(before) != 1:
            return positions
        kept = before[0].positions
        context = max(self.room.context(need.context), self.shape.prompt_positions)
        prefix_slots = self.scheduler.wanted_prefix_slots(slots)
        fits = self.room.fits(CacheShape((Ring(slots, kept),), prefix_slots, context))
        return kept if positions <= kept < MANY_TIMES * positions and fits else positions

    def _with_prompts(self, rings: tuple[Ring, ...], need: _Need) -> CacheShape:
        """These rings, and the sizes of the prompt cache beside them.

        The prompt cache keeps its positions where they suffice and the slots fit: others are another program.
        Requests of all lengths come to a server, which keeps neither these nor those of its slots where they
        are many times what it needs (`MANY_TIMES`).
        """
        scheduler, needed = self.scheduler, self.room.context(need.context)
        shape = CacheShape(rings, 0, needed)
        prefix_slots = scheduler.wanted_prefix_slots(shape.slots)
        shape = shape._replace(prefix_slots=prefix_slots)
        kept = shape._replace(prompt_positions=max(needed, self.shape.prompt_positions))
        most = self.room.fitting(kept.prompt_positions + self.room.ring(need.limit, need.limit))
        least = max(scheduler.most_in_use[1], 1)
        if (
            (shape.slots <= most or self.room.fits(kept))
            and self.room.fits(kept._replace(prefix_slots=least))
            and not (self.max_new_tokens is None and kept.prompt_positions >= MANY_TIMES * needed)
        ):
            shape = kept
        if not self.room.fits(shape):  # the memory is full: fewer prompts wait in it for a slot
            shape = shape._replace(prefix_slots=max(self.room.prefix_slots(shape), least))
        assert self.room.fits(shape), (shape, self.room)
        return shape

    def _running(self, *, margin: bool) -> _Slots:
        """The slots of those that run, with a `margin` of positions or without one."""
        scheduler = self.scheduler
        slots = _Slots(self.room, self._bounds, margin, scheduler.num_replicas)
        for slot, who in enumerate(scheduler.slots):
            if who is not None:
                group, positions = self.groups[who.ticket], self._positions(who.ticket, who.sample)
                slots.add(positions, group, slot // scheduler.num_slots)
        return slots

    def _sizes_in_rings(self) -> CacheShape:
        """Admits samples while there is room for them with a margin; the sizes for all that run."""
        scheduler = self.scheduler
        now, ahead = self._running(margin=False), self._running(margin=True)
        need = self._needed()
        in_use, new_groups = scheduler.most_in_use[1], 0
        running = {(who.ticket, who.sample) for who in scheduler.slots if who is not None}
        waiting = [(who, False) for who in scheduler.placed if who not in running]
        queued = (
            ((w.ticket, sample), True)
            for w in scheduler.queued
            for sample in (w.begun or range(w.num_waiting))
        )
        admitted: set[int] = set()
        for who, is_queued in chain(waiting, queued):
            ticket = who[0]
            has_tokens = not is_queued or scheduler.has_begun(ticket)
            group = self.groups[ticket]
            positions = self._positions(*who) if has_tokens else self._at_most(self.tokens_per_call, group)
            longer = need.and_(self._need(ticket, ()))
            more_now, more_ahead = (each.with_(positions, group) for each in (now, ahead))
            new = new_groups + (is_queued and ticket not in admitted)
            prefix_slots = in_use + -(-new // scheduler.num_replicas)
            fits = all(
                self.room.fits(
                    CacheShape(
                        slots.rings,
                        prefix_slots,
                        self.room.context(longer.context),
                    )
                )
                for slots in (more_now, more_ahead)
            )
            fits &= self.most_slots is None or more_now.most <= self.most_slots
            if not fits and now.most:
                break
            if not fits and (scheduler.free_a_prefix_slot() or self._requeue_another(who)):
                return self._sizes_in_rings()  # alone, the first one fits
            now, ahead, need, new_groups = more_now, more_ahead, longer, new
            admitted.add(ticket)
        scheduler.barred = next((w.ticket for w in scheduler.queued if w.ticket not in admitted), None)
        scheduler.max_loads = [sum(counts) for counts in now.counts]
        keep = _kept_of_requests if self._has_apart else _kept
        kept = tuple(map(keep, now.rings, [*self.shape.rings, *[Ring(0, 0)] * len(now.rings)]))
        prefix_slots = max(in_use + new_groups, 1)
        fits = self.room.fits(CacheShape(kept, prefix_slots, self.room.context(need.context)))
        rings = kept if fits else now.rings
        scheduler.max_slots = sum(ring.slots for ring in rings)
        return self._with_prompts(rings, need)


def _kept(wanted: Ring, before: Ring) -> Ring:
    """The ring with as many slots as before, if these suffice and are not twice as many."""
    slots = before.slots if wanted.slots <= before.slots <= 2 * wanted.slots else wanted.slots
    return wanted._replace(slots=slots)


def _kept_of_requests(wanted: Ring, before: Ring) -> Ring:
    """The ring as before, if it suffices and is not many times too large; else with slots of few numbers."""
    if not wanted.slots:
        return wanted
    slots, positions = power_of_four(max(wanted.slots, FEWEST_SLOTS)), wanted.positions
    if wanted.slots <= before.slots < SPARSE * wanted.slots:
        slots = before.slots
    if positions <= before.positions < MANY_TIMES * positions:
        positions = before.positions
    return Ring(slots, positions)


class _Slots:
    """How many slots of each ring sequences need, with a `margin` of positions or without one."""

    def __init__(self, room: Room, bounds: tuple[int, ...], margin: bool, num_replicas: int):
        self._room, self._bounds, self._margin = room, bounds, margin
        self.counts = [[0] * len(bounds) for _ in range(num_replicas)]
        self._longest = [0] * len(bounds)
        self._limits = [0] * len(bounds)

    def add(self, positions: int, group: Group, replica: int) -> None:
        """One more sequence of a group; in the last ring, if it has a grammar."""
        positions = min(positions + self._margin * (positions // MARGIN), self._bounds[-1], group.limit)
        last = len(self._bounds) - 1
        ring = last if group.is_constrained else bisect_left(self._bounds, positions)
        self.counts[replica][ring] += 1
        self._longest[ring] = max(self._longest[ring], positions)
        self._limits[ring] = max(self._limits[ring], min(group.limit, self._bounds[ring]))

    def with_(self, positions: int, group: Group) -> _Slots:
        """These and one more sequence, on the replica that has the fewest."""
        more = _Slots(self._room, self._bounds, self._margin, 0)
        more.counts, more._longest = list(map(list.copy, self.counts)), list(self._longest)
        more._limits = list(self._limits)
        emptiest = min(range(len(self.counts)), key=lambda replica: sum(self.counts[replica]))
        more.add(positions, group, emptiest)
        return more

    @property
    def most(self) -> int:
        """Sequences of the replica that has the most."""
        return max(map(sum, self.counts))

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The rings up to the last that is used; at least one slot."""
        each = zip(zip(*self.counts, strict=True), self._longest, self._limits, strict=True)
        # By the limits of those in it: one that fits alone must not need more because others may have more.
        rings = [
            Ring(round_up(max(counts), minimum=1), self._room.ring(longest, limit)) if longest else Ring(0, 0)
            for counts, longest, limit in each
        ]
        while rings and not rings[-1].slots:
            rings.pop()
        return tuple(rings) or (Ring(1, self._room.ring(TOKENS_PER_CALL, self._bounds[0])),)
