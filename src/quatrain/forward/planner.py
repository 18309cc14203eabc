"""Cuts a mini-batch into micro-batches: which sequences stand in which buffer, and how wide the buffers are.

Data flow: `TokenTable` -> `MicroBatchPlanner.plans` -> `MicroBatchPlan` -> `micro_batch`. In fixed mode a
buffer holds one sequence; with a token budget it holds whole sequences one after another, the share of one
data shard or of a part of it (`MicroBatchPlanner.line_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from quatrain.forward.table import TokenTable
from quatrain.models.feature_store import FeatureStore
from quatrain.ops.packing import (
    DEFAULT_COST,
    PackingCost,
    buffers_per_shard,
    plan_packing,
    useful_common_prefix,
)
from quatrain.ops.shape_buckets import round_up
from quatrain.types.metrics import Metric


@dataclass(frozen=True)
class Segment:
    """Sequences side by side in a buffer: their shared prefix once, then the rest of each."""

    rows: np.ndarray
    """Row numbers of the sequences in the token table."""
    num_shared: int
    """Tokens of the shared prefix, including the common prefix of all sequences."""
    num_tokens: int
    """Tokens of the shared prefix and of all the rests."""


@dataclass(frozen=True)
class MicroBatchPlanner:
    """How a mini-batch is cut into micro-batches.

    A micro-batch has at most `rows` sequences or at most `max_tokens` tokens per data shard; exactly one of
    the two is set. The packer balances `cost` over the `num_shards` shards of a micro-batch. With
    `share_prompts`, which needs a token budget, the prompt that the sequences of a group share is computed
    once for the group, and the common prefix of all sequences once per buffer. `line_tokens` splits a
    shard's tokens into several buffers (`Backend.line_tokens`).
    """

    rows: int | None = None
    max_tokens: int | None = None
    num_shards: int = 1
    cost: PackingCost = DEFAULT_COST
    share_prompts: bool = False
    line_tokens: int | None = None
    store: FeatureStore | None = field(default=None, compare=False)
    """What has the pictures of the sequences for the model; None: it reads text alone."""

    def __post_init__(self) -> None:
        assert (self.rows is None) != (self.max_tokens is None), "exactly one of rows and max_tokens is set"
        assert self.max_tokens is not None or not self.share_prompts, "sharing prompts needs a token budget"

    def plans(self, table: TokenTable) -> list[MicroBatchPlan]:
        """The micro-batches of `table` in the order they run; every sequence is in exactly one."""
        if self.max_tokens is None:
            return self._fixed_rows(table)
        lengths = table.lengths
        lines = buffers_per_shard(lengths, self.max_tokens, self.line_tokens)
        # The budget is a shard's: where it has several buffers, each has its part of it.
        max_tokens = self.max_tokens // lines
        groups, prefixes, by_all = np.arange(len(table)), np.zeros(len(table), np.int64), 0
        if self.share_prompts and table.group_ids is not None:
            groups, prefixes, by_all = _shared_prefixes(table, max_tokens)
        packing = plan_packing(
            lengths,
            max_tokens,
            self.num_shards * lines,
            groups=groups,
            prefixes=prefixes,
            shared_prefix=by_all,
            cost=self.cost,
        )

        def segments(rows: np.ndarray) -> Iterator[Segment]:
            """Of a buffer with the sequences `rows`, of which those that share a prefix are adjacent."""
            for part in np.split(rows, np.flatnonzero(np.diff(groups[rows])) + 1) if len(rows) else []:
                prefix = int(prefixes[part[0]])
                yield Segment(part, prefix, prefix + int((lengths[part] - prefix).sum()))

        return [
            MicroBatchPlan(
                tuple(tuple(segments(rows)) for rows in bins),
                self.num_shards,
                width,
                packed=True,
                shared=self.share_prompts,
                num_common=by_all,
            )
            for bins, width in zip(packing.bins, packing.widths, strict=True)
        ]

    def _fixed_rows(self, table: TokenTable) -> list[MicroBatchPlan]:
        """Micro-batches of `rows` sequences per shard, all as wide as the longest sequence of the table."""
        assert self.rows is not None
        # Without a budget every micro-batch is as wide as the longest of the table: one program, at the price
        # of padding.
        lengths = table.lengths.tolist()
        shards = np.array_split(np.arange(len(table)), self.num_shards)
        largest = len(shards[0])
        rows = min(self.rows, max(largest, 1))
        return [
            MicroBatchPlan(
                tuple(
                    tuple(Segment(np.array([row]), 0, lengths[row]) for row in shard[i : i + 1])
                    for shard in shards
                    for i in range(first, first + rows)
                ),
                self.num_shards,
                round_up(max(lengths)),
            )
            for first in range(0, largest, rows)
        ]


def _shared_prefixes(table: TokenTable, max_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(groups [B], tokens [B], tokens that all sequences share) of prefixes in buffers of `max_tokens`.

    Sequences with equal numbers in `groups` share a prefix that is longer than that of all; `tokens` is the
    longest prefix that a sequence shares with its group, or else with all sequences.
    """
    assert table.group_ids is not None
    by_all = common_prefix_tokens(table, max_tokens)
    groups, tokens = np.arange(len(table)), np.full(len(table), by_all, np.int64)
    for group in np.unique(table.group_ids):
        for rows in _with_one_prompt(table, np.flatnonzero(table.group_ids == group)):
            prefix = table.common_tokens(rows, _num_unsampled(table, rows))
            if prefix > by_all:
                groups[rows], tokens[rows] = rows[0], prefix
    return groups, tokens, by_all


