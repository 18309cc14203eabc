"""What a loss sees of a micro-batch, and what it returns.

Data flow: `update/gradient.py` makes a `ScoredTokens` of the forward pass and the micro-batch's columns -> a
policy loss, built in (`losses/`) or a user's own -> `TokenLoss`, which is weighted and summed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

BROUGHT_BY = {
    "advantages": "the advantage stage",
    "rollout_logprobs": "the rollout",
    "old_logprobs": "training by reinforcement",
    "ref_logprobs": "update.kl_coef above 0, which loads the frozen reference",
    "teacher_logprobs": "a teacher (distill.teacher)",
}
"""What brings each column that not every objective has."""
TEACHER_WORDS, TEACHER_WORD_LOGPROBS = "teacher_words", "teacher_word_logprobs"
"""Columns [R, K, k] int32 and [R, K, k + 1] float32: the teacher's likeliest words, and the log-probabilities
of them and of all others together (`top_words.py`). The model reads them."""
LISTED_WORDS = "listed_words"
"""Column [R, K, W] int32: words whose log-probabilities are asked for in the place of each scored token;
`top_words.NO_WORD` where there are fewer. The model reads it."""


class Tokens:
    """The scored tokens of a micro-batch: R rows of at most K tokens, padded at the end of each row.

    A sequence lies in one row and is never cut, so a sum over it (`sequence_sum`) is the same however the
    batch is cut into micro-batches. Tokens of different sequences of a row may stand in any order.
    """

    mask: jax.Array
    """[R, K] bool: False on padding, where everything else is 0."""
    sequence_ids: jax.Array
    """[R, K] int32: equal for two tokens of a row where they belong to the same sequence; in [0, K)."""
    columns: Mapping[str, jax.Array]
    """The other arrays [R, K] by name, as far as the configuration brings them."""
    predictions: ClassVar[tuple[str, ...]]
    """The arrays [R, K] that the model computed, through which the gradient flows."""

    def column(self, name: str) -> jax.Array:
        """The array `name`; raises ValueError where this objective does not have it."""
        if name not in self.columns:
            remedy = f"{name} comes with {BROUGHT_BY[name]}" if name in BROUGHT_BY else "use one of these"
            known = ", ".join([*self.predictions, "mask", *sorted(self.columns)])
            raise ValueError(
                f"a loss reads arrays that its micro-batches have: got {name!r}; they have {known}; {remedy}"
            )
        return self.columns[name]

    def sequence_sum(self, values: jax.Array) -> jax.Array:
        """[R, K]: for each token, the sum of `values` [R, K] over its sequence; 0 on padding."""
        values = jnp.where(self.mask, values, 0)
        num_ids = self.mask.shape[1]

        def of_row(row: jax.Array, ids: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(row, ids, num_segments=num_ids)[ids]

        return jnp.where(self.mask, jax.vmap(of_row)(values, self.sequence_ids), 0)

    @property
    def sequence_lengths(self) -> jax.Array:
        """[R, K] float32: for each token, the number of scored tokens of its sequence; 0 on padding."""
        return self.sequence_sum(jnp.ones(self.mask.shape, jnp.float32))

    def sequence_mean(self, values: jax.Array) -> jax.Array:
        """[R, K]: for each token, the mean of `values` [R, K] over its sequence; 0 on padding."""
        return self.sequence_sum(values) / jnp.maximum(self.sequence_lengths, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScoredTokens(Tokens):
    """What a policy loss reads: the scored tokens of a micro-batch, with their log-probabilities.

    All arrays are [R, K]; log-probabilities and entropy are in nats at the sampling temperature, float32. The
    gradient flows through `logprobs` and `entropy` alone.
    """

    predictions: ClassVar[tuple[str, ...]] = ("logprobs", "entropy")

    logprobs: jax.Array
    """Log-probability of each token under the policy being trained."""
    entropy: jax.Array
    """Entropy of the distribution each token was drawn from, under the policy being trained."""
    mask: jax.Array
    sequence_ids: jax.Array
    columns: Mapping[str, jax.Array] = field(default_factory=dict)

    @property
    def old_logprobs(self) -> jax.Array:
        """Log-probabilities that the ratio is taken to."""
        return self.column("old_logprobs")

    @property
    def rollout_logprobs(self) -> jax.Array:
        """Log-probabilities under the distribution the sampler drew from."""
        return self.column("rollout_logprobs")

    @property
    def ref_logprobs(self) -> jax.Array:
        """Log-probabilities under the frozen reference; with `update.kl_coef` above 0 only."""
        return self.column("ref_logprobs")

    @property
    def advantages(self) -> jax.Array:
        """Advantage of each token."""
        return self.column("advantages")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DistilledTokens(ScoredTokens):
    """Scored tokens with the policy's divergence from a teacher, through which the gradient flows too."""

    predictions = ("logprobs", "entropy", "divergence", "mass")

    divergence: jax.Array | None = None
    """[R, K] float32 divergence in nats of the distributions that each token was drawn from."""
    mass: jax.Array | None = None
    """[R, K] float32 probability, without a gradient: with the teacher's top k words, of these under the
    policy; else of words that only the teacher has, under the teacher."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ListedTokens(Tokens):
    """Scored tokens with the log-probabilities of the words that the column `listed_words` has for each.

    The gradient flows through `listed` alone.
    """

    predictions: ClassVar[tuple[str, ...]] = ("listed",)

    listed: jax.Array
    """[R, K, W] float32 log-probability in nats of each word; 0 where the list has no word."""
    mask: jax.Array
    sequence_ids: jax.Array
    columns: Mapping[str, jax.Array] = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValuedTokens(Tokens):
    """What the value loss reads: the scored tokens of a micro-batch, with the critic's values.

    All arrays are [R, K] float32. The gradient flows through `values` alone.
    """

    predictions = ("values",)

    values: jax.Array
    """Value of the state in which each token was drawn, under the critic being trained."""
    mask: jax.Array
    sequence_ids: jax.Array
    columns: Mapping[str, jax.Array] = field(default_factory=dict)

    @property
    def old_values(self) -> jax.Array:
        """Values of the critic at the start of the training step."""
        return self.column("old_values")

    @property
    def returns(self) -> jax.Array:
        """What the values are trained to predict."""
        return self.column("returns")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLoss:
    """What a loss returns: a loss for each scored token, and numbers to log; all arrays [R, K].

    The loss of a mini-batch is the sum of `loss` times the token weights of `update.loss_aggregation`. Values
    on padding are ignored.
    """

    loss: jax.Array
    means: Mapping[str, jax.Array] = field(default_factory=dict)
    """Logged as `update/<name>`: the mean over tokens."""
    peaks: Mapping[str, jax.Array] = field(default_factory=dict)
    """Logged as `update/<name>`: the largest over tokens."""
    weighted: jax.Array | None = None
    """Further losses of the tokens, which have their weights already: their sum is added."""


MiniBatchColumns = Callable[..., dict[str, np.ndarray]]
"""(logprobs, advantages, mask, rng, **others that it names) -> columns by name.

Host-side: `logprobs` [B, T] float32 of the policy at the start of the optimizer step, `advantages` [B, T]
float32 and `mask` [B, T] bool of the completion tokens, for the whole mini-batch, and a numpy random
generator. Others are arguments of the loss, and `old_logprobs` [B, T] float32, to which the ratio is taken;
in the first optimizer step on tokens of the current policy they are `logprobs`, to the bit. Each column is
[B, T] float32, 0 outside the mask.
"""


def with_mini_batch_columns(
    function: MiniBatchColumns,
) -> Callable[[Callable[..., TokenLoss]], Callable[..., TokenLoss]]:
    """A decorator for a loss that needs statistics of its whole mini-batch, which no micro-batch has.

    `function` computes columns before the mini-batch is cut into micro-batches; the loss reads them as
    `tokens.column(name)`. So the loss stays a sum over micro-batches, however the mini-batch is cut.
    """

    def decorated(loss: Callable[..., TokenLoss]) -> Callable[..., TokenLoss]:
        loss.mini_batch_columns = function  # type: ignore[attr-defined]
        return loss

    return decorated
