"""The evaluations of a run: before training, every `eval.every_steps` steps, and after the last one.

Used by `train.py` between two steps. Data flow: weights -> the loss on given data (`given.Course`), and
`evaluate.Evaluator` in the rollout's turn -> metrics, completions, the accuracy that progress lines show, and
the best evaluation so far.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

from quatrain.cluster.stop import Stop
from quatrain.config.data_sets import shown_data_sets
from quatrain.config.errors import listed, of_which_nearest
from quatrain.config.schema import Config
from quatrain.config.secrets import comparable, same
from quatrain.config.tasks import EVALUATED
from quatrain.loop.evaluate import Evaluation, Evaluator, TeacherKL, finite_numbers, result, results
from quatrain.loop.given import Course
from quatrain.loop.recorder import Recorder
from quatrain.models.feature_store import FeatureStore
from quatrain.rollout.rollouts import Rollouts
from quatrain.run.best import Best
from quatrain.run.resume import differing
from quatrain.run.run_dir import RunDir
from quatrain.types.metrics import Metric
from quatrain.update.learner import TrainState

logger = logging.getLogger(__name__)


def best_of(config: Config, folder: RunDir, names: Sequence[str]) -> Best | None:
    """The best evaluation by `checkpoint.best_metric`, or None.

    `names`: the metrics of every evaluation. Raises ValueError if the metric is none of them.
    """
    metric = config.checkpoint.best_metric
    if metric is None:
        return None
    if not names:
        raise ValueError(
            f"checkpoint.best_metric needs evaluations; got {metric} and nothing to evaluate on; set "
            f"{EVALUATED[config.run.task]}, or checkpoint.best_metric to null"
        )
    if metric not in names:
        raise ValueError(
            "checkpoint.best_metric must be a metric that every evaluation has"
            f"{of_which_nearest(metric, names)}; got {metric}; they are {listed(names)}"
        )
    return Best(folder.path, metric, config.checkpoint.best_mode)


InTurn = Callable[[Callable[[], Evaluation]], Evaluation]
"""Runs a job that samples, when it is its turn to."""


@dataclass(frozen=True)
class Generation:
    """What generates completions for evaluations, and what judges them."""

    evaluator: Evaluator
    engine: Rollouts
    in_turn: InTurn
    teacher_kl: Callable[[Any], TeacherKL | None] = lambda params: None
    """Of the policy with these parameters."""

    @classmethod
    def beside(cls, evaluator: Evaluator, engine: Rollouts) -> Self:
        """With an engine of its own, whose memory is the update's between evaluations."""

        def in_turn(job: Callable[[], Evaluation]) -> Evaluation:
            try:
                return job()
            finally:
                engine.release()

        return cls(evaluator, engine, in_turn)


