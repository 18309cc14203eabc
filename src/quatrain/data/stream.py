"""The endless stream of a table's rows: which row stands at a position, by seed and position alone.

Used by the sources of `prompts.py`. A checkpoint stores a position, and any position is found at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

import grain
import numpy as np

# grain accepts 32-bit seeds only.
_SEEDS = 2**32


class RowStream:
    """The numbers of rows by their positions in an endless stream, `stream[position]`.

    `sizes` are the rows of each source, which are numbered one after another. With `weights`, whole numbers,
    the sources are mixed: among the first n rows the count of source i differs from its share,
    n * weights[i] / sum(weights), by less than one, and is the share after every sum(weights) rows (in any
    window: less than two, with two sources less than one; with more, no order has less for all weights).
    Each source goes through its own rows, again and again, reshuffled in each epoch of its own by `seed`;
    without `shuffle` in order. Without weights there is one source.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[int] = (), *, seed: int, shuffle: bool = True):
        weights = weights or (1,)
        sizes = sizes if len(weights) > 1 else (sum(sizes),)
        self._weights, self._starts = weights, list(accumulate(sizes, initial=0))
        rows = [grain.MapDataset.range(size) for size in sizes]
        # Epoch e has grain's seed + e: neighbouring seeds would give sources of one size the same orders.
        others = np.random.SeedSequence(seed).generate_state(len(rows) - 1).tolist()
        seeds = [seed % _SEEDS, *others]
        ordered = [each.shuffle(seed=own) for each, own in zip(rows, seeds, strict=True)] if shuffle else rows
        self._streams = [each.repeat() for each in ordered]
        ties = np.random.default_rng(seed).permutation(len(weights)) if shuffle else range(len(weights))
        self._sources, self._before = _pattern(weights, list(ties))

    def source(self, position: int) -> int:
        """The number of the source of the row at `position`."""
        return int(self._sources[position % len(self._sources)])

    def __getitem__(self, position: int) -> int:
        repeats, place = divmod(position, len(self._sources))
        source = int(self._sources[place])
        drawn = repeats * self._weights[source] + int(self._before[place])
        return self._starts[source] + int(self._streams[source][drawn])


def _pattern(weights: Sequence[int], ties: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each of sum(weights) places, and how many places before it have the same source.

    Row j of a source of weight w of W has a place from floor(j W / w) on and before ceil((j + 1) W / w), so
    that its count among the first n is the floor or the ceiling of its share. The one whose last place is
    next goes first, which finds places for all if there are some (Liu and Layland, 1973, for unit jobs), and
    there are, as rows cut into parts fit (Baruah et al., Algorithmica 15, 1996); `ties` orders equals.
    """
    total = sum(weights)
    jobs = sorted(
        (row * total // weight, -(-(row + 1) * total // weight), tie, source)
        for source, (weight, tie) in enumerate(zip(weights, ties, strict=True))
        for row in range(weight)
    )
    waiting: list[tuple[int, int, int]] = []
    sources = np.empty(total, np.int32)
    begun = 0
    for place in range(total):
        while begun < total and jobs[begun][0] <= place:
            heapq.heappush(waiting, jobs[begun][1:])
            begun += 1
        sources[place] = heapq.heappop(waiting)[2]
    before = np.empty(total, np.int64)
    for source, weight in enumerate(weights):
        before[sources == source] = np.arange(weight)
    return sources, before
