"""Losses that couple the sequences of a batch (pairs, lists, all of it), which no token's loss can be.

Data flow: predictions of a mini-batch without gradient (`forward/predict.py`) -> `Coupled`, on the host ->
its slopes, the token weights of `LINEAR` -> `gradient.py`. The gradient of a loss C of predictions p is
sum dC/dp x gradient of p, whatever the micro-batches: so no cut can change it, and what C is made of is in
no compiled program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from quatrain.forward.table import TokenTable
from quatrain.ops.tokens import TokenLoss, Tokens
from quatrain.types.metrics import Metric


class CoupledLoss(NamedTuple):
    """A loss C of all predictions of a mini-batch, and how it changes with each."""

    slopes: np.ndarray
    """[B, T] float64: dC / d prediction; 0 outside the completion mask."""
    loss: float
    """C, logged as `loss`."""
    metrics: dict[str, Metric]
    """By the names that they are logged under."""


class Coupled(ABC):
    """A loss of a whole mini-batch."""

    @abstractmethod
    def __call__(self, predicted: np.ndarray, table: TokenTable) -> CoupledLoss:
        """The loss of the predictions [B, T] float64 for `table`: log-probabilities of a policy, or values.

        They are finite, and 0 outside the completion mask. Called on the host, by every process alike.
        """


def _linear(tokens: Tokens) -> TokenLoss:
    """A `gradient.Objective` whose gradient is that of the prediction of each token, and whose value is 0.

    The coupled loss has a value of its own, which is not the sum of slopes x predictions.
    """
    predicted = getattr(tokens, tokens.predictions[0])
    return TokenLoss(predicted - jax.lax.stop_gradient(predicted))


LINEAR = _linear
"""One for all coupled losses, so that all share the compiled programs of a model."""


def linearized(
    objective: Coupled, predicted: np.ndarray, table: TokenTable
) -> tuple[CoupledLoss, TokenTable]:
    """The loss of the predictions [B, T], and `table` with its slopes as the token weights of `LINEAR`.

    Where a prediction is not finite so is the loss, and no optimizer step is taken with it. Raises ValueError
    as `check_coupled`.
    """
    if np.isfinite(predicted).all():
        found = objective(predicted.astype(np.float64), table)
        check_coupled(found, table)
    else:
        # The model's fault, not the objective's: counted as any other step that is not finite.
        found = CoupledLoss(np.where(table.completion_mask, np.nan, 0.0), float("nan"), {})
    # The weights alone: other columns would be inputs of the compiled programs.
    return found, replace(table, columns={"weights": np.asarray(found.slopes, np.float32)})


def check_coupled(found: CoupledLoss, table: TokenTable) -> None:
    """Raises ValueError if `found` is no loss of `table`: wrong shapes, or numbers that are not finite."""
    slopes, mask = np.asarray(found.slopes), table.completion_mask
    if slopes.shape != mask.shape:
        raise ValueError(
            "the slopes of a coupled loss have the shape [B, T] of its predictions; got slopes "
            f"{list(slopes.shape)} for predictions {list(mask.shape)}; return one slope for each"
        )
    # As the programs get them: what float32 cannot hold would be infinite there.
    with np.errstate(over="ignore"):
        bad = np.argwhere(~np.isfinite(slopes.astype(np.float32)))
    if len(bad):
        row, place = bad[0].tolist()
        raise ValueError(
            f"the slopes of a coupled loss are finite float32 numbers; got {slopes[row, place]} for token "
            f"{place} of sequence {row}, and {len(bad) - 1} more; bound what the loss divides by and raises "
            "to a power"
        )
    elsewhere = np.argwhere((slopes != 0) & ~mask)
    if len(elsewhere):
        row, place = elsewhere[0].tolist()
        raise ValueError(
            "the slopes of a coupled loss are 0 outside table.completion_mask, where nothing is predicted; "
            f"got {slopes[row, place]} for token {place} of sequence {row}; multiply them by the mask"
        )
    if not np.isfinite(found.loss):
        raise ValueError(
            f"a coupled loss is a finite number; got {found.loss}; bound what it divides by and takes the "
            "logarithm of"
        )
    if wrong := [name for name, metric in found.metrics.items() if not isinstance(metric, Metric)]:
        raise ValueError(
            f"the metrics of a coupled loss are of types.metrics.Metric; got {found.metrics[wrong[0]]!r} for "
            f"{wrong[0]!r}; Metric(sum, count) is the mean of count items"
        )
    if "loss" in found.metrics:
        raise ValueError(
            "the metrics of a coupled loss have names of their own; got 'loss', which is logged already as "
            "the loss; leave it out"
        )
