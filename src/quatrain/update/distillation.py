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

from quatrain.config.sections.reward import DistillConfig
from quatrain.forward.specs import OutcomesSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.ops.distill import sampled_advantages
from quatrain.ops.divergences import Divergence
from quatrain.ops.tokens import TEACHER_WORD_LOGPROBS, TEACHER_WORDS, DistilledTokens, ScoredTokens
from quatrain.types.batches import RewardedBatch
from quatrain.types.metrics import Metric

TEACHER_LOGPROBS = "teacher_logprobs"
"""Entry of `RewardedBatch.token_logprobs`: NaN on the completion tokens of sequences without a teacher."""
COLUMNS = (TEACHER_LOGPROBS, "teacher_weights")
TAUGHT = "distill/taught"
"""Mean that is 1 for a token with a teacher, of which `over_taught` makes the others' denominator."""


@dataclass(frozen=True)
class Distillation:
    """The keys of `distill` that the update reads, in a run of `num_steps` training steps."""

    weight: float
    rl_weight: float
    clip: float
    discount: float
    warmdown_steps: int | None
    num_steps: int
    kind: Divergence | None = None
    """The divergence over the vocabulary that is the term, a loss of its own; None: an advantage of sampled
    tokens."""
    beta: float = 0.5
    top_k: int = 0
    """Words that the divergence tells apart; 0: all."""

    @classmethod
    def of(cls, config: DistillConfig, num_steps: int) -> Distillation | None:
        """That of `config`; None without a teacher."""
        if config.teacher is None:
            return None
        keys = config.weight, config.rl_weight, config.clip, config.discount, config.warmdown_steps
        kind = None if config.loss == "sampled" else config.loss
        return cls(*keys, num_steps, kind, config.beta, config.top_k)

    @property
    def over_words(self) -> bool:
        """Whether the term is a loss of its own."""
        return self.kind is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return COLUMNS[self.over_words :]

    def compared(self, policy: PolicySpec, num_words: int | None) -> PolicySpec:
        """`policy`, which computes its divergence from the top words of the first `num_words`, if asked to.

        None: of all its words.
        """
        # With all words the teacher's states are computed in the update (`WordTeacher`), which extends the
        # spec itself.
        if self.kind is None or not self.top_k:
            return policy
        count = policy.arch.vocab_size if num_words is None else num_words
        return policy.extended(OutcomesSpec, kind=self.kind, beta=self.beta, num_words=count)

    def weight_at(self, train_step: int) -> float:
        """The weight in the training step after `train_step` finished ones."""
        # Counted from the end, so that a run that is made longer keeps its full weight for longer.
        left = max(self.num_steps - train_step, 0)
        return self.weight * (1.0 if self.warmdown_steps is None else min(left / self.warmdown_steps, 1.0))

    def columns(self, rewarded: RewardedBatch, train_step: int, longest: int | None) -> dict[str, np.ndarray]:
        """The columns [B, T, ...] of a table of the rows of `rewarded`.

        `longest`: tokens of the longest sequence that a teacher can read which computes in the update, that
        of a loss over all words. Raises ValueError for a batch that any other teacher has not scored.
        """
        mask, weight = rewarded.rollouts.completion_mask, np.float32(self.weight_at(train_step))
        if longest is not None:
            readable = rewarded.rollouts.lengths <= longest
            return {"teacher_weights": np.where(mask & readable[:, None], weight, np.float32(0))}
        teacher, top = rewarded.token_logprobs.get(TEACHER_LOGPROBS), rewarded.teacher_words
        if teacher is None or (top is None and self.over_words):
            raise ValueError(
                "distillation needs the teacher's log-probabilities, and the batch has none; call "
                "teacher.score before the advantages are estimated, as quatrain.learn does"
            )
        # NaN marks tokens without a teacher; it must leave before the device, where 0 * NaN would reach the
        # sum.
        weights = np.where(mask & ~np.isnan(teacher), weight, np.float32(0))
        if self.over_words and top is not None:
            words = {TEACHER_WORDS: top.words, TEACHER_WORD_LOGPROBS: top.logprobs}
            return {"teacher_weights": weights, **words}
        return dict(zip(COLUMNS, (np.nan_to_num(teacher), weights), strict=True))

    def weighted(self, mini: TokenTable, aggregation: str, max_new_tokens: int) -> TokenTable:
        """`mini` whose `teacher_weights` are token weights of `aggregation`, over the tokens with a teacher.

        For a loss over the vocabulary alone: it counts other sequences than the policy loss does.
        """
        if not self.over_words:
            return mini
        weights = mini.columns["teacher_weights"]
        # The mean is over tokens with a teacher: over all, the term would weaken with every row that has
        # none.
        taught = replace(mini, completion_mask=mini.completion_mask & (weights > 0), columns={})
        of_tokens = taught.weighted(aggregation, max_new_tokens).columns["weights"]
        return mini.with_columns(teacher_weights=weights * of_tokens)

    def advantages(self, tokens: ScoredTokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(advantages [R, K], means to log) of `tokens`."""
        taught = {TAUGHT: (tokens.column("teacher_weights") > 0).astype(jnp.float32)}
        if self.over_words:
            return self.rl_weight * tokens.advantages, taught
        mixed, clipped = sampled_advantages(
            tokens, rl_weight=self.rl_weight, clip=self.clip, discount=self.discount
        )
        return mixed, {**taught, "distill/clipped_fraction": clipped}

    def term(self, tokens: ScoredTokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(weighted divergence [R, K] of `tokens`, means to log), 0 where there is no teacher."""
        assert isinstance(tokens, DistilledTokens), "the model computes divergences"
        assert tokens.divergence is not None, "the model computes divergences"
        assert tokens.mass is not None, "the model computes the mass"
        weights = tokens.column("teacher_weights")
        # Rows without a teacher hold the divergence from whatever stood in their columns.
        divergence, mass = (jnp.where(weights > 0, x, 0.0) for x in (tokens.divergence, tokens.mass))
        name = "distill/topk_mass_policy" if self.top_k else "distill/outside_mass"
        return weights * divergence, {"distill/loss": divergence, name: mass}


def over_taught(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """The `metrics` of an update, with means of the teacher's term over the tokens that have a teacher."""
    if TAUGHT not in metrics:
        return dict(metrics)
    # A sum of ones over all steps, so the number of tokens with a teacher; `Metric.count` is that of all
    # tokens.
    count = metrics[TAUGHT].value
    return {
        name: replace(metric, count=count)
        if name.startswith("distill/") and metric.reduction == "mean"
        else metric
        for name, metric in metrics.items()
        if name != TAUGHT
    }
