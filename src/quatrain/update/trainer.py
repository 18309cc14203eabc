"""Optimizer steps of one model: mini-batch -> micro-batches -> exact gradient -> optimizer.

Used for the policy (`learner.py`), the critic (`critic.py`) and the supervised warm start (`supervised.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from quatrain.config.schema import OptimizerConfig
from quatrain.forward.micro_batch import MicroBatch, fill
from quatrain.forward.planner import MicroBatchPlanner, describe_plans
from quatrain.forward.predict import in_rows, predict_tokens
from quatrain.forward.specs import ModelSpec
from quatrain.forward.table import TokenTable
from quatrain.parallel.mesh import to_memory
from quatrain.types.batches import brief
from quatrain.types.metrics import Metric, combine
from quatrain.update.coupled import LINEAR, Coupled, linearized
from quatrain.update.gradient import (
    Accumulated,
    Objective,
    abstract_optimizer,
    all_at_once,
    init_optimizer,
    nothing_accumulated,
    optimizer_step,
    passes,
)
from quatrain.update.optimizer import Optimizer, OptimizerNumbers
from quatrain.update.residuals import residual_memory
from quatrain.update.teacher import WordTeacher

logger = logging.getLogger(__name__)
POLICY_STREAM, CRITIC_STREAM, WARM_START_STREAM, REFERENCE_STREAM = range(4)
"""The streams of random numbers with which the parameters of each model are rounded."""

FILL_S = 0.05
"""Seconds of filling buffers after which others get a turn: each stop costs one of their units."""
OF_SAMPLED_WEIGHTS = "rollout/", "moe/replay_changed"
"""The metrics that compare sampler and trainer begin so."""


@dataclass(frozen=True)
class ModelState:
    """Parameters and optimizer state of a model. `step` counts applied optimizer steps."""

    params: Any
    opt_state: Any
    step: int = 0
    bad_steps: int = 0
    """Optimizer steps in a row, up to now, that were not applied for a non-finite loss or gradient."""

    __repr__ = brief


State = TypeVar("State", bound=ModelState)


@dataclass
class StepTotals:
    """Metrics of the optimizer steps of one training step."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    applied: int = 0
    bad: int = 0
    skipped: int = 0
    shard_s: float = 0.0
    expert_tokens: np.ndarray | None = None
    """[L, E] float64: tokens of each expert of each layer; None for a model without experts."""

    def add(self, metrics: dict[str, Metric], applied: bool, expert_tokens: np.ndarray | None) -> None:
        """Count an optimizer step and its tokens of each expert [L, E]; combine its metrics."""
        first = not self.applied and not self.bad
        self.applied += applied
        self.bad += not applied
        # Only before the first update are sampler and trainer the same weights.
        self.combine({k: v for k, v in metrics.items() if first or not k.startswith(OF_SAMPLED_WEIGHTS)})
        if expert_tokens is not None:
            before = 0.0 if self.expert_tokens is None else self.expert_tokens
            self.expert_tokens = before + expert_tokens.astype(np.float64)

    @property
    def load_metrics(self) -> dict[str, Metric]:
        """How the tokens of all optimizer steps are spread over the experts."""
        if self.expert_tokens is None:
            return {}
        shares = self.expert_tokens / self.expert_tokens.sum(axis=1, keepdims=True)
        return {
            "moe/load_max": Metric(float(shares.max()) * shares.shape[1], reduction="max"),
            "moe/dead_experts": Metric(float((self.expert_tokens == 0).sum())),
        }

    def combine(self, metrics: dict[str, Metric]) -> None:
        """Combine `metrics` with those of the same names."""
        self.metrics = combine(self.metrics, metrics)


