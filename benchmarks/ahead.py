"""Rollouts ahead of training: how much of the ideal overlap is reached.

    python benchmarks/ahead.py schedule
    python benchmarks/ahead.py overlap --steps 12 --figure timeline.svg

`schedule` runs `AsyncRollouts` with stages that sleep, for constant and for random times, and compares the
time of the whole run with that of the ideal schedule for the times that were drawn (`ideal_makespan`).

`overlap` trains the quickstart on two simulated CPU devices with one thread each, rollout and training on a
device of their own, in processes one after the other: with `rollout.max_staleness` 0 (each stage runs alone),
with 1, and in flight. It prints the median seconds of a step, and beside them the larger of rollout and
update measured alone. `--figure` draws when rollout and training were busy in the three runs.

Both need a quiet machine; `overlap` needs two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from quatrain.loop.asynchronous import AsyncRollouts
from quatrain.report.plot import can_plot, style_axes
from quatrain.run.metrics import read_metrics
from quatrain.types.batches import PromptPlace, RewardedBatch, RolloutBatch

STEPS = 24
"""Training steps of a run of `schedule`."""
MODES: dict[str, tuple[str, ...]] = {
    "0": (),
    "1": ("rollout.max_staleness=1",),
    "1, in flight": ("rollout.max_staleness=1", "rollout.in_flight=true"),
}
"""Settings of the runs of `overlap`, by how the table and the figure call them."""
APART = (
    "placement.train=0",
    "placement.rollout=1",
    "sft.steps=60",
    "eval.every_steps=0",
    "eval.num_prompts=1",
    "eval.final_num_prompts=1",
    "checkpoint.every_steps=0",
    "logging.wandb=disabled",
)
FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
WARM_UP = 3
"""Steps at the start that compile, and are not counted."""

Row = Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("schedule", "overlap"))
    parser.add_argument("--steps", type=int, default=12, help="measured training steps of `overlap`")
    parser.add_argument("--unit", type=float, default=0.05, help="mean seconds of a sleeping stage")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs of `overlap`"
    )
    parser.add_argument("--figure", type=Path, help="file of the figure of `overlap`, as timeline.svg")
    args = parser.parse_args(arguments)
    if args.what == "schedule":
        print("\n".join(schedule_table(args.unit)))
        return 0
    runs = {name: overlap_run((*settings, *args.set), args.steps) for name, settings in MODES.items()}
    print("\n".join(overlap_table(runs)))
    if args.figure is not None:
        if not can_plot():
            raise SystemExit(
                f"{args.figure} is not drawn: it needs matplotlib, `pip install 'quatrain[plot]'`"
            )
        draw(runs, args.figure)
    return 0


# --- stages that sleep ---


def ideal_makespan(rollout: Sequence[float], update: Sequence[float], lag: int, fence_every: int) -> float:
    """Seconds of a run whose step t needs `rollout[t]` and `update[t]`, if nobody waits without need.

    The rollout of batch t begins when that of batch t - 1 has ended and the weights that sample it exist:
    those after step max(t - lag, last fence up to t). The update of step t begins when its batch is there
    and the update before it has ended.
    """
    sampled: list[float] = []
    trained: list[float] = []
    for t in range(len(rollout)):
        fence = t // fence_every * fence_every if fence_every else 0
        needed = max(t - lag, fence)  # number of updates that come before
        ready = trained[needed - 1] if needed else 0.0
        sampled.append(max(sampled[-1] if sampled else 0.0, ready) + rollout[t])
        trained.append(max(trained[-1] if trained else 0.0, sampled[t]) + update[t])
    return trained[-1]


class Sleeping:
    """Rollout, reward and stream of prompts in one: a batch of one token takes the seconds of its step."""

    def __init__(self, seconds: Sequence[float]):
        self.seconds = seconds

    def place(self, params: Any) -> Any:
        return params

    def sync_weights(self, params: Any, version: int) -> None:
        self.version = version

    def release(self) -> None:
        pass

    def generate(self, prompts: Sequence[int], *, step: int) -> RolloutBatch:
        time.sleep(self.seconds[step])
        mask = np.array([[False, True]])
        return RolloutBatch(
            input_ids=np.ones((1, 2), np.int32),
            attention_mask=np.ones((1, 2), np.bool_),
            completion_mask=mask,
            rollout_logprobs=np.zeros((1, 2), np.float32),
            policy_version=np.where(mask, self.version, -1).astype(np.int32),
            finish_reason=np.array(["stop"]),
            group_ids=np.array([step], np.int64),
            prompts=("",),
            completions=("",),
        )

    def score(self, rollouts: RolloutBatch) -> RewardedBatch:
        zero = np.zeros(1, np.float32)
        return RewardedBatch(rollouts, zero, zero[None], ("none",))

    def take(self, place: PromptPlace, sample: Any) -> tuple[RewardedBatch, PromptPlace]:
        return sample([place.next_prompt]), PromptPlace(place.next_prompt + 1)

    def close(self) -> None:
        pass


def sleeping_run(rollout: Sequence[float], update: Sequence[float], lag: int, fence_every: int) -> float:
    """Measured seconds of `AsyncRollouts` with these stages; checks which weights sample each batch."""
    sleeping: Any = Sleeping(rollout)
    stages: Any = SimpleNamespace(rollout=sleeping, reward=sleeping)
    ahead = AsyncRollouts(stages, sleeping, max_staleness=lag, steps=len(rollout), barrier_every=fence_every)
    began = time.perf_counter()
    for t in range(len(rollout)):
        state: Any = SimpleNamespace(params={"w": jnp.zeros(1)}, step=t, train_step=t, place=PromptPlace(t))
        taken = ahead.take(state)
        fence = t // fence_every * fence_every if fence_every else 0
        assert taken.rewarded.rollouts.policy_version[0, 1] == max(t - lag, fence)
        time.sleep(update[t])
    seconds = time.perf_counter() - began
    ahead.close()
    return seconds


def schedule_table(unit: float) -> list[str]:
    """A Markdown table: measured seconds over those of the ideal schedule."""
    rng = np.random.default_rng(0)
    times = {
        "equal": (np.full(STEPS, unit), np.full(STEPS, unit)),
        "rollout twice as long": (np.full(STEPS, 2 * unit), np.full(STEPS, unit)),
        "log-normal, sigma 0.5": tuple(unit * rng.lognormal(0, 0.5, (2, STEPS))),
    }
    lines = [
        "| stages | lag | fence every | seconds | ideal | ratio | without a lag |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (rollout, update) in times.items():
        for lag in range(4):
            for fence_every in (0, 8):
                ideal = ideal_makespan(rollout, update, lag, fence_every)
                seconds = sleeping_run(rollout, update, lag, fence_every)
                alone = float(np.sum(rollout) + np.sum(update))
                lines.append(
                    f"| {name} | {lag} | {fence_every or '–'} | {seconds:.2f} | {ideal:.2f} "
                    f"| {seconds / ideal:.3f} | {alone:.2f} |"
                )
    return lines


# --- the quickstart on two devices ---


def overlap_run(settings: Sequence[str], steps: int) -> list[Row]:
    """The metrics of the measured steps of a run in a process of its own."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {FLAGS}"
    environ["PJRT_NPROC"] = "1"  # else a stage that runs alone uses the threads of both devices
    with tempfile.TemporaryDirectory() as folder:
        every = (*APART, *settings, f"run.steps={steps + WARM_UP}", f"run.dir={folder}", "run.name=run")
        command = [sys.executable, "-m", "quatrain.cli", "train", *(x for s in every for x in ("--set", s))]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr.strip().splitlines()[-1])
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    return [row for row in rows if row["step"] > WARM_UP and "time/step_s" in row]


