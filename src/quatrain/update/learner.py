"""Line 4 of the stanza: advantages to new weights.

Data flow: `AdvantagedBatch` -> mini-batches of whole groups -> micro-batches -> exact gradient ->
optimizer -> `TrainState`. Old and reference log-probabilities are computed here, when needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from quatrain.config.schema import LogprobConfig, OptimizerConfig, UpdateConfig
from quatrain.metrics import Metric
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import to_memory
from quatrain.types import AdvantagedBatch
from quatrain.update.cuts import Cutting, describe_cuts
from quatrain.update.gradient import init_optimizer, optimizer_step, predict_tokens
from quatrain.update.micro_batch import fill
from quatrain.update.objective import PolicyObjective
from quatrain.update.optimizer import build_optimizer, learning_rate
from quatrain.update.residuals import residual_memory
from quatrain.update.specs import PolicySpec
from quatrain.update.table import TokenTable, mini_batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """What training changes. `step` counts applied optimizer steps, `train_step` finished rollout batches."""

    params: Any
    opt_state: Any
    step: int = 0
    train_step: int = 0
    bad_steps: int = 0
    """Optimizer steps in a row, up to now, that were not applied for a non-finite loss or gradient."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)


class TooManyBadSteps(RuntimeError):
    """`update.max_bad_steps` optimizer steps in a row had a non-finite loss or gradient.

    `state` is that of the training step given up, metrics included; `batch` is what it trained on.
    """

    def __init__(self, state: TrainState, batch: AdvantagedBatch, limit: int):
        super().__init__(
            f"update.max_bad_steps={limit}: {limit} optimizer steps in a row had a non-finite loss or "
            "gradient and were not applied; lower optimizer.learning_rate or look at the rewards and samples"
        )
        self.state = state
        self.batch = batch


