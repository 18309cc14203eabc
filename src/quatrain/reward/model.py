"""Reward models: sequence-classification models that score a prompt with its completion, computed in JAX.

Stage 2 of a training step, beside the reward functions: prompts and completions of a `RolloutBatch` -> text
in the reward model's chat template -> its token ids -> packed micro-batches -> one score per sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from quatrain.backend import Backend, this_backend
from quatrain.config.schema import ModelConfig, RewardConfig
from quatrain.data.tokenizer import load_tokenizer, render_completed
from quatrain.models.attention import longest_buffer, unpacks
from quatrain.models.attention.probe import trusted_attention
from quatrain.models.attention.unpacking import Unpacking, unpacking
from quatrain.models.decoder import forward, scores
from quatrain.models.families import Architecture
from quatrain.models.flops import packing_cost
from quatrain.models.params import partition
from quatrain.ops.packing import buffers_per_shard, plan_packing
from quatrain.parallel.axes import DATA_AXES, TP
from quatrain.parallel.collectives import all_gather_shards, from_first_device, shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.host_memory import trim_after_compiling
from quatrain.parallel.mesh import data_sharding, mesh_shape, one_device, place, to_memory
from quatrain.reward.values import Scores
from quatrain.types.batches import PromptText, RolloutBatch
from quatrain.weights.load import load_classifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoreSpec:
    """How packed sequences become scores: model, dtype of activations, devices; static in compiled functions.

    Parameters lie on `mesh`; `backend` holds the settings for the kind of its devices.
    """

    arch: Architecture
    dtype: str = "float32"
    mesh: Mesh = field(default_factory=one_device)
    attention: str = "xla"
    backend: Backend = field(default_factory=this_backend)


class _Buffers(NamedTuple):
    """The input of one forward pass: R buffers of T positions, the same number for each data shard."""

    input_ids: jax.Array  # [R, T] int32
    positions: jax.Array  # [R, T] int32, from 0 in each sequence
    segment_ids: jax.Array  # [R, T] int32, from 1 in each buffer; 0 on padding
    layout: Unpacking | None


def score_sequences(
    params: Any, sequences: Sequence[Sequence[int]], spec: ScoreSpec, *, max_tokens: int
) -> np.ndarray:
    """[n] float32 scores of n sequences of token ids, the same in every process.

    The score is that of the last token that is not the padding token of config.json, and of the first token
    if there is no other, as in transformers. Sequences are packed into micro-batches of at most `max_tokens`
    tokens per data shard; all processes of the mesh must call this together. Raises ValueError if a sequence
    has no token or more than `max_tokens`.
    """
    result = np.zeros(len(sequences), np.float32)
    lengths = [len(ids) for ids in sequences]
    lines = buffers_per_shard(lengths, max_tokens, longest_buffer(spec.attention, spec.backend))
    packing = plan_packing(
        lengths,
        max_tokens // lines,
        mesh_shape(spec.mesh).num_data_shards * lines,
        cost=packing_cost(spec.arch),
    )
    for bins, width in zip(packing.bins, packing.widths, strict=True):
        batch = _fill(bins, width, sequences, spec)
        with trim_after_compiling():
            every = np.asarray(_score_program(spec.backend)(params, batch, spec=spec))
        for buffer, rows in enumerate(bins):
            starts = np.cumsum([0, *(len(sequences[row]) for row in rows)])
            for start, row in zip(starts, rows, strict=False):
                result[row] = every[buffer, start + _pooled(sequences[row], spec.arch.pad_token_id)]
    return result


def _pooled(ids: Sequence[int], pad_token_id: int | None) -> int:
    """The position in a sequence whose score is the sequence's."""
    return next((at for at in reversed(range(len(ids))) if ids[at] != pad_token_id), 0)


def _fill(
    bins: Sequence[np.ndarray], width: int, sequences: Sequence[Sequence[int]], spec: ScoreSpec
) -> _Buffers:
    """The buffers of one micro-batch on the data shards of the mesh; `bins` has the sequences of each."""
    input_ids, positions, segment_ids = np.zeros((3, len(bins), width), np.int32)
    for buffer, rows in enumerate(bins):
        start = 0
        for number, row in enumerate(rows, start=1):
            own = np.s_[buffer, start : start + len(sequences[row])]
            input_ids[own] = sequences[row]
            positions[own] = np.arange(len(sequences[row]))
            segment_ids[own] = number
            start += len(sequences[row])
    layout = unpacking(segment_ids, np.zeros_like(segment_ids)) if unpacks(spec.attention) else None
    sharding = data_sharding(spec.mesh)
    arrays = [place(array, sharding) for array in (input_ids, positions, segment_ids)]
    return _Buffers._make([*arrays, jax.tree.map(lambda x: place(x, sharding), layout)])


def _scores(params: Any, batch: _Buffers, *, spec: ScoreSpec) -> jax.Array:
    """[R, T] float32 scores at every position, the same bits on every device."""

    def own(params: Any, batch: _Buffers) -> jax.Array:
        arch, backend = spec.arch, spec.backend
        hidden = forward(
            params,
            arch,
            batch.input_ids,
            batch.positions,
            batch.segment_ids,
            dtype=jnp.dtype(spec.dtype),
            attention=spec.attention,
            layout=batch.layout,
            backend=backend,
        )
        return all_gather_shards(from_first_device(scores(params, arch, hidden), TP))

    in_specs = (partition(spec.arch, mesh_shape(spec.mesh)), PartitionSpec(DATA_AXES))
    return shard_mapped(own, spec.mesh, in_specs, PartitionSpec())(params, batch)


