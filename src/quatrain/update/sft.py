"""The supervised step: demonstrations to new weights, through the same gradient as the update.

Data flow: `Demonstration`s -> micro-batches -> negative log-likelihood of the completion
tokens, averaged over the batch's tokens -> optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from quatrain.config.schema import OptimizerConfig, SFTConfig
from quatrain.metrics import Metric
from quatrain.ops.tokens import ScoredTokens, TokenLoss
from quatrain.parallel.mesh import to_memory
from quatrain.types import Demonstration
from quatrain.update.cuts import Cutting
from quatrain.update.gradient import init_optimizer, optimizer_step
from quatrain.update.micro_batch import micro_batches
from quatrain.update.optimizer import build_optimizer
from quatrain.update.residuals import residual_memory
from quatrain.update.specs import PolicySpec
from quatrain.update.table import TokenTable


def negative_log_likelihood(tokens: ScoredTokens) -> TokenLoss:
    """-log p of each demonstrated token: a `gradient.Objective`."""
    loss = -tokens.logprobs
    return TokenLoss(loss, {"sft/loss": loss, "sft/entropy": tokens.entropy})


class SupervisedLearner:
    """Trains on demonstrations with AdamW, warm-up and cosine decay to zero over `config.steps`.

    The optimizer's state is kept in `optimizer_memory` between its steps.
    """

    def __init__(
        self,
        policy: PolicySpec,
        config: SFTConfig,
        cutting: Cutting,
        *,
        optimizer_memory: Literal["device", "host"] = "device",
    ):
        self.policy = policy
        self.optimizer_memory = optimizer_memory
        self.cutting = cutting
        settings = OptimizerConfig(
            learning_rate=config.learning_rate, schedule="cosine", warmup_steps=config.warmup_steps
        )
        self.optimizer = build_optimizer(settings, config.steps)
        self.residuals = residual_memory(policy.backend, policy.remat)

    def init(self, params: Any) -> Any:
        """Optimizer state for `params`."""
        return to_memory(self.optimizer_memory, init_optimizer(self.optimizer, params))

    def step(
        self, params: Any, opt_state: Any, demonstrations: Sequence[Demonstration]
    ) -> tuple[Any, Any, dict[str, Metric]]:
        """One optimizer step on a batch of demonstrations; donates `params` and `opt_state`.

        Raises ValueError where the loss or gradient is not finite: a warm start does not recover from that.
        """
        table = _table(demonstrations).weighted("token_mean", max_new_tokens=1)
        params, opt_state, applied, metrics = optimizer_step(
            params,
            opt_state,
            (batch for _, batch in micro_batches(table, self.cutting, self.policy.mesh)),
            model=self.policy,
            objective=negative_log_likelihood,
            optimizer=self.optimizer,
            residuals=self.residuals,
        )
        if not applied:
            raise ValueError(
                "the supervised warm start met a non-finite loss or gradient; lower sft.learning_rate"
            )
        return params, opt_state, metrics


def _table(demonstrations: Sequence[Demonstration]) -> TokenTable:
    prompts = np.array([len(demonstration.prompt_ids) for demonstration in demonstrations])
    totals = prompts + np.array([len(demonstration.completion_ids) for demonstration in demonstrations])
    columns = np.arange(totals.max())
    attention = columns < totals[:, None]
    input_ids = np.zeros(attention.shape, np.int32)
    input_ids[attention] = np.concatenate([ids for demonstration in demonstrations for ids in demonstration])
    return TokenTable(input_ids, attention, attention & (columns >= prompts[:, None]), {})
