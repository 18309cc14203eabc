"""A batch as a table: sequences, and the per-token columns that an objective reads.

Data flow: `RolloutBatch` or demonstrations -> `TokenTable` -> `cuts` (which sequences share a micro-batch) ->
`micro_batch` (arrays of static shape). Token weights are computed from the whole mini-batch before it is cut,
so no cut can change the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quatrain.ops.losses import token_weights
from quatrain.types.batches import RolloutBatch


@dataclass(frozen=True)
class TokenTable:
    """B sequences with the per-token columns [B, T] that an objective reads; absent columns are zeros.

    Columns are float32; those of a teacher's words have a further dimension, of the words.

    Sequences with one of `group_ids` [B] in common may share what they begin with; None: nothing is shared.
    Those with one of `episode_ids` [B] in common weigh as one; None: each is an episode.
    """

    input_ids: np.ndarray
    attention_mask: np.ndarray
    completion_mask: np.ndarray
    columns: dict[str, np.ndarray]
    group_ids: np.ndarray | None = None
    episode_ids: np.ndarray | None = None

    @classmethod
    def of(cls, rollouts: RolloutBatch) -> TokenTable:
        """The sequences of `rollouts`, without columns."""
        ids, episodes = rollouts.input_ids, rollouts.episode_ids
        masks = rollouts.attention_mask, rollouts.completion_mask
        return cls(ids, *masks, {}, rollouts.group_ids, episodes)

    def with_columns(self, **columns: np.ndarray) -> TokenTable:
        """This table with `columns` added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def take(self, rows: np.ndarray) -> TokenTable:
        """The sequences `rows` of this table."""
        groups, episodes = (None if ids is None else ids[rows] for ids in (self.group_ids, self.episode_ids))
        return TokenTable(
            self.input_ids[rows],
            self.attention_mask[rows],
            self.completion_mask[rows],
            {name: values[rows] for name, values in self.columns.items()},
            groups,
            episodes,
        )

    def weighted(self, aggregation: str, max_new_tokens: int) -> TokenTable:
        """This table with the token weights of `aggregation` over all its sequences."""
        weights = token_weights(aggregation, self.completion_mask, max_new_tokens, self.episode_ids)
        return self.with_columns(weights=weights)

    @property
    def lengths(self) -> np.ndarray:
        """[B] int64, prompt and completion tokens of each sequence."""
        return self.attention_mask.sum(axis=1)

    def __len__(self) -> int:
        return len(self.input_ids)
