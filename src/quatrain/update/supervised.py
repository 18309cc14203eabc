"""The supervised step: examples to new weights, through the same gradient as the update.

Data flow: `Example`s -> micro-batches -> negative log-likelihood of the completion
tokens, averaged over the batch's tokens -> optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from quatrain.config.schema import OptimizerConfig, SFTConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.ops.tokens import ScoredTokens, TokenLoss
from quatrain.types.batches import Example
from quatrain.types.metrics import Metric
from quatrain.update.trainer import WARM_START_STREAM, ModelState, StepTotals, Trainer


def negative_log_likelihood(tokens: ScoredTokens) -> TokenLoss:
    """-log p of each trained token: a `gradient.Objective`."""
    loss = -tokens.logprobs
    return TokenLoss(loss, {"sft/loss": loss, "sft/entropy": tokens.entropy})


class SupervisedLearner:
    """Trains on examples with AdamW, warm-up and cosine decay to zero over `config.steps`.

    The moments' dtype and the rounding of parameters are those of `optimizer`, the optimizer of training. The
    state is kept in `optimizer_memory` between its steps. `seed` is the run's.
    """

    def __init__(
        self,
        policy: PolicySpec,
        config: SFTConfig,
        planner: MicroBatchPlanner,
        *,
        seed: int,
        optimizer: OptimizerConfig,
        optimizer_memory: Literal["device", "host"] = "device",
    ):
        settings = OptimizerConfig(
            learning_rate=config.learning_rate,
            schedule="cosine",
            warmup_steps=config.warmup_steps,
            state_dtype=optimizer.state_dtype,
            stochastic_rounding=optimizer.stochastic_rounding,
        )
        self.trainer = Trainer(
            policy,
            planner,
            settings,
            total_steps=config.steps,
            seed=seed,
            stream=WARM_START_STREAM,
            optimizer_memory=optimizer_memory,
        )
        self.init = self.trainer.init

    def step(self, state: ModelState, examples: Sequence[Example]) -> tuple[ModelState, dict[str, Metric]]:
        """One optimizer step on a batch of examples; donates the state's arrays.

        Raises ValueError where the loss or gradient is not finite: a warm start does not recover from that.
        """
        table = _table(examples).weighted("token_mean", max_new_tokens=1)
        totals = StepTotals()
        state = self.trainer.step(state, table, negative_log_likelihood, totals, schedule_step=state.step)
        if totals.bad:
            raise ValueError(
                "the supervised warm start met a non-finite loss or gradient; lower sft.learning_rate"
            )
        return state, totals.metrics | totals.load_metrics


def _table(examples: Sequence[Example]) -> TokenTable:
    lengths = np.array([len(example.input_ids) for example in examples])
    attention = np.arange(lengths.max()) < lengths[:, None]
    input_ids, scored = np.zeros(attention.shape, np.int32), np.zeros_like(attention)
    input_ids[attention] = np.concatenate([example.input_ids for example in examples])
    scored[attention] = np.concatenate([example.scored for example in examples])
    return TokenTable(input_ids, attention, scored, {})
