"""Decides before each round which samples run in it, and the sizes of the KV cache that they need.

Plain Python, called by `session.py`. Samples are admitted by the lengths that they have, not by those that
they may reach. If the next call does not fit into the memory any more, those with the fewest tokens are
preempted: they wait without keys and values, and are computed again when there is room.

All decisions depend on lengths, tickets and the memory alone, never on time: a run and its repetition, and
all processes of a run, decide the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from quatrain.engine.cache import CacheShape, Room
from quatrain.engine.decode import TOKENS_PER_CALL
from quatrain.engine.groups import Group
from quatrain.engine.scheduler import Scheduler
from quatrain.ops.shape_buckets import power_of_two, round_down, round_up


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
    samples. Completions have up to `max_new_tokens`; None: as many as their groups say. With `turns`, each
    sample has a prefix slot of its own from its second turn on.
    """

    scheduler: Scheduler
    room: Room
    groups: Mapping[int, Group]
    group_size: int
    most_slots: int | None
    max_new_tokens: int | None
    turns: bool
    num_preempted: int = 0

    def __post_init__(self) -> None:
        self.shape = CacheShape(0, 0, self.room.context(1), 0)
        """The sizes of this round."""

    def next_shape(self) -> CacheShape:
        """The sizes of the next round; preempts samples that do not fit, and bars those that must wait."""
        self.scheduler.barred = next((waiting.ticket for waiting in self.scheduler.queued), None)
        self._preempt()
        need = self._admit()
        self.shape = self._sizes(need)
        return self.shape

    def may_widen(self, prompt_positions: int) -> bool:
        """Whether the prompt cache may have so many positions in this round; it then has."""
        shape = self.shape._replace(prompt_positions=max(prompt_positions, self.shape.prompt_positions))
        fits = self.room.fits(shape)
        if fits:
            self.shape = shape
        return fits

    def _preempt(self) -> None:
        """Until the next call of those that run fits: at last the sample with the most tokens alone."""
        scheduler, need = self.scheduler, self._needed()
        slots, prefix_slots = scheduler.most_in_use
        while not self.room.fits(self._least(slots, prefix_slots, need)):
            if not scheduler.free_a_prefix_slot():
                placed = sorted(scheduler.placed, key=self._by_tokens)
                assert len(placed) > 1, "`Session` accepts no sequence that does not fit alone"
                # As few numbers of slots as possible, each of which is a program: on to the next smaller one.
                given_up = self._beyond(round_down(slots - 1)) if slots > 1 else placed[:1]
                for who in given_up:
                    scheduler.preempt(*who)
                    self.num_preempted += 1
            slots, prefix_slots = scheduler.most_in_use
            need = self._needed()

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
        needs = [self._need(waiting.ticket, waiting.begun) for waiting in queued]
        fitting, together = self._fitting(need), need.and_(*needs)
        most = self.most_slots
        scheduler.barred = None
        demand = -(-scheduler.demand // replicas)
        wanted = max(demand if most is None else min(demand, most), scheduler.most_in_use[0])
        if (fit := self._fitting(together)) >= wanted:
            need, fitting = together, fit
        else:
            count = sum(loads)
            for own, waiting in zip(needs, queued, strict=True):
                longer = need.and_(own)
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
        context = max(len(group.context), group.kept)
        return _Need(context, max(used, 0), self.max_new_tokens or group.limit)

    def _ring(self, need: _Need, calls: int = 1) -> int:
        """Positions of a slot for the next call; of `calls` times as many tokens."""
        return self.room.ring(calls * (need.used + TOKENS_PER_CALL), need.limit)

    def _least(self, slots: int, prefix_slots: int, need: _Need) -> CacheShape:
        """The sizes for so many that run."""
        slots = max(slots, 1)
        prefix_slots = max(prefix_slots, slots if self.turns else 1)
        return CacheShape(slots, prefix_slots, self.room.context(need.context), self._ring(need))

    def _fitting(self, need: _Need) -> int:
        """Slots of a replica for samples with this need, with room for twice as many tokens of each.

        Without that room, most would be preempted soon. At least as many as fit with the longest completions.
        """
        context, in_use = self.room.context(need.context), self.scheduler.most_in_use[1]
        ring, longest = self._ring(need, 2), self.room.ring(need.limit, need.limit)
        slots = round_down(self.room.num_positions // ring)
        least = self.room.fitting(context + longest)
        while least and not self.room.fits(CacheShape(least, max(least, in_use), context, longest)):
            least -= 1
        while slots > least:
            groups = slots if self.turns else power_of_two(-(-slots // self.group_size))
            if self.room.fits(CacheShape(slots, max(min(groups, slots), in_use), context, ring)):
                return slots
            slots = round_down(slots - 1)
        return least

    def _sizes(self, need: _Need) -> CacheShape:
        """The sizes for the samples that may run now.

        The prompt cache keeps its positions where they suffice and the slots fit: others are another program.
        Requests of all lengths come to a server, which does not keep four times the positions that it needs.
        """
        scheduler = self.scheduler
        slots = scheduler.wanted_slots()
        prefix_slots = scheduler.wanted_prefix_slots(slots)
        if self.turns:
            prefix_slots = max(prefix_slots, slots)
        needed = self.room.context(need.context)
        shape = CacheShape(slots, prefix_slots, needed, self._ring(need))
        kept = shape._replace(prompt_positions=max(needed, self.shape.prompt_positions))
        most = self.room.fitting(kept.prompt_positions + self.room.ring(need.limit, need.limit))
        least = max(scheduler.most_in_use[1], 1)
        if (
            (slots <= most or self.room.fits(kept))
            and self.room.fits(kept._replace(prefix_slots=least))
            and not (self.max_new_tokens is None and kept.prompt_positions >= 4 * needed)
        ):
            shape = kept
        if not self.room.fits(shape):  # the memory is full: fewer prompts wait in it for a slot
            left = (self.room.num_positions - slots * shape.generated_positions) // shape.prompt_positions
            shape = shape._replace(prefix_slots=max(left, least))
        assert self.room.fits(shape), (shape, self.room)
        return shape
