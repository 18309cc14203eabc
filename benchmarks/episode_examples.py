"""What the examples of episodes learn: the guessing game, and word problems with and without a calculator.

    python benchmarks/episode_examples.py --out results.jsonl --figure episodes.svg
    python benchmarks/episode_examples.py --only game --seeds 1 --out results.jsonl

Each variant is `quatrain train` with a configuration of `examples/`, as its page says, with the seeds 0, 1, …

    game               guessing_game.yaml; the figures are the reward, which is the share of games won
    calculator         calculator.yaml; the figures are the accuracy on held-out problems
    without the tool   calculator.yaml without the tool, and with the demonstrations that do not call it

Every run is a process of its own. Its result is added to `--out` when it ends; a later call skips what is in
that file. At the end it prints a Markdown table of all results, and `--figure` draws the evaluations and the
rewards of training over the steps, if matplotlib is installed. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from algorithms import append, commit, read_rows, say

from quatrain.config.schema import RolloutConfig
from quatrain.report.plot import can_plot, style_axes
from quatrain.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A configuration of `examples/`, settings beside it, and the metric of an evaluation."""

    config: str
    metric: str
    settings: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = {
    "game": Variant("guessing_game.yaml", "eval/reward"),
    "calculator": Variant("calculator.yaml", "eval/accuracy_lenient"),
    "without the tool": Variant(
        "calculator.yaml",
        "eval/accuracy_lenient",
        {
            "rollout.tools": [],
            "rollout.max_turns": RolloutConfig().max_turns,
            "rollout.max_environment_tokens": None,
            "sft.data": "calculator/guesses.jsonl",
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object per run")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--figure", type=Path, help="file of the figure, as episodes.svg")
    args = parser.parse_args(arguments)
    failed = 0
    for seed in range(args.seeds):
        for name in args.only:
            if any(_is(row, name, seed, args.set) and "error" not in row for row in read_rows(args.out)):
                continue
            row = run(name, seed, args.set)
            append(args.out, row)
            say(f"{name}, seed {seed}: {row.get('error') or row['evaluations'][-1][1]} in {row['wall_s']} s")
            failed += "error" in row
    rows = [row for row in read_rows(args.out) if "error" not in row and row["set"] == args.set]
    print(table(rows))
    if args.figure is not None and can_plot():
        draw(rows, args.figure)
    return 1 if failed else 0


def run(name: str, seed: int, more: Sequence[str]) -> Row:
    """Trains one variant, in a folder that has the files that the examples speak of."""
    variant = VARIANTS[name]
    row: Row = {"variant": name, "seed": seed, "set": list(more), "commit": commit()}
    row["load"] = round(os.getloadavg()[0], 2)
    settings = {**variant.settings, "seed": seed, "run.name": "run", "logging.wandb": "disabled"}
    texts = [f"{key}={json.dumps(value)}" for key, value in settings.items()] + list(more)
    command = ["-m", "quatrain.cli", "train", f"examples/{variant.config}"]
    command += [part for text in texts for part in ("--set", text)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(EXAMPLES)
        subprocess.run([sys.executable, "examples/calculator.py"], cwd=folder, check=True)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
        row["wall_s"] = round(time.perf_counter() - began, 1)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return row | {"error": said[-1]}
        return row | figures(read_metrics(Path(folder) / "runs" / "run" / "metrics.jsonl"), variant.metric)


def figures(metrics: Sequence[Mapping[str, Any]], evaluated: str) -> Row:
    """[step, value] of each evaluation, [step, mean reward] and [step, mean turns] of each training step."""

    def curve(name: str) -> list[list[float]]:
        return [[row["step"], round(row[name], 4)] for row in metrics if row.get(name) is not None]

    return {
        "evaluations": curve(evaluated),
        "rewards": curve("reward/mean"),
        "turns": curve("episode/turns/mean"),
        "train_s": round(sum(row.get("time/step_s") or 0 for row in metrics), 1),
    }


def table(rows: Sequence[Row]) -> str:
    """The Markdown table: means over the seeds, and each seed after training."""
    lines = [
        "| | held-out, before | after | each seed | reward of training, first 5 steps | last 5 steps | "
        "turns, last 5 steps |",
        "|---|---|---|---|---|---|---|",
    ]

    def mean(of: Sequence[Row], name: str, part: slice) -> str:
        values = [value for row in of for _, value in row[name][part]]
        return f"{statistics.fmean(values):.2f}" if values else "–"

    first, last = slice(0, 5), slice(-5, None)
    for name in VARIANTS:
        mine = [row for row in rows if row["variant"] == name]
        if not mine:
            continue
        each = ", ".join(f"{row['evaluations'][-1][1]:.2f}" for row in mine)
        cells = [
            name,
            mean(mine, "evaluations", slice(0, 1)),
            mean(mine, "evaluations", slice(-1, None)),
            each,
            mean(mine, "rewards", first),
            mean(mine, "rewards", last),
            mean(mine, "turns", last),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each variant: rewards of training (thin) and evaluations (dots) of every seed."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    # Text stays text and ids do not change from call to call: a small file with a small diff.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quatrain"}):
        figure = Figure(figsize=(10, 2.6), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
            style_axes(axes, name)
            for row in (row for row in rows if row["variant"] == name):
                axes.plot(*zip(*row["rewards"]), color="#9db9da", linewidth=0.8)
                axes.plot(*zip(*row["evaluations"]), color="#2667b5", linewidth=1.2, marker="o", markersize=3)
            if name == "game":
                axes.axhline(2 / 3, color="#bbbbbb", linewidth=0.8, linestyle=":")
            axes.set_ylim(-0.03, 1.03)
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def _is(row: Row, name: str, seed: int, more: Sequence[str]) -> bool:
    return (row["variant"], row["seed"], row["set"]) == (name, seed, list(more))


if __name__ == "__main__":
    sys.exit(main())
