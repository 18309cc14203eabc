"""Cuts a mini-batch into micro-batches: which sequences stand in which buffer, and how wide the buffers are.

Data flow: `TokenTable` -> `Cutting.cut` -> `Cut` -> `micro_batch`. In fixed mode a buffer holds one sequence;
with a token budget it holds whole sequences one after another, the share of one data shard or of a part of
it (`Cutting.line_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from quatrain.config.schema import CriticConfig, LogprobConfig, UpdateConfig
from quatrain.ops.ladder import round_up
from quatrain.ops.packing import (
    DEFAULT_COST,
    PackingCost,
    buffers_per_shard,
    common_tokens,
    plan_packing,
    useful_common_prefix,
)
from quatrain.types.metrics import Metric
from quatrain.update.table import TokenTable

T = TypeVar("T")


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
class Cutting:
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

    def __post_init__(self) -> None:
        assert (self.rows is None) != (self.max_tokens is None), "exactly one of rows and max_tokens is set"
        assert self.max_tokens is not None or not self.share_prompts, "sharing prompts needs a token budget"

    @classmethod
    def of(
        cls,
        sizes: UpdateConfig | LogprobConfig | CriticConfig,
        cost: PackingCost,
        *,
        num_shards: int = 1,
        share_prompts: bool = False,
        line_tokens: int | None = None,
    ) -> Cutting:
        """The cutting that a section of the configuration asks for; only a token budget shares prompts."""
        rows, max_tokens = sizes.micro_batch_size, sizes.max_tokens_per_device
        share_prompts = share_prompts and max_tokens is not None
        return cls(rows, max_tokens, num_shards, cost, share_prompts, line_tokens)

    def cut(self, table: TokenTable) -> list[Cut]:
        """The micro-batches of `table` in the order they run; every sequence is in exactly one."""
        if self.max_tokens is None:
            return self._fixed_rows(table)
        return self._packed(table, self.max_tokens)

    def _packed(self, table: TokenTable, max_tokens: int) -> list[Cut]:
        lines = buffers_per_shard(table.lengths, max_tokens, self.line_tokens)
        max_tokens //= lines
        shared = _SharedPrefixes.of(table, max_tokens) if self.share_prompts else _SharedPrefixes.none(table)
        packing = plan_packing(
            table.lengths,
            max_tokens,
            self.num_shards * lines,
            groups=shared.groups,
            prefixes=shared.tokens,
            shared_prefix=shared.by_all,
            cost=self.cost,
        )
        return [
            Cut(
                tuple(shared.segments(rows, table.lengths) for rows in bins),
                self.num_shards,
                width,
                packed=True,
                shared=self.share_prompts,
                num_common=shared.by_all,
            )
            for bins, width in zip(packing.bins, packing.widths, strict=True)
        ]

    def _fixed_rows(self, table: TokenTable) -> list[Cut]:
        """Micro-batches of `rows` sequences per shard, all as wide as the longest sequence of the table."""
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


@dataclass(frozen=True)
class _SharedPrefixes:
    """Which sequences of a table share a prefix that is computed once for them."""

    groups: np.ndarray
    """[B] integers; sequences with equal numbers share a prefix that is longer than the common prefix."""
    tokens: np.ndarray
    """[B] tokens of the longest prefix that a sequence shares with its group, or else with all sequences."""
    by_all: int
    """Tokens of the common prefix of all sequences."""

    @classmethod
    def none(cls, table: TokenTable) -> _SharedPrefixes:
        return cls(np.arange(len(table)), np.zeros(len(table), np.int64), 0)

    @classmethod
    def of(cls, table: TokenTable, max_tokens: int) -> _SharedPrefixes:
        if table.group_ids is None:
            return cls.none(table)
        by_all = common_prefix_tokens(table, max_tokens)
        groups, tokens = np.arange(len(table)), np.full(len(table), by_all, np.int64)
        for rows, prefix in shared_prefixes(table):
            if prefix > by_all:
                groups[rows], tokens[rows] = rows[0], prefix
        return cls(groups, tokens, by_all)

    def segments(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[Segment, ...]:
        """The segments of a buffer with the sequences `rows`; those that share a prefix are adjacent."""
        starts = np.flatnonzero(np.diff(self.groups[rows])) + 1
        parts = np.split(rows, starts) if len(rows) else []
        prefixes = (int(self.tokens[part[0]]) for part in parts)
        return tuple(
            Segment(part, prefix, prefix + int((lengths[part] - prefix).sum()))
            for part, prefix in zip(parts, prefixes, strict=True)
        )


def _whole_sequences(table: TokenTable) -> list[Segment]:
    return [Segment(np.array([row]), 0, int(length)) for row, length in enumerate(table.lengths)]


def shared_prefixes(table: TokenTable) -> list[tuple[np.ndarray, int]]:
    """For each group: the row numbers of its sequences, and the tokens of the prefix that they share.

    A shared prefix ends before the first token that the policy sampled in one of the sequences.
    """
    assert table.group_ids is not None
    groups = (np.flatnonzero(table.group_ids == group) for group in np.unique(table.group_ids))
    return [(rows, _common_tokens(table, rows)) for rows in groups]


def common_prefix_tokens(table: TokenTable, max_tokens: int) -> int:
    """Tokens of the common prefix of all sequences; 0 where it is too short to be worth sharing."""
    if not len(table) or table.lengths.max() > max_tokens:  # too long: the packer says so
        return 0
    given = _given_tokens(table, np.arange(len(table)))
    return useful_common_prefix(table.input_ids[:, :given], table.lengths)


def _common_tokens(table: TokenTable, rows: np.ndarray) -> int:
    """Tokens of the prefix that the sequences `rows` share, before any token that the policy sampled."""
    return common_tokens(table.input_ids[rows, : _given_tokens(table, rows)])


def _given_tokens(table: TokenTable, rows: np.ndarray) -> int:
    """Positions before the first that is sampled, or padding, in one of the sequences `rows`."""
    given = table.attention_mask[rows].all(axis=0) & ~table.completion_mask[rows].any(axis=0)
    return int(np.logical_and.accumulate(given).sum())


@dataclass(frozen=True)
class Cut:
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
        return common + int(own.sum()), common**2 + int((own * (own + 2 * common)).sum())


def describe_cuts(table: TokenTable, cuts: list[Cut], cost: PackingCost) -> dict[str, Metric]:
    """The metrics `batch/…` and `global_seqlen/…`: how well `cuts` fill and balance the devices."""
    shards = cuts[0].num_shards
    before = [part.sum() for part in np.array_split(table.lengths, shards)]
    after, imbalance = np.zeros(shards), [1.0]
    for cut in cuts:
        held = [
            np.sum([cut.work(buffer) for buffer in buffers], axis=0)
            for buffers in _split(cut.buffers, shards)
        ]
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
    """`items` split into `parts` consecutive parts whose sizes differ by at most one."""
    ends = [len(run) for run in np.array_split(np.arange(len(items)), parts)]
    stops = np.cumsum(ends)
    return [items[stop - size : stop] for stop, size in zip(stops, ends, strict=True)]
