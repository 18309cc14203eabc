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
from quatrain.forward.specs import CriticSpec, ModelSpec, of_all_columns, predicted_here
from quatrain.forward.table import TokenTable
from quatrain.parallel.axes import DATA_AXES, TP
from quatrain.parallel.collectives import all_gather_shards, from_first_device, shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.host_memory import trim_after_compiling


def _predict(params: Any, batch: MicroBatch, *, model: ModelSpec) -> tuple[jax.Array, jax.Array]:
    """[R, K] float32: the first prediction of `model` for each scored token, and the mask.

    Both are on every device, the same bits.
    """

    def on_shard(params: Any, batch: MicroBatch) -> tuple[jax.Array, jax.Array]:
        predicted = jnp.where(batch.mask, model.predict(params, batch).numbers[0], 0.0)
        return all_gather_shards((from_first_device(predicted, TP), batch.mask))

    in_specs = (model.partition, PartitionSpec(DATA_AXES))
    return shard_mapped(on_shard, model.mesh, in_specs, PartitionSpec())(params, batch)


_predict_program = jit_for_backend(_predict, static_argnames=("model",))


def _scored_hidden(params: Any, batch: MicroBatch, *, model: ModelSpec) -> jax.Array:
    """[R, K, D]: the hidden states before the scored tokens, on their data shards; other entries are any."""

    def on_shard(params: Any, batch: MicroBatch) -> jax.Array:
        hidden, _ = model.hidden(params, batch)
        places, here = predicted_here(batch, hidden)
        return of_all_columns(jnp.take_along_axis(hidden, places[..., None], axis=1), here[..., None])

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
    result = np.zeros(table.completion_mask.shape, np.float32)
    table = replace(table, columns={})  # so that one program predicts for tables of any columns
    forms = model.forms._replace(counted=False)
    for sequences, batch in micro_batches(table, planner, model.mesh, forms):
        with trim_after_compiling():
            outputs = _predict_program(model.backend)(params, batch, model=model)
            predicted, mask = (np.asarray(x) for x in outputs)
        part = np.zeros((len(sequences), table.input_ids.shape[1]), np.float32)
        part[table.completion_mask[sequences]] = predicted[mask]
        result[sequences] = part
    return result


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
