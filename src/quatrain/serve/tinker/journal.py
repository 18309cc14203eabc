"""The figures of a training client, a row for each optimizer step, under the names that those of a run have.

Data flow: each call's `Pass` and `Passed`, then `AdamNumbers` -> numbers by the names of the metrics ->
`metrics.jsonl` in the client's folder, of which `quatrain report` makes a page. `serve` knows no runs: what
writes the folder is given by `loop/journals.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np

from quatrain.ops.kl import MAX_LOG_RATIO
from quatrain.serve.tinker.calls import AdamNumbers, Datum, Pass, Passed
from quatrain.types.metrics import Metric, combine

logger = logging.getLogger(__name__)


class Rows(Protocol):
    """Where the rows of a client go; `write` may raise OSError."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of a step, in the order of steps; those of the last one are merged."""

    def close(self) -> None:
        """No more rows will come."""


class Journal:
    """The figures of one training client; its calls are told in their order.

    They are for people: a row that cannot be written is told in the log, and training goes on.
    """

    def __init__(self, rows: Rows):
        self._rows = rows
        self._metrics: dict[str, Metric] = {}
        self._step = 0
        self._has_failed = False

    def passed(self, asked: Pass, passed: Passed) -> None:
        """Adds what a forward_backward found to the figures of the next step; forward alone adds nothing."""
        if not asked.forward_only:
            self._metrics = combine(self._metrics, _metrics_of(asked, passed))

    def void(self) -> None:
        """Forgets the figures of a gradient that is not stepped with."""
        self._metrics = {}

    def stepped(self, step: int, adam: AdamNumbers, metrics: Mapping[str, float]) -> None:
        """Writes the row of a step; `step` have been taken, and `metrics` are those of the answer."""
        numbers = {name: metric.result() for name, metric in self._metrics.items() if metric.count}
        numbers["update/learning_rate"] = adam.learning_rate
        if "grad_norm:mean" in metrics:
            numbers["update/grad_norm"] = metrics["grad_norm:mean"]
        self.void()
        # A program may load an earlier checkpoint and go on from there; rows have an order.
        self._step = max(self._step + 1, step)
        self._write(numbers)

    def saved(self, user_metadata: Mapping[str, str] | None) -> None:
        """Adds the `reward` that a program notes in the `user_metadata` of a checkpoint to the last row."""
        with suppress(ValueError):
            if user_metadata and "reward" in user_metadata:
                self._write({"reward/mean": float(user_metadata["reward"])})

    def close(self) -> None:
        """The client has ended, or the server does."""
        try:
            self._rows.close()
        except OSError as error:
            logger.warning("the page of a training client does not say that it has ended: %s", error)

    def _write(self, numbers: Mapping[str, float]) -> None:
        try:
            self._rows.write(self._step, numbers)
        except OSError as error:
            if not self._has_failed:
                logger.warning("figures of a training client are not written: %s", error)
            self._has_failed = True
        else:
            self._has_failed = False


def _metrics_of(asked: Pass, passed: Passed) -> dict[str, Metric]:
    """The figures of one call. Means are over the rows with a weight or an advantage."""
    counted = [_counted(datum) for datum in asked.data]
    num = float(sum(rows.sum() for rows in counted))
    tokens = float(sum(len(datum.tokens) for datum in asked.data))
    metrics = {
        "loss": Metric(passed.metrics["loss:sum"], num),
        "batch/tokens": Metric(tokens, reduction="sum"),
    }
    if "clip_fraction:mean" in passed.metrics:
        metrics["update/clip_fraction"] = Metric(passed.metrics["clip_fraction:mean"] * num, num)
    of_sampler = [
        (logprobs - datum.columns["logprobs"])[rows]
        for datum, logprobs, rows in zip(asked.data, passed.logprobs, counted, strict=True)
        if "logprobs" in datum.columns
    ]
    if not of_sampler or not sum(map(len, of_sampler)):
        return metrics
    differences = np.concatenate(of_sampler).astype(np.float64)
    log_ratio = np.clip(differences, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, size, num = np.exp(log_ratio), np.abs(differences), float(differences.size)
    return metrics | {
        "update/ratio_mean": Metric(float(ratio.sum()), num),
        "update/ratio_max": Metric(float(ratio.max()), reduction="max"),
        # KL(sampler || policy), as k3 estimates it of the sampler's tokens.
        "update/behaviour_kl": Metric(float((ratio - 1 - log_ratio).sum()), num),
        "rollout/logprob_diff_mean": Metric(float(size.sum()), num),
        "rollout/logprob_diff_max": Metric(float(size.max()), reduction="max"),
    }


def _counted(datum: Datum) -> np.ndarray:
    """[T] bool: the rows that the loss counts, each once however many targets it has; of gspo in its mask."""
    by = datum.columns.get("advantages", datum.columns.get("weights", np.ones(1)))
    inside = datum.columns.get("sequence_ratio_mask", np.ones(1)) > 0
    counted = (datum.targets >= 0) & (by != 0) & inside
    return counted if counted.ndim == 1 else counted.any(axis=-1)
