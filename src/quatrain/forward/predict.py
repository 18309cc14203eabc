"""The pass without gradient: a number for each token or sequence, in the order of the batch.

Used by the update stage (log-probabilities of policy and reference, values of the critic) and by reward
models. Data flow: `TokenTable` -> packed micro-batches (`planner.py`, `micro_batch.py`) ->
`ModelSpec.predict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from quatrain.forward.micro_batch import MicroBatch, micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.specs import CriticSpec, ModelSpec, of_all_columns, of_all_tokens, predicted_here
from quatrain.forward.table import TokenTable
from quatrain.parallel.axes import DATA_AXES, TP
from quatrain.parallel.collectives import all_gather_shards, from_first_device, shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.host_memory import trim_after_compiling

Gathered = tuple[tuple[jax.Array, ...], jax.Array]
"""Predictions [R, K, ...] of the scored tokens of a micro-batch, 0 elsewhere, and its mask [R, K].

They are of all data shards, the same bits on every device.
"""


def gathered(numbers: Iterable[jax.Array], mask: jax.Array) -> Gathered:
    """Predictions `numbers` of a data shard, and those of all others. In a function mapped over the mesh."""
    found = (of_all_tokens(x, mask) for x in numbers)
    return all_gather_shards((tuple(from_first_device(x, TP) for x in found), mask))


def in_rows(table: TokenTable, parts: Iterable[tuple[np.ndarray, Gathered]]) -> list[np.ndarray]:
    """[B, T, ...] each: the predictions of micro-batches, in the rows of `table`; 0 where nothing is scored.

    `parts` have the sequences of each micro-batch (`MicroBatchPlan.sequences`).
    """
    results: list[np.ndarray] = []
    for sequences, on_devices in parts:
        predicted, mask = jax.device_get(on_devices)
        shape, scored = table.completion_mask.shape, table.completion_mask[sequences]
        results = results or [np.zeros((*shape, *x.shape[2:]), x.dtype) for x in predicted]
        for result, values in zip(results, predicted, strict=True):
            part = np.zeros((len(sequences), *result.shape[1:]), result.dtype)
            # Both list the tokens of these sequences in the same order: `cut.sequences` is the order of the
            # buffers.
            part[scored] = values[mask]
            result[sequences] = part
    return results


def _predict(params: Any, batch: MicroBatch, *, model: ModelSpec, count: int = 1) -> Gathered:
    """The first `count` predictions of `model` for each scored token."""

    def on_shard(params: Any, batch: MicroBatch) -> Gathered:
        return gathered(model.predict(params, batch).numbers[:count], batch.mask)

    in_specs = (model.partition, PartitionSpec(DATA_AXES))
    return shard_mapped(on_shard, model.mesh, in_specs, PartitionSpec())(params, batch)


_predict_program = jit_for_backend(_predict, static_argnames=("model", "count"))


def _scored_hidden(params: Any, batch: MicroBatch, *, model: ModelSpec) -> jax.Array:
    """[R, K, D]: the hidden states before the scored tokens, on their data shards; other entries are any."""

    def on_shard(params: Any, batch: MicroBatch) -> jax.Array:
        hidden, _ = model.hidden(params, batch)
        places, here = predicted_here(batch, hidden)
        return of_all_columns(jnp.take_along_axis(hidden, places[..., None], axis=1), here)

    shards = PartitionSpec(DATA_AXES)
    return shard_mapped(on_shard, model.mesh, (model.partition, shards), shards)(params, batch)


scored_hidden_program = jit_for_backend(_scored_hidden, static_argnames=("model",))
"""`scored_hidden_program(backend)` is the jitted `_scored_hidden`."""


def predict_tokens(
    params: Any, table: TokenTable, *, model: ModelSpec, planner: MicroBatchPlanner
) -> np.ndarray:
    """[B, T] float32: log-probability (of a policy) or value (of a critic) of every completion token.

    0 outside the completion mask. All processes of the mesh must call this together, and get the same bits.
    """
    [result] = predict_columns(params, table, model=model, planner=planner)
    return result


def predict_columns(
    params: Any, table: TokenTable, *, model: ModelSpec, planner: MicroBatchPlanner, count: int = 1
) -> list[np.ndarray]:
    """[B, T, ...] each: the first `count` predictions of `model`, as `predict_tokens`."""
    # So that one program predicts for tables of any columns.
    table = replace(table, columns={name: table.columns[name] for name in model.reads}, balance=None)
    # Sums of routers are for the loss; without them the program of a pass has fewer inputs and outputs.
    forms = model.forms._replace(counted=False)

    def parts() -> Iterator[tuple[np.ndarray, Gathered]]:
        for sequences, batch in micro_batches(table, planner, model.mesh, forms):
            with trim_after_compiling():
                found = jax.device_get(
                    _predict_program(model.backend)(params, batch, model=model, count=count)
                )
            yield sequences, found

    return in_rows(table, parts())


def sequence_scores(
    params: Any, sequences: Sequence[Sequence[int]], *, model: CriticSpec, planner: MicroBatchPlanner
) -> np.ndarray:
    """[n] float32 scores of n sequences of token ids, as `predict_tokens` computes them.

    The place is that of `TokenTable.scored_at_end`, without the padding token of config.json. Raises
    ValueError if a sequence has no token, or more than the token budget of `planner`.
    """
    table = TokenTable.scored_at_end(sequences, model.arch.pad_token_id)
    # One place of each row is scored, so they are in the order of the rows.
    return predict_tokens(params, table, model=model, planner=planner)[table.completion_mask]
