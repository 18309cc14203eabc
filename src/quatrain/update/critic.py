"""The critic of PPO: values of tokens, and its own optimizer steps towards their returns.

Data flow: `learner.py` calls `values` before the advantages are estimated, and `step` before the policy's
optimizer steps. Micro-batches, exact weights, meshes and memory are those of `trainer.py`, as for the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import numpy as np

from quatrain.config.schema import Config, CriticConfig, OptimizerConfig, UpdateConfig
from quatrain.data.policy import Policy
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import CriticSpec
from quatrain.forward.table import TokenTable
from quatrain.models.families import Architecture
from quatrain.models.feature_store import FeatureStore
from quatrain.models.params import Params, partition
from quatrain.ops.tokens import TokenLoss, ValuedTokens
from quatrain.ops.value_loss import explained_variance, value_loss
from quatrain.parallel.mesh import copy_if_aliased, full, mesh_shape, reshard, shardings, to_memory
from quatrain.types.metrics import Metric
from quatrain.update.trainer import CRITIC_STREAM, ModelState, StepTotals, Trainer, mini_batches_of_step

RENAMED = {
    "loss": "critic/loss",
    "update/grad_norm": "critic/grad_norm",
    "batch/micro_batches": "critic/micro_batches",
    "batch/padding_fraction": "critic/padding_fraction",
}
"""Metrics of `Trainer` that are logged for the critic, and how; others are the policy's alone."""


@dataclass(frozen=True)
class ValueObjective:
    """The value loss, with the names that its metrics are logged under: a `gradient.Objective`."""

    clip_value: float | None

    def __call__(self, tokens: ValuedTokens) -> TokenLoss:
        """Token loss [R, K] and its metrics."""
        token = value_loss(tokens, clip_value=self.clip_value)
        return TokenLoss(token.loss, {f"critic/{name}": values for name, values in token.means.items()})


class Critic:
    """Owns the critic's optimizer; everything that changes is in a `ModelState`.

    The weights of tokens in the loss are those of the policy's `update.loss_aggregation`. The parameters are
    kept in `memory` while no values are computed and the critic is not trained, the optimizer's state between
    optimizer steps. `store` has the pictures for this model.
    """

    def __init__(
        self,
        model: CriticSpec,
        config: CriticConfig,
        update: UpdateConfig,
        optimizer: OptimizerConfig,
        *,
        max_new_tokens: int,
        total_steps: int,
        seed: int,
        memory: Literal["device", "host"] = "device",
        store: FeatureStore | None = None,
    ):
        self.model, self.seed, self.memory = model, seed, memory
        self.objective = ValueObjective(config.clip_value)
        self.mini_batch_size, self.epochs = config.mini_batch_size, config.epochs
        self.warmup_steps = config.warmup_steps
        self.loss_aggregation, self.max_new_tokens = update.loss_aggregation, max_new_tokens
        shared: dict[str, Any] = {"share_prompts": update.shares_prompts, "store": store}
        self.forward_planner = model.planner(config.forward_sizes, **shared)
        self.trainer = Trainer(
            model,
            model.planner(config, **shared),
            optimizer,
            total_steps=total_steps,
            seed=seed,
            stream=CRITIC_STREAM,
            optimizer_memory=memory,
        )

    @classmethod
    def of(cls, config: Config, policy: Policy, *, steps: int) -> Self | None:
        """The critic of a run of `steps` training steps; None where `critic.enabled` is false."""
        arch, path = policy.critic_arch, config.critic.path
        if arch is None:
            return None
        store = policy.store if path is None else policy.store_beside(arch, path, policy.meshes.critic)
        return cls(
            CriticSpec.of(config.model, arch, policy.meshes.critic),
            config.critic,
            config.update,
            config.critic_optimizer,
            max_new_tokens=config.rollout.max_new_tokens,
            total_steps=steps * config.optimizer_steps(config.critic),
            seed=config.seed,
            memory="host" if config.offload.critic else "device",
            store=store,
        )

    def init(self, params: Any) -> ModelState:
        """A state at step 0; `params` belong to the critic from here on (their buffers are donated)."""
        return self._put_away(self.trainer.init(params))

    def values(self, state: ModelState, table: TokenTable) -> np.ndarray:
        """[B, T] float32: value of the state in which each completion token was drawn; 0 elsewhere."""
        # Not put away again: the copy on the devices is dropped, the one that waits is still there.
        params = to_memory("device", state.params)
        return predict_tokens(params, table, model=self.model, planner=self.forward_planner)

    def step(
        self, state: ModelState, table: TokenTable, totals: StepTotals, *, train_step: int, max_bad_steps: int
    ) -> tuple[ModelState, dict[str, Metric]]:
        """All optimizer steps of one rollout batch, whose `table` has columns `old_values` and `returns`.

        `totals` counts them. Donates the state's arrays. Ends early after `max_bad_steps` optimizer steps in
        a row that were not applied.
        """
        assert table.group_ids is not None
        state = replace(state, params=to_memory("device", state.params))
        for place, rows in mini_batches_of_step(
            table.group_ids, self.mini_batch_size, epochs=self.epochs, seed=self.seed, train_step=train_step
        ):
            # A mini-batch whose tokens are all masked has no loss; its step would decay the weights for
            # nothing.
            mini = table.take(rows)
            if not mini.completion_mask.any():
                continue
            # The policy's aggregation: values and advantages must count tokens alike, else their errors are
            # of other means.
            mini = mini.weighted(self.loss_aggregation, self.max_new_tokens)
            state = self.trainer.step(state, mini, self.objective, totals, place)
            if totals.bad and state.bad_steps >= max_bad_steps:
                break
        # Renamed at the end: the trainer's metrics have one set of names, and the policy's come from the same
        # trainer.
        logged = {RENAMED.get(name, name): metric for name, metric in totals.metrics.items()}
        metrics = {name: metric for name, metric in logged.items() if name.startswith("critic/")}
        metrics |= {
            "critic/learning_rate": Metric(self.trainer.optimizer.learning_rate(place)),
            "critic/optimizer_steps": Metric(totals.applied, reduction="sum"),
            "critic/bad_steps": Metric(totals.bad, reduction="sum"),
        }
        mask = table.completion_mask
        # Of the values before the step: those after it have seen these returns.
        explained = explained_variance(table.columns["old_values"][mask], table.columns["returns"][mask])
        if explained is not None:
            metrics["critic/explained_variance"] = Metric(explained)
        return self._put_away(state), metrics

    def _put_away(self, state: ModelState) -> ModelState:
        """`state` with its parameters in the memory in which they wait."""
        return replace(state, params=to_memory(self.memory, state.params))


def critic_params(policy_params: Params, arch: Architecture, mesh: Any) -> Params:
    """Parameters of a critic that starts from a policy's: copies of them, and a `value_head` of zeros.

    `arch` is the critic's architecture, the policy's with the head `value_head`; the copies lie on `mesh`.
    """
    # Tied embeddings stay, they are also the input; only a head of its own has no place in a critic.
    kept = {name: leaf for name, leaf in policy_params.items() if name != "lm_head"}
    places = shardings(mesh, partition(arch, mesh_shape(mesh)))
    score_place = places.pop("score")
    # Both models donate their parameters: a shared buffer would be freed by the first step of either.
    copied: Params = jax.tree.map(copy_if_aliased, reshard(kept, places), kept)
    dtype = policy_params["final_norm"].dtype
    return copied | {"score": full((1, arch.hidden_size), 0.0, dtype, score_place)}
