"""A teacher on the quickstart: what is learned from rewards, from a teacher, and from both, and how fast.

    python benchmarks/distillation.py --teacher runs/teacher --out results.jsonl --figure distill.svg
    python benchmarks/distillation.py --teacher runs/teacher --only GRPO both --seeds 1 --out results.jsonl

A variant is the quickstart (`quatrain train` without arguments) for 60 steps with an evaluation every 5, and
the settings below; the student is the quickstart's after its warm start. `--teacher` is the folder of a run:
the quickstart of 150 steps, trained first if it is missing, whose `final/` teaches. Runs, results and figure
are those of `algorithms.py`, whose `--help` explains them; the table has the training steps until an
evaluation gives 0.95 or more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import algorithms
from algorithms import COMMON, Row, Settings

from quatrain.config.layers import file_layer

TARGET = 0.95
STEPS: Settings = {"run.steps": 60, "eval.every_steps": 5}
TAUGHT: Settings = {"update.kl_coef": 0}
ALONE: Settings = {**TAUGHT, "distill.rl_weight": 0}
VARIANTS: dict[str, Settings] = {
    "GRPO": {},
    "sampled, n 8": ALONE,
    "sampled, n 1": {**ALONE, "rollout.n": 1, "data.batch_size": 256},
    "both": TAUGHT,
    "reverse KL": {**ALONE, "distill.loss": "reverse_kl"},
    "sampled, n 1, 32 a step": {**ALONE, "rollout.n": 1},
}
FIGURE = tuple(VARIANTS)[:5]
"""The variants with as many sequences in a step."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="folder of the teacher's run")
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object per run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants to run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--figure", type=Path, help="file of the figure, as distill.svg")
    args = parser.parse_args(arguments)
    names = algorithms.select(list(VARIANTS), args.only)
    if not (args.teacher / "final").is_dir():
        train_teacher(args.teacher)
    failed = 0
    for seed in range(args.seeds):
        for name in names:
            settings = settings_of(name, seed, args.teacher)
            if any(
                algorithms.same(row, name, settings) and "error" not in row
                for row in algorithms.read_rows(args.out)
            ):
                continue
            algorithms.say(f"{name}, seed {seed} …")
            row = algorithms.run(name, seed, settings)
            algorithms.append(args.out, row)
            algorithms.say(f"{name}, seed {seed}: {algorithms.told(row)}")
            failed += "error" in row
    wanted = [
        (name, settings_of(name, seed, args.teacher)) for name in VARIANTS for seed in range(args.seeds)
    ]
    rows = algorithms.latest(algorithms.read_rows(args.out), wanted)
    print(table(rows))
    if args.figure is not None and algorithms.can_plot():
        shown = [row | {"variant": f"teacher/{row['variant']}"} for row in rows if row["variant"] in FIGURE]
        algorithms.draw(["teacher"], shown, args.figure, target=TARGET)
    return 1 if failed else 0


def settings_of(name: str, seed: int, teacher: Path) -> Settings:
    """All settings of a run, by dotted key: the quickstart's, then the variant's."""
    quickstart = {setting.key: setting.value for setting in file_layer(None)}
    taught = {"distill.teacher": str(teacher / "final")} if VARIANTS[name] else {}
    every = {**quickstart, **COMMON, **STEPS, **taught, **VARIANTS[name], "seed": seed}
    return dict(json.loads(json.dumps(every)))


def train_teacher(folder: Path) -> None:
    """The quickstart, with its own number of steps; raises SystemExit if it fails."""
    where = {"run.dir": str(folder.parent), "run.name": folder.name, **COMMON}
    overrides = [part for key, value in where.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    done = subprocess.run([sys.executable, "-m", "quatrain.cli", "train", *overrides], env=environ)
    if done.returncode:
        raise SystemExit("the teacher could not be trained")


def table(rows: Sequence[Row]) -> str:
    """The Markdown table: steps to the target and the last accuracy of each seed."""
    lines = [f"| | steps to {TARGET:g} | accuracy at the end |", "|---|---|---|"]
    for name in VARIANTS:
        done = [row for row in rows if row["variant"] == name and "error" not in row]
        steps = [algorithms.steps_to(TARGET, row["accuracy"]) for row in done]
        reached = ", ".join("–" if step is None else str(step) for step in steps)
        after = ", ".join(f"{row['after']:.3f}" for row in done)
        if done:
            lines.append(f"| {name} | {reached} | {after} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