def _with_one_prompt(table: TokenTable, rows: np.ndarray) -> Iterator[np.ndarray]:
    """The sequences `rows` of a group in parts that begin alike; an episode's may begin anew, without it."""
    if table.episode_ids is None:
        yield rows
        return
    while rows.size:
        prompts = [_num_unsampled(table, rows[i : i + 1]) for i in range(len(rows))]
        shortest = int(np.argmin(prompts))
        # An episode's later sequences may have lost the beginning: shared with them, the prompt would shrink
        # for all.
        same = np.ones(len(rows), bool)
        for column in [table.input_ids] if table.pictures is None else [table.input_ids, table.pictures.ids]:
            prompt = column[rows[shortest], : prompts[shortest]]
            same &= (column[rows, : len(prompt)] == prompt).all(axis=1)
        yield rows[same]
        rows = rows[~same]


def common_prefix_tokens(table: TokenTable, max_tokens: int) -> int:
    """Tokens of the common prefix of all sequences; 0 where it is too short to be worth sharing."""
    if not len(table) or table.lengths.max() > max_tokens:  # too long: the packer says so
        return 0
    rows = np.arange(len(table))
    return useful_common_prefix(table.common_tokens(rows, _num_unsampled(table, rows)), table.lengths)


def _num_unsampled(table: TokenTable, rows: np.ndarray) -> int:
    """Positions before the first that is sampled, or padding, in one of the sequences `rows`.

    A shared prefix ends there: what the policy sampled is scored for each sequence. In a table whose places
    are `scored_once`, it ends before the first that two of them score.
    """
    attention, scored = table.attention_mask[rows], table.completion_mask[rows]
    most = 1 if table.scored_once and len(rows) > 1 else 0
    unsampled = attention.all(axis=0) & (scored.sum(axis=0) <= most)
    count = int(np.logical_and.accumulate(unsampled).sum())
    # A sequence that is scored behind its end too has one scored token more than tokens of its own. With the
    # token before, of which each then has its own, a buffer's list of scored tokens holds them all.
    return max(count - 1, 0) if (scored & ~attention).any() else count


@dataclass(frozen=True)
class MicroBatchPlan:
    """The layout of one micro-batch: which segments stand in which buffer, and how wide the buffers are.

    A buffer is one row of the micro-batch's arrays. The buffers of one shard are adjacent, shard after shard.
    """

    buffers: tuple[tuple[Segment, ...], ...]
    num_shards: int
    width: int
    """Tokens of each buffer, padding included."""
    packed: bool = False
    """Whether a buffer may hold several sequences."""
    shared: bool = False
    """Whether segments may hold sequences with a shared prefix."""
    num_common: int = 0
    """Tokens of the common prefix of all sequences, with which each buffer begins."""

    @property
    def sequences(self) -> np.ndarray:
        """Row numbers of the sequences, in the order of their scored tokens."""
        rows = [segment.rows for buffer in self.buffers for segment in buffer]
        return np.concatenate([np.zeros(0, np.int64), *rows])

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.buffers) * self.width

    def work(self, buffer: tuple[Segment, ...]) -> tuple[int, int]:
        """Tokens of `buffer`, the common prefix counted once, and the squares that `PackingCost.of` takes."""
        if not buffer:
            return 0, 0
        common = self.num_common
        own = np.array([segment.num_tokens - common for segment in buffer], np.int64)
        # A segment's tokens also attend to the common prefix: (common + own)^2 - common^2.
        return common + int(own.sum()), common**2 + int((own * (own + 2 * common)).sum())


def describe_plans(table: TokenTable, cuts: list[MicroBatchPlan], cost: PackingCost) -> dict[str, Metric]:
    """The metrics `batch/…` and `global_seqlen/…`: how well `cuts` fill and balance the devices."""
    shards = cuts[0].num_shards
    before = [part.sum() for part in np.array_split(table.lengths, shards)]
    after, imbalance = np.zeros(shards), 1.0
    for cut in cuts:
        work = np.array([cut.work(buffer) for buffer in cut.buffers]).reshape(shards, -1, 2).sum(axis=1)
        after += work[:, 0]
        costs = cost.of(work[:, 0], work[:, 1])
        if costs.any():
            imbalance = max(imbalance, costs.max() / costs.mean())
    computed, filled = sum(cut.num_tokens for cut in cuts), after.sum()
    tokens = float(table.lengths.sum())
    return {
        "batch/micro_batches": Metric(len(cuts), reduction="sum"),
        "batch/tokens": Metric(tokens, reduction="sum"),
        "batch/padding_fraction": Metric(float(computed - filled), computed),
        "batch/shared_fraction": Metric(float(tokens - filled), tokens),
        "batch/imbalance": Metric(float(imbalance), reduction="max"),
        "global_seqlen/min": Metric(float(min(before)), reduction="min"),
        "global_seqlen/max": Metric(float(max(before)), reduction="max"),
        "global_seqlen/mean": Metric(float(np.mean(before))),
        "global_seqlen/minmax_diff": Metric(float(max(before) - min(before)), reduction="max"),
        "global_seqlen/balanced_min": Metric(float(after.min()), reduction="min"),
        "global_seqlen/balanced_max": Metric(float(after.max()), reduction="max"),
    }
