"""Reward models: sequence-classification models that score a prompt with its completion, computed in JAX.

Stage 2 of a training step, beside the reward functions: prompts and completions of a `RolloutBatch` -> text
in the reward model's chat template -> its token ids -> the pass of `forward/` -> one score per sequence.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from quatrain.backend import this_backend
from quatrain.config.schema import LogprobConfig, ModelConfig, RewardConfig
from quatrain.data.tokenizer import load_tokenizer, render_completed
from quatrain.forward.predict import sequence_scores
from quatrain.forward.specs import CriticSpec
from quatrain.models.probe import trusted_attention
from quatrain.parallel.mesh import to_memory
from quatrain.reward.forms import FunctionScores
from quatrain.types.batches import PromptText, RolloutBatch
from quatrain.weights.load_model import load_classifier

logger = logging.getLogger(__name__)


class RewardModel:
    """A loaded reward model: its tokenizer, its parameters, and the most tokens that it scores at once.

    Parameters are kept in `memory` between calls of `score`, and moved to the devices for a call.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        params: Any,
        spec: CriticSpec,
        *,
        max_tokens: int,
        memory: Literal["device", "host"] = "device",
    ):
        self.name, self.tokenizer, self.spec, self.max_tokens = name, tokenizer, spec, max_tokens
        self._planner = spec.planner(LogprobConfig(max_tokens_per_device=max_tokens))
        self.longest = min(max_tokens, spec.arch.longest)
        """Tokens of the longest sequence that gets a score."""
        self._params = to_memory(memory, params)

    def check_prompt(self, prompt: PromptText) -> None:
        """Raises ValueError if no completion of `prompt` can be scored: the chat template is missing or
        rejects its messages, or the prompt alone is longer than `longest` tokens.
        """
        if not isinstance(prompt, str) and not self.tokenizer.chat_template:
            raise ValueError(
                f"the reward model {self.name} needs a chat template for prompts that are messages, and its "
                "tokenizer has none; add chat_template to its tokenizer_config.json, or use plain prompts"
            )
        try:
            tokens = len(render_completed(self.tokenizer, prompt, ""))
        except ValueError as error:
            raise ValueError(f"the reward model {self.name} cannot read this prompt: {error}") from error
        if tokens > self.longest:
            raise ValueError(
                f"a prompt must fit into a reward model; this one has {tokens} tokens for {self.name}, which "
                f"has {self.spec.arch.longest} positions, and reward.model_max_tokens_per_device is "
                f"{self.max_tokens}; remove the prompt, raise the budget or take another reward model"
            )

    def score(self, rollouts: RolloutBatch) -> FunctionScores:
        """[E] float32 scores of the completions, one for each episode, NaN for a sequence without a score.

        A sequence has no score if it has more than `longest` tokens (counted in `too_long`), or if its score
        is not finite (counted in `errors`). All processes of the mesh must call this together, with the same
        rollouts.
        """
        sequences = [
            render_completed(self.tokenizer, rollouts.prompts[row], rollouts.completions[row])
            for row in rollouts.episodes.first_rows
        ]
        short = np.flatnonzero([len(ids) <= self.longest for ids in sequences])
        values = np.full(len(sequences), np.nan, np.float32)
        held = [sequences[row] for row in short]
        began = time.perf_counter()
        if held:
            params = to_memory("device", self._params)
            values[short] = sequence_scores(params, held, model=self.spec, planner=self._planner)
        seconds = time.perf_counter() - began
        bad = int((~np.isfinite(values[short])).sum())
        if bad:
            logger.warning("the reward model %s computed %d scores that are not finite", self.name, bad)
        values[np.isinf(values)] = np.nan
        counts = {"errors": bad, "too_long": len(sequences) - len(short), "tokens": sum(map(len, held))}
        return FunctionScores(values, counts, seconds)


def load_reward_models(
    config: RewardConfig,
    model: ModelConfig,
    *,
    mesh: Mesh,
    memory: Literal["device", "host"] = "device",
    longest: int = 0,
) -> dict[str, RewardModel]:
    """The reward models of `reward.functions`, by their entries there, on `mesh`.

    Parameters are stored in `model.param_dtype`, activations are in `model.dtype`. A warning is logged for a
    model that cannot score sequences of `longest` tokens, the longest that a run can produce. Raises
    ValueError, which names the entry, for a model that is missing, damaged, of an unsupported kind or family,
    or without a tokenizer, and for one that `mesh` cannot shard.
    """
    budget = config.model_max_tokens_per_device
    models = {}
    for entry, path in config.models.items():
        try:
            loaded = load_classifier(path, dtype=model.param_dtype, mesh=mesh)
            tokenizer = load_tokenizer(path)
            if len(tokenizer) > loaded.arch.vocab_size:
                raise ValueError(
                    "a tokenizer must not have more tokens than its model's vocabulary: it has "
                    f"{len(tokenizer)}, the model {loaded.arch.vocab_size}; save the tokenizer that the "
                    "model was trained with in its folder"
                )
        except ValueError as error:
            raise ValueError(f"the reward model {entry} cannot be used: {error}") from error
        kind = this_backend().kind
        attention = trusted_attention("auto", loaded.arch, platform=kind, dtype=model.dtype)
        arch = loaded.arch.for_length(min(budget, longest))
        spec = CriticSpec(arch, model.dtype, attention=attention, mesh=mesh)
        scorer = RewardModel(path, tokenizer, loaded.params, spec, max_tokens=budget, memory=memory)
        if scorer.longest < longest:
            logger.warning(
                "the reward model %s reads at most %d tokens, and the longest sequence of this run has %d of "
                "the policy; sequences that are too long get no score (counted in reward/<name>/too_long)",
                path,
                scorer.longest,
                longest,
            )
        models[entry] = scorer
    return models