class Trainer:
    """Owns the optimizer of one model; everything that changes is in a `ModelState`.

    Parameters lie on the mesh of `model`, over whose data shards every micro-batch is spread. `total_steps`
    is the length of the learning-rate schedule in optimizer steps. The optimizer's state is kept in
    `optimizer_memory` between its steps. With a `teacher` the objective's tokens have the divergence from it.
    Stochastic rounding draws from `stream` of the run's `seed`.
    """

    def __init__(
        self,
        model: ModelSpec,
        planner: MicroBatchPlanner,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        seed: int,
        stream: int = POLICY_STREAM,
        optimizer_memory: Literal["device", "host"] = "device",
        teacher: WordTeacher | None = None,
    ):
        self.model, self.planner, self.teacher = model, planner, teacher
        self.optimizer = Optimizer(optimizer, total_steps)
        self.optimizer_memory = optimizer_memory
        self.residuals = residual_memory(model.backend, model.remat)
        self._draws = (seed, stream) if optimizer.stochastic_rounding else None

    def init(self, params: Any) -> ModelState:
        """A state at step 0; the trained part of `params` is the trainer's from here on (it is donated)."""
        opt_state = init_optimizer(self.optimizer.form, self.model.trained(params))
        return ModelState(params, to_memory(self.optimizer_memory, opt_state))

    def abstract(self, params: Any) -> ModelState:
        """The state of `init` as `ShapeDtypeStruct`s, for parameters that are some."""
        return ModelState(params, abstract_optimizer(self.optimizer.form, self.model.trained(params)))

    def step(
        self,
        state: State,
        mini: TokenTable,
        objective: Objective | Coupled,
        totals: StepTotals,
        schedule_step: int,
    ) -> State:
        """One optimizer step on the mini-batch `mini`: `forward_backward`, then `optim_step`."""
        accumulated = self.forward_backward(state, mini, objective, totals)
        return self.optim_step(state, accumulated, totals, schedule_step)

    def forward_backward(
        self,
        state: State,
        table: TokenTable,
        objective: Objective | Coupled,
        totals: StepTotals,
        total: Accumulated | None = None,
        *,
        want: bool = False,
    ) -> Accumulated:
        """The gradient of the loss of `table`, added to an earlier `total`, whose gradient is donated.

        For an objective of tokens the table has token weights; for a coupled one it needs none. With `want`
        the predictions are returned too, as `predict_tokens` has them: of an objective of tokens at no
        further pass. Raises ValueError for a coupled loss that is not one (`check_coupled`); `total` is then
        as it was.
        """
        return all_at_once(self.passes(state, table, objective, totals, total, want=want))

    def passes(
        self,
        state: State,
        table: TokenTable,
        objective: Objective | Coupled,
        totals: StepTotals,
        total: Accumulated | None = None,
        *,
        want: bool = False,
        backward: bool = True,
    ) -> Generator[Any, None, Accumulated]:
        """`forward_backward`, which stops between micro-batches, as `gradient.passes`, for those who have
        other work there; while it fills their buffers, after each `FILL_S`.

        From the first pass on `total` is donated. Without `backward` there is no gradient: `total` is then
        neither read nor added to, and what is returned has the metrics of this call alone.
        """
        loss, metrics, predictions = 0.0, {}, None
        if isinstance(objective, Coupled):
            assert self.teacher is None, "a coupled loss reads the policy alone"
            predictions = predict_tokens(state.params, table, model=self.model, planner=self.planner)
            found, table = linearized(objective, predictions, table)
            objective, loss, metrics = LINEAR, found.loss, found.metrics
        began = time.perf_counter()
        cuts = self.planner.plans(table)
        model, params = self.model, state.params
        forms = model.forms if self.teacher is None else model.forms.joined(self.teacher.forms)
        # All before the first pass, so that no pass waits for the host to fill buffers.
        filled: list[MicroBatch] = []
        since = began
        for cut in cuts:
            if time.perf_counter() - since > FILL_S:
                yield
                since = time.perf_counter()
            filled.append(fill(cut, table, model.mesh, forms, self.planner.store))
        batches: Iterable[MicroBatch] = filled
        totals.combine(describe_plans(table, cuts, self.planner.cost))
        totals.shard_s += time.perf_counter() - began
        if self.teacher is not None:
            model, params, batches = self.teacher.joined(model, params, batches)
        if not backward:
            total = None
        summed = yield from passes(
            params,
            batches,
            model=model,
            objective=objective,
            residuals=self.residuals,
            total=None if total is None else total.total,
            want=want and predictions is None,
            backward=backward,
        )
        before = total or Accumulated(None, ())
        if want and predictions is None:
            sequences = (cut.sequences for cut in cuts)
            [predictions] = in_rows(table, zip(sequences, summed.predictions, strict=True))
        return Accumulated(
            summed.total,
            (*before.stats, summed.stats),
            predictions if want else None,
            before.loss + loss,
            combine(before.metrics, metrics),
        )

    def nothing(self, state: State) -> Accumulated:
        """The sums before the first `forward_backward`: an optimizer step with them has a gradient of 0."""
        return nothing_accumulated(state.params, self.model)

    def optim_step(
        self,
        state: State,
        accumulated: Accumulated,
        totals: StepTotals,
        schedule_step: int,
        *,
        numbers: OptimizerNumbers | None = None,
    ) -> State:
        """One optimizer step with the sums of `forward_backward`. Donates the state's arrays.

        `schedule_step` is its place in the learning-rate schedule, which counts steps that are not applied
        too; `numbers` replace those of this place. A step with a non-finite loss or gradient is not applied;
        it is counted in state and `totals`.
        """
        params, opt_state, applied, metrics, expert_tokens = optimizer_step(
            state.params,
            state.opt_state,
            accumulated,
            model=self.model,
            form=self.optimizer.form,
            numbers=numbers or self.optimizer.numbers(schedule_step),
            # From the step, not from a generator that lives on: a resumed run rounds to the same bits.
            draw=None if self._draws is None else np.array([*self._draws, state.step], np.uint32),
        )
        totals.add(metrics, applied, expert_tokens)
        bad = 0 if applied else state.bad_steps + 1
        if bad:
            logger.warning("optimizer step not applied: loss or gradient is not finite (%d in a row)", bad)
        # Only applied steps count: they number the versions of the weights that samplers hold.
        step = state.step + applied
        return replace(state, params=params, opt_state=opt_state, step=step, bad_steps=bad)


def mini_batches_of_step(
    group_ids: np.ndarray, size: int, *, epochs: int, seed: int, train_step: int, resting_steps: int = 0
) -> list[tuple[int, np.ndarray]]:
    """(place in the learning-rate schedule, rows) of each optimizer step of a training step.

    Every epoch draws its own mini-batches of whole groups, ceil(groups / size) of them, whose sizes differ by
    at most one group. The places follow from the number of the training step, so that they depend neither on
    which optimizer steps were applied nor on a resume; all training steps have as many groups. `group_ids`
    [B]; `size` groups per mini-batch at most; in the first `resting_steps` training steps there is no
    optimizer step.
    """
    # Whole groups: an advantage is relative to its group, and must be trained against the same weights.
    groups, membership = np.unique(group_ids, return_inverse=True)
    orders = (
        np.random.default_rng([seed, train_step, epoch]).permutation(len(groups)) for epoch in range(epochs)
    )
    parts = [part for order in orders for part in np.array_split(order, -(-len(groups) // size))]
    rows = [np.flatnonzero(np.isin(membership, part)) for part in parts]
    return list(enumerate(rows, (train_step - resting_steps) * len(rows)))
