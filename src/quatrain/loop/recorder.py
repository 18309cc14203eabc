"""What a run shows and writes of its steps: progress, timings, traces, metrics, samples, warnings.

Used by `train.py` and `run.py` around each stage and step; the files are those of `report/writer.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from quatrain.cluster.processes import is_main_process
from quatrain.cluster.stop import Stop
from quatrain.config.schema import Config
from quatrain.loop.asynchronous import TrainBatch
from quatrain.parallel.compilations import compile_seconds
from quatrain.parallel.host_memory import peak_bytes
from quatrain.report.progress import Progress
from quatrain.report.writer import Report
from quatrain.run.metrics import StageTimer, reduce_metrics
from quatrain.types.metrics import Metric, Metrics
from quatrain.types.rollouts import RolloutProgress

logger = logging.getLogger(__name__)
LEAST_BLIND_GAP = 1e-6
"""Nats below which `vision/blind_gap` is nothing."""


class Recorder:
    """Shows and times the stages of a run in `folder`, and writes what its steps gave.

    `report` is open, and `progress` shown, as long as the run is in progress.
    """

    report: Report
    progress: Progress

    def __init__(self, config: Config, folder: Path, stop: Stop, left_out: Metrics):
        self._config, self._folder, self._stop = config, folder, stop
        self._left_out = left_out
        """Metrics of the rows that are not trained on, which every step has."""
        self._tracing = False
        self.timer = StageTimer()
        self.numbers: dict[str, float] = {}
        """Metrics of the last training step, those of the evaluation after it among them."""
        self._last = -1

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measures the seconds of a training step and of compiling in it; `run.profile_steps` are traced.

        Consecutive steps are one trace.
        """
        traced = self._config.run.profile_steps
        if step in traced and not self._tracing and is_main_process():
            jax.profiler.start_trace(str(self._folder / "profile"))
            self._tracing = True
        if self._config.rollout.max_staleness:
            self.progress.stage("waiting for the rollout")
        before, goes_on = compile_seconds(), False
        try:
            with self.timer.stage("step"):
                yield
            goes_on = step + 1 in traced
        finally:
            self.timer.add("compile", compile_seconds() - before)
            if self._tracing and not goes_on:
                jax.profiler.stop_trace()
                self._tracing = False

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Shows `stage` in the progress display, and measures its seconds."""
        self.progress.stage(stage)
        with self.timer.stage(stage):
            yield

    def took(self, batch: TrainBatch) -> None:
        """Counts the seconds of the stages that a batch has gone through."""
        for stage, seconds in batch.seconds.items():
            self.timer.add(stage, seconds)

    def show_sampling(self, stage: str) -> None:
        """Shows what the rollout does: as the stage of the step, or beside it where it runs ahead."""
        (self.progress.beside if self._config.rollout.max_staleness else self.progress.stage)(stage)

    def show_decoding(self, decoding: RolloutProgress) -> None:
        """Shows the progress of the rollout, after which the run may be stopped."""
        if self._config.rollout.max_staleness:
            self.progress.beside(f"rollout: {decoding}")
        else:
            self.progress.detail(str(decoding))
        self._stop.safe_point()

    def log(self, step: int, metrics: Metrics | None = None) -> None:
        """Writes metrics of `step`, and the seconds of the stages since the last call; the page is due."""
        numbers = reduce_metrics({**(metrics or {}), **self.timer.metrics()})
        self.report.log(step, numbers)
        if step == self._last:
            self.numbers |= numbers

    def record(
        self,
        step: int,
        metrics: Metrics,
        num_tokens: float,
        *,
        accuracy: float | None,
        loss: float | None = None,
    ) -> None:
        """Writes metrics, hints and warnings of a step on `num_tokens`, and moves the progress display on."""
        tokens_per_s = num_tokens / self.timer.seconds("step")
        self._last, self.numbers = (
            step,
            reduce_metrics(
                {
                    **metrics,
                    **self.timer.metrics(),
                    **peak_memory(),
                    "throughput/tokens_per_s": Metric(tokens_per_s),
                    **self._left_out,
                }
            ),
        )
        self.report.log(step, self.numbers)
        self.report.hint(step, self.numbers)
        mismatch = logprob_diff_warning(self._config, metrics)
        if mismatch is not None:
            logger.warning("step %d: %s", step, mismatch)
        gap = metrics.get("vision/blind_gap")
        if gap is not None and gap.result() < LEAST_BLIND_GAP:
            logger.warning(
                "step %d: grey in the place of pictures changes log-probabilities by %.2g nats on average: "
                "the model does not see them. Look at a sample's prompt, at model.path and at its "
                "preprocessor_config.json",
                *(step, gap.result()),
            )
        reward = metrics["reward/mean"].result() if "reward/mean" in metrics else None
        self.progress.step(step, reward=reward, loss=loss, accuracy=accuracy, tokens_per_s=tokens_per_s)


def left_out(source: Any, rows: str) -> Metrics:
    """Metrics of the `rows` of a source that are not trained on, or not whole: `data/skipped_prompts` …"""
    counts = {
        "skipped": source.skipped + source.longer,
        "truncated": source.truncated,
        "filtered": source.filtered,
    }
    return {f"data/{kind}_{rows}": Metric(count, reduction="sum") for kind, count in counts.items()}


def logprob_diff_warning(config: Config, update: Metrics) -> str | None:
    """The warning for a step if sampler and trainer differ by more than `rollout.logprob_diff_warning`.

    None if they do not, if no token was trained on, and if the key is null.
    """
    limit, mean = config.rollout.logprob_diff_warning, update.get("rollout/logprob_diff_mean")
    if limit is None or mean is None or not mean.result() > limit:
        return None
    return (
        f"log-probabilities of sampler and trainer differ by {mean.result():.3g} nats on average and "
        f"{update['rollout/logprob_diff_max'].result():.3g} at most (rollout.logprob_diff_warning is "
        f"{limit:g}): the trained policy differs from the one that was sampled from. Sample without "
        f"rollout.top_p, top_k and min_p, or set model.dtype to float32 (it is {config.model.dtype}); null "
        "disables this warning"
    )


def peak_memory() -> dict[str, Metric]:
    """The most memory in use so far, where the device or the system tells."""
    peak = peak_bytes()
    return {} if peak is None else {"memory/peak_gib": Metric(peak / 2**30, reduction="max")}
