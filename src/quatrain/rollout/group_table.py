"""Which groups wait, which worker has which, and which are finished: each group comes out exactly once.

Used by `supervisor.py`. Pure bookkeeping, without threads, clocks or tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from quatrain.rollout.worker import FinishedGroup, GroupSpec

BUSY = 1.25
"""A turn waits for the worker that has its dialogue while this has at most so many times its part."""
MOST_HOMES = 4096
"""Dialogues whose workers are remembered."""
SUSPECT = 2
"""From this many failures on, a group is given to a worker that has no other group."""
SHOWN_CHARS = 80
"""Characters of a prompt in a message."""


class GroupFailed(RuntimeError):
    """A group failed on every worker that it was given to."""


@dataclass
class _Entry:
    spec: GroupSpec
    only: str | None = None
    """The only worker that may have it; None: any."""
    worker: str | None = None
    failures: int = 0
    failed_on: set[str] = field(default_factory=set)
    """The workers that said so."""
    result: FinishedGroup | None = None
    withdrawn: bool = False
    """Whether nobody asks for it any more."""

    def waits_for(self, worker: str, able: Collection[str]) -> bool:
        if self.worker is not None or self.result is not None or self.only not in (None, worker):
            return False
        return worker not in self.failed_on or self.only == worker or self.failed_on.issuperset(able)

    @property
    def suspect(self) -> bool:
        return self.failures >= SUSPECT


class GroupTable:
    """Groups by number, each until `take` returns its result.

    A group fails if a worker says so, or is lost while it has the group; it is then given out again, at most
    `retries` times. A worker that said so gets it again only if all `able` workers have, those that can
    sample now. A group that failed twice is given out alone, so that a group which ends every worker does not
    make others fail with it. A turn of an agent (`own`) that failed too often is finished, with its last
    error, and costs its episode; another group ends the run.

    The turns of a session go to the worker that returned its last one, as long as this can sample and is not
    busier than others: it keeps the session's context.
    """

    def __init__(self, retries: int):
        self.retried = 0
        """Groups that had to be given out again, so far."""
        self._retries = retries
        self._entries: dict[int, _Entry] = {}
        self._homes: dict[str, str] = {}

    def __len__(self) -> int:
        """Groups that were added and not taken."""
        return len(self._entries)

    @property
    def num_unfinished(self) -> int:
        """Groups that wait or that a worker has."""
        return sum(entry.result is None for entry in self._entries.values())

    def num_waiting(self, worker: str, able: Collection[str] = ()) -> int:
        """Groups that no worker has, and `worker` may have."""
        return len(self._waiting(worker, able))

    def is_given(self, number: int) -> bool:
        """Whether a worker has this group."""
        return self._entries[number].worker is not None

    def add(self, groups: Iterable[GroupSpec], *, only: str | None = None) -> None:
        """Groups with new numbers, which wait to be given out in this order; with `only`, to this worker."""
        for group in groups:
            if group.number in self._entries:
                raise ValueError(f"numbers of groups must be unique; {group.number} was added before")
            self._entries[group.number] = _Entry(group, only)

    def held(self, worker: str) -> list[GroupSpec]:
        """The groups that `worker` has."""
        return [entry.spec for entry in self._entries.values() if entry.worker == worker]

    def largest_waiting(self, worker: str, able: Collection[str] = ()) -> int:
        """Samples of the largest group that waits and `worker` may have; 1 if none waits."""
        return max((entry.spec.sampling.n for entry in self._waiting(worker, able)), default=1)

    def give(self, worker: str, room: int, able: Collection[str] = ()) -> list[GroupSpec]:
        """Gives the next waiting groups to `worker`, which may then have at most `room`."""
        waiting = self._waiting(worker, able)
        held = [entry for entry in self._entries.values() if entry.worker == worker]
        suspects = [entry for entry in waiting if entry.suspect]
        if any(entry.suspect for entry in held):
            return []
        others = [entry for entry in waiting if not entry.suspect][: max(room - len(held), 0)]
        # While one waits to be given alone, nothing else is given, so that a worker becomes free for it.
        given = others if not suspects else [] if held else suspects[:1]
        for entry in given:
            entry.worker = worker
        return [entry.spec for entry in given]

    def _waiting(self, worker: str, able: Collection[str]) -> list[_Entry]:
        """The groups that no worker has, and `worker` may have."""
        counts = Counter(entry.worker for entry in self._entries.values())
        most = BUSY * self.num_unfinished / max(len(able), 1)
        # One that is lost, or has more than its part, is not waited for: that costs a context, no time.
        free = {home for home in able if counts[home] <= most}
        return [
            entry
            for entry in self._entries.values()
            if entry.waits_for(worker, able)
            and ((home := self._home(entry)) in (None, worker) or home not in free)
        ]

    def _home(self, entry: _Entry) -> str | None:
        own = entry.spec.own
        return None if own is None or entry.failures else self._homes.get(own.session)

    def finish(self, worker: str, group: FinishedGroup) -> None:
        """Takes back a group that `worker` has: finished, or to be given out again if it failed.

        Raises GroupFailed if it failed too often, and ValueError if `worker` does not have it or returns
        another number of samples than the group asks for.
        """
        entry = self._entries.get(group.number)
        if entry is None or entry.worker != worker:
            raise ValueError(f"returned group {group.number}, which it does not have")
        if entry.withdrawn:
            del self._entries[group.number]
        elif group.error is not None:
            entry.failed_on.add(worker)
            self._fail(entry, worker, group.error)
        elif len(group.samples) != entry.spec.sampling.n:
            raise ValueError(
                f"returned {len(group.samples)} samples of group {group.number}, which has "
                f"{entry.spec.sampling.n}"
            )
        else:
            entry.worker, entry.result = None, group
            if session := "" if entry.spec.own is None else entry.spec.own.session:
                self._homes.pop(session, None)
                self._homes[session] = worker
                if len(self._homes) > MOST_HOMES:
                    del self._homes[next(iter(self._homes))]

    def lose(self, worker: str, why: str) -> int:
        """Takes all groups from `worker`, which is lost; how many.

        Raises GroupFailed if one of them failed too often.
        """
        entries = [entry for entry in self._entries.values() if entry.worker == worker]
        for entry in entries:
            entry.worker = None
        for entry in entries:
            self._fail(entry, worker, why)
        return len(entries)

    def _fail(self, entry: _Entry, worker: str, why: str) -> None:
        entry.worker = None
        if entry.withdrawn:
            del self._entries[entry.spec.number]
            return
        entry.failures += 1
        self.retried += 1
        if entry.failures > self._retries and entry.spec.own is not None:
            failed = f"it failed {entry.failures} times, last on {worker}: {why}"
            entry.result = FinishedGroup(entry.spec.number, error=failed)
        elif entry.failures > self._retries:
            spec, text = entry.spec, entry.spec.prompt.text
            end = (text if isinstance(text, str) else str(text[-1].get("content")))[-SHOWN_CHARS:]
            raise GroupFailed(
                f"group {spec.prompt.group_id} of step {spec.step} failed {entry.failures} times, last on "
                f"{worker}: {why}; its prompt ends with {end!r}; if other groups fail with the same error, "
                "mend the workers or servers; otherwise see what this prompt or its environment does to "
                "them, and mend it or take it out of the data"
            )

    def finished(self, numbers: Sequence[int]) -> bool:
        """Whether the results of all these groups have come."""
        return all(self._entries[number].result is not None for number in numbers)

    def results(self, numbers: Sequence[int]) -> list[FinishedGroup]:
        """The results of those of these groups that are finished, which stay in the table."""
        found = (self._entries[number].result for number in numbers)
        return [result for result in found if result is not None]

    def holds(self, numbers: Sequence[int]) -> bool:
        """Whether all these groups were added, and not taken yet."""
        return all(number in self._entries for number in numbers)

    def withdraw(self, numbers: Iterable[int]) -> None:
        """Forgets groups, finished or not; those that a worker has as soon as it no longer does."""
        for number in numbers:
            if (entry := self._entries.get(number)) is None:
                continue
            if entry.worker is None:
                del self._entries[number]
            entry.withdrawn = True

    def take(self, numbers: Sequence[int]) -> list[FinishedGroup]:
        """Removes these finished groups: their results, in this order."""
        results = self.results(numbers)
        if len(results) < len(numbers):
            raise ValueError("only finished groups can be taken")
        for number in numbers:
            del self._entries[number]
        return results
