"""The teacher's term of the objective: its columns in a table of tokens, and its part of their advantages.

Data flow: `RewardedBatch` with the teacher's log-probabilities (`teacher.py`) -> columns of the table that
`learner.py` cuts -> advantages of the tokens of a micro-batch, for the policy loss (`objective.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.config.sections.distill import DistillConfig
from quatrain.forward.table import TokenTable
from quatrain.ops.distill import sampled_advantages
from quatrain.ops.tokens import DistilledTokens, ScoredTokens

TEACHER_LOGPROBS = "teacher_logprobs"
"""Entry of `RewardedBatch.token_logprobs`: NaN on the completion tokens of sequences without a teacher."""
COLUMNS = (TEACHER_LOGPROBS, "teacher_weights")


@dataclass(frozen=True)
class Distillation:
    """The keys of `distill` that the update reads, in a run of `num_steps` training steps."""

    weight: float
    rl_weight: float
    clip: float
    discount: float
    warmdown_steps: int | None
    num_steps: int
    over_words: bool = False
    """Whether the term is a divergence over the vocabulary, a loss of its own, and not an advantage."""

    @classmethod
    def of(cls, config: DistillConfig, num_steps: int) -> Distillation | None:
        """That of `config`; None without a teacher."""
        if config.teacher is None:
            return None
        keys = config.weight, config.rl_weight, config.clip, config.discount, config.warmdown_steps
        return cls(*keys, num_steps, config.loss != "sampled")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return COLUMNS[self.over_words :]

    def weight_at(self, train_step: int) -> float:
        """The weight in the training step after `train_step` finished ones."""
        left = max(self.num_steps - train_step, 0)
        return self.weight * (1.0 if self.warmdown_steps is None else min(left / self.warmdown_steps, 1.0))

    def columns(
        self, known: Mapping[str, np.ndarray], mask: np.ndarray, train_step: int, readable: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The columns [B, T] of a table with the completion mask `mask`.

        `readable` [B] says which sequences the teacher of a loss over the vocabulary can read. Raises
        ValueError for a batch that no teacher of sampled tokens has scored.
        """
        weight = np.float32(self.weight_at(train_step))
        if self.over_words:
            return {"teacher_weights": np.where(mask & readable[:, None], weight, np.float32(0))}
        if TEACHER_LOGPROBS not in known:
            raise ValueError(
                "distillation needs the teacher's log-probabilities, and the batch has none; call "
                "teacher.score before the advantages are estimated, as quatrain.learn does"
            )
        teacher = known[TEACHER_LOGPROBS]
        weights = np.where(mask & ~np.isnan(teacher), weight, np.float32(0))
        return dict(zip(COLUMNS, (np.nan_to_num(teacher), weights), strict=True))

    def weighted(self, mini: TokenTable, aggregation: str, max_new_tokens: int) -> TokenTable:
        """`mini` whose `teacher_weights` are token weights of `aggregation`, over the tokens with a teacher.

        For a loss over the vocabulary alone: it counts other sequences than the policy loss does.
        """
        if not self.over_words:
            return mini
        weights = mini.columns["teacher_weights"]
        taught = replace(mini, completion_mask=mini.completion_mask & (weights > 0), columns={})
        of_tokens = taught.weighted(aggregation, max_new_tokens).columns["weights"]
        return mini.with_columns(teacher_weights=weights * of_tokens)

    def advantages(self, tokens: ScoredTokens) -> tuple[jax.Array, jax.Array]:
        """(advantages [R, K], 1.0 where the teacher's part was clipped) of `tokens`."""
        if self.over_words:
            return self.rl_weight * tokens.advantages, jnp.zeros(tokens.mask.shape)
        return sampled_advantages(tokens, rl_weight=self.rl_weight, clip=self.clip, discount=self.discount)

    def term(self, tokens: ScoredTokens) -> tuple[jax.Array, jax.Array]:
        """(weighted divergence, divergence) [R, K] of `tokens`, 0 where there is no teacher."""
        assert isinstance(tokens, DistilledTokens), "the model computes divergences"
        assert tokens.divergence is not None, "the model computes divergences"
        weights = tokens.column("teacher_weights")
        divergence = jnp.where(weights > 0, tokens.divergence, 0.0)
        return weights * divergence, divergence