class Learner:
    """Owns the optimizer and the frozen reference; everything that changes is in the `TrainState`.

    `temperature` and `max_new_tokens` are the rollout's; `total_steps` the optimizer steps the schedule
    spans. Parameters lie on the mesh of `policy`, over whose data shards every micro-batch is spread.
    `reference` are the parameters of the reference policy, which must be set before the first step if
    `update.kl_coef` is not 0; they are used on the devices that they lie on, and may be kept in host memory
    (`parallel.mesh.to_memory`). The
    optimizer's state is kept in `optimizer_memory` between its steps.
    """

    def __init__(
        self,
        policy: PolicySpec,
        update: UpdateConfig,
        logprob: LogprobConfig,
        optimizer: OptimizerConfig,
        *,
        max_new_tokens: int,
        total_steps: int,
        seed: int,
        reference: Any = None,
        optimizer_memory: Literal["device", "host"] = "device",
    ):
        assert update.mini_batch_size is not None, "batch sizes are derived before they come here"
        self.objective = PolicyObjective.of(update, on_policy=True)
        self.objective.check()
        self.policy = policy
        self.config = update
        self.mini_batch_size = update.mini_batch_size
        shares = update.shares_prompts(policy.attention)
        self.cutting, self.logprob_cutting = (
            Cutting.of(
                section,
                policy.packing_cost,
                num_shards=policy.mesh_shape.num_data_shards,
                share_prompts=shares,
            )
            for section in (update, logprob)
        )
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.reference = reference
        self.optimizer_memory = optimizer_memory
        self.optimizer = build_optimizer(optimizer, total_steps)
        self.residuals = residual_memory(policy.backend, policy.remat)
        self.learning_rate = learning_rate(optimizer, total_steps)

    def init(self, params: Any) -> TrainState:
        """A state at step 0; `params` belong to the learner from here on (their buffers are donated)."""
        return TrainState(params, to_memory(self.optimizer_memory, init_optimizer(self.optimizer, params)))

    def step(self, state: TrainState, batch: AdvantagedBatch) -> TrainState:
        """All optimizer steps of one rollout batch: epochs x mini-batches. Donates `state`'s arrays.

        An optimizer step with a non-finite loss or gradient is counted and not applied; so is one in which
        no token has a signal. Raises TooManyBadSteps, carrying state and batch, after `max_bad_steps` of the
        former in a row.
        """
        compilations = num_compilations()
        began = time.perf_counter()
        group_ids = batch.rollouts.group_ids
        num_parts = -(-len(np.unique(group_ids)) // self.mini_batch_size)
        on_policy = self.config.old_logprobs == "auto" and num_parts * self.config.epochs == 1
        table = self._table(state.params, batch, on_policy)
        prepared = time.perf_counter()
        objective = replace(self.objective, on_policy=on_policy)
        totals = _Totals()
        hopeless = False
        for rows in self._mini_batches(group_ids, state.train_step):
            mini = table.take(rows).weighted(self.config.loss_aggregation, self.max_new_tokens)
            state = self._optimizer_step(state, mini, objective, totals)
            hopeless = bool(totals.bad) and state.bad_steps >= self.config.max_bad_steps
            if hopeless:
                break
        finished = time.perf_counter()
        trained_tokens = float(batch.rollouts.attention_mask.sum()) * self.config.epochs
        metrics = totals.metrics | {
            "update/learning_rate": Metric(float(self.learning_rate(max(state.step - 1, 0)))),
            "update/optimizer_steps": Metric(totals.applied, reduction="sum"),
            "update/bad_steps": Metric(totals.bad, reduction="sum"),
            "update/skipped_steps": Metric(totals.skipped, reduction="sum"),
            "update/compilations": Metric(num_compilations() - compilations, reduction="sum"),
            "time/update_logprobs_s": Metric(prepared - began),
            "time/shard_s": Metric(totals.shard_s),
            "throughput/update_tokens_per_s": Metric(trained_tokens / (finished - began)),
        }
        if hopeless:
            raise TooManyBadSteps(replace(state, metrics=metrics), batch, self.config.max_bad_steps)
        return replace(state, train_step=state.train_step + 1, metrics=metrics)

    def _mini_batches(self, group_ids: np.ndarray, train_step: int) -> Iterator[np.ndarray]:
        """Rows of each optimizer step: every epoch draws its own mini-batches of whole groups."""
        for epoch in range(self.config.epochs):
            rng = np.random.default_rng([self.seed, train_step, epoch])
            yield from mini_batches(group_ids, self.mini_batch_size, rng)

    def _table(self, params: Any, batch: AdvantagedBatch, on_policy: bool) -> TokenTable:
        rollouts = batch.rollouts
        logprobs = partial(predict_tokens, model=self.policy, cutting=self.logprob_cutting)
        columns = {"advantages": batch.advantages, "rollout_logprobs": rollouts.rollout_logprobs}
        table = TokenTable(
            rollouts.input_ids,
            rollouts.attention_mask,
            rollouts.completion_mask,
            columns,
            rollouts.group_ids,
        )
        if self.config.old_logprobs == "rollout":
            table = table.with_columns(old_logprobs=rollouts.rollout_logprobs)
        elif not on_policy:
            table = table.with_columns(old_logprobs=logprobs(params, table))
        if self.config.kl_coef:
            table = table.with_columns(ref_logprobs=self._reference_logprobs(table))
        return table

    def _reference_logprobs(self, table: TokenTable) -> np.ndarray:
        assert self.reference is not None, "update.kl_coef needs the reference parameters"
        mesh = jax.tree.leaves(self.reference)[0].sharding.mesh
        policy = replace(self.policy, mesh=mesh)
        cutting = replace(self.logprob_cutting, num_shards=policy.mesh_shape.num_data_shards)
        return predict_tokens(to_memory("device", self.reference), table, model=policy, cutting=cutting)

    def _optimizer_step(
        self, state: TrainState, mini: TokenTable, objective: PolicyObjective, totals: _Totals
    ) -> TrainState:
        signal = mini.columns["advantages"].any() or self.config.kl_coef or self.config.entropy_coef
        if not signal or not mini.completion_mask.any():
            totals.skipped += 1
            return state
        began = time.perf_counter()
        cuts = self.cutting.cut(mini)
        batches = [fill(cut, mini, self.policy.mesh) for cut in cuts]
        totals.combine(describe_cuts(mini, cuts, self.cutting.cost))
        totals.shard_s += time.perf_counter() - began
        params, opt_state, applied, metrics = optimizer_step(
            state.params,
            state.opt_state,
            batches,
            model=self.policy,
            objective=objective,
            optimizer=self.optimizer,
            residuals=self.residuals,
        )
        totals.add(metrics, applied)
        if applied:
            return replace(state, params=params, opt_state=opt_state, step=state.step + 1, bad_steps=0)
        state = replace(state, params=params, opt_state=opt_state, bad_steps=state.bad_steps + 1)
        logger.warning(
            "optimizer step not applied: loss or gradient is not finite (%d in a row)", state.bad_steps
        )
        return state


@dataclass
class _Totals:
    """Metrics of the optimizer steps of one training step."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    applied: int = 0
    bad: int = 0
    skipped: int = 0
    shard_s: float = 0.0

    def add(self, metrics: dict[str, Metric], applied: bool) -> None:
        first = not self.applied and not self.bad
        self.applied += applied
        self.bad += not applied
        # Only before the first update are sampler and trainer the same weights.
        self.combine({k: v for k, v in metrics.items() if first or not k.startswith("rollout/")})

    def combine(self, metrics: dict[str, Metric]) -> None:
        for name, metric in metrics.items():
            self.metrics[name] = self.metrics[name].combine(metric) if name in self.metrics else metric
