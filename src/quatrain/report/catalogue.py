"""Every metric a run logs, with unit, reduction and meaning.

The stages emit these names, `sinks` writes them; a name that is not here is a mistake in one or the other.
`scripts/document.py` makes docs/metrics.md of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class MetricDoc(NamedTuple):
    """What a name means. `reduction`: how the parts of a step become its one number."""

    unit: str
    reduction: str
    meaning: str


_STATS = {"mean": "Mean", "std": "Standard deviation", "min": "Least", "max": "Greatest"}


def _stats(name: str, unit: str, of: str, stats: Iterable[str] = tuple(_STATS)) -> dict[str, MetricDoc]:
    return {f"{name}/{stat}": MetricDoc(unit, stat, f"{_STATS[stat]} {of}.") for stat in stats}


def _seconds(meanings: dict[str, str]) -> dict[str, MetricDoc]:
    return {f"time/{stage}_s": MetricDoc("s", "sum", meaning) for stage, meaning in meanings.items()}


CATALOGUE: dict[str, MetricDoc] = {
    "loss": MetricDoc(
        "nats", "mean", "Whole loss: policy loss, KL and entropy terms, aggregated as configured."
    ),
    "update/policy_loss": MetricDoc("nats", "mean", "Policy loss alone, mean over tokens."),
    "update/kl": MetricDoc(
        "nats", "mean", "KL to the frozen reference, mean over tokens; only with `update.kl_coef`."
    ),
    "update/entropy": MetricDoc(
        "nats", "mean", "Entropy of the policy at the sampling temperature, mean over tokens."
    ),
    "update/ratio_mean": MetricDoc("1", "mean", "Probability ratio new / old policy, mean over tokens."),
    "update/ratio_max": MetricDoc("1", "max", "Greatest probability ratio of a token."),
    "update/clip_fraction": MetricDoc(
        "fraction", "mean", "Tokens whose ratio was clipped, in any of the three ways."
    ),
    "update/clip_low_fraction": MetricDoc("fraction", "mean", "Tokens clipped at 1 - `update.clip_low`."),
    "update/clip_high_fraction": MetricDoc("fraction", "mean", "Tokens clipped at 1 + `update.clip_high`."),
    "update/clip_dual_fraction": MetricDoc(
        "fraction", "mean", "Tokens whose loss was bounded by `update.dual_clip`."
    ),
    "update/grad_norm": MetricDoc(
        "1", "mean", "Global norm of the gradient before clipping, mean over optimizer steps."
    ),
    "update/learning_rate": MetricDoc("1", "last", "Learning rate of the last optimizer step."),
    "update/optimizer_steps": MetricDoc("steps", "sum", "Optimizer steps applied in this training step."),
    "update/bad_steps": MetricDoc(
        "steps", "sum", "Optimizer steps not applied: loss or gradient was not finite."
    ),
    "update/skipped_steps": MetricDoc(
        "steps", "sum", "Optimizer steps skipped: no token had a weight or an advantage."
    ),
    "update/compilations": MetricDoc(
        "programs", "sum", "Programs compiled during the update; 0 once shapes settled."
    ),
    "batch/micro_batches": MetricDoc(
        "micro-batches", "sum", "Micro-batches of all optimizer steps, on each data shard."
    ),
    "batch/tokens": MetricDoc(
        "tokens", "sum", "Prompt and completion tokens of all optimizer steps, padding left out."
    ),
    "batch/padding_fraction": MetricDoc("fraction", "mean", "Computed tokens that are padding."),
    "batch/shared_fraction": MetricDoc(
        "fraction", "mean", "Tokens that need no computing, because sequences begin with the same."
    ),
    "batch/imbalance": MetricDoc(
        "1", "max", "Cost of a micro-batch's dearest data shard over that of its mean shard."
    ),
    "global_seqlen/min": MetricDoc(
        "tokens", "min", "Tokens of the smallest data shard, if sequences went to shards in their order."
    ),
    "global_seqlen/max": MetricDoc("tokens", "max", "Tokens of the largest such shard."),
    "global_seqlen/mean": MetricDoc("tokens", "mean", "Tokens of a data shard, mean over shards."),
    "global_seqlen/minmax_diff": MetricDoc(
        "tokens", "max", "Difference of largest and smallest, if sequences went to shards in their order."
    ),
    "global_seqlen/balanced_min": MetricDoc(
        "tokens", "min", "Tokens of the smallest data shard, as planned."
    ),
    "global_seqlen/balanced_max": MetricDoc("tokens", "max", "Tokens of the largest data shard, as planned."),
    **_stats("reward", "reward", "total reward of a sequence, abstentions left out"),
    **_stats("reward/<name>", "reward", "raw value of one reward function, abstentions left out"),
    "reward/<name>/errors": MetricDoc(
        "sequences", "sum", "Sequences on which this function raised and cost -1."
    ),
    "reward/<name>/abstained": MetricDoc(
        "sequences", "sum", "Sequences on which this function returned None."
    ),
    **_stats("advantage", "1", "advantage of a sequence"),
    "advantage/zero_signal_fraction": MetricDoc(
        "fraction", "mean", "Groups whose advantages are all zero: nothing is learned from them."
    ),
    **_stats("length/prompt", "tokens", "prompt length", ("mean", "max")),
    **_stats("length/completion", "tokens", "completion length, stop token included", ("mean", "max")),
    **_stats("length/total", "tokens", "length of prompt and completion", ("mean", "max")),
    "rollout/truncated_fraction": MetricDoc(
        "fraction", "mean", "Completions cut at `rollout.max_new_tokens`."
    ),
    "rollout/logprob_diff_mean": MetricDoc(
        "nats", "mean", "Absolute difference of a token's log-probability between sampler and trainer."
    ),
    "rollout/logprob_diff_max": MetricDoc("nats", "max", "Greatest such difference of a token."),
    "rollout/tokens_per_s": MetricDoc(
        "tokens/s", "mean", "Completion tokens over the seconds of generation."
    ),
    "rollout/prefill_s": MetricDoc("s", "sum", "Part of generation that read the prompts."),
    "rollout/prefill_tokens": MetricDoc(
        "tokens", "sum", "Prompt tokens computed: a group's once, what packed prompts begin with once a row."
    ),
    "rollout/decode_s": MetricDoc("s", "sum", "Part of generation that sampled tokens."),
    "rollout/slot_utilisation": MetricDoc(
        "fraction", "mean", "Decode work that gave a token, of what the widest batch could do in its steps."
    ),
    "rollout/wasted_decode_fraction": MetricDoc(
        "fraction", "mean", "Decode work, in slots times steps, that gave no token of a completion."
    ),
    "rollout/compilations": MetricDoc(
        "programs", "sum", "Programs compiled during the rollout; 0 once shapes settled."
    ),
    "data/skipped_prompts": MetricDoc(
        "prompts", "sum", "Training prompts left out as longer than `data.max_prompt_length`."
    ),
    "data/truncated_prompts": MetricDoc(
        "prompts", "sum", "Training prompts cut on the left to `data.max_prompt_length`."
    ),
    **_seconds(
        {
            "rollout": "Rollout, all of it.",
            "rollout_sync": "Rollout: taking over the new weights.",
            "rollout_generate": "Rollout: prefill and decode.",
            "rollout_flush": "Rollout: tokens to text and training arrays.",
            "reward": "Reward functions.",
            "advantage": "Advantages.",
            "shard": "Moving the batch to the devices.",
            "update": "Update, all of it.",
            "update_logprobs": "Update: old and reference log-probabilities.",
            "eval": "Evaluation.",
            "checkpoint": "Starting a checkpoint: waiting for the one before and copying the arrays.",
            "step": "The whole training step: its four stages.",
            "sft": "The supervised warm start.",
        }
    ),
    "time/<stage>_s_mean10": MetricDoc(
        "s", "mean", "Mean of `time/<stage>_s` over the last 10 steps that had it."
    ),
    "throughput/tokens_per_s": MetricDoc(
        "tokens/s", "mean", "Prompt and completion tokens over the seconds of the step."
    ),
    "throughput/update_tokens_per_s": MetricDoc(
        "tokens/s", "mean", "Tokens trained on over the seconds of the update."
    ),
    "eval/accuracy_strict": MetricDoc(
        "fraction", "mean", "Greedy completions with the right answer and the format."
    ),
    "eval/accuracy_lenient": MetricDoc("fraction", "mean", "Greedy completions with the right answer."),
    "eval/reward": MetricDoc("reward", "mean", "Total reward of greedy completions."),
    "eval/completion_length": MetricDoc("tokens", "mean", "Length of greedy completions."),
    "eval/truncated_fraction": MetricDoc(
        "fraction", "mean", "Greedy completions cut at `rollout.max_new_tokens`."
    ),
    "eval/mean_at_n": MetricDoc(
        "fraction", "mean", "Right answers among `eval.n` sampled completions a prompt."
    ),
    "eval/pass_at_n": MetricDoc(
        "fraction", "mean", "Prompts with a right answer among `eval.n` sampled completions."
    ),
    "eval/num_prompts": MetricDoc("prompts", "sum", "Prompts evaluated."),
    "eval/skipped_prompts": MetricDoc("prompts", "sum", "Evaluation prompts left out as too long."),
    "eval/truncated_prompts": MetricDoc("prompts", "sum", "Evaluation prompts cut on the left."),
    "sft/loss": MetricDoc("nats", "mean", "Warm start: negative log-likelihood of a demonstrated token."),
    "sft/entropy": MetricDoc(
        "nats", "mean", "Warm start: entropy of the model, mean over demonstrated tokens."
    ),
}
"""Name -> meaning. `<name>` and `<stage>` stand for any reward function and any timed stage."""


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """The names that the catalogue does not explain, sorted."""
    return sorted(name for name in set(names) if not any(_matches(pattern, name) for pattern in CATALOGUE))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.sub("<[a-z]+>", ".+", re.escape(pattern)), name) is not None
