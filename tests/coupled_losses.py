"""A loss that couples sequences, for tests: with its slopes by hand, and for JAX to differentiate."""

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.forward.table import TokenTable
from quatrain.types.metrics import Metric
from quatrain.update.coupled import Coupled, CoupledLoss

TOGETHER = 1e-3


class Pairs(Coupled):
    """The mean of -log sigmoid(s_2i - s_2i+1 - reference) over pairs of rows, s sums over their tokens, and
    `TOGETHER` times the square of the mean of all s: no pair is alone."""

    def __call__(self, predicted: np.ndarray, table: TokenTable) -> CoupledLoss:
        sums = np.where(table.completion_mask, predicted, 0).sum(axis=1)
        gaps = sums[::2] - sums[1::2] - table.of_rows["reference"][::2]
        of_chosen = -1 / (1 + np.exp(gaps)) / len(gaps)
        slopes = np.stack([of_chosen, -of_chosen], 1).reshape(-1) + 2 * TOGETHER * sums.mean() / len(sums)
        loss = np.logaddexp(0, -gaps).mean() + TOGETHER * sums.mean() ** 2
        accuracy = Metric(float((gaps > 0).sum()), len(gaps))
        return CoupledLoss(slopes[:, None] * table.completion_mask, float(loss), {"pairs/accuracy": accuracy})


def pairs_loss(sums: jax.Array, reference: np.ndarray) -> jax.Array:
    """The loss of `Pairs`, of sums [B]."""
    gaps = sums[::2] - sums[1::2] - reference[::2]
    return jnp.logaddexp(0, -gaps).mean() + TOGETHER * sums.mean() ** 2


def with_reference(table: TokenTable) -> TokenTable:
    """`table` with what `Pairs` reads."""
    reference = np.random.default_rng(5).normal(size=len(table))
    return TokenTable(**vars(table) | {"of_rows": {"reference": reference}})
