"""Packing: sequences into micro-batches of at most so many tokens per data shard.

Data flow: lengths -> `plan_packing` -> the rows of every micro-batch and shard, for each pass that reads a
budget of tokens (update, log-probabilities, values). A plan depends on its arguments alone, so every process
computes the same plan.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LEAST_COMMON_PREFIX = 32
"""Fewest tokens of a prefix shared by all sequences: every query of a buffer reads it, which has a price."""
WIDTH_UNIT = 128
"""Widths of buffers are multiples of so many tokens, or the whole budget."""
OCTAVE = (11, 9, 7)
"""Sixteenths of the budget: with their halves, quarters and eighths the widths of a single micro-batch."""
SEVERAL = (7, 11, 13, 16)
"""Sixteenths of the budget: the widths where there are several micro-batches. Few, because each is a program
to compile, and chosen so that the sums of `LAST` of them come close to any total."""
LAST = 3
"""So many micro-batches, the last ones, may be narrower than the budget."""
PAIRS = 8
"""Pairs of sequences that are tried where the longest that fits would leave a gap too small for any other."""


@dataclass(frozen=True)
class PackingCost:
    """Compute of a sequence: linear * tokens + quadratic * tokens^2, in any unit.

    The default is verl's for a 7B (hidden size 4096: 6 * 4096 * tokens + tokens^2); its ratio is the number
    of tokens at which attention costs as much as everything linear in the tokens.
    """

    linear: float = 24576.0
    quadratic: float = 1.0

    def __post_init__(self) -> None:
        both = (self.linear, self.quadratic)
        if not all(math.isfinite(value) and value >= 0 for value in both) or not any(both):
            raise ValueError(f"PackingCost: both are finite and not negative, and one is above 0; got {both}")

    def of(self, tokens: Any, squares: Any) -> Any:
        """Cost of a sum of lengths and a sum of their squares: integers, hence exact in any order."""
        return self.linear * tokens + self.quadratic * squares


DEFAULT_COST = PackingCost()


class Packing(NamedTuple):
    """Which sequences each micro-batch has on each data shard, and how wide its buffers are."""

    bins: tuple[tuple[np.ndarray, ...], ...]
    """[micro-batches][shards] int64 indices of sequences; those that share a group prefix are adjacent."""
    widths: tuple[int, ...]
    """[micro-batches] tokens of the buffer of each shard."""


def common_tokens(*columns: np.ndarray) -> int:
    """How many tokens n sequences begin with in common, with all `columns` [n, T] of them: ids, pictures."""
    same = np.logical_and.reduce([(column == column[0]).all(axis=0) for column in columns])
    return int(np.logical_and.accumulate(same).sum())


def useful_common_prefix(common: int, lengths: np.ndarray) -> int:
    """Of `common` tokens that all sequences begin with, those that are worth being shared, or 0.

    Never all of one of `lengths` [n]: its last token is its own.
    """
    tokens = min(common, int(lengths.min()) - 1)
    return tokens if tokens >= LEAST_COMMON_PREFIX else 0


def width_buckets(max_tokens: int) -> tuple[int, ...]:
    """The widths a buffer may have, ascending: three an octave, from an eighteenth of `max_tokens` on."""
    return _rungs(max_tokens, [16, 13, *(sixteenths / 2**k for k in range(4) for sixteenths in OCTAVE)])


def _rungs(max_tokens: int, sixteenths: Iterable[float]) -> tuple[int, ...]:
    """Parts of `max_tokens`, ascending, each rounded up to a multiple of `WIDTH_UNIT` but never above it."""
    widths = (math.ceil(max_tokens * part / (16 * WIDTH_UNIT)) * WIDTH_UNIT for part in sixteenths)
    return tuple(sorted({min(width, max_tokens) for width in widths}))


def buffers_per_shard(lengths: np.ndarray | Sequence[int], max_tokens: int, line_tokens: int | None) -> int:
    """Into how many buffers a shard's `max_tokens` are split, each with room for the longest of `lengths`.

    Buffers have at most `line_tokens` tokens, unless a sequence has more; None: one buffer.
    """
    longest = int(np.max(lengths, initial=1))
    if line_tokens is None or longest > max_tokens:
        return 1
    return max(1, min(-(-max_tokens // line_tokens), max_tokens // longest))


def plan_packing(
    lengths: Any,
    max_tokens: int,
    num_shards: int,
    *,
    groups: np.ndarray | None = None,
    prefixes: np.ndarray | None = None,
    shared_prefix: int = 0,
    cost: PackingCost = DEFAULT_COST,
) -> Packing:
    """Sequences into micro-batches of one bin per shard, every bin of at most `max_tokens` tokens.

    All micro-batches have the full width, except the last `LAST`: their widths get the least sum that could
    hold the remaining tokens, and then larger sums until all sequences fit. A micro-batch takes the longest
    sequence that fits into one of its bins, again and again, each into the bin of least cost that has room. A
    group that shares a prefix is placed whole, like one sequence; where none fits whole, one is split, and
    each part holds the prefix again. Bins may be empty.

    `lengths` [n] are whole tokens >= 1, all prefixes included. Sequences of equal `groups` [n] share
    `prefixes` [n] tokens, at least `shared_prefix`; None: each is alone. `shared_prefix` tokens, with which
    all sequences begin, stand once in every buffer. Raises ValueError for a length above `max_tokens` or
    below 1, lengths that are not [n] integers, and `max_tokens` or `num_shards` below 1.
    """
    lengths = _check(lengths, max_tokens, num_shards)
    groups = np.arange(len(lengths)) if groups is None else groups
    prefixes = np.zeros(len(lengths), np.int64) if prefixes is None else prefixes - shared_prefix
    # The shared prefix stands once in each buffer: it leaves the lengths here and the widths below.
    units = _units(lengths - shared_prefix, groups, prefixes)
    # Each token also attends to the prefix of all: (p + t)^2 - p^2 = 2 p t + t^2.
    cost = PackingCost(cost.linear + 2 * shared_prefix * cost.quadratic, cost.quadratic)
    single, several = (
        tuple(width - shared_prefix for width in widths if width > shared_prefix)
        for widths in (width_buckets(max_tokens), _rungs(max_tokens, SEVERAL))
    )
    micro_batches = _micro_batches(_Pool(units), single, several, num_shards, cost)
    # A single micro-batch has more widths to choose from: it is a program of its own anyway.
    rungs = single if len(micro_batches) == 1 else several
    least = (next(width for width in rungs if width >= tokens) for _, tokens in micro_batches)
    bins = tuple(tuple(map(_rows, bins)) for bins, _ in micro_batches)
    return Packing(bins, tuple(shared_prefix + width for width in least))


def _check(lengths: Any, max_tokens: int, num_shards: int) -> np.ndarray:
    """`lengths` as [n] int64, or the error that says what is wrong."""
    array = np.asarray(lengths if len(lengths) else np.zeros(0, np.int64))
    problem = None
    if max_tokens < 1 or num_shards < 1:
        name, value = ("max_tokens", max_tokens) if max_tokens < 1 else ("num_shards", num_shards)
        problem = f"{name} is at least 1, got {value}; set it to 1 or more"
    elif array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        got = f"{array.dtype} of shape {array.shape}"
        problem = f"lengths are whole numbers of tokens, one per sequence; got {got}"
    elif (least := array.min(initial=1)) < 1:
        problem = f"a sequence has at least 1 token, got {least} at index {array.argmin()}; leave it out"
    elif (most := array.max(initial=1)) > max_tokens:
        where = f"the sequence of {most} tokens at index {array.argmax()}"
        problem = f"max_tokens={max_tokens} cannot hold {where}; set it to at least {most}"
    if problem:
        raise ValueError(f"packing: {problem}")
    return array.astype(np.int64)


class _Unit(NamedTuple):
    """Sequences that are placed together: a single one, or some of a group with their prefix counted once."""

    tokens: int
    rows: tuple[int, ...]
    own: tuple[int, ...] = ()
    """[rows] tokens after the group prefix, descending; empty for a single sequence, which has no prefix."""

    def split(self, room: int) -> tuple[_Unit, _Unit] | None:
        """The sequences that fit into `room` with the prefix, the longest first, and the others; or None."""
        prefix = self.tokens - sum(self.own)
        # The longest first, as everywhere: short sequences find room later, long ones do not.
        parts: tuple[list[tuple[int, int]], ...] = [], []
        tokens = prefix
        for own, row in zip(self.own, self.rows, strict=False):
            fits = tokens + own <= room
            tokens += own * fits
            parts[not fits].append((own, row))
        return (_group(prefix, parts[0]), _group(prefix, parts[1])) if all(parts) else None


def _group(prefix: int, members: list[tuple[int, int]]) -> _Unit:
    """The unit of `members` (tokens after the prefix, row), descending."""
    own, rows = zip(*members, strict=True)
    return _Unit(prefix + sum(own), rows, own)


def _units(lengths: np.ndarray, groups: np.ndarray, prefixes: np.ndarray) -> list[_Unit]:
    """The sequences, those of a group together where they share a prefix; ascending by tokens."""
    units, members = [], defaultdict(list)
    for row, (length, group, prefix) in enumerate(zip(lengths.tolist(), groups.tolist(), prefixes.tolist())):
        if prefix:
            members[group, prefix].append((length - prefix, row))
        else:
            units.append(_Unit(length, (row,)))
    units += [_group(prefix, sorted(held, reverse=True)) for (_, prefix), held in members.items()]
    # By tokens, then by rows: every process makes the plan for itself, and must make the same.
    return sorted(units)


_MicroBatch = tuple[list[list[_Unit]], int]
"""The bins, and the tokens of the fullest."""


def _micro_batches(
    pool: _Pool, single: tuple[int, ...], several: tuple[int, ...], num_shards: int, cost: PackingCost
) -> list[_MicroBatch]:
    """All units of `pool`: one micro-batch of a width in `single`, or several of widths in `several`."""
    full, filled = single[-1], list[_MicroBatch]()
    total = -(-sum(pool.sizes) // num_shards)  # of one shard; the widths sum to no less
    count = max(1, -(-total // full))
    while True:
        # Full ones stay from try to try: only the widths of the last depend on the total that is tried.
        while len(filled) < count - LAST:
            filled.append(pool.fill(full, num_shards, cost))
        rungs = single if count == 1 else several
        widths = _widths(rungs, total - len(filled) * full, count - len(filled))
        # Tried on a copy: where not all sequences fit, the same ones are placed anew in wider buffers.
        rest = _Pool(pool.units)
        last = [rest.fill(width, num_shards, cost) for width in widths]
        if not rest.sizes:
            return filled + last
        # Half of what is left over: gaps of wider bins may take the rest. If all are full, one bin more.
        left = -(-sum(rest.sizes) // num_shards)
        reached, most = len(filled) * full + sum(widths), count * full
        total = min(reached + max(1, left // 2), most) if reached < most else most + left
        count = -(-total // full)


def _rows(units: list[_Unit]) -> np.ndarray:
    """The sequences of a bin, those of a unit side by side."""
    return np.array([row for rows in sorted(sorted(unit.rows) for unit in units) for row in rows], np.int64)


def _widths(rungs: tuple[int, ...], total: int, count: int) -> tuple[int, ...]:
    """`count` widths, descending, of the least sum from `total` on."""
    choices = itertools.combinations_with_replacement(rungs, count)
    return min((sum(choice), choice) for choice in choices if sum(choice) >= total)[1][::-1]


class _Pool:
    """Units not placed yet, ascending by tokens."""

    def __init__(self, units: list[_Unit]) -> None:
        self.units, self.sizes = units.copy(), [unit.tokens for unit in units]
        self.has_groups = any(len(unit.own) > 1 for unit in units)

    def fill(self, width: int, num_shards: int, cost: PackingCost) -> _MicroBatch:
        """A micro-batch of bins of at most `width` tokens, which takes units until none left fits."""
        bins: list[list[_Unit]] = [[] for _ in range(num_shards)]
        rooms, costs = [width] * num_shards, [0.0] * num_shards
        while unit := self.take(max(rooms)):
            fitting = [k for k, room in enumerate(rooms) if room >= unit.tokens]
            # By cost, not by tokens: shards wait for the slowest, and attention makes long sequences dearer.
            k = min(fitting, key=costs.__getitem__)
            bins[k].append(unit)
            rooms[k] -= unit.tokens
            costs[k] += cost.of(unit.tokens, unit.tokens**2)
        return bins, width - min(rooms)

    def take(self, room: int) -> _Unit | None:
        """The longest unit that fits; where none does, the part that fits of the longest that has one."""
        at = bisect.bisect_right(self.sizes, room)
        if at:
            return self._pop(self._closest(at - 1, room))
        # A group is split only where nothing fits whole: each of its parts computes the prefix again.
        for k in reversed(range(len(self.units) if self.has_groups else 0)):
            if parts := self.units[k].split(room):
                self._pop(k)
                # Put back in its order, and not at the end: every process must take the same units in the
                # same order.
                at = bisect.bisect_left(self.units, parts[1])
                self.units.insert(at, parts[1])
                self.sizes.insert(at, parts[1].tokens)
                return parts[0]
        return None

    def _closest(self, longest: int, room: int) -> int:
        """`longest`, unless no other fits beside it and a pair of shorter ones leaves less of `room`."""
        best, gap = longest, room - self.sizes[longest]
        if not 0 < gap < self.sizes[0]:
            return best
        # Only the last few pairs: a search among all would take longer than the padding it saves.
        end = bisect.bisect_right(self.sizes, room - self.sizes[0])
        for k in range(max(1, end - PAIRS), end):
            other = min(bisect.bisect_right(self.sizes, room - self.sizes[k]), k) - 1
            left = room - self.sizes[k] - self.sizes[other]
            if left < gap:
                best, gap = k, left
        return best

    def _pop(self, k: int) -> _Unit:
        del self.sizes[k]
        return self.units.pop(k)
