"""Packing: whole sequences into micro-batches of at most so many tokens per data shard.

Data flow: lengths -> `plan_packing` -> the rows of every micro-batch and shard, for each pass that reads a
budget of tokens (update, log-probabilities, values). Host-side numpy int64; a plan depends on its arguments
alone, and every comparison is made on exact integer sums, so that every host finds the same one.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GOOD = 1.03  # imbalance that ends the search; a full bin further above the mean may give up its shortest
LEVEL = 1.005  # moves and swaps end where the dearest bin is not further above the mean
LAST = (1, 2, 4)  # how many micro-batches, the last ones, share evenly what the full ones leave
WIDENINGS = 3  # totals of widths that are tried before plain first fit
LEAST_PREAMBLE = 32  # tokens; attention looks back at a preamble from all of its line, which has a price
OFFERS = 16  # bins a sequence is offered, the one with the most room first


@dataclass(frozen=True)
class PackingCost:
    """Compute of a sequence: linear * tokens + quadratic * tokens^2, in any unit.

    The default is verl's for a 7B (hidden size 4096: 6 * 4096 * tokens + tokens^2); its ratio is the number
    of tokens at which attention costs as much as all that is linear.
    """

    linear: float = 24576.0
    quadratic: float = 1.0

    def __post_init__(self) -> None:
        both = (self.linear, self.quadratic)
        if not all(math.isfinite(value) and value >= 0 for value in both) or not any(both):
            raise ValueError(
                f"PackingCost: linear and quadratic are finite and not negative, and one is above 0; got "
                f"{self.linear} and {self.quadratic}"
            )

    def of(self, tokens: Any, squares: Any) -> Any:
        """Cost of a sum of lengths and a sum of their squares: integers, hence exact in any order."""
        return self.linear * tokens + self.quadratic * squares


DEFAULT_COST = PackingCost()


@dataclass(frozen=True, eq=False)
class Packing:
    """Which sequences make up each micro-batch on each shard; A micro-batches, D shards, n sequences."""

    bins: tuple[tuple[np.ndarray, ...], ...]  # [A][D] int64 indices of sequences
    widths: tuple[int, ...]  # [A] tokens of the D buffers of a micro-batch, a rung of the ladder
    max_tokens: int
    num_shards: int
    num_sequences: int
    tokens_per_shard: np.ndarray  # [D] int64
    imbalance: float  # the largest max/mean of cost over the D bins of one micro-batch; 1 for an empty one
    order: np.ndarray = field(init=False)  # [n] int64: `bins` one after another, micro-batch by micro-batch

    def __post_init__(self) -> None:
        rows = [rows for micro_batch in self.bins for rows in micro_batch]
        object.__setattr__(self, "order", np.concatenate(rows))

    @property
    def num_micro_batches(self) -> int:
        return len(self.bins)

    @property
    def padding_fraction(self) -> float:
        """The part of the computed tokens, sum of widths * D, that holds no sequence."""
        return 1 - int(self.tokens_per_shard.sum()) / (sum(self.widths) * self.num_shards)

    def restore_order(self, values: Any) -> Any:
        """Values in the order of `order` -> the same in the order of the sequences.

        Args:
            values: an array [n, ...] or a sequence of n; value k belongs to sequence order[k].

        Returns:
            An array for an array, a list for any other sequence.
        """
        if len(values) != self.num_sequences:
            raise ValueError(
                f"restore_order takes one value per sequence: expected {self.num_sequences}, got "
                f"{len(values)}; pass the values of all bins, one after another as in `order`"
            )
        position = np.empty_like(self.order)
        position[self.order] = np.arange(self.num_sequences)
        return values[position] if isinstance(values, np.ndarray) else [values[k] for k in position]


def common_tokens(sequences: np.ndarray) -> int:
    """How many tokens the rows of `sequences` [n, T] begin with in common."""
    return int(np.logical_and.accumulate((sequences == sequences[0]).all(axis=0)).sum())


def worthwhile_preamble(sequences: np.ndarray, lengths: np.ndarray) -> int:
    """Tokens that rows of `sequences` [n, T] begin with in common and that are worth being shared, or 0.

    Never all of one of `lengths` [n]: its last token is its own.
    """
    tokens = min(common_tokens(sequences), int(lengths.min()) - 1)
    return tokens if tokens >= LEAST_PREAMBLE else 0


def width_ladder(max_tokens: int) -> tuple[int, ...]:
    """The widths a micro-batch may have: 1/4, 1/2, 3/4 and all of `max_tokens`, ascending.

    Each is rounded up to a multiple of 128, but never above `max_tokens`; equal ones are one.
    """
    quarters = (-(-max_tokens * k // 4) for k in (1, 2, 3, 4))
    return tuple(sorted({min(-(-width // 128) * 128, max_tokens) for width in quarters}))


def least_imbalance(
    lengths: np.ndarray, max_tokens: int, num_shards: int, cost: PackingCost = DEFAULT_COST
) -> float:
    """A bound that no plan's `imbalance` is below: the longest sequence alone in its bin, and in the D - 1
    others as many of the next longest, in part if need be, as the cap lets in.
    """
    descending = np.sort(lengths)[::-1].astype(np.int64)
    if not len(descending):
        return 1.0
    longest, others = descending[0], descending[1:]
    room = (num_shards - 1) * max_tokens - (np.cumsum(others) - others)
    tokens = np.clip(room, 0, others)
    own, rest = cost.of(longest, longest**2), cost.of(tokens.sum(), (tokens * others).sum())
    return max(1.0, float(own * num_shards / (own + rest)))


def plan_packing(
    lengths: Any,
    max_tokens: int,
    num_shards: int,
    *,
    min_micro_batches: int = 1,
    micro_batches_multiple_of: int = 1,
    cost: PackingCost = DEFAULT_COST,
    ladder: tuple[int, ...] | None = None,
) -> Packing:
    """Sequences into A micro-batches of D bins, every bin of at most C = `max_tokens` tokens.

    A = max(ceil(total / (C * D)), `min_micro_batches`), rounded up to `micro_batches_multiple_of`, and more
    where that many cannot hold all. Among the plans tried the one with the fewest computed tokens (sum of
    widths * D) is taken, the better balanced of two equal ones; so micro-batches are full but for the last.
    Those of least cost stand at both ends, the largest in the middle. Bins may be empty.

    Each plan tried fills the first micro-batches bin by bin with the longest sequence that still fits, shares
    the rest evenly among the last ones (longest first, always to the bin with the most room), groups bins of
    like cost and then levels the bins of each micro-batch by moves and swaps under the cap.

    Args:
        lengths: [n] integers >= 1, tokens of each sequence.
        max_tokens: most tokens of a shard in one micro-batch.
        num_shards: data shards.
        min_micro_batches: fewest micro-batches.
        micro_batches_multiple_of: what A must be a multiple of (pipeline stages).
        cost: compute of a sequence; see `PackingCost`.
        ladder: the widths a micro-batch may have, ascending up to `max_tokens`; by default `width_ladder`.

    Raises:
        ValueError: a length above `max_tokens` or below 1, lengths that are not [n] integers, or one of the
            other numbers below 1.
    """
    lengths = _check(lengths, max_tokens, num_shards, min_micro_batches, micro_batches_multiple_of)
    search = _Search(lengths, ladder or width_ladder(max_tokens), num_shards, cost)
    first_fit = search.pool.copy().first_fit(max_tokens)
    fewest = max(-(-int(lengths.sum()) // (max_tokens * num_shards)), min_micro_batches)
    enough = max(-(-len(first_fit) // num_shards), fewest)
    for count in (fewest, enough):
        num_micro_batches = -(-count // micro_batches_multiple_of) * micro_batches_multiple_of
        drafts = list(search.drafts(num_micro_batches, first_fit))
        if drafts:
            break
    return search.packing(min(drafts, key=lambda draft: (sum(draft.widths), draft.imbalance)))


def _check(lengths: Any, max_tokens: int, num_shards: int, minimum: int, multiple: int) -> np.ndarray:
    """`lengths` as [n] int64, or the error that says what is wrong."""
    numbers = {
        "max_tokens": max_tokens,
        "num_shards": num_shards,
        "min_micro_batches": minimum,
        "micro_batches_multiple_of": multiple,
    }
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"packing: {name} is at least 1, got {value}; set it to 1 or more")
    array = np.asarray(lengths)
    if array.ndim == 1 and not array.size:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"packing: lengths are whole numbers of tokens, one per sequence; got {array.dtype} of shape "
            f"{array.shape}; pass the sum of each row of the attention mask"
        )
    array = array.astype(np.int64)
    shortest, longest = int(array.argmin()), int(array.argmax())
    if array[shortest] < 1:
        raise ValueError(
            f"packing: a sequence has at least 1 token, got {array[shortest]} at index {shortest}; leave "
            f"empty sequences out"
        )
    if array[longest] > max_tokens:
        raise ValueError(
            f"packing: max_tokens={max_tokens} cannot hold the sequence of {array[longest]} tokens at index "
            f"{longest}; set it to at least {array[longest]}"
        )
    return array


class _Pool:
    """Sequences not placed yet, ascending by length; of equal ones the lowest index counts as the longest."""

    def __init__(self, lengths: list[int], rows: list[int]) -> None:
        self.lengths, self.rows = lengths, rows

    def copy(self) -> _Pool:
        return _Pool(self.lengths.copy(), self.rows.copy())

    def fill(self, room: int) -> list[int]:
        """Take the longest sequence that fits in what is left of `room`, again and again."""
        taken: list[int] = []
        end = len(self.rows)
        while end := bisect.bisect_right(self.lengths, room, 0, end):
            end -= 1
            room -= self.lengths.pop(end)
            taken.append(self.rows.pop(end))
        return taken

    def first_fit(self, room: int) -> list[list[int]]:
        """Take all into as many bins as it needs: first fit by decreasing length."""
        bins = []
        while self.rows:
            bins.append(self.fill(room))
        return bins

    def put_back(self, length: int, row: int) -> None:
        at = bisect.bisect_left(self.lengths, length)
        while at < len(self.rows) and self.lengths[at] == length and self.rows[at] > row:
            at += 1
        self.lengths.insert(at, length)
        self.rows.insert(at, row)

    def share(self, rooms: list[int]) -> list[list[int]] | None:
        """Take all, longest first, each to the bin that is furthest below its share.

        The shares are in proportion to `rooms`. None where a sequence fits in no bin it is offered.
        """
        total, capacity = sum(self.lengths), sum(rooms)
        if total > capacity:
            return None
        bins: list[list[int]] = [[] for _ in rooms]
        spare = [room - room * total // capacity for room in rooms]
        heap = [(extra - room, k) for k, (room, extra) in enumerate(zip(rooms, spare))]  # load - share
        heapq.heapify(heap)
        for length, row in zip(reversed(self.lengths), reversed(self.rows)):
            passed: list[tuple[int, int]] = []
            while heap and length + heap[0][0] > spare[heap[0][1]] and len(passed) < OFFERS:
                passed.append(heapq.heappop(heap))
            if not heap or len(passed) == OFFERS:
                return None
            above, k = heap[0]
            heapq.heapreplace(heap, (above + length, k))
            bins[k].append(row)
            for entry in passed:
                heapq.heappush(heap, entry)
        return bins


@dataclass(frozen=True)
class _Draft:
    micro_batches: list[list[list[int]]]
    widths: list[int]
    costs: list[float]
    imbalance: float


class _Search:
    """The plans worth trying for one set of lengths."""

    def __init__(
        self, lengths: np.ndarray, ladder: tuple[int, ...], num_shards: int, cost: PackingCost
    ) -> None:
        self.lengths, self.squares, self.cost = lengths, lengths**2, cost
        self.ladder, self.max_tokens, self.num_shards = ladder, ladder[-1], num_shards
        order = np.lexsort((-np.arange(len(lengths)), lengths))
        self.pool = _Pool(lengths[order].tolist(), order.tolist())
        self.good = max(GOOD, 1.01 * least_imbalance(lengths, self.max_tokens, num_shards, cost))

    def sums(self, bins: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and sum of squared lengths of each bin, [len(bins)] int64."""
        rows = np.fromiter(itertools.chain.from_iterable(bins), np.int64)
        ends = np.cumsum([0] + [len(rows) for rows in bins])
        running = np.zeros((2, len(rows) + 1), np.int64)
        np.cumsum([self.lengths[rows], self.squares[rows]], axis=1, out=running[:, 1:])
        tokens, squares = np.diff(running[:, ends], axis=1)
        return tokens, squares

    def drafts(self, num_micro_batches: int, first_fit: list[list[int]]) -> Iterator[_Draft]:
        """Plans of so many micro-batches, at the least total of widths at which one is found."""
        floor = self.floor(num_micro_batches)
        need = -(-int(self.lengths.sum()) // self.num_shards)
        found = False
        for _ in range(WIDENINGS):
            choices = [w for w in (self.filled(floor, need), self.spread(floor, need)) if w] if floor else []
            if found or not choices:
                break
            least = min(map(sum, choices))
            for widths in choices[: 1 if choices[0] == choices[-1] else 2]:
                for draft in self.drafts_of_widths(widths):
                    found = True
                    yield draft
                    if draft.imbalance <= self.good and sum(draft.widths) <= least:
                        return
            need = least + 1
        num_bins = num_micro_batches * self.num_shards
        if not found and len(first_fit) <= num_bins:
            empty: list[list[int]] = [[] for _ in range(num_bins - len(first_fit))]
            yield self.draft([*first_fit, *empty], [self.max_tokens] * num_micro_batches)

    def drafts_of_widths(self, widths: list[int]) -> Iterator[_Draft]:
        """Plans whose widths, descending, are at most these."""
        for last in sorted({min(last, len(widths)) for last in LAST}):
            for heavy in (math.inf, GOOD):
                bins = self.assign(widths, last, heavy)
                if bins is None:
                    break
                yield self.draft(bins, widths)
                if self.num_shards == 1 or last == len(widths):
                    break

    def floor(self, num_micro_batches: int) -> list[int] | None:
        """The widths, descending, that the long sequences alone ask for; None where they need more bins."""
        widths = [self.ladder[0]] * num_micro_batches
        for rung, above in itertools.pairwise(self.ladder):
            longer = len(self.lengths) - bisect.bisect_right(self.pool.lengths, rung)
            bins = -(-longer // (self.max_tokens // (rung + 1)))
            count = -(-bins // self.num_shards)
            if count > num_micro_batches:
                return None
            widths[:count] = [above] * count
        return widths

    def filled(self, floor: list[int], need: int) -> list[int] | None:
        """`floor` widened to a sum of `need`: as many full ones as possible, and one between."""
        widths, total = floor.copy(), sum(floor)
        for k, width in enumerate(floor):
            if total >= need:
                break
            rest = total - width
            least = max(width, need - rest)
            widths[k] = next((rung for rung in self.ladder if rung >= least), self.max_tokens)
            total = rest + widths[k]
        return widths if total >= need else None

    def spread(self, floor: list[int], need: int) -> list[int] | None:
        """`floor` widened to a sum of `need`, always the narrowest by one rung."""
        widths, total = floor.copy(), sum(floor)
        for rung, above in itertools.pairwise(self.ladder):
            for k, width in enumerate(widths):
                if total < need and width == rung:
                    widths[k] = above
                    total += above - rung
        return sorted(widths, reverse=True) if total >= need else None

    def assign(self, widths: list[int], last: int, heavy: float) -> list[list[int]] | None:
        """Bins of all sequences, D for each of `widths`; None where they do not fit."""
        pool = self.pool.copy()
        bins: list[list[int]] = []
        for width in widths[: len(widths) - last]:
            group = [pool.fill(width) for _ in range(self.num_shards)]
            if heavy < math.inf:
                self.lighten(group, pool, heavy)
            bins += group
        rest = pool.share([width for width in widths[len(widths) - last :] for _ in range(self.num_shards)])
        return None if rest is None else bins + rest

    def lighten(self, group: list[list[int]], pool: _Pool, heavy: float) -> None:
        """In bins dearer than `heavy` times the mean, put shorter sequences in the place of the shortest."""
        while True:
            tokens, squares = self.sums(group)
            costs = self.cost.of(tokens, squares)
            most = heavy * self.cost.of(tokens.sum(), squares.sum()) / len(group)
            k = int(costs.argmax())
            if costs[k] <= most or len(group[k]) == 1:
                return
            row = group[k].pop()
            length = int(self.lengths[row])
            given_up = self.cost.of(length, length**2)
            room = int((most - costs[k] + given_up) * length / given_up)  # shorter ones cost less per token
            group[k] += pool.fill(min(room, length - 1)) if room > 0 else []
            pool.put_back(length, row)

    def draft(self, bins: list[list[int]], widths: list[int]) -> _Draft:
        """Bins of like cost into one micro-batch, those of one micro-batch levelled."""
        order = np.lexsort((-self.cost.of(*self.sums(bins)), -np.repeat(widths, self.num_shards)))
        groups = [[bins[k] for k in chunk] for chunk in order.reshape(len(widths), self.num_shards)]
        tokens, squares = self.sums([rows for group in groups for rows in group])
        tokens, squares = tokens.reshape(len(widths), -1), squares.reshape(len(widths), -1)
        for a, group in enumerate(groups):
            self.level(group, tokens[a], squares[a], widths[a])
        costs = self.cost.of(tokens, squares).max(1)
        means = self.cost.of(tokens.sum(1), squares.sum(1)) / self.num_shards
        rungs = np.searchsorted(self.ladder, tokens.max(1))
        return _Draft(
            micro_batches=groups,
            widths=[self.ladder[k] for k in rungs],
            costs=means.tolist(),
            imbalance=float(np.max(costs / np.where(means > 0, means, 1), initial=1.0)),
        )

    def level(self, group: list[list[int]], tokens: np.ndarray, squares: np.ndarray, room: int) -> None:
        """Moves and swaps from the dearest of the D bins to another that make the dearer of the two cheaper.

        Changes `group`, and with it its `tokens` and `squares` [D].
        """
        mean = self.cost.of(tokens.sum(), squares.sum()) / len(group)
        for _ in range(8 * len(group)):
            costs = self.cost.of(tokens, squares)
            high = int(costs.argmax())
            if costs[high] <= LEVEL * mean:
                return
            # Partners are the sequences of the other bins, and for a move -1, which has no tokens.
            bins = [(k, row) for k, rows in enumerate(group) if k != high for row in (*rows, -1)]
            other, partners = np.array(bins).T
            lengths = np.where(partners >= 0, self.lengths[partners], 0)
            own = self.lengths[group[high]][:, None]
            fewer = own - lengths
            saved = self.cost.of(fewer, own**2 - lengths**2)
            dearer = np.maximum(costs[high] - saved, costs[other] + saved)
            fits = (tokens[other] + fewer <= room) & (tokens[high] - fewer <= room) & (saved > 0)
            dearer = np.where(fits, dearer, np.inf)
            i, j = np.unravel_index(dearer.argmin(), dearer.shape)
            if dearer[i, j] >= costs[high]:
                return
            k, partner = bins[j]
            group[k].append(group[high].pop(i))
            if partner >= 0:
                group[k].remove(partner)
                group[high].append(partner)
            change = fewer[i, j], (own**2 - lengths**2)[i, j]
            tokens[[high, k]] += np.array([-1, 1]) * change[0]
            squares[[high, k]] += np.array([-1, 1]) * change[1]

    def packing(self, draft: _Draft) -> Packing:
        """The plan in the order it runs: the micro-batches of least cost at both ends."""
        ascending = sorted(range(len(draft.costs)), key=lambda a: (draft.costs[a], a))
        order = ascending[::2] + ascending[1::2][::-1]
        # Every other micro-batch backwards: no shard gets the dearest bin of all of them.
        groups = [draft.micro_batches[a][:: -1 if k % 2 else 1] for k, a in enumerate(order)]
        bins = [[np.array(sorted(rows), np.int64) for rows in group] for group in groups]
        tokens = [[int(self.lengths[rows].sum()) for rows in micro_batch] for micro_batch in bins]
        return Packing(
            bins=tuple(map(tuple, bins)),
            widths=tuple(draft.widths[a] for a in order),
            max_tokens=self.max_tokens,
            num_shards=self.num_shards,
            num_sequences=len(self.lengths),
            tokens_per_shard=np.array(tokens, np.int64).sum(0),
            imbalance=draft.imbalance,
        )
