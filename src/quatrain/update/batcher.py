"""Cuts an advantaged batch into mini-batches of whole groups and these into micro-batches for the device.

Data flow: `AdvantagedBatch` -> `TokenTable` (per-token columns of the whole batch) -> `mini_batches` (row
numbers) -> `micro_batches` (`MicroBatch` of static shape). Token weights are computed from the whole
mini-batch before it is cut, so no cut can change the gradient. R rows, T columns, K scored tokens a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from quatrain.ops.ladder import round_up
from quatrain.ops.losses import token_weights


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
    meta_fields=[],
)
@dataclass(frozen=True)
class MicroBatch:
    """What one forward/backward sees. Scored tokens are listed per row, so the head runs on them alone.

    `predictors[r, k]` is the column whose hidden state predicts `targets[r, k]`. `mask` is False on the
    padding of that list, where `weights` and all else are 0.
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


def micro_batches(table: TokenTable, rows_per_batch: int) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """(row numbers, micro-batch) of at most `rows_per_batch` sequences; the last is padded with empty rows.

    Widths come from a ladder over the whole table, so all micro-batches share one shape.
    """
    width = round_up(int(table.attention_mask.sum(axis=1).max(initial=1)))
    scored = round_up(int(table.completion_mask.sum(axis=1).max(initial=1)))
    for first in range(0, len(table), rows_per_batch):
        rows = np.arange(first, min(first + rows_per_batch, len(table)))
        yield rows, _pad(table.take(rows), rows_per_batch, width, scored)


def _pad(table: TokenTable, rows: int, width: int, scored: int) -> MicroBatch:
    columns = min(width, table.input_ids.shape[1])
    attention = _fit(table.attention_mask[:, :columns], (rows, width))
    input_ids = np.where(attention, _fit(table.input_ids[:, :columns], (rows, width)), 0)
    where = [np.flatnonzero(row) for row in table.completion_mask]
    targets = np.zeros((rows, scored), np.int32)
    mask = np.zeros((rows, scored), bool)
    for row, places in enumerate(where):
        targets[row, : len(places)] = places
        mask[row, : len(places)] = True
    token_columns = {}
    for name in TOKEN_COLUMNS:
        values = np.zeros((rows, scored), np.float32)
        if name in table.columns:
            for row, places in enumerate(where):
                values[row, : len(places)] = table.columns[name][row, places]
        token_columns[name] = values
    host = {
        "input_ids": input_ids.astype(np.int32),
        "positions": np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width)),
        "segment_ids": attention.astype(np.int32),
        "predictors": np.maximum(targets - 1, 0),
        "targets": np.take_along_axis(input_ids, targets, axis=1).astype(np.int32),
        "mask": mask,
        **token_columns,
    }
    return MicroBatch(**jax.device_put(host))


def _fit(values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    padding = [(0, want - have) for want, have in zip(shape, values.shape)]
    return np.pad(values, padding)
