"""The teacher's term of the objective: its columns in a table of tokens, and its part of their advantages.

Data flow: `RewardedBatch` with the teacher's log-probabilities (`teacher.py`) -> columns of the table that
`learner.py` cuts -> advantages of the tokens of a micro-batch, for the policy loss (`objective.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from quatrain.config.sections.distill import DistillConfig
from quatrain.ops.distill import sampled_advantages
from quatrain.ops.tokens import ScoredTokens

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

    @classmethod
    def of(cls, config: DistillConfig, num_steps: int) -> Distillation | None:
        """That of `config`; None without a teacher."""
        if config.teacher is None:
            return None
        keys = config.weight, config.rl_weight, config.clip, config.discount, config.warmdown_steps
        return cls(*keys, num_steps)

    def weight_at(self, train_step: int) -> float:
        """The weight in the training step after `train_step` finished ones."""
        left = max(self.num_steps - train_step, 0)
        return self.weight * (1.0 if self.warmdown_steps is None else min(left / self.warmdown_steps, 1.0))

    def columns(
        self, known: Mapping[str, np.ndarray], mask: np.ndarray, train_step: int
    ) -> dict[str, np.ndarray]:
        """The columns [B, T] of a table with the completion mask `mask`.

        Raises ValueError for a batch that no teacher has scored.
        """
        if TEACHER_LOGPROBS not in known:
            raise ValueError(
                "distillation needs the teacher's log-probabilities, and the batch has none; call "
                "teacher.score before the advantages are estimated, as quatrain.learn does"
            )
        teacher = known[TEACHER_LOGPROBS]
        weights = np.where(mask & ~np.isnan(teacher), self.weight_at(train_step), 0.0)
        return dict(zip(COLUMNS, (np.nan_to_num(teacher), weights.astype(np.float32)), strict=True))

    def advantages(self, tokens: ScoredTokens) -> tuple[jax.Array, jax.Array]:
        """`sampled_advantages` of `tokens`."""
        return sampled_advantages(tokens, rl_weight=self.rl_weight, clip=self.clip, discount=self.discount)
