"""Evaluation: accuracy and rewards of greedy completions, and mean@n / pass@n of sampled ones.

Used before, during and after training, with the engine of the rollout, and by the command `quatrain eval`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quatrain.cluster.processes import decided_by_main, is_main_process
from quatrain.config.data_sets import shown_data_sets
from quatrain.config.errors import listed
from quatrain.config.load import Resolved
from quatrain.config.schema import Config
from quatrain.data.prompts import PromptSource
from quatrain.data.rows import NO_ROWS, GivenRows
from quatrain.loop.policy import LoadedPolicy, load_policy
from quatrain.loop.stages import build_engine
from quatrain.parallel.compilation_cache import ProgramCount
from quatrain.report.progress import Progress, waiting
from quatrain.report.start_up import starting
from quatrain.reward.functions import format_of
from quatrain.reward.scorer import STATS, RewardScorer, short_names
from quatrain.rollout.rollouts import Rollouts
from quatrain.run.catalogue import CATALOGUE
from quatrain.run.metrics import reduce_metrics
from quatrain.run.samples import evaluation_sample
from quatrain.types.batches import Prompt, RewardedBatch, RolloutBatch, brief
from quatrain.types.metrics import Metric, Metrics, combine
from quatrain.types.rollouts import Sampling, rollout_batch
from quatrain.update.teacher_prompts import TeacherPrompts

logger = logging.getLogger(__name__)

ANSWER_COLUMN = "answer"
"""Data column with the gold answer; without it, and without `eval.accuracy`, there is no accuracy."""
DEFAULT_ACCURACY = "correct"
ACCURACIES = {"accuracy_lenient": "accuracy", "accuracy_strict": "strict accuracy"}
"""Metric -> its name in sentences."""


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts that are evaluated together. `name`: their key in `data.eval`; empty if that is one source."""

    name: str
    source: PromptSource

    @property
    def prefix(self) -> str:
        """How the names of this set's metrics begin."""
        return f"eval/{self.name}/" if self.name else "eval/"

    def prompts(self, count: int | None) -> list[Prompt]:
        """The first `count` prompts (None: all)."""
        return self.source.head(count)

    def skipped_metrics(self) -> dict[str, Metric]:
        """Numbers of prompts skipped and truncated because of `data.max_prompt_length`."""
        return {
            f"{self.prefix}skipped_prompts": Metric(self.source.skipped, reduction="sum"),
            f"{self.prefix}truncated_prompts": Metric(self.source.truncated, reduction="sum"),
        }


TeacherKL = Callable[[RolloutBatch], Metric | None]
"""The KL of the policy to its teacher, on greedy completions; None where it cannot be said."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics, named without the prefix of their set, and a record of each completion for `samples/`."""

    metrics: Metrics = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()

    __repr__ = brief

    def and_(self, other: Evaluation) -> Evaluation:
        """This evaluation and `other`, of other prompts of the same set, as one."""
        return Evaluation(combine(self.metrics, other.metrics), [*self.samples, *other.samples])


