"""Cuts an advantaged batch into mini-batches of whole groups and these into micro-batches for the device.

Data flow: `AdvantagedBatch` -> `TokenTable` (per-token columns of the whole batch) -> `mini_batches` (row
numbers) -> `Cutting.cut` (which sequences share a micro-batch) -> `MicroBatch` of static shape. Token weights
are computed from the whole mini-batch before it is cut, so no cut can change the gradient.

A micro-batch has R lines of T positions: in fixed mode a line holds one sequence, with a token budget it
holds one data shard's share of whole sequences, one after another. Scored tokens are listed per line, K = T
places for them: those the list does not fill cost nothing, and so there is one shape less to compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from quatrain.ops.ladder import round_up
from quatrain.ops.losses import token_weights
from quatrain.ops.packing import DEFAULT_COST, PackingCost, plan_packing
from quatrain.types import Metric


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "input_ids",
        "positions",
        "segment_ids",
        "predictors",
        "targets",
        "mask",
        "weights",
        "advantages",
        "rollout_logprobs",
        "old_logprobs",
        "ref_logprobs",
    ],
    meta_fields=["packed"],
)
@dataclass(frozen=True)
class MicroBatch:
    """What one forward/backward sees. Scored tokens are listed per line, so the head runs on them alone.

    `predictors[r, k]` is the column whose hidden state predicts `targets[r, k]`. `mask` is False on the
    padding of that list, which is at its end and where `weights` and all else are 0. Segments count from 1
    on each line, and positions from 0 in each segment.
    """

    input_ids: jax.Array  # [R, T] int32
    positions: jax.Array  # [R, T] int32
    segment_ids: jax.Array  # [R, T] int32, 0 on padding
    predictors: jax.Array  # [R, K] int32
    targets: jax.Array  # [R, K] int32
    mask: jax.Array  # [R, K] bool
    weights: jax.Array  # [R, K] float32
    advantages: jax.Array  # [R, K] float32
    rollout_logprobs: jax.Array  # [R, K] float32
    old_logprobs: jax.Array  # [R, K] float32
    ref_logprobs: jax.Array  # [R, K] float32
    packed: bool = False
    """Lines may hold several segments; static."""


TOKEN_COLUMNS = ("weights", "advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class TokenTable:
    """B sequences with the per-token columns [B, T] that the objective reads; absent columns are zeros."""

    input_ids: np.ndarray
    attention_mask: np.ndarray
    completion_mask: np.ndarray
    columns: dict[str, np.ndarray]

    def with_columns(self, **columns: np.ndarray) -> TokenTable:
        """This table with `columns` added or replaced."""
        return TokenTable(
            self.input_ids, self.attention_mask, self.completion_mask, {**self.columns, **columns}
        )

    def take(self, rows: np.ndarray) -> TokenTable:
        """The sequences `rows` of this table."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return TokenTable(
            self.input_ids[rows], self.attention_mask[rows], self.completion_mask[rows], columns
        )

    def weighted(self, aggregation: str, max_new_tokens: int) -> TokenTable:
        """This table with the token weights of `aggregation` over all its sequences."""
        return self.with_columns(weights=token_weights(aggregation, self.completion_mask, max_new_tokens))

    @property
    def lengths(self) -> np.ndarray:
        """[B] int64, prompt and completion tokens of each sequence."""
        return self.attention_mask.sum(axis=1)

    def __len__(self) -> int:
        return len(self.input_ids)


