"""Optimizer steps on data that exist: a batch to new weights, through the same gradient as the update.

Data flow: `Example`s -> `example_table` -> the objective `negative_log_likelihood`, or pairs -> a coupled
objective (`preferences.py`) -> `Trainer` -> `TrainState`. Used by `loop/given.py`, for `quatrain sft`, `dpo`
and `rm`, and for the warm start of `quatrain train`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from quatrain.config.schema import OptimizerConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.specs import ModelSpec
from quatrain.forward.table import TokenTable, padded
from quatrain.ops.tokens import ScoredTokens, TokenLoss
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import check_held, to_memory
from quatrain.types.batches import Example, brief
from quatrain.types.metrics import Metric, mean_of_rows
from quatrain.types.pictures import stacked
from quatrain.update.coupled import Coupled
from quatrain.update.gradient import Objective
from quatrain.update.learner import TooManyBadSteps, TrainState
from quatrain.update.trainer import POLICY_STREAM, StepTotals, Trainer

SFT_LOSS = "sft/loss"
OF_RUNS = ("update/learning_rate", "update/optimizer_steps", "update/bad_steps", "update/compilations")
"""Metrics of a step that say nothing of a warm start as a whole."""


def negative_log_likelihood(tokens: ScoredTokens) -> TokenLoss:
    """-log p of each demonstrated token: a `gradient.Objective`."""
    loss = -tokens.logprobs
    return TokenLoss(loss, {SFT_LOSS: loss, "sft/entropy": tokens.entropy})


def example_table(examples: Sequence[Example]) -> TokenTable:
    """The examples as rows, each token that is trained with the weight 1 / N of all N of them."""
    input_ids, attention = padded([each.input_ids for each in examples])
    scored = np.zeros(attention.shape, bool)
    scored[attention] = np.concatenate([each.scored for each in examples])
    of_rows = {"source": np.array([each.source for each in examples])}
    pictures = stacked((each.pictures for each in examples), input_ids.shape[1])
    table = TokenTable(input_ids, attention, scored, {}, of_rows=of_rows, pictures=pictures)
    return table.weighted("token_mean", max_new_tokens=1)


def log_likelihoods(predicted: np.ndarray, table: TokenTable) -> dict[str, Metric]:
    """`sft/loss` of log-probabilities [B, T] of an `example_table`, and of each of its sources."""
    losses, tokens = -predicted.sum(axis=1, dtype=np.float64), table.completion_mask.sum(axis=1)
    return mean_of_rows(SFT_LOSS, losses, tokens, table.of_rows["source"])


@dataclass(frozen=True)
class GivenBatch:
    """What a step trains on: rows of data, their table, and after it what a coupled objective read."""

    rows: Sequence[Any]
    table: TokenTable
    predictions: np.ndarray | None = None
    """[B, T] float32, before the step; None where nobody asked for them."""

    __repr__ = brief

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.table.attention_mask.sum())


class GivenLearner:
    """Owns the optimizer of a model that is trained on given data; what changes is in a `TrainState`.

    One training step is one optimizer step on its batch with `objective`, of tokens or coupled. `total_steps`
    and `stream` are those of `Trainer`. The optimizer's state waits in `optimizer_memory` between steps, the
    parameters in `policy_memory`. `rate_key` is named where `max_bad_steps` steps in a row are not applied.
    With `by_source`, the loss of the examples of each data set is logged too.
    """

    def __init__(
        self,
        model: ModelSpec,
        planner: MicroBatchPlanner,
        objective: Objective | Coupled,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        seed: int,
        max_bad_steps: int,
        rate_key: str,
        stream: int = POLICY_STREAM,
        optimizer_memory: Literal["device", "host"] = "device",
        policy_memory: Literal["device", "host"] = "device",
        by_source: bool = False,
    ):
        self.model, self.objective, self.max_bad_steps, self.rate_key = (
            model,
            objective,
            max_bad_steps,
            rate_key,
        )
        self.policy_memory, self.by_source = policy_memory, by_source
        if planner.store is not None:
            planner.store.follow_steps()
        self.trainer = Trainer(
            model,
            planner,
            optimizer,
            total_steps=total_steps,
            seed=seed,
            stream=stream,
            optimizer_memory=optimizer_memory,
        )

    def init(self, params: Any) -> TrainState:
        """A state at step 0; the parameters are the learner's from here on (their buffers are donated)."""
        check_held(params, "the parameters to train", "load them again")
        state = self.trainer.init(params)
        return TrainState(to_memory(self.policy_memory, state.params), state.opt_state)

    def abstract(self, params: Any) -> TrainState:
        """The state of `init` as `ShapeDtypeStruct`s, for parameters that are some."""
        state = self.trainer.abstract(params)
        return TrainState(state.params, state.opt_state)

    def step(self, state: TrainState, batch: GivenBatch) -> tuple[TrainState, GivenBatch]:
        """The state after one optimizer step on `batch`, with its metrics. Donates the arrays of `state`.

        A step with a non-finite loss or gradient is counted and not applied. Raises TooManyBadSteps, with
        state and batch, after `max_bad_steps` of them in a row.
        """
        compilations, began, totals = num_compilations(), time.perf_counter(), StepTotals()
        waiting, place = state.params, state.train_step
        state = replace(state, params=to_memory("device", waiting))
        coupled = isinstance(self.objective, Coupled)
        want = coupled or self.by_source
        summed = self.trainer.forward_backward(state, batch.table, self.objective, totals, want=want)
        state = self.trainer.optim_step(state, summed, totals, place)
        batch = replace(batch, predictions=summed.predictions)
        if self.policy_memory != "device":  # a base under adapters goes on waiting where it is
            trained = to_memory(self.policy_memory, self.model.trained(state.params))
            state = replace(state, params=self.model.with_trained(waiting, trained))
        metrics = totals.metrics | totals.load_metrics
        if self.by_source and not coupled and summed.predictions is not None:
            metrics = log_likelihoods(summed.predictions, batch.table) | metrics
        if SFT_LOSS in metrics:
            loss = metrics[SFT_LOSS]
            metrics |= {
                "sft/perplexity": Metric(perplexity(loss)),
                "sft/tokens": Metric(loss.count, reduction="sum"),
            }
        seconds = time.perf_counter() - began
        metrics |= {
            "update/learning_rate": Metric(self.trainer.optimizer.learning_rate(place)),
            "update/optimizer_steps": Metric(totals.applied, reduction="sum"),
            "update/bad_steps": Metric(totals.bad, reduction="sum"),
            "update/compilations": Metric(num_compilations() - compilations, reduction="sum"),
            "throughput/update_tokens_per_s": Metric(batch.num_tokens / seconds),
            "time/shard_s": Metric(totals.shard_s),
            **({} if self.trainer.planner.store is None else self.trainer.planner.store.end_step()),
        }
        state = replace(state, metrics=metrics)
        if state.bad_steps >= self.max_bad_steps:
            remedy = f"lower {self.rate_key} or look at the data"
            raise TooManyBadSteps(state, batch, self.max_bad_steps, remedy)
        return replace(state, train_step=place + 1), batch


def perplexity(loss: Metric) -> float:
    """exp of the mean loss; infinite where float64 has no such number."""
    mean = loss.result()
    return math.exp(mean) if mean < math.log(1e300) else math.inf if mean == mean else math.nan