def rollout_s(row: Row) -> float:
    """Seconds that the rollout and its rewards took."""
    return row["time/rollout_s"] + row["time/reward_s"]


def update_s(row: Row) -> float:
    """Seconds of a step without those of the rollout and of waiting for it."""
    parts = ("time/token_scores_s", "time/advantage_s", "time/update_s")
    return sum(row.get(name, 0.0) for name in parts)


def overlap_table(runs: Mapping[str, Sequence[Row]]) -> list[str]:
    """A Markdown table with the medians of each run."""

    def median(rows: Sequence[Row], of: Any) -> float:
        return statistics.median(of(row) for row in rows)

    alone = runs["0"]
    bound = max(median(alone, rollout_s), median(alone, update_s))
    lines = [
        "| `rollout.max_staleness` | step | rollout | update | training waits | rollout waits "
        "| step / larger stage alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in runs.items():
        step = median(rows, lambda row: row["time/step_s"])
        waits = [
            median(rows, lambda row, k=k: row.get(f"time/{k}_s", 0.0))
            for k in ("wait_rollout", "wait_weights")
        ]
        cells = (step, median(rows, rollout_s), median(rows, update_s), *waits)
        lines.append(f"| {name} | {' | '.join(f'{value:.3f}' for value in cells)} | {step / bound:.2f} |")
    return lines


def spans(rows: Sequence[Row]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """[(begin, seconds)] of each rollout and of each update, from 0 at the first step's begin.

    A step's seconds are known. Its update ends with it, and its rollout began `time/lead_s` before training
    took the batch, which is when training had waited for it; without a lag it began with the step.
    """
    rollouts, updates = [], []
    began = 0.0
    for row in rows:
        step, update = row["time/step_s"], update_s(row)
        waited = row.get("time/wait_rollout_s", 0.0) + row.get("time/place_weights_s", 0.0)
        rollouts.append((began + waited - row.get("time/lead_s", 0.0), rollout_s(row)))
        updates.append((began + step - update, update))
        began += step
    return rollouts, updates


def draw(runs: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Two lines for each run, rollout and training, with a bar where it was busy."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quatrain"}):
        figure = Figure(figsize=(9, 1.3 * len(runs)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(runs), 1, sharex=True, squeeze=False)
        for axes, (name, rows) in zip(grid[:, 0], runs.items(), strict=True):
            style_axes(axes, f"rollout.max_staleness {name}")
            rollouts, updates = spans(rows)
            for height, bars, color in ((1, rollouts, "#2667b5"), (0, updates, "#c46a1b")):
                shades = [0.9 if k % 2 else 0.55 for k in range(len(bars))]
                for bar, shade in zip(bars, shades, strict=True):
                    axes.broken_barh([bar], (height - 0.35, 0.7), color=color, alpha=shade, linewidth=0)
            axes.set_yticks([0, 1], ["training", "rollout"])
            axes.set_xlabel("")
        grid[-1, 0].set_xlabel("seconds")
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
