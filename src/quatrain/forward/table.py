"""A batch as a table: sequences, and the per-token columns that an objective reads.

Data flow: `RolloutBatch` or demonstrations -> `TokenTable` -> `cuts` (which sequences share a micro-batch) ->
`micro_batch` (arrays of static shape). Token weights are computed from the whole mini-batch before it is cut,
so no cut can change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from quatrain.models.architecture import Architecture
from quatrain.ops.losses import token_weights
from quatrain.ops.packing import common_tokens
from quatrain.types.batches import RolloutBatch
from quatrain.types.kept import KeptSets
from quatrain.types.pictures import Pictures
from quatrain.types.routes import live_of


def padded(
    sequences: Sequence[Sequence[int] | np.ndarray], *, behind: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [B, T] int32 with zeros at the end, and where there are tokens [B, T].

    T: the length of the longest of the sequences, and so many columns `behind` it.
    """
    lengths = np.array([len(ids) for ids in sequences], int)
    attention = np.arange(lengths.max(initial=0) + behind) < lengths[:, None]
    input_ids = np.zeros(attention.shape, np.int32)
    input_ids[attention] = np.concatenate([np.zeros(0, np.int32), *map(np.asarray, sequences)])
    return input_ids, attention


@dataclass(frozen=True)
class TokenTable:
    """B sequences with the per-token columns [B, T] that an objective reads; absent columns are zeros.

    Columns are float32; those of a teacher's words have a further dimension, of the words.

    Sequences with one of `group_ids` [B] in common may share what they begin with; None: nothing is shared.
    Those with one of `episode_ids` [B] in common weigh as one; None: each is an episode.
    A model with experts uses the `routes` [B, T, L, k] where they are recorded; None: it chooses live.
    """

    input_ids: np.ndarray
    attention_mask: np.ndarray
    completion_mask: np.ndarray
    columns: dict[str, np.ndarray]
    group_ids: np.ndarray | None = None
    episode_ids: np.ndarray | None = None
    routes: np.ndarray | None = None
    balance: np.ndarray | None = None
    """[L, E] float32, of a mini-batch with an auxiliary loss: the loss of a token for each unit of
    probability that a layer's router gives an expert."""
    targets: np.ndarray | None = None
    """[B, T] int32: the tokens whose log-probabilities the completion mask asks for; None: those of
    `input_ids`. The target at place t is predicted from the tokens before t, so no target has place 0; one
    more place than a sequence has tokens is predicted from all of them."""
    scored_once: bool = False
    """A place that several sequences begin with is in the completion mask of one of them, so that what they
    share may have scored places; else it ends before the first."""
    of_rows: dict[str, np.ndarray] = field(default_factory=dict)
    """Numbers [B] of each sequence that a coupled objective reads on the host; no program has them."""
    pictures: Pictures | None = None
    """Of [B, T]: which picture each token stands for; None: there are none."""
    kept: KeptSets | None = None
    """Of [B, T]: the words that each token was drawn from, over which log-probabilities are; None: all."""

    @classmethod
    def of(cls, rollouts: RolloutBatch) -> TokenTable:
        """The sequences of `rollouts`, without columns, routes and kept words, which are of the policy."""
        ids, episodes = rollouts.input_ids, rollouts.episode_ids
        masks = rollouts.attention_mask, rollouts.completion_mask
        return cls(ids, *masks, {}, rollouts.group_ids, episodes, pictures=rollouts.pictures)

    @classmethod
    def of_policy(cls, rollouts: RolloutBatch, arch: Architecture) -> TokenTable:
        """As `of`, with the sampler's routes and kept words: for passes of the model that has sampled, and
        for the kept words also of its reference.

        Raises ValueError for those of another model than `arch`.
        """
        if rollouts.routes is not None:
            arch.check_routes(rollouts.routes)
        if rollouts.kept is not None:
            rollouts.kept.check_vocabulary(arch.vocab_size)
        return replace(cls.of(rollouts), routes=rollouts.routes, kept=rollouts.kept)

    @classmethod
    def scored_at_end(cls, sequences: Sequence[Sequence[int]], pad_token_id: int | None = None) -> Self:
        """The `sequences` of token ids, each with one scored place: behind its last token.

        So a `CriticSpec` predicts one number from all tokens. Padding tokens at the end are left out, as
        transformers' classifiers do; of a sequence of padding alone the first token counts.
        """
        input_ids, attention = padded(sequences, behind=1)
        columns = np.arange(attention.shape[1])
        kept = attention & (input_ids != pad_token_id)
        scored = np.where(kept, columns, 0).max(axis=1, initial=0) + 1
        return cls(input_ids, attention, columns == scored[:, None], {})

    def with_columns(self, **columns: np.ndarray) -> TokenTable:
        """This table with `columns` added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def take(self, rows: np.ndarray) -> TokenTable:
        """The sequences `rows` of this table."""
        optional = self.group_ids, self.episode_ids, self.routes, self.targets
        groups, episodes, routes, targets = (None if each is None else each[rows] for each in optional)
        masks = self.attention_mask[rows], self.completion_mask[rows]
        columns, of_rows = (
            {name: values[rows] for name, values in named.items()} for named in (self.columns, self.of_rows)
        )
        ids = self.input_ids[rows]
        pictures = None if self.pictures is None else self.pictures[rows]
        return TokenTable(
            *(ids, *masks, columns, groups, episodes, routes),
            targets=targets,
            of_rows=of_rows,
            pictures=pictures,
            kept=None if self.kept is None else self.kept.take(rows),
        )

    def weighted(self, aggregation: str, max_new_tokens: int) -> TokenTable:
        """This table with the token weights of `aggregation` over all its sequences."""
        weights = token_weights(aggregation, self.completion_mask, max_new_tokens, self.episode_ids)
        return self.with_columns(weights=weights)

    def balanced(self, coef: float, num_experts: int) -> TokenTable:
        """This mini-batch with the auxiliary loss coef / L · Σ_l E Σ_e f_le p_le, `coef` for even loads.

        f are the parts of its choices that an expert has, as recorded, and p the mean probabilities of the
        router, over all tokens but the last of each sequence. With f known before the mini-batch is cut, this
        is a sum over tokens. Source: Switch Transformer, arXiv:2101.03961, section 2.2, for k experts of a
        token. Raises ValueError if nothing is recorded.
        """
        if self.routes is None:
            raise ValueError(
                "update.router_aux_coef needs recorded routes of experts, and this batch has none; set it to "
                "0, or let the sampler record them (rollout.record_routes auto; servers must return them)"
            )
        inputs = self.attention_mask.copy()
        inputs[np.arange(len(self)), self.lengths - 1] = False
        routes, live = self.routes[inputs], live_of(self.routes.dtype)
        layers = routes.shape[1]
        counts = np.zeros((layers, num_experts))
        for layer in range(layers):
            recorded = (routes[:, layer] != live).any(axis=1)
            counts[layer] = np.bincount(routes[recorded, layer].reshape(-1), minlength=num_experts)
        parts = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        balance = coef * num_experts / layers / max(int(inputs.sum()), 1) * parts
        return replace(self, balance=balance.astype(np.float32))

    def common_tokens(self, rows: np.ndarray, tokens: int) -> int:
        """How many of the first `tokens` of the sequences `rows` are the same: ids, pictures and routes."""
        ids = [self.input_ids] if self.pictures is None else [self.input_ids, self.pictures.ids]
        common = common_tokens(*(column[rows, :tokens] for column in ids))
        if self.routes is not None:
            first = self.routes[rows[0]]
            for row in rows[1:]:
                same = (self.routes[row, :common] == first[:common]).all(axis=(1, 2))
                common = int(np.logical_and.accumulate(same).sum())
        return common

    @property
    def lengths(self) -> np.ndarray:
        """[B] int64, prompt and completion tokens of each sequence."""
        return self.attention_mask.sum(axis=1)

    def __len__(self) -> int:
        return len(self.input_ids)