class Evaluations:
    """Evaluates a run of `steps` training steps: on given data by `course`, and by `generation`.

    `store` has the features of pictures, of which evaluations keep none for training.
    """

    def __init__(
        self,
        config: Config,
        best: Best | None,
        recorder: Recorder,
        stop: Stop,
        *,
        steps: int,
        generation: Generation | None = None,
        course: Course | None = None,
        store: FeatureStore | None = None,
    ):
        self._config, self._generation, self._course = config, generation, course
        self._recorder, self._stop, self._steps, self._store = recorder, stop, steps, store
        self._sets = [] if generation is None else generation.evaluator.sets
        self._done_as = self._what_decides()
        self.best = best
        self.before: dict[str, float] = {}
        """Metrics before training."""
        self.accuracy: float | None = None
        """Accuracy of the last evaluation, for progress lines; None also where it was of another kind."""
        self._evaluated: int | None = None
        """The training step that was evaluated last."""
        self.changed: list[str] = []
        """How the evaluations of this run differ from those before the checkpoint that it goes on from."""

    def first(self, params: Any) -> None:
        """Evaluate `params` before training, unless `eval.before` is false."""
        if self._config.eval.before:
            self.before = self._evaluate(params, 0, 0, "evaluation before training")

    def when_due(self, state: TrainState) -> dict[str, float]:
        """The metrics every `eval.every_steps` training steps, except after the last; else none."""
        if not self._is_due(state.train_step):
            return {}
        return self._evaluate(state.params, state.train_step, state.step, "evaluation")

    def last(self, params: Any, step: int, *, version: int) -> dict[str, float]:
        """The metrics of `params`, after so many optimizer steps, on `eval.final_num_prompts`."""
        return self._evaluate(params, step, version, "final evaluation", last=True)

    def _is_due(self, step: int) -> bool:
        every = self._config.eval.every_steps
        return bool(every and step) and step % every == 0 and step < self._steps and step != self._evaluated

    def _evaluate(
        self, params: Any, step: int, version: int, name: str, *, last: bool = False
    ) -> dict[str, float]:
        recorder, course = self._recorder, self._course
        if not self._sets and (course is None or course.evaluation is None):
            return {}
        recorder.progress.stage(name)
        metrics: dict[str, Metric] = {}
        passing = nullcontext() if self._store is None else self._store.passing()
        with self._stop.interruptible(), recorder.timer.stage("eval"), passing:
            if course is not None:
                metrics |= course.evaluate(params)
            generated = self._generate(params, version, name, last=last)
        metrics |= generated.metrics
        self._evaluated = step
        recorder.log(step, metrics)
        recorder.report.evaluation(step, generated.samples)
        recorder.report.page()
        numbers = finite_numbers(metrics)
        for line in () if last else (*losses(numbers), *result(self._sets, numbers)):
            recorder.report.event(f"evaluation at step {step}: {line}")
        if self.best is not None:
            self.best.note(step, numbers)
        shown = f"{self._sets[0].prefix}accuracy_lenient" if self._sets else "eval/accuracy"
        self.accuracy = numbers.get(shown)
        return numbers

    def _generate(self, params: Any, version: int, name: str, *, last: bool) -> Evaluation:
        """The evaluation of completions, if there is one."""
        generation, config, progress = self._generation, self._config.eval, self._recorder.progress
        if generation is None or not self._sets:
            return Evaluation()
        first = config.usual_num_prompts
        count = config.final_num_prompts if last else first
        total = generation.evaluator.num_completions(generation.engine, count)

        def job() -> Evaluation:
            generation.engine.sync_weights(params, version)
            return generation.evaluator.evaluate(
                generation.engine,
                first=first,
                count=count,
                teacher_kl=generation.teacher_kl(params),
                on_progress=lambda done: progress.stage(f"{name} {done}/{total}"),
            )

        return generation.in_turn(job)

    def results(self, after: Mapping[str, float]) -> Iterator[str]:
        """Sentences that compare the evaluations before and after training."""
        for key in LOSSES:
            if key in after:
                values = [f"{self.before[key]:.4f} before"] if key in self.before else []
                yield f"{key}: {', '.join([*values, f'{after[key]:.4f} after training'])}"
        yield from results(self._sets, self.before, after)

    def to_save(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` keeps of the evaluations so far."""
        return {
            "before": self.before,
            "evaluated_as": {what: comparable(value, os.environ) for what, value in self._done_as.items()},
            "accuracy": self.accuracy,
            "evaluation_due": self._is_due(step),
            "best": None if self.best is None else self.best.found,
        }

    def restore(self, saved: Mapping[str, Any], step: int, checkpoints: list[int]) -> None:
        """Goes on from the checkpoint of `step`; evaluations of another kind are not compared with later."""
        self.before, self.accuracy = saved["before"], saved["accuracy"]
        self._evaluated = None if saved["evaluation_due"] else step
        self.changed = self._changed(saved)
        if self.changed:
            logger.warning(
                "the evaluations have changed in %s: they are compared neither with that before training nor "
                "with the best so far",
                ", ".join(self.changed),
            )
            self.before, self.accuracy = {}, None
        if self.best is not None:
            self.best.restore(saved.get("best"), step, [] if self.changed else checkpoints)

    def _what_decides(self) -> dict[str, Any]:
        """What decides whether two evaluations of a run can be compared, as JSON values."""
        config, rollout = self._config, self._config.rollout
        count = config.eval.usual_num_prompts
        episodes = {
            "environment": rollout.environment,
            "tools": list(rollout.tools),
            "max_turns": rollout.max_turns,
            "max_environment_tokens": rollout.max_environment_tokens,
        }
        return {
            **({} if self._course is None else self._course.evaluated_as),
            "data.eval": {name: shown_data_sets(spec) for name, spec in config.data.eval_sets.items()},
            "num_prompts": count,
            "accuracy": config.eval.accuracy,
            "max_new_tokens": config.eval.max_new_tokens or rollout.max_new_tokens,
            **(episodes if rollout.has_episodes else {}),
            "rows": {each.name: each.source.digests(count) for each in self._sets},
        }

    def _changed(self, saved: Mapping[str, Any]) -> list[str]:
        """What differs from the evaluations of the checkpoint `saved`."""
        now = self._done_as
        before = {"rows": now["rows"]} | saved.get("evaluated_as", now)  # earlier versions saved no digests
        changed = [
            what for what in {**before, **now} if what not in before or not same(before[what], now.get(what))
        ]
        if changed != ["rows"]:
            return [what for what in changed if what != "rows"]
        return [
            f"{part} of {shown_data_sets(self._config.data.eval_sets[name])}"
            for name, digests in now["rows"].items()
            for part in differing(before["rows"].get(name, {}), digests)
        ]


LOSSES = ("eval/loss", "eval/accuracy")
"""The metrics of given data that are said in sentences."""


def losses(numbers: Mapping[str, float]) -> Iterator[str]:
    """What an evaluation on given data found, in words."""
    if found := [f"{key.removeprefix('eval/')} {numbers[key]:.4f}" for key in LOSSES if key in numbers]:
        yield ", ".join(found)
