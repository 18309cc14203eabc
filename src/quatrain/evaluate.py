"""Evaluation: greedy accuracy, strict and lenient, and mean@n / pass@n of sampled completions.

Used before, during and after training, with the engine of the rollout, and by the command `quatrain eval`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from quatrain.cluster.processes import decided_by_main
from quatrain.config.load import Resolved
from quatrain.config.schema import EvalConfig
from quatrain.data.prompts import PromptSource, load_prompts
from quatrain.metrics import Metric, combine
from quatrain.policy import build_engine, build_scorer, load_policy
from quatrain.report.metrics import reduce_metrics
from quatrain.report.progress import Progress
from quatrain.reward.functions import correct as reward_correct
from quatrain.reward.functions import has_format
from quatrain.reward.scorer import RewardScorer
from quatrain.rollout.interface import Rollouts
from quatrain.types import Prompt, RolloutBatch

ANSWER_COLUMN = "answer"
"""Data column with the gold answer; without it, evaluation reports no accuracy."""


def evaluate(
    engine: Rollouts,
    scorer: RewardScorer,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Metric]:
    """Metrics `eval/…` of the current weights of `engine`, over `prompts`.

    Of greedy completions: `accuracy_strict` (correct and in the required format), `accuracy_lenient`
    (correct), `reward`, `completion_length`, `truncated_fraction`. If `config.n` > 0, also of completions
    sampled at `config.temperature`: `mean_at_n` (fraction of correct completions) and `pass_at_n` (share of
    prompts with at least one correct completion), both without regard to format. Accuracies need the data
    column `answer`. `on_progress` is called with the number of prompts done and the total; each prompt counts
    once for greedy and once for sampled completions.
    """
    greedy = replace(engine.sampling, n=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    kinds = [(greedy, _greedy_metrics)]
    if config.n:
        kinds.append((replace(greedy, n=config.n, temperature=config.temperature), _sampled_metrics))
    metrics: dict[str, Metric] = {}
    done, total = 0, len(prompts) * len(kinds)
    for sampling, measure in kinds:
        stride = max(1, config.batch_size // sampling.n)
        for first in range(0, len(prompts), stride):
            part = prompts[first : first + stride]
            metrics = combine(metrics, measure(engine.generate(part, sampling=sampling), scorer))
            done += len(part)
            on_progress(done, total)
    return metrics


def skipped_prompt_metrics(source: PromptSource) -> dict[str, Metric]:
    """Metrics: numbers of skipped and truncated evaluation prompts, longer than `data.max_prompt_length`."""
    return {
        "eval/skipped_prompts": Metric(source.skipped, reduction="sum"),
        "eval/truncated_prompts": Metric(source.truncated, reduction="sum"),
    }


def finite_numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The reduced value of each metric by name, without means over zero items and non-finite values."""
    return {name: value for name, value in reduce_metrics(metrics).items() if math.isfinite(value)}


def _correct(rollouts: RolloutBatch) -> np.ndarray | None:
    """[B] 1 for a correct answer, 0 for a wrong one, NaN if the gold answer cannot be judged (see `correct`).

    None without the column of gold answers.
    """
    answers = rollouts.columns.get(ANSWER_COLUMN)
    if answers is None:
        return None
    completions = list(rollouts.completions)
    judged = decided_by_main(lambda: reward_correct([], completions, list(answers)))
    return np.array([math.nan if value is None else value for value in judged], np.float64)


def _greedy_metrics(rollouts: RolloutBatch, scorer: RewardScorer) -> dict[str, Metric]:
    truncated = rollouts.finish_reason == "length"
    metrics = {
        "eval/num_prompts": Metric(len(rollouts), reduction="sum"),
        "eval/truncated_fraction": Metric(float(truncated.sum()), len(rollouts)),
        "eval/completion_length": Metric(float(rollouts.completion_lengths.sum()), len(rollouts)),
        "eval/reward": _mean(scorer.score(rollouts).rewards),
    }
    correct = _correct(rollouts)
    if correct is not None:
        strict = correct * np.array([has_format(c) for c in rollouts.completions])
        metrics["eval/accuracy_lenient"] = _mean(correct)
        metrics["eval/accuracy_strict"] = _mean(strict)
    return metrics


def _mean(values: np.ndarray) -> Metric:
    """The mean of `values` without NaN entries, as a metric."""
    given = values[~np.isnan(values)]
    return Metric(float(given.sum()), len(given))


def _sampled_metrics(rollouts: RolloutBatch, scorer: RewardScorer) -> dict[str, Metric]:
    correct = _correct(rollouts)
    if correct is None:
        return {}
    judged = ~np.isnan(correct)
    groups, membership = np.unique(rollouts.group_ids[judged], return_inverse=True)
    passed = np.bincount(membership, correct[judged], len(groups)) > 0
    return {
        "eval/mean_at_n": _mean(correct),
        "eval/pass_at_n": Metric(float(passed.sum()), len(groups)),
    }


def evaluate_run(resolved: Resolved) -> dict[str, float]:
    """`quatrain eval`: the metrics of the model `model.path` on `data.eval`.

    Uses all prompts, or the first `eval.final_num_prompts`. Shows progress on stderr. Raises ValueError if
    `data.eval` is null.
    """
    config = resolved.config
    if config.data.eval is None:
        raise ValueError("evaluation needs prompts: set data.eval, for example to a .jsonl file")
    loaded = load_policy(config, critic=False)
    scorer = build_scorer(config, loaded)
    source = load_prompts(
        config.data.eval,
        config.data,
        loaded.tokenizer,
        seed=config.seed,
        required_columns=scorer.required_columns,
        check_prompt=scorer.check_prompt,
    )
    prompts = source.head(config.eval.final_num_prompts)
    total = len(prompts) * (2 if config.eval.n else 1)
    with closing(scorer), Progress(total) as progress:
        progress.phase("evaluation", first=0)
        engine = build_engine(config, loaded, on_progress=lambda decoding: progress.detail(str(decoding)))
        engine.sync_weights(loaded.params, 0)
        metrics = evaluate(
            engine, scorer, prompts, config.eval, on_progress=lambda done, total: progress.step(done)
        )
    return dict(sorted(finite_numbers(metrics | skipped_prompt_metrics(source)).items()))