_score_program = jit_for_backend(_scores, static_argnames=("spec",))
"""`_score_program(backend)` is the jitted `_scores`."""


class RewardModel:
    """A loaded reward model: its tokenizer, its parameters, and the most tokens that it scores at once.

    Parameters are kept in `memory` between calls of `score`, and moved to the devices for a call.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        params: Any,
        spec: ScoreSpec,
        *,
        max_tokens: int,
        memory: Literal["device", "host"] = "device",
    ):
        self.name = name
        self.tokenizer = tokenizer
        self.spec = spec
        self.max_tokens = max_tokens
        self.longest = min(max_tokens, spec.arch.max_position)
        """Tokens of the longest sequence that gets a score."""
        self._params = to_memory(memory, params)

    def check_prompt(self, prompt: PromptText) -> None:
        """Raises ValueError if no completion of `prompt` can be scored.

        That is so if the prompt consists of messages and the tokenizer has no chat template, if the template
        rejects the messages, or if the prompt alone is longer than `longest` tokens.
        """
        if not isinstance(prompt, str) and not self.tokenizer.chat_template:
            raise ValueError(
                f"the reward model {self.name} needs a chat template for prompts that are messages, and its "
                "tokenizer has none; add chat_template to its tokenizer_config.json, or give prompts as "
                "plain strings"
            )
        try:
            tokens = len(render_completed(self.tokenizer, prompt, ""))
        except ValueError as error:
            raise ValueError(f"the reward model {self.name} cannot read this prompt: {error}") from error
        if tokens > self.longest:
            raise ValueError(
                f"a prompt must not be longer than a reward model can read; this one has {tokens} tokens for "
                f"{self.name}, which has {self.spec.arch.max_position} positions, and "
                f"reward.model_max_tokens_per_device is {self.max_tokens}; remove the prompt, raise the "
                "budget or take another reward model"
            )

    def score(self, rollouts: RolloutBatch) -> Scores:
        """[B] float32 scores of the completions, NaN for a sequence without a score.

        A sequence has no score if it has more than `longest` tokens (counted in `too_long`), or if its score
        is not finite (counted in `errors`). All processes of the mesh must call this together, with the same
        rollouts.
        """
        pairs = zip(rollouts.prompts, rollouts.completions, strict=True)
        sequences = [render_completed(self.tokenizer, prompt, completion) for prompt, completion in pairs]
        short = np.flatnonzero([len(ids) <= self.longest for ids in sequences])
        values = np.full(len(sequences), np.nan, np.float32)
        held = [sequences[row] for row in short]
        began = time.perf_counter()
        if held:
            params = to_memory("device", self._params)
            values[short] = score_sequences(params, held, self.spec, max_tokens=self.max_tokens)
        seconds = time.perf_counter() - began
        bad = int((~np.isfinite(values[short])).sum())
        if bad:
            logger.warning("the reward model %s computed %d scores that are not finite", self.name, bad)
        values[np.isinf(values)] = np.nan
        counts = {"errors": bad, "too_long": len(sequences) - len(short), "tokens": sum(map(len, held))}
        return Scores(values, counts, seconds)


def load_reward_models(
    config: RewardConfig,
    model: ModelConfig,
    *,
    mesh: Mesh,
    memory: Literal["device", "host"] = "device",
    longest: int = 0,
) -> dict[str, RewardModel]:
    """The reward models of `reward.functions`, by their entries there, on `mesh`.

    Parameters are stored in `model.param_dtype`, activations are in `model.dtype`. A warning is logged for a
    model that cannot score sequences of `longest` tokens, the longest that a run can produce. Raises
    ValueError, which names the entry, for a model that is missing, damaged, of an unsupported kind or family,
    or without a tokenizer, and for one that `mesh` cannot shard.
    """
    budget = config.model_max_tokens_per_device
    models = {}
    for entry, path in config.models.items():
        assert budget is not None, "batch sizes are derived before they come here"
        try:
            loaded = load_classifier(path, dtype=model.param_dtype, mesh=mesh)
            tokenizer = load_tokenizer(path)
            _check_vocabulary(len(tokenizer), loaded.arch.vocab_size)
        except ValueError as error:
            raise ValueError(f"the reward model {entry} cannot be used: {error}") from error
        kind = this_backend().kind
        attention = trusted_attention("auto", loaded.arch, platform=kind, dtype=model.dtype)
        spec = ScoreSpec(loaded.arch, model.dtype, mesh, attention)
        scorer = RewardModel(path, tokenizer, loaded.params, spec, max_tokens=budget, memory=memory)
        if scorer.longest < longest:
            logger.warning(
                "the reward model %s reads at most %d tokens, and the longest sequence of this run has %d "
                "tokens of the policy: sequences that are too long get no score from it, and are counted in "
                "reward/<name>/too_long",
                path,
                scorer.longest,
                longest,
            )
        models[entry] = scorer
    return models


def _check_vocabulary(num_tokens: int, vocab_size: int) -> None:
    if num_tokens > vocab_size:
        raise ValueError(
            f"a tokenizer must not have more tokens than its model's vocabulary: it has {num_tokens} tokens, "
            f"the model {vocab_size}; save the tokenizer that the model was trained with in its folder"
        )
