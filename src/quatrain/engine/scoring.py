"""Log-probabilities of given tokens, and the likeliest tokens in their place: the prompt's in an answer.

Data flow: token ids -> packed like prompts (`groups.py`) -> one forward pass -> `Scores`, for `engine.score`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quatrain.engine.decode import EACH_REPLICA, EVERYWHERE, Program, sharded_program
from quatrain.engine.groups import (
    Admitted,
    Group,
    Pack,
    UsualSampling,
    as_jit_arguments,
    pack_prompts,
    seen_by,
    split_into_packs,
)
from quatrain.models.attention.unpacking import Unpacking
from quatrain.models.decoder import logits
from quatrain.models.delta_rule import Chunks
from quatrain.models.feature_store import FeatureStore
from quatrain.models.vision import Inserts
from quatrain.ops.logprobs import even_parts
from quatrain.ops.shape_buckets import power_of_two
from quatrain.parallel.collectives import all_gather_shards
from quatrain.types.batches import Prompt
from quatrain.types.pictures import Pictures, joined

MOST_LIKELIEST = 5
"""Most alternatives to a token, as in OpenAI's completions."""
MOST_OF_PROMPT = 64
"""Most alternatives to a token of a prompt in `prompt_logprobs`."""
LOGITS_AT_ONCE = 2**24
"""Logits that exist at one time, 64 MiB: those of a few tokens with all words of the vocabulary."""


class Scores(NamedTuple):
    """Of T tokens in the model's own distribution: temperature 1, all words.

    The first token has nothing before it, and arbitrary values.
    """

    logprobs: np.ndarray
    """[T] float32."""
    likeliest: np.ndarray
    """[T, K] int32, the likeliest tokens in the place of each, in order."""
    likeliest_logprobs: np.ndarray
    """[T, K] float32; a token that is among the likeliest has the same value here to the bit."""
    listed_logprobs: np.ndarray
    """[T, W] float32, those of the words that were listed for the place of each; arbitrary where none was."""

    def pairs(self) -> list[list[tuple[int, float]]]:
        """The likeliest tokens in the place of each, with their log-probabilities."""
        both = zip(self.likeliest.tolist(), self.likeliest_logprobs.tolist(), strict=True)
        return [list(zip(*each, strict=True)) for each in both]


class PackedRow(NamedTuple):
    """T packed tokens, as in `Packed`, whatever the number of sequences among them."""

    input_ids: jax.Array  # [T] int32
    positions: jax.Array  # [T] int32
    segment_ids: jax.Array  # [T] int32
    branch_ids: jax.Array  # [T] int32
    predictors: jax.Array  # [T] int32, the place of the token before each; arbitrary for the first ones
    listed: jax.Array  # [T, W] int32, words that are scored in the place of each
    layout: Unpacking | None  # of [1, T] tokens
    chunks: Chunks | None  # of [1, T] tokens
    turns: jax.Array | None  # as in `Packed`
    inserts: Inserts | None


def packs_to_score(
    sequences: Sequence[Sequence[int]],
    num_replicas: int,
    pictures: Sequence[Pictures | None] | None = None,
    features: FeatureStore | None = None,
) -> list[list[Pack]]:
    """The packs of each call of the device, one for each replica, of as many tokens as prompts that are
    prefilled together."""
    admitted = []
    for number, ids in enumerate(sequences):
        seen = None if pictures is None else pictures[number]
        whole = None if seen is None else joined((seen, len(seen)), (None, len(ids) - len(seen)))
        group = Group.of(Prompt(0, np.asarray(ids, np.int32), "", pictures=whole), 0, (0,), 1)
        group.seen = seen_by(group.prompt, features)
        admitted.append(Admitted(group, number, 0))
    packs = split_into_packs(admitted)
    calls = [packs[first : first + num_replicas] for first in range(0, len(packs), num_replicas)]
    return [call + [[]] * (num_replicas - len(call)) for call in calls]