class Evaluator:
    """The evaluation sets of a run, and what judges their completions.

    Completions are scored by the reward functions of `scorer`, and by the function that decides accuracy:
    `eval.accuracy`; if it is one of the reward functions, one call serves both. Where the key is null,
    `correct` decides if the prompts have a column `answer`. `rows` has the rows of data sets that are no
    files, by their names in `data.eval`. `close` ends the worker processes of that
    function, not those of `scorer`. Raises ValueError if it cannot be imported or called, and for invalid
    data (`load_prompts`).
    """

    def __init__(self, config: Config, loaded: LoadedPolicy, scorer: RewardScorer, rows: GivenRows = NO_ROWS):
        self._config, self._scorer = config.eval, scorer
        rewards, spec = config.reward, config.eval.accuracy or DEFAULT_ACCURACY
        self._format = format_of(rewards, scorer.opening) if scorer.formats else None
        rollout = config.rollout
        self._episodes = "" if not rollout.has_episodes else "agent/" if rollout.agent else "episode/"
        self._own: RewardScorer | None = None
        if spec not in rewards.functions:
            rewards = rewards.model_copy(update={"functions": {spec: 1.0}})
            self._own = RewardScorer(
                rewards,
                decide=decided_by_main,
                episodes=config.rollout.has_episodes,
                # As of a function that rewards too: what is no reward is no wrong answer.
                faults_abstain=config.rollout.agent_failure == "abstain",
                accuracy_beside=scorer,
            )
        self._accuracy = short_names(rewards)[spec]
        self._teaches = config.distill.teacher is not None
        self.reads = TeacherPrompts.of(config.distill, loaded)
        """The prompts of the teacher's own, if it has some."""
        self._unread = frozenset(() if self.reads is None else self.reads.columns)
        """Columns that the teacher's prompts need."""
        try:
            self.sets = self._load_sets(config, loaded, rows)
            self.warnings = list(self._checked(config.data.eval_sets))
            """Of values that are probably not intended."""
        except BaseException:
            self.close()
            raise

    def _load_sets(self, config: Config, loaded: LoadedPolicy, rows: GivenRows) -> list[EvaluationSet]:
        needed: dict[str, str] = {}
        if config.eval.accuracy is not None and self._own is not None:
            needed = dict.fromkeys(self._own.required_columns, f"eval.accuracy {config.eval.accuracy}")
        return [
            EvaluationSet(name, loaded.prompts(config, spec, self._scorer, rows, needed))
            for name, spec in config.data.eval_sets.items()
        ]

    def _checked(self, specs: Mapping[str, Any]) -> Iterator[str]:
        """Warnings about the prompts; raises ValueError if no answer of a set can be judged."""
        for each in self.sets:
            name = shown_data_sets(specs[each.name])
            if self._teaches and not self.taught(each):
                missing = listed(self._unread.difference(each.prompts(1)[0].columns))
                yield f"{name}: there is no eval/teacher_kl without the column {missing} of distill.prompt"
            yield from (f"{name}: {warning}" for warning in each.source.warnings)
            yield from self._scorer.check_answers(name, each.source)
            if self._own is None:
                continue
            try:
                yield from self._own.check_answers(name, each.source)
            except ValueError as error:
                if self._config.accuracy is not None:
                    raise
                yield f"there is no accuracy, because eval.accuracy is null and {error}"

    def taught(self, each: EvaluationSet) -> bool:
        """Whether a teacher can read the prompts of a set."""
        return self._teaches and not self._unread.difference(each.prompts(1)[0].columns)

    def close(self) -> None:
        """Ends the worker processes of the function that decides accuracy."""
        if self._own is not None:
            self._own.close()

    def metric_names(self) -> list[str]:
        """The names of the metrics of every evaluation, in which those of a set's further prompts are not."""
        functions = self._scorer.function_names
        counts = {f"reward/{name}/{what}" for name in functions for what in ("errors", "abstained")}
        episodes = {name for name in CATALOGUE if self._episodes and name.startswith(self._episodes)}
        names: list[str] = []
        for each in self.sets:
            columns = dict.fromkeys(each.prompts(1)[0].columns, ())
            rollouts = replace(rollout_batch([], None, {}), columns=columns)
            none = np.zeros(0, np.float32)
            nothing = RewardedBatch(rollouts, none, np.zeros((len(functions), 0), np.float32), functions)
            right = none if self._has_accuracy(rollouts) else None
            of_set = counts | episodes
            of_set |= _greedy_metrics(nothing, right, None if self._format is None else none).keys()
            if self._config.n:
                of_set |= _sampled_metrics(nothing, right).keys()
            if right is not None:
                of_set.add("accuracy_errors")
            if self.taught(each):
                of_set.add("teacher_kl")
            names += sorted([*(each.prefix + name for name in of_set), *each.skipped_metrics()])
        return names

    def num_completions(self, engine: Rollouts, count: int | None) -> int:
        """How many completions `evaluate` generates for the first `count` prompts of each set."""
        per_prompt = sum(sampling.n for sampling in self._samplings(engine))
        return per_prompt * sum(len(each.prompts(count)) for each in self.sets)

    def evaluate(
        self,
        engine: Rollouts,
        *,
        first: int | None = None,
        count: int | None = None,
        on_progress: Callable[[int], None] = lambda done: None,
        teacher_kl: TeacherKL | None = None,
    ) -> Evaluation:
        """The evaluation of the weights of `engine` on the first `count` prompts of each set (None: all).

        Metrics of greedy completions: `accuracy_lenient` (right by the function that decides accuracy, whose
        values are bounded to 0 and 1) and, if a reward function asks for a format,
        `accuracy_strict` (right and in that format); `reward`, `reward/<name>` of each function, its counts
        of errors and abstentions, `completion_length`, `truncated_fraction`, `num_prompts`, and `teacher_kl`
        by the function of this name. If `eval.n` > 0,
        also of completions sampled at `eval.temperature` and `eval.top_p`: `mean_at_n` (fraction of right
        completions) and `pass_at_n` (share of prompts with at least one), both without regard to format.

        The metrics are those of the first `first` prompts, the ones that the run's other evaluations use. If
        `count` prompts are more, the metrics of all of them are there too, named `final/…`. `on_progress` is
        called with the number of completions finished so far.
        """
        done = 0
        metrics: dict[str, Metric] = {}
        samples: list[Mapping[str, Any]] = []
        for each in self.sets:
            prompts = each.prompts(count)
            usual = len(prompts[:first])
            whole = Evaluation()
            for infix, part in (("", prompts[:usual]), ("final/", prompts[usual:])):
                for judged, size in self._judged(engine, part, teacher_kl if self.taught(each) else None):
                    whole, done = whole.and_(judged), done + size
                    on_progress(done)
                if part:
                    metrics |= {f"{each.prefix}{infix}{name}": m for name, m in whole.metrics.items()}
            metrics |= each.skipped_metrics()
            samples += [{"set": each.name, **sample} for sample in whole.samples]
        return Evaluation(metrics, samples)

    def _samplings(self, engine: Rollouts) -> list[Sampling]:
        """Greedy and, if `eval.n` > 0, sampled completions."""
        config, training = self._config, engine.sampling
        length = config.max_new_tokens or training.max_new_tokens
        greedy = replace(training, n=1, max_new_tokens=length, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        sampled = replace(greedy, n=config.n or 1, temperature=config.temperature, top_p=config.top_p)
        return [greedy, sampled] if config.n else [greedy]

    def _judged(
        self, engine: Rollouts, prompts: Sequence[Prompt], teacher_kl: TeacherKL | None
    ) -> Iterator[tuple[Evaluation, int]]:
        """The evaluation of each `eval.batch_size` completions, and their number."""
        for sampling in self._samplings(engine):
            stride = max(1, self._config.batch_size // sampling.n)
            parts = [prompts[at : at + stride] for at in range(0, len(prompts), stride)]
            at_once = max(self._config.batch_size, sampling.n)
            for rollouts in engine.generate_each(parts, sampling=sampling, at_once=at_once):
                rewarded = self._scorer.score(rollouts)
                done = len(rollouts.episodes.first_rows)
                greedy = sampling.temperature == 0
                judged = self._judge(rewarded, greedy=greedy)
                if greedy and teacher_kl is not None and (kl := teacher_kl(rollouts)) is not None:
                    judged = replace(judged, metrics={**judged.metrics, "teacher_kl": kl})
                yield judged, done

    def _judge(self, rewarded: RewardedBatch, *, greedy: bool) -> Evaluation:
        right, errors = self._right(rewarded)
        strict = None
        if right is not None and self._format is not None:
            said = rewarded.rollouts
            strict = right * np.array(self._format(list(said.prompts), list(said.completions)))
        metrics = _greedy_metrics(rewarded, right, strict) if greedy else _sampled_metrics(rewarded, right)
        if right is not None:
            metrics["accuracy_errors"] = errors
        samples = [
            evaluation_sample(rewarded, i, greedy=greedy, right=right, strict=strict)
            for i in range(len(rewarded.rollouts))
        ]
        return Evaluation(metrics, samples)

    def _has_accuracy(self, rollouts: RolloutBatch) -> bool:
        """Whether something decides accuracy."""
        return self._config.accuracy is not None or ANSWER_COLUMN in rollouts.columns

    def _right(self, rewarded: RewardedBatch) -> tuple[np.ndarray | None, Metric]:
        """([B] 0 (wrong) to 1 (right), NaN where the function abstained or failed; number of failures).

        None if nothing decides accuracy.
        """
        if not self._has_accuracy(rewarded.rollouts):
            return None, Metric(0.0, reduction="sum")
        judged = rewarded if self._own is None else self._own.score(rewarded.rollouts)
        values = judged.judged_by(self._accuracy).astype(np.float64)
        return np.clip(values, 0.0, 1.0), judged.metrics[f"reward/{self._accuracy}/errors"]


def finite_numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The reduced value of each metric by name, without means over zero items and non-finite values."""
    return {name: value for name, value in reduce_metrics(metrics).items() if math.isfinite(value)}


def result(sets: Sequence[EvaluationSet], numbers: Mapping[str, float]) -> Iterator[str]:
    """The accuracies, or else the mean reward, of each set of one evaluation."""
    for each in sets:
        names = [name for name in ACCURACIES if each.prefix + name in numbers] or ["reward"]
        keys = {ACCURACIES.get(name, name): each.prefix + name for name in names}
        values = [f"{label} {numbers[key]:.3f}" for label, key in keys.items() if key in numbers]
        of = " ".join(filter(None, (each.name, f"on {numbers[f'{each.prefix}num_prompts']:.0f} prompts")))
        yield f"{', '.join(values)} ({of})"


def results(
    sets: Sequence[EvaluationSet], before: Mapping[str, float], after: Mapping[str, float]
) -> Iterator[str]:
    """A sentence for each accuracy, or else the mean reward, of each set: before and after training."""
    for each in sets:
        names = [name for name in ACCURACIES if each.prefix + name in after] or ["reward"]
        for name in names:
            key, final = f"{each.prefix}{name}", f"{each.prefix}final/{name}"
            if key not in after:
                continue
            values = [f"{before[key]:.3f} before"] if key in before else []
            values.append(f"{after[key]:.3f} after training")
            what = " ".join(filter(None, ("held-out", each.name, ACCURACIES.get(name, "reward"))))
            yield f"{what}, on {after[f'{each.prefix}num_prompts']:.0f} prompts: {', '.join(values)}"
            if final in after:
                count = after[f"{each.prefix}final/num_prompts"]
                yield f"{what}, on {count:.0f} prompts: {after[final]:.3f} after training"


def _greedy_metrics(
    rewarded: RewardedBatch, right: np.ndarray | None, strict: np.ndarray | None
) -> dict[str, Metric]:
    rollouts, first_rows = rewarded.rollouts, rewarded.rollouts.episodes.first_rows
    count, truncated = len(first_rows), rollouts.finish_reason[first_rows] == "length"
    per_function = zip(rewarded.function_names, rewarded.rewards_per_function[:, first_rows], strict=True)
    of_functions = tuple(f"reward/{name}/" for name in rewarded.function_names)
    logged = {n for n in rewarded.metrics if n.startswith(of_functions) and n.rpartition("/")[2] not in STATS}
    metrics = {
        "num_prompts": Metric(count, reduction="sum"),
        "truncated_fraction": Metric(float(truncated.sum()), count),
        "completion_length": Metric(float(rollouts.completion_lengths.sum()), count),
        "reward": _mean(rewarded.rewards[first_rows]),
        **{f"reward/{name}": _mean(values) for name, values in per_function},
        **{
            name: metric
            for name, metric in rewarded.metrics.items()
            if name.startswith("reward/") and not name.endswith("/seconds")
            if metric.reduction == "sum" or name in logged
        },
    }
    metrics |= {
        name: metric for name, metric in rollouts.metrics.items() if name.startswith(("episode/", "agent/"))
    }
    if right is not None:
        metrics["accuracy_lenient"] = _mean(right[first_rows])
    if strict is not None:
        metrics["accuracy_strict"] = _mean(strict[first_rows])
    return metrics


def _mean(values: np.ndarray) -> Metric:
    """The mean of `values` without NaN entries, as a metric."""
    given = values[~np.isnan(values)]
    return Metric(float(given.sum(dtype=np.float64)), len(given))


def _sampled_metrics(rewarded: RewardedBatch, right: np.ndarray | None) -> dict[str, Metric]:
    if right is None:
        return {}
    first_rows = rewarded.rollouts.episodes.first_rows
    right, group_ids = right[first_rows], rewarded.rollouts.group_ids[first_rows]
    judged = ~np.isnan(right)
    groups, membership = np.unique(group_ids[judged], return_inverse=True)
    passed = np.bincount(membership, right[judged], len(groups)) > 0
    return {"mean_at_n": _mean(right), "pass_at_n": Metric(float(passed.sum()), len(groups))}


def evaluate_run(resolved: Resolved) -> dict[str, float]:
    """`quatrain eval`: the metrics of the model `model.path` on the evaluation sets of `data.eval`.

    Uses all prompts of each set, or the first `eval.final_num_prompts`. Shows progress on stderr. Raises
    ValueError if `data.eval` is null.
    """
    config = resolved.config
    if config.data.eval is None:
        given = config.run.on_given_data
        also = f"; the loss on {config.key_of('eval')} is eval/loss of the run's metrics" if given else ""
        raise ValueError(f"evaluation needs prompts: set data.eval, for example to a .jsonl file{also}")
    with starting(), waiting():
        loaded = load_policy(config, critic=False, adapters=False)
    count = config.eval.final_num_prompts
    with (
        closing(RewardScorer.of(config, loaded)) as scorer,
        closing(Evaluator(config, loaded, scorer)) as evaluator,
        Progress(1, programs=ProgramCount("eval", config)) as progress,
        closing(
            build_engine(config, loaded, scorer, on_progress=lambda decoding: progress.detail(str(decoding)))
        ) as engine,
    ):
        for warning in evaluator.warnings if is_main_process() else ():
            logger.warning("%s", warning)
        progress.phase("evaluation", evaluator.num_completions(engine, count), first=0)
        engine.sync_weights(loaded.params, 0)
        found = evaluator.evaluate(engine, first=count, count=count, on_progress=progress.step)
    return dict(sorted(finite_numbers(found.metrics).items()))
