"""Cuts a mini-batch into micro-batches: which sequences stand in which line, and how wide the lines are.

Data flow: `TokenTable` -> `Cutting.cut` -> `Cut` -> `micro_batch`. In fixed mode a line holds one sequence;
with a token budget it holds one data shard's share of whole sequences, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from quatrain.config.schema import LogprobConfig, UpdateConfig
from quatrain.metrics import Metric
from quatrain.ops.ladder import round_up
from quatrain.ops.packing import (
    DEFAULT_COST,
    PackingCost,
    common_tokens,
    plan_packing,
    width_ladder,
    worthwhile_preamble,
)
from quatrain.update.table import TokenTable

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """Sequences that stand together in a line: the `shared` tokens all begin with, then the rest of each.

    `num_tokens` are those of both, a preamble among them.
    """

    rows: np.ndarray
    shared: int
    num_tokens: int


@dataclass(frozen=True)
class Cutting:
    """How a mini-batch is cut: `rows` sequences, or `max_tokens` tokens, per data shard; one of them is set.

    `cost` is what the packer balances over the `num_shards` shards of a micro-batch. With `share_prompts`,
    which takes a token budget, what sequences of a group begin with is computed once for all of them, and
    what all sequences begin with once for each line.
    """

    rows: int | None = None
    max_tokens: int | None = None
    num_shards: int = 1
    cost: PackingCost = DEFAULT_COST
    share_prompts: bool = False

    def __post_init__(self) -> None:
        assert (self.rows is None) != (self.max_tokens is None), "one way to cut, not two and not none"
        assert self.max_tokens is not None or not self.share_prompts, "prompts are shared in packed lines"

    @classmethod
    def of(
        cls,
        sizes: UpdateConfig | LogprobConfig,
        cost: PackingCost,
        *,
        num_shards: int = 1,
        share_prompts: bool = False,
    ) -> Cutting:
        """As a section of the configuration has it; prompts are shared only under its token budget."""
        rows, max_tokens = sizes.micro_batch_size, sizes.max_tokens_per_device
        return cls(rows, max_tokens, num_shards, cost, share_prompts and max_tokens is not None)

    def cut(self, table: TokenTable) -> list[Cut]:
        """The micro-batches of `table`, in the order to run them; every sequence is in exactly one."""
        if self.max_tokens is None:
            return self._fixed_rows(table)
        if not self.share_prompts or table.group_ids is None:
            return self._packed(_whole_sequences(table), self.max_tokens, 0)
        # Long segments share more, short ones fill the buffers better.
        groups, preamble = common_beginnings(table), common_preamble(table, self.max_tokens)
        fractions = (preamble + (self.max_tokens - preamble) // k for k in (1, 2, 4))
        candidates = [*(shared_segments(table, groups, most) for most in fractions), _whole_sequences(table)]
        plans = [self._packed(segments, self.max_tokens, preamble) for segments in candidates]
        return min(plans, key=lambda cuts: (len(cuts), sum(cut.num_tokens for cut in cuts)))

    def _packed(self, segments: list[Segment], max_tokens: int, preamble: int) -> list[Cut]:
        own = np.array([segment.num_tokens for segment in segments], np.int64) - preamble
        segments = [replace(segment, shared=max(segment.shared, preamble)) for segment in segments]
        # Of what stands beside the preamble, which all of it looks back at.
        ladder = tuple(width - preamble for width in width_ladder(max_tokens) if width > preamble)
        cost = replace(self.cost, linear=self.cost.linear + 2 * preamble * self.cost.quadratic)
        packing = plan_packing(own, max_tokens - preamble, self.num_shards, cost=cost, ladder=ladder)
        return [
            Cut(
                tuple(tuple(segments[i] for i in held) for held in bins),
                len(bins),
                preamble + width,
                packed=True,
                shared=self.share_prompts,
                preamble=preamble,
            )
            for bins, width in zip(packing.bins, packing.widths, strict=True)
        ]

    def _fixed_rows(self, table: TokenTable) -> list[Cut]:
        """Shard after shard takes its share; the width comes from the whole table: there is one shape."""
        assert self.rows is not None
        width = round_up(int(table.lengths.max(initial=1)))
        shares = [list(share) for share in _split(_whole_sequences(table), self.num_shards)]
        largest = max(len(share) for share in shares)
        rows = min(self.rows, max(largest, 1))
        return [
            Cut(
                tuple(tuple(share[i : i + 1]) for share in shares for i in range(first, first + rows)),
                self.num_shards,
                width,
            )
            for first in range(0, largest, rows)
        ]


def _whole_sequences(table: TokenTable) -> list[Segment]:
    return [Segment(np.array([row]), 0, int(length)) for row, length in enumerate(table.lengths)]


def common_beginnings(table: TokenTable) -> list[tuple[np.ndarray, int]]:
    """The row numbers of each group, and the tokens that all of its sequences begin with.

    At most up to the first token that one of them produced.
    """
    assert table.group_ids is not None
    groups = (np.flatnonzero(table.group_ids == group) for group in np.unique(table.group_ids))
    return [(rows, _common_tokens(table, rows)) for rows in groups]


def common_preamble(table: TokenTable, max_tokens: int) -> int:
    """Tokens that all sequences begin with, none of them produced, where they are enough to be shared."""
    if not len(table) or table.lengths.max() > max_tokens:  # the packer says what is too long
        return 0
    given = _given_tokens(table, np.arange(len(table)))
    return worthwhile_preamble(table.input_ids[:, :given], table.lengths)


def shared_segments(
    table: TokenTable, groups: list[tuple[np.ndarray, int]], max_tokens: int
) -> list[Segment]:
    """Each of `groups` as one segment, or as several where it has more than `max_tokens` tokens.

    A segment of one sequence may be longer than that.
    """
    lengths, segments = table.lengths, []
    for rows, shared in groups:
        if not shared:
            segments += [Segment(rows[i : i + 1], 0, int(lengths[row])) for i, row in enumerate(rows)]
            continue
        own = lengths[rows] - shared
        held: list[int] = []
        tokens = shared
        for row, extra in zip(rows, own, strict=True):
            if held and tokens + extra > max_tokens:
                segments.append(Segment(np.array(held), shared, tokens))
                held, tokens = [], shared
            held.append(int(row))
            tokens += int(extra)
        segments.append(Segment(np.array(held), shared, tokens))
    return segments


def _common_tokens(table: TokenTable, rows: np.ndarray) -> int:
    """Tokens that `rows` begin with in common, none of them produced by the policy."""
    return common_tokens(table.input_ids[rows, : _given_tokens(table, rows)])


def _given_tokens(table: TokenTable, rows: np.ndarray) -> int:
    """Tokens before the first that one of `rows` produced or does not have."""
    given = table.attention_mask[rows].all(axis=0) & ~table.completion_mask[rows].any(axis=0)
    return int(np.logical_and.accumulate(given).sum())


@dataclass(frozen=True)
class Cut:
    """One micro-batch before it has tokens: the segments of each line, and the width of the buffer.

    The lines of a shard are side by side, shard after shard. Each begins with the `preamble` tokens that all
    sequences begin with.
    """

    lines: tuple[tuple[Segment, ...], ...]
    num_shards: int
    width: int
    packed: bool = False
    shared: bool = False
    preamble: int = 0

    @property
    def sequences(self) -> np.ndarray:
        """Row numbers in the order their scored tokens come."""
        rows = [segment.rows for line in self.lines for segment in line]
        return np.concatenate([np.zeros(0, np.int64), *rows])

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.lines) * self.width

    def work(self, line: tuple[Segment, ...]) -> tuple[int, int]:
        """Tokens of `line`, its preamble once, and the sum of squares that `PackingCost.of` takes."""
        if not line:
            return 0, 0
        preamble = self.preamble
        own = np.array([segment.num_tokens - preamble for segment in line], np.int64)
        return preamble + int(own.sum()), preamble**2 + int((own * (own + 2 * preamble)).sum())


def describe_cuts(table: TokenTable, cuts: list[Cut], cost: PackingCost) -> dict[str, Metric]:
    """How well `cuts` of `table` fill and balance the devices: the `batch/` and `global_seqlen/` metrics."""
    shards = cuts[0].num_shards
    before = [part.sum() for part in np.array_split(table.lengths, shards)]
    after, imbalance = np.zeros(shards), [1.0]
    for cut in cuts:
        held = [np.sum([cut.work(line) for line in lines], axis=0) for lines in _split(cut.lines, shards)]
        after += [tokens for tokens, _ in held]
        costs = np.array([cost.of(*each) for each in held])
        if costs.any():
            imbalance.append(costs.max() / costs.mean())
    computed, filled = sum(cut.num_tokens for cut in cuts), after.sum()
    tokens = float(table.lengths.sum())
    return {
        "batch/micro_batches": Metric(len(cuts), reduction="sum"),
        "batch/tokens": Metric(tokens, reduction="sum"),
        "batch/padding_fraction": Metric(float(computed - filled), computed),
        "batch/shared_fraction": Metric(float(tokens - filled), tokens),
        "batch/imbalance": Metric(float(max(imbalance)), reduction="max"),
        "global_seqlen/min": Metric(float(min(before)), reduction="min"),
        "global_seqlen/max": Metric(float(max(before)), reduction="max"),
        "global_seqlen/mean": Metric(float(np.mean(before))),
        "global_seqlen/minmax_diff": Metric(float(max(before) - min(before)), reduction="max"),
        "global_seqlen/balanced_min": Metric(float(after.min()), reduction="min"),
        "global_seqlen/balanced_max": Metric(float(after.max()), reduction="max"),
    }


def _split(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """`items` in `parts` runs whose sizes differ by one at most."""
    ends = [len(run) for run in np.array_split(np.arange(len(items)), parts)]
    stops = np.cumsum(ends)
    return [items[stop - size : stop] for stop, size in zip(stops, ends, strict=True)]