def mini_batches(group_ids: np.ndarray, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Row numbers of each mini-batch: whole groups in random order, sizes differing by at most one group.

    `group_ids` [B]; `size` groups per mini-batch at most, so ceil(groups / size) mini-batches.
    """
    groups, membership = np.unique(group_ids, return_inverse=True)
    order = rng.permutation(len(groups))
    count = -(-len(groups) // size)
    return [np.flatnonzero(np.isin(membership, part)) for part in np.array_split(order, count)]


@dataclass(frozen=True)
class Cutting:
    """How a mini-batch is cut: `rows` sequences, or `max_tokens` tokens, per data shard; one of them is set.

    `cost` is what the packer balances over the `num_shards` shards of a micro-batch.
    """

    rows: int | None = None
    max_tokens: int | None = None
    num_shards: int = 1
    cost: PackingCost = DEFAULT_COST

    def __post_init__(self) -> None:
        assert (self.rows is None) != (self.max_tokens is None), "one way to cut, not two and not none"

    def cut(self, table: TokenTable) -> list[Cut]:
        """The micro-batches of `table`, in the order to run them; every sequence is in exactly one."""
        if self.max_tokens is None:
            return self._fixed_rows(table)
        packing = plan_packing(table.lengths, self.max_tokens, self.num_shards, cost=self.cost)
        return [
            Cut(tuple(bins), len(bins), width, packed=True)
            for bins, width in zip(packing.bins, packing.widths, strict=True)
        ]

    def _fixed_rows(self, table: TokenTable) -> list[Cut]:
        """Shard after shard takes its share; widths come from the whole table, so there is one shape."""
        assert self.rows is not None
        width = round_up(int(table.lengths.max(initial=1)))
        shares = np.array_split(np.arange(len(table)), self.num_shards)
        largest = max(len(share) for share in shares)
        rows = min(self.rows, max(largest, 1))
        cuts = []
        for first in range(0, largest, rows):
            lines = [share[i : i + 1] for share in shares for i in range(first, first + rows)]
            cuts.append(Cut(tuple(lines), self.num_shards, width, packed=False))
        return cuts


@dataclass(frozen=True)
class Cut:
    """One micro-batch before it has tokens: the sequences of each line, and the shape of the buffer.

    The lines of a shard are side by side, shard after shard.
    """

    lines: tuple[np.ndarray, ...]
    num_shards: int
    width: int
    packed: bool

    @property
    def sequences(self) -> np.ndarray:
        """Row numbers in the order their tokens come."""
        return np.concatenate(self.lines)

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.lines) * self.width

    def fill(self, table: TokenTable) -> MicroBatch:
        """The micro-batch of these sequences of `table`."""
        shape = (len(self.lines), self.width)
        tokens = {name: np.zeros(shape, np.int32) for name in ("input_ids", "positions", "segment_ids")}
        scored = {name: np.zeros(shape, np.int32) for name in ("predictors", "targets")}
        columns = {name: np.zeros(shape, np.float32) for name in TOKEN_COLUMNS}
        mask = np.zeros(shape, bool)
        for line, sequences in enumerate(self.lines):
            start = first = 0
            for segment, row in enumerate(sequences, start=1):
                length = int(table.attention_mask[row].sum())
                stop = start + length
                tokens["input_ids"][line, start:stop] = table.input_ids[row, :length]
                tokens["positions"][line, start:stop] = np.arange(length)
                tokens["segment_ids"][line, start:stop] = segment
                places = np.flatnonzero(table.completion_mask[row])
                last = first + len(places)
                scored["predictors"][line, first:last] = start + places - 1
                scored["targets"][line, first:last] = table.input_ids[row, places]
                for name in columns.keys() & table.columns.keys():
                    columns[name][line, first:last] = table.columns[name][row, places]
                mask[line, first:last] = True
                start, first = stop, last
        host = {**tokens, **scored, **columns, "mask": mask}
        return MicroBatch(**jax.device_put(host), packed=self.packed)


def micro_batches(table: TokenTable, cutting: Cutting) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """(row numbers, in the order their tokens come; micro-batch) for each part of `table`."""
    for cut in cutting.cut(table):
        yield cut.sequences, cut.fill(table)


def describe_cuts(table: TokenTable, cuts: list[Cut], cost: PackingCost) -> dict[str, Metric]:
    """How well `cuts` of `table` fill and balance the devices: the `batch/` and `global_seqlen/` metrics."""
    lengths = table.lengths
    computed = sum(cut.num_tokens for cut in cuts)
    shards = cuts[0].num_shards
    before = [part.sum() for part in np.array_split(lengths, shards)]
    after, imbalance = np.zeros(shards), []
    for cut in cuts:
        parts = np.array_split(np.arange(len(cut.lines)), shards)
        held = [lengths[np.concatenate([cut.lines[line] for line in part])] for part in parts]
        after += [part.sum() for part in held]
        costs = np.array([cost.of(part, part**2).sum() for part in held])
        imbalance.append(costs.max() / costs.mean() if costs.any() else 1.0)
    return {
        "batch/micro_batches": Metric(len(cuts), reduction="sum"),
        "batch/tokens": Metric(float(lengths.sum()), reduction="sum"),
        "batch/padding_fraction": Metric(float(computed - lengths.sum()), computed),
        "batch/imbalance": Metric(float(max(imbalance)), reduction="max"),
        "global_seqlen/min": Metric(float(min(before)), reduction="min"),
        "global_seqlen/max": Metric(float(max(before)), reduction="max"),
        "global_seqlen/mean": Metric(float(np.mean(before))),
        "global_seqlen/minmax_diff": Metric(float(max(before) - min(before)), reduction="max"),
        "global_seqlen/balanced_min": Metric(float(after.min()), reduction="min"),
        "global_seqlen/balanced_max": Metric(float(after.max()), reduction="max"),
    }
