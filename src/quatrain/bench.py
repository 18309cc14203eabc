"""`quatrain bench`: seconds per stage of the training step of a configuration, on this machine.

Runs real training steps into a temporary folder, drops the first (it compiles) and reports medians.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from quatrain.config.load import Resolved
from quatrain.report.metrics import read_metrics
from quatrain.train import train

MEASURES = (
    "time/step_s",
    "time/rollout_s",
    "time/reward_s",
    "time/advantage_s",
    "time/update_s",
    "rollout/tokens_per_s",
    "throughput/tokens_per_s",
    "throughput/update_tokens_per_s",
)


def bench(resolved: Resolved, steps: int) -> dict[str, float]:
    """Median of each of `MEASURES` over `steps` training steps, after one that is dropped.

    No warm start, no evaluation, no checkpoint but the last; nothing is left on disk.
    """
    with tempfile.TemporaryDirectory(prefix="quatrain-bench-") as folder:
        config = resolved.config.model_copy(
            update={
                "run": resolved.config.run.model_copy(
                    update={"dir": folder, "name": "bench", "steps": steps + 1}
                ),
                "sft": resolved.config.sft.model_copy(update={"steps": 0}),
                "data": resolved.config.data.model_copy(update={"eval": None}),
                "checkpoint": resolved.config.checkpoint.model_copy(update={"every_steps": 0}),
                "logging": resolved.config.logging.model_copy(
                    update={"wandb": "disabled", "tensorboard": False}
                ),
            }
        )
        train(replace(resolved, config=config))
        rows = [row for row in read_metrics(Path(folder) / "bench" / "metrics.jsonl") if row["step"] > 1]
    return {name: statistics.median(row[name] for row in rows) for name in MEASURES}
