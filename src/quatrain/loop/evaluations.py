"""The evaluations of a run: before training, every `eval.every_steps` steps, and after the last one.

Used by `train.py` between two steps. Data flow: weights -> `evaluate.Evaluator`, in the rollout's turn ->
metrics, completions, the accuracy that progress lines show, and the best evaluation so far.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from quatrain.cluster.stop import Stop
from quatrain.config.data_sets import shown_data_sets
from quatrain.config.errors import listed, of_which_nearest
from quatrain.config.schema import Config
from quatrain.config.secrets import comparable, same
from quatrain.loop.asynchronous import AsyncRollouts
from quatrain.loop.evaluate import Evaluation, Evaluator, finite_numbers, result
from quatrain.loop.recorder import Recorder
from quatrain.loop.stages import Stages
from quatrain.run.best import Best
from quatrain.run.resume import differing
from quatrain.run.run_dir import RunDir
from quatrain.update.learner import TrainState

logger = logging.getLogger(__name__)


def best_of(config: Config, folder: RunDir, evaluator: Evaluator) -> Best | None:
    """The best evaluation by `checkpoint.best_metric`, or None; raises ValueError if no evaluation has it."""
    metric = config.checkpoint.best_metric
    if metric is None:
        return None
    if config.data.eval is None:
        raise ValueError(
            f"checkpoint.best_metric needs evaluations; got {metric} and data.eval null; set data.eval, or "
            "checkpoint.best_metric to null"
        )
    names = evaluator.metric_names()
    if metric not in names:
        raise ValueError(
            "checkpoint.best_metric must be a metric that every evaluation has"
            f"{of_which_nearest(metric, names)}; got {metric}; they are {listed(names)}"
        )
    return Best(folder.path, metric, config.checkpoint.best_mode)


class Evaluations:
    """Evaluates a run of `steps` training steps with the engine of its rollout, in turn with `batches`."""

    def __init__(
        self,
        config: Config,
        evaluator: Evaluator,
        best: Best | None,
        stages: Stages,
        batches: AsyncRollouts,
        recorder: Recorder,
        stop: Stop,
        *,
        steps: int,
    ):
        self._config, self._evaluator, self._stages = config, evaluator, stages
        self._batches, self._recorder, self._stop, self._steps = batches, recorder, stop, steps
        self._done_as = self._what_decides()
        self.best = best
        self.before: dict[str, float] = {}
        """Metrics before training."""
        self.accuracy: float | None = None
        """Accuracy of the last evaluation, for progress lines; None also where it was of another kind."""
        self._evaluated: int | None = None
        """The training step that was evaluated last."""

    def first(self, params: Any) -> None:
        """Evaluate `params` before training, unless `eval.before` is false."""
        if self._config.eval.before:
            self.before = self._evaluate(params, 0, 0, "evaluation before training")

    def when_due(self, state: TrainState) -> None:
        """Evaluate every `eval.every_steps` training steps, except after the last."""
        if self._is_due(state.train_step):
            self._evaluate(state.params, state.train_step, state.step, "evaluation")

    def last(self, params: Any, step: int, *, version: int) -> dict[str, float]:
        """The metrics of `params`, after so many optimizer steps, on `eval.final_num_prompts`."""
        return self._evaluate(params, step, version, "final evaluation", last=True)

    def _is_due(self, step: int) -> bool:
        every = self._config.eval.every_steps
        return bool(every and step) and step % every == 0 and step < self._steps and step != self._evaluated

    def _evaluate(
        self, params: Any, step: int, version: int, name: str, *, last: bool = False
    ) -> dict[str, float]:
        sets = self._evaluator.sets
        if not sets:
            return {}
        config, recorder = self._config.eval, self._recorder
        first = config.usual_num_prompts
        count = config.final_num_prompts if last else first
        engine = self._stages.rollout
        total = self._evaluator.num_completions(engine, count)
        recorder.progress.stage(name)

        def job() -> Evaluation:
            engine.sync_weights(params, version)
            return self._evaluator.evaluate(
                engine,
                first=first,
                count=count,
                teacher_kl=self._stages.teacher_kl(params),
                on_progress=lambda done: recorder.progress.stage(f"{name} {done}/{total}"),
            )

        with self._stop.interruptible(), recorder.timer.stage("eval"):
            evaluation = self._batches.run(job)
        self._evaluated = step
        recorder.log(step, evaluation.metrics)
        recorder.report.evaluation(step, evaluation.samples)
        recorder.report.page()
        numbers = finite_numbers(evaluation.metrics)
        for of_set in () if last else result(sets, numbers):
            recorder.report.event(f"evaluation at step {step}: {of_set}")
        if self.best is not None:
            self.best.note(step, numbers)
        self.accuracy = numbers.get(f"{sets[0].prefix}accuracy_lenient")
        return numbers

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
        changed = self._changed(saved)
        if changed:
            logger.warning(
                "the evaluations have changed in %s: they are compared neither with that before training nor "
                "with the best so far",
                ", ".join(changed),
            )
            self.before, self.accuracy = {}, None
        if self.best is not None:
            self.best.restore(saved.get("best"), step, [] if changed else checkpoints)

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
            "data.eval": {name: shown_data_sets(spec) for name, spec in config.data.eval_sets.items()},
            "num_prompts": count,
            "accuracy": config.eval.accuracy,
            "max_new_tokens": config.eval.max_new_tokens or rollout.max_new_tokens,
            **(episodes if rollout.has_episodes else {}),
            "rows": {each.name: each.source.digests(count) for each in self._evaluator.sets},
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
