"""The pass without gradient: a number for each token or sequence, in the order of the batch.

Used by the update stage (log-probabilities of policy and reference, values of the critic) and by reward
models. Data flow: `TokenTable` -> packed micro-batches (`planner.py`, `micro_batch.py`) ->
`ModelSpec.predict`.
"""

from __future__ import annotations

from collections.abc import Sequence
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

Predicted = tuple[tuple[jax.Array, ...], jax.Array]


def _predict(params: Any, batch: MicroBatch, *, model: ModelSpec, count: int = 1) -> Predicted:
    """[R, K, ...]: the first `count` predictions of `model` for each scored token, and the mask.

    All are on every device, the same bits.
    """

    def on_shard(params: Any, batch: MicroBatch) -> Predicted:
        found = (of_all_tokens(x, batch.mask) for x in model.predict(params, batch).numbers[:count])
        return all_gather_shards((tuple(from_first_device(x, TP) for x in found), batch.mask))

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
    results: list[np.ndarray] = []
    table = replace(table, columns={})  # so that one program predicts for tables of any columns
    # Sums of routers are for the loss; without them the program of a pass has fewer inputs and outputs.
    forms = model.forms._replace(counted=False)
    for sequences, batch in micro_batches(table, planner, model.mesh, forms):
        with trim_after_compiling():
            predicted, mask = jax.device_get(
                _predict_program(model.backend)(params, batch, model=model, count=count)
            )
        shape, scored = table.completion_mask.shape, table.completion_mask[sequences]
        results = results or [np.zeros((*shape, *x.shape[2:]), x.dtype) for x in predicted]
        for result, values in zip(results, predicted, strict=True):
            part = np.zeros((len(sequences), *result.shape[1:]), result.dtype)
            # Both list the tokens of these sequences in the same order: `cut.sequences` is the order of the
            # buffers.
            part[scored] = values[mask]
            result[sequences] = part
    return results


def sequence_scores(
    params: Any, sequences: Sequence[Sequence[int]], *, model: CriticSpec, planner: MicroBatchPlanner
) -> np.ndarray:
    """[n] float32 scores of n sequences of token ids, as `predict_tokens` computes them.

    The score is that of the last token that is not the padding token of config.json, and of the first token
    if there is no other, as in transformers. Raises ValueError if a sequence has no token, or more than the
    token budget of `planner`.
    """
    lengths = np.array([len(ids) for ids in sequences], int)
    columns = np.arange(lengths.max(initial=0) + 1)  # the value of a last token stands in the column after it
    attention = columns < lengths[:, None]
    input_ids = np.zeros(attention.shape, np.int32)
    input_ids[attention] = np.concatenate([np.zeros(0, np.int32), *map(np.asarray, sequences)])
    kept = attention & (input_ids != model.arch.pad_token_id)
    scored = np.where(kept, columns, 0).max(axis=1, initial=0) + 1
    table = TokenTable(input_ids, attention, columns == scored[:, None], {})
    return predict_tokens(params, table, model=model, planner=planner)[np.arange(len(lengths)), scored]