def score_packs(
    program: Program,
    params: Any,
    packs: list[Pack],
    num_likeliest: int,
    listed: np.ndarray | None = None,
    features: FeatureStore | None = None,
) -> list[Scores]:
    """The scores of each sequence in `packs`, in order, with `num_likeliest` alternatives to each token.

    `listed` [T, W] int32 are words for the place of each token of the only sequence, to be scored too; -1:
    none. `features` are those of pictures.
    """
    packed = pack_prompts(packs, 1, 1, program.forms, UsualSampling(), features=features)
    num_tokens, most = (len(array) // len(packs) for array in (packed.input_ids, packed.starts))
    starts, lengths, common = map(np.asarray, (packed.starts, packed.lengths, packed.num_common))
    before = np.maximum(np.tile(np.arange(num_tokens, dtype=np.int32) - 1, (len(packs), 1)), 0)
    where = []
    for replica, pack in enumerate(packs):
        for i in range(replica * most, replica * most + len(pack)):
            places = np.arange(lengths[i])
            places[common[replica] :] += starts[i] - common[replica]
            # The token before the first one after the common prefix is the last of that prefix.
            before[replica, starts[i]] = max(common[replica] - 1, 0)
            where.append(replica * num_tokens + places)
    num_listed = 0 if listed is None else listed.shape[1]
    words = np.zeros((before.size, power_of_two(num_listed) if num_listed else 0), np.int32)
    if listed is not None:
        [places] = where
        words[places, :num_listed] = np.maximum(listed, 0)
    [predictors, words_of_token] = as_jit_arguments(before.reshape(-1), words)
    found = score_program(program.backend)(
        params,
        PackedRow(
            *packed[:4],
            predictors,
            words_of_token,
            packed.layout,
            packed.chunks,
            packed.turns,
            packed.inserts,
        ),
        program=program,
        num_likeliest=_compiled(num_likeliest, program.arch.vocab_size),
    )
    logprobs, *more = map(np.asarray, jax.device_get(found))
    counts = num_likeliest, num_likeliest, num_listed
    of_token = Scores(logprobs, *(x[:, :count] for x, count in zip(more, counts, strict=True)))
    return [Scores(*(array[places] for array in of_token)) for places in where]


def _compiled(num_likeliest: int, num_words: int) -> int:
    """The number of alternatives of the program that gives `num_likeliest`: one of three."""
    return min(next(most for most in (0, MOST_LIKELIEST, MOST_OF_PROMPT) if most >= num_likeliest), num_words)


def _score(params: dict, packed: PackedRow, program: Program, num_likeliest: int) -> tuple[jax.Array, ...]:
    """`Scores` of each of the packed tokens of all replicas."""
    hidden_TD, *_ = program.hidden(params, packed)
    num_tokens = len(hidden_TD)
    most = max(LOGITS_AT_ONCE // program.arch.vocab_size, 1)
    num_chunks, size = even_parts(num_tokens, most)
    words = jnp.concatenate([packed.input_ids[:, None], packed.listed], axis=1)
    padded = num_chunks * size - num_tokens
    before = jnp.pad(packed.predictors, (0, padded)).reshape(num_chunks, size)
    words = jnp.pad(words, ((0, padded), (0, 0))).reshape(num_chunks, size, -1)

    def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        before, words = chunk
        scores = logits(params, program.arch, hidden_TD[before], backend=program.backend)
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        own = jnp.take_along_axis(scores, words, axis=-1) - total
        best, likeliest = lax.top_k(scores, num_likeliest)
        return own[:, 0], likeliest, best - total, own[:, 1:]

    found = lax.map(of_chunk, (before, words))
    whole = (x.reshape(num_chunks * size, *x.shape[2:])[:num_tokens] for x in found)
    return all_gather_shards(tuple(whole))


score_program = sharded_program(_score, (EACH_REPLICA,), EVERYWHERE, statics=("num_likeliest",))
