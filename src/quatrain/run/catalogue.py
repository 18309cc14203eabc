"""All metrics that a run logs, with unit, reduction and meaning.

The stages produce metrics under these names, and `sinks` writes them. Tests check that every logged metric is
listed here. `scripts/document.py` generates docs/metrics.md from this catalogue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple


class MetricDoc(NamedTuple):
    """Documentation of a metric. `reduction`: how its values within a step are combined into one number."""

    unit: str
    reduction: str
    meaning: str


_STATS = {"mean": "Mean", "std": "Standard deviation", "min": "Minimum", "max": "Maximum"}


def _stats(name: str, unit: str, of: str, stats: Iterable[str] = tuple(_STATS)) -> dict[str, MetricDoc]:
    return {f"{name}/{stat}": MetricDoc(unit, stat, f"{_STATS[stat]} of {of}.") for stat in stats}


def _seconds(meanings: dict[str, str]) -> dict[str, MetricDoc]:
    return {f"time/{stage}_s": MetricDoc("s", "sum", meaning) for stage, meaning in meanings.items()}


CATALOGUE: dict[str, MetricDoc] = {
    "loss": MetricDoc(
        "nats",
        "mean",
        "Complete loss: policy loss, KL and entropy terms, weighted by `update.loss_aggregation`.",
    ),
    "update/policy_loss": MetricDoc(
        "nats", "mean", "Policy loss without KL and entropy terms, mean over tokens."
    ),
    "update/kl": MetricDoc(
        "nats", "mean", "KL to the frozen reference, mean over tokens; logged if `update.kl_coef` is above 0."
    ),
    "update/entropy": MetricDoc(
        "nats", "mean", "Entropy of the policy at the sampling temperature, mean over tokens."
    ),
    "update/ratio_mean": MetricDoc(
        "1", "mean", "Probability ratio of the current to the old policy, mean over tokens."
    ),
    "update/ratio_max": MetricDoc("1", "max", "Maximum of the probability ratio over tokens."),
    "update/clip_fraction": MetricDoc(
        "fraction", "mean", "Fraction of tokens whose ratio was clipped, in any of the following three ways."
    ),
    "update/clip_low_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of tokens clipped at the lower bound of the ratio: with `ppo_clip` and `clip_cov`, "
        "1 - `update.clip_low`.",
    ),
    "update/clip_high_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of tokens clipped at the upper bound of the ratio: with `ppo_clip` and `clip_cov`, "
        "1 + `update.clip_high`.",
    ),
    "update/clip_dual_fraction": MetricDoc(
        "fraction", "mean", "Fraction of tokens whose loss was bounded by `update.dual_clip`."
    ),
    "update/high_covariance_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of tokens that `clip_cov` or `kl_cov` chose by the covariance of their log-probability and "
        "advantage.",
    ),
    "update/grad_norm": MetricDoc(
        "1", "mean", "Global norm of the gradient before clipping, mean over optimizer steps."
    ),
    "update/learning_rate": MetricDoc(
        "1", "last", "Learning rate of the last optimizer step, applied or not."
    ),
    "update/optimizer_steps": MetricDoc("steps", "sum", "Optimizer steps applied in this training step."),
    "update/bad_steps": MetricDoc(
        "steps", "sum", "Optimizer steps not applied because loss or gradient was not finite."
    ),
    "update/skipped_steps": MetricDoc(
        "steps", "sum", "Optimizer steps skipped because every advantage was 0, without a KL or entropy term."
    ),
    "update/masked_sequences": MetricDoc(
        "sequences", "sum", "Truncated completions left out of the loss (`update.mask_truncated`)."
    ),
    "update/behaviour_weight_mean": MetricDoc(
        "1", "mean", "Weight of a token's policy loss by `update.correction`, mean over tokens."
    ),
    "update/corrected_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of tokens whose weight `update.correction` bounded: truncated at the cap, or masked.",
    ),
    "update/behaviour_kl": MetricDoc(
        "nats",
        "mean",
        "KL of the sampler's distribution to the policy at the start of the training step (k3), mean over "
        "tokens; logged with `update.correction`.",
    ),
    "update/masked_groups": MetricDoc(
        "groups",
        "sum",
        "Groups in which every advantage is 0, left out of the loss (`update.mask_zero_signal`).",
    ),
    "update/compilations": MetricDoc(
        "programs",
        "sum",
        "Programs compiled or read from the compilation cache in the update; 0 once all shapes occurred. "
        "With `rollout.max_staleness` above 0, those of the rollout's thread count too.",
    ),
    "critic/loss": MetricDoc(
        "reward^2", "mean", "Value loss of the critic, weighted by `update.loss_aggregation`."
    ),
    "critic/clip_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of tokens whose clipped value had the larger loss (`critic.clip_value`).",
    ),
    "critic/value_mean": MetricDoc("reward", "mean", "Value of a token in the critic's optimizer steps."),
    "critic/return_mean": MetricDoc("reward", "mean", "Return of a token, which the value should predict."),
    "critic/explained_variance": MetricDoc(
        "1",
        "mean",
        "1 - Var(return - value) / Var(return) over the tokens of the batch, before the critic's optimizer "
        "steps: 1 for a perfect critic, 0 for a constant one; left out if all returns are equal.",
    ),
    "critic/grad_norm": MetricDoc(
        "1", "mean", "Global norm of the critic's gradient before clipping, mean over optimizer steps."
    ),
    "critic/learning_rate": MetricDoc(
        "1", "last", "Learning rate of the critic's last optimizer step, applied or not."
    ),
    "critic/optimizer_steps": MetricDoc(
        "steps", "sum", "Optimizer steps of the critic applied in this training step."
    ),
    "critic/bad_steps": MetricDoc(
        "steps", "sum", "Optimizer steps of the critic not applied because loss or gradient was not finite."
    ),
    "critic/micro_batches": MetricDoc(
        "micro-batches", "sum", "Micro-batches of the critic that each data shard computed."
    ),
    "critic/padding_fraction": MetricDoc(
        "fraction", "mean", "Fraction of the tokens computed by the critic's optimizer steps that is padding."
    ),
    "batch/micro_batches": MetricDoc(
        "micro-batches", "sum", "Micro-batches that each data shard computed, over all optimizer steps."
    ),
    "batch/tokens": MetricDoc(
        "tokens",
        "sum",
        "Prompt and completion tokens of the sequences of all optimizer steps, without padding.",
    ),
    "batch/padding_fraction": MetricDoc(
        "fraction", "mean", "Fraction of the computed tokens that is padding."
    ),
    "batch/shared_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of `batch/tokens` not computed, because prompts and common prefixes are shared.",
    ),
    "batch/imbalance": MetricDoc(
        "1",
        "max",
        "Cost of the most expensive data shard of a micro-batch, divided by the mean cost of its shards.",
    ),
    "global_seqlen/min": MetricDoc(
        "tokens",
        "min",
        "Tokens of the smallest data shard in an optimizer step, if sequences were assigned to shards in "
        "their order.",
    ),
    "global_seqlen/max": MetricDoc(
        "tokens",
        "max",
        "Tokens of the largest data shard in an optimizer step, if sequences were assigned to shards in "
        "their order.",
    ),
    "global_seqlen/mean": MetricDoc(
        "tokens",
        "mean",
        "Tokens of a data shard in an optimizer step, mean over shards; shared tokens counted for each "
        "sequence.",
    ),
    "global_seqlen/minmax_diff": MetricDoc(
        "tokens",
        "max",
        "Difference between the largest and the smallest data shard in an optimizer step, if sequences "
        "were assigned to shards in their order.",
    ),
    "global_seqlen/balanced_min": MetricDoc(
        "tokens",
        "min",
        "Tokens of the smallest data shard in an optimizer step, after balancing; shared tokens counted "
        "once.",
    ),
    "global_seqlen/balanced_max": MetricDoc(
        "tokens",
        "max",
        "Tokens of the largest data shard in an optimizer step, after balancing; shared tokens counted once.",
    ),
    **_stats(
        "reward",
        "reward",
        "a sequence's total reward; sequences on which all functions abstained are left out",
    ),
    **_stats(
        "reward/<name>",
        "reward",
        "a sequence's unweighted value of this reward function, without abstentions",
    ),
    "reward/greedy/mean": MetricDoc(
        "reward", "mean", "Mean reward of the greedy completions (`rollout.greedy_baseline`)."
    ),
    "reward/kl": MetricDoc(
        "nats",
        "mean",
        "KL to the frozen reference per token (k1), mean over a sequence's tokens, then over sequences; "
        "logged if `reward.kl_coef` is above 0.",
    ),
    "reward/kl_coef": MetricDoc("1", "mean", "Coefficient of the KL in the reward."),
    "reward/kl_penalty": MetricDoc("reward", "mean", "Reward subtracted from a sequence for its KL."),
    "reward/<name>/errors": MetricDoc(
        "sequences",
        "sum",
        "Sequences on which this reward function failed, each scored -1; of a reward model: sequences whose "
        "score is not finite, which get none.",
    ),
    **{
        f"reward/<name>/errors/{kind}": MetricDoc(
            "sequences", "sum", f"Sequences {meaning}; part of `errors`."
        )
        for kind, meaning in (
            ("timeout", "on which this reward function took longer than `reward.timeout_s`"),
            (
                "crash",
                "on which a signal ended the process of this reward function, as after a segmentation fault",
            ),
            ("memory", "on which this reward function exceeded `reward.memory_mb`"),
            ("exit", "on which this reward function called `sys.exit` or `os._exit`"),
            (
                "error",
                "on which this reward function raised another exception or returned a value that is not "
                "finite",
            ),
        )
    },
    "reward/<name>/seconds": MetricDoc(
        "s", "sum", "Seconds that this reward function or reward model took for the completions of the step."
    ),
    "reward/<name>/abstained": MetricDoc(
        "sequences",
        "sum",
        "Sequences on which this reward function abstained (returned None); of a reward model: sequences "
        "without a score.",
    ),
    "reward/<name>/too_long": MetricDoc(
        "sequences",
        "sum",
        "Sequences without a score of this reward model, because they are longer than its positions or "
        "`reward.model_max_tokens_per_device`.",
    ),
    "reward/<name>/tokens": MetricDoc(
        "tokens", "sum", "Tokens of the sequences that this reward model scored, by its own tokenizer."
    ),
    "async/staleness_mean": MetricDoc(
        "optimizer steps",
        "mean",
        "Age of the weights that sampled a token at the start of the training step, mean over tokens.",
    ),
    "async/staleness_max": MetricDoc("optimizer steps", "max", "Largest age of these weights over tokens."),
    "async/versions_per_sequence_max": MetricDoc(
        "versions", "max", "Largest number of versions of the weights that sampled one sequence."
    ),
    "fleet/alive": MetricDoc("workers", "mean", "Rollout workers alive when a batch was complete."),
    "fleet/restarts": MetricDoc("workers", "sum", "Rollout workers that were lost and started again."),
    "fleet/regiven_groups": MetricDoc(
        "groups", "sum", "Groups that were given to a worker again, because it failed on them or was lost."
    ),
    "fleet/stale_groups": MetricDoc(
        "groups", "sum", "Groups that were refused: other weights sampled them than those asked for."
    ),
    "fleet/busy_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of the rollout workers' time, since the last batch, in which they had groups.",
    ),
    "time/weights_gather_s": MetricDoc(
        "s",
        "mean",
        "Seconds for gathering the weights on the main host and publishing them to rollout workers.",
    ),
    "time/weights_load_s": MetricDoc("s", "max", "Longest time that a rollout worker took to load them."),
    **_stats("advantage", "1", "a sequence's advantage"),
    "advantage/zero_signal_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of groups whose advantages are all zero; nothing is learned from these groups.",
    ),
    **_stats("length/prompt", "tokens", "a sequence's prompt length", ("mean", "max")),
    **_stats(
        "length/completion", "tokens", "a sequence's completion length, stop token included", ("mean", "max")
    ),
    **_stats("length/total", "tokens", "a sequence's total length of prompt and completion", ("mean", "max")),
    **_stats(
        "length/environment",
        "tokens",
        "what environment and chat template added to an episode, which is not trained on",
        ("mean", "max"),
    ),
    **_stats("episode/turns", "turns", "the policy's turns in an episode", ("mean", "max")),
    "episode/reward/mean": MetricDoc(
        "reward", "mean", "Mean of the environment's rewards in an episode: of its turns and at its end."
    ),
    "episode/errors": MetricDoc(
        "episodes", "sum", "Episodes that an error of their environment ended (`finish_reason` `error`)."
    ),
    "episode/timeouts": MetricDoc(
        "episodes",
        "sum",
        "Episodes whose environment took longer than `rollout.environment_timeout_s`.",
    ),
    "episode/tool_calls": MetricDoc("calls", "sum", "Calls of tools in the completions."),
    "episode/malformed_calls": MetricDoc(
        "calls", "sum", "Of these, calls that could not be made; the policy read why."
    ),
    "episode/tool_errors": MetricDoc(
        "calls", "sum", "Of these, calls of tools that raised an exception; the policy read it."
    ),
    **{
        f"dynamic_sampling/{name}": MetricDoc(unit, "sum", f"{meaning} (`rollout.dynamic_sampling_rounds`).")
        for name, unit, meaning in (
            ("rounds", "rounds", "Rounds of drawing prompts in a training step"),
            ("drawn_groups", "groups", "Groups that were drawn in a training step"),
            ("dropped_groups", "groups", "Groups without signal that were drawn and not trained on"),
            (
                "returned_groups",
                "groups",
                "Groups beyond the last one used, whose prompts the next training step draws again",
            ),
            (
                "filled_groups",
                "groups",
                "Groups without signal that are trained on because the rounds did not suffice",
            ),
        )
    },
    "rollout/truncated_fraction": MetricDoc(
        "fraction",
        "mean",
        "Fraction of completions cut at `rollout.max_new_tokens`, and of episodes that ended because a limit "
        "on tokens left no room.",
    ),
    "rollout/logprob_diff_mean": MetricDoc(
        "nats",
        "mean",
        "Absolute difference between the sampler's and the trainer's log-probability of a token, mean over "
        "the tokens of the first optimizer step.",
    ),
    "rollout/logprob_diff_max": MetricDoc(
        "nats", "max", "Maximum of this absolute difference over the same tokens."
    ),
    "rollout/tokens_per_s": MetricDoc("tokens/s", "mean", "Completion tokens per second of generation."),
    "rollout/prefill_s": MetricDoc("s", "sum", "Seconds of generation spent in prefill (computing prompts)."),
    "rollout/prefill_tokens": MetricDoc(
        "tokens",
        "sum",
        "Prompt tokens computed: each prompt once per group, a common prefix once per packed row. In "
        "episodes, also the tokens before a turn that are not in the cache.",
    ),
    "rollout/decode_s": MetricDoc("s", "sum", "Seconds of generation spent in decoding."),
    "rollout/slot_utilisation": MetricDoc(
        "fraction", "mean", "Decoded tokens, divided by decode steps times the largest number of slots."
    ),
    "rollout/wasted_decode_fraction": MetricDoc(
        "fraction", "mean", "Fraction of slots times decode steps that gave no token of a completion."
    ),
    "rollout/compilations": MetricDoc(
        "programs",
        "sum",
        "Programs compiled or read from the compilation cache in the rollout; 0 once all shapes occurred.",
    ),
    "data/skipped_prompts": MetricDoc(
        "prompts", "sum", "Training prompts skipped because they are longer than `data.max_prompt_length`."
    ),
    "data/truncated_prompts": MetricDoc(
        "prompts", "sum", "Training prompts cut to their last `data.max_prompt_length` tokens."
    ),
    "data/filtered_prompts": MetricDoc(
        "prompts", "sum", "Training prompts left out by `data.min_pass_rate` and `data.max_pass_rate`."
    ),
    **_seconds(
        {
            "rollout": "Seconds of the rollout stage.",
            "rollout_sync": "Seconds of the rollout stage spent copying the new weights to the rollout mesh.",
            "rollout_generate": "Seconds of the rollout stage spent in prefill and decoding.",
            "rollout_flush": "Seconds of the rollout stage spent converting tokens to text and to arrays.",
            "environment_wait": "Seconds of the rollout stage in which nothing was decoded, because answers "
            "of environments were waited for.",
            "reward": "Seconds of the reward stage.",
            "place_weights": "Seconds spent copying weights for the batches to be sampled ahead.",
            "wait_rollout": "Seconds that training waited for the batch (`rollout.max_staleness` above 0).",
            "lead": "Seconds from the beginning of the batch's rollout until training took it "
            "(`rollout.max_staleness` above 0).",
            "wait_weights": "Seconds that the rollout waited for weights before it sampled the batch "
            "(`rollout.max_staleness` above 0).",
            "reward_models": "Seconds of the reward stage spent computing the scores of reward models.",
            "token_scores": "Seconds spent on what advantages need of the models: values of the critic, and "
            "log-probabilities for KL in the reward.",
            "advantage": "Seconds of the advantage stage.",
            "critic": "Seconds of the update stage spent on the critic's optimizer steps.",
            "shard": "Seconds of the update stage spent splitting mini-batches and moving them to devices.",
            "update": "Seconds of the update stage.",
            "update_logprobs": "Seconds of the update stage spent on old and reference log-probabilities.",
            "eval": "Seconds of an evaluation.",
            "checkpoint": "Seconds to start a checkpoint: waiting for the previous one, copying arrays.",
            "step": "Seconds of the training step: rollout, reward, advantage and update.",
            "compile": "Seconds of the training step spent compiling programs, or reading them from the "
            "compilation cache.",
            "sft": "Seconds of the supervised warm start.",
        }
    ),
    "time/<stage>_s_mean10": MetricDoc(
        "s", "mean", "Mean of `time/<stage>_s` over the last 10 steps in which the stage ran."
    ),
    "memory/peak_gib": MetricDoc(
        "GiB",
        "max",
        "Most memory in use since the start, on the device of the main process that used the most; on a CPU, "
        "the largest resident set of the main process, without workers' processes.",
    ),
    "throughput/tokens_per_s": MetricDoc(
        "tokens/s",
        "mean",
        "Prompt and completion tokens of the batch that is trained on per second of the training step.",
    ),
    "throughput/update_tokens_per_s": MetricDoc(
        "tokens/s", "mean", "Prompt and completion tokens, times `update.epochs`, per second of the update."
    ),
    "eval/accuracy_lenient": MetricDoc(
        "fraction",
        "mean",
        "Fraction of greedy completions that are right by `eval.accuracy`. Completions that it cannot judge "
        "are left out of both accuracies.",
    ),
    "eval/accuracy_strict": MetricDoc(
        "fraction",
        "mean",
        "Fraction of greedy completions that are right and in the `<think>/<answer>` format; logged if the "
        "reward function `format` or `tag_count` asks for it.",
    ),
    "eval/accuracy_errors": MetricDoc(
        "completions", "sum", "Completions on which the function that decides accuracy failed; not judged."
    ),
    "eval/reward": MetricDoc("reward", "mean", "Mean total reward of greedy completions."),
    "eval/reward/<name>/errors": MetricDoc(
        "completions", "sum", "Greedy completions on which this reward function failed."
    ),
    "eval/reward/<name>/errors/<kind>": MetricDoc(
        "completions", "sum", "Greedy completions on which this reward function failed in this way."
    ),
    "eval/reward/<name>/abstained": MetricDoc(
        "completions", "sum", "Greedy completions on which this reward function abstained."
    ),
    "eval/reward/<name>": MetricDoc(
        "reward", "mean", "Mean unweighted value of this reward function, without abstentions."
    ),
    "eval/completion_length": MetricDoc("tokens", "mean", "Mean length of greedy completions."),
    "eval/truncated_fraction": MetricDoc(
        "fraction", "mean", "Fraction of greedy completions cut at the maximum length."
    ),
    "eval/mean_at_n": MetricDoc(
        "fraction", "mean", "Fraction of right answers among `eval.n` sampled completions per prompt."
    ),
    "eval/pass_at_n": MetricDoc(
        "fraction",
        "mean",
        "Fraction of prompts with at least one right answer among `eval.n` sampled completions.",
    ),
    "eval/num_prompts": MetricDoc("prompts", "sum", "Number of prompts evaluated."),
    "eval/skipped_prompts": MetricDoc(
        "prompts", "sum", "Evaluation prompts skipped because they are longer than `data.max_prompt_length`."
    ),
    "eval/truncated_prompts": MetricDoc(
        "prompts", "sum", "Evaluation prompts cut to their last `data.max_prompt_length` tokens."
    ),
    "sft/loss": MetricDoc(
        "nats",
        "mean",
        "Warm start: negative log-likelihood, mean over the tokens of the demonstrated completions.",
    ),
    "sft/entropy": MetricDoc(
        "nats",
        "mean",
        "Warm start: entropy of the model, mean over the tokens of the demonstrated completions.",
    ),
}
"""Name -> meaning. `<name>` and `<stage>` stand for any reward function and any timed stage."""


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """The names that are not in the catalogue, sorted.

    Metrics of an evaluation may have the name of their set after `eval/`, then `final/` where they are of all
    prompts of the evaluation after training: `eval/gsm8k/final/reward`. The metrics of episodes are listed
    once: `eval/episode/turns/mean` is looked up as `episode/turns/mean`.
    """
    return sorted(name for name in set(names) if pattern_of(name) is None)


@cache
def pattern_of(name: str) -> str | None:
    """The key of the catalogue that lists the metric `name`; None if it is not listed."""
    found = (known for each in (name, _without_set(name)) for known in CATALOGUE if _matches(known, each))
    return name if name in CATALOGUE else next(found, None)


def _without_set(name: str) -> str:
    plain = re.sub(r"^eval/(final/|(?!reward/|episode/)[\w.-]+/(final/)?)", "eval/", name)
    return plain.removeprefix("eval/") if plain.startswith("eval/episode/") else plain


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.sub("<[a-z]+>", ".+", re.escape(pattern)), name) is not None
