"""Records of completions for the files in `samples/`: JSON objects with texts, rewards and data columns.

Data flow: `AdvantagedBatch` of a training step, or the `RewardedBatch` of an evaluation -> records ->
`sinks.Report`, which removes secrets and writes them -> the run page and `quatrain samples`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from quatrain.types import AdvantagedBatch, RewardedBatch

TRAINER_LOGPROBS = "trainer_logprobs"
"""Entry of `RewardedBatch.token_logprobs` with the policy's log-probabilities before the update."""
TokenText = Callable[[int], str]


def training_sample(
    batch: AdvantagedBatch, index: int, *, step: int, token_text: TokenText | None = None
) -> dict[str, Any]:
    """Sequence `index` of a training step; `advantage` is the mean over its completion tokens.

    With `token_text`, which returns the text of a token id, the record has `tokens`: of each completion token
    its text, id, advantage, and log-probability by the sampler and, where it was computed, by the trainer.
    """
    mask = batch.rollouts.completion_mask[index]
    advantages = batch.advantages[index][mask]
    record = {
        "step": step,
        "group_id": int(batch.rollouts.group_ids[index]),
        **_completion(batch.rewarded, index),
        "advantage": _number(advantages.mean(dtype=np.float64)) if advantages.size else None,
    }
    if token_text is not None:
        ids = batch.rollouts.input_ids[index][mask].tolist()
        of_trainer = batch.rewarded.token_logprobs.get(TRAINER_LOGPROBS)
        record["tokens"] = {
            "texts": [token_text(token) for token in ids],
            "ids": ids,
            "sampler_logprobs": _numbers(batch.rollouts.rollout_logprobs[index][mask]),
            **({} if of_trainer is None else {TRAINER_LOGPROBS: _numbers(of_trainer[index][mask])}),
            "advantages": _numbers(advantages),
        }
    return record


def evaluation_sample(
    rewarded: RewardedBatch,
    index: int,
    *,
    greedy: bool,
    right: np.ndarray | None,
    strict: np.ndarray | None,
) -> dict[str, Any]:
    """Sequence `index` of an evaluation, whose group ids are the numbers of the prompts in their set.

    `right`, `strict`: [B] whether completions are right, and also in the required format; NaN for those that
    cannot be judged.
    """
    groups = rewarded.rollouts.group_ids
    return {
        "prompt_index": int(groups[index]),
        "sample": int((groups[:index] == groups[index]).sum()),
        "greedy": greedy,
        **_completion(rewarded, index),
        "correct": None if right is None else _number(right[index]),
        "strict": None if strict is None else _number(strict[index]),
    }


def _completion(rewarded: RewardedBatch, index: int) -> dict[str, Any]:
    rollouts = rewarded.rollouts
    raw = rewarded.rewards_per_function[:, index]
    return {
        "prompt": rollouts.prompts[index],
        "completion": rollouts.completions[index],
        "columns": {name: plain_json(values[index]) for name, values in rollouts.columns.items()},
        "rewards": {name: _number(value) for name, value in zip(rewarded.function_names, raw, strict=True)},
        "reward": _number(rewarded.rewards[index]),
        "finish_reason": str(rollouts.finish_reason[index]),
        "completion_tokens": int(rollouts.completion_lengths[index]),
    }


def plain_json(value: Any) -> Any:
    """`value` as JSON can hold it; what JSON has no form for, such as a date, becomes its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    return str(value)


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    """The value in its shortest decimal form that gives the same float32; None if it is not finite."""
    return float(str(np.float32(value))) if np.isfinite(value) else None
