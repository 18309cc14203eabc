"""Every advantage estimator and every policy loss on the quickstart: what each learns, and how fast.

    python benchmarks/algorithms.py --out results.jsonl --figure algorithms.svg
    python benchmarks/algorithms.py --only gae gspo --seeds 1 --steps 30 --out results.jsonl
    python benchmarks/algorithms.py --only 'loss/*' --out results.jsonl

A variant is the quickstart (`quatrain train` without arguments) with one estimator and the loss `ppo_clip`
(`estimator/NAME`), or with the estimator `grpo` and one loss (`loss/NAME`), and the settings of the tables
below. Each is trained for the same number of steps with the seeds 0, 1, …: a run with one seed has the same
model, warm start and prompts in every variant. `--set` adds settings to all of them.

Every run is a process of its own. Its result is added to `--out` when it ends, with all settings; a later
call skips what is in that file with the same settings, and repeats what failed. Seeds are the outer loop, so
that an interrupted call leaves every variant with the first seeds.

At the end it prints Markdown tables of all results in `--out` with these settings, also of those that
`--only` leaves out of this call:

    before, after  held-out accuracy (greedy, strict format), mean of the seeds
    each seed      accuracy after training
    steps to 0.9   training steps until an evaluation gives 0.9 or more; evaluations are `eval.every_steps`
                   apart; – if none does
    seconds        of the training steps, without compilation, median of the seeds

`--figure` draws the accuracy over the steps, if matplotlib is installed. The exit status is 1 if a run
failed. Seconds are for comparison within one file from one quiet machine: `load` in the file is the load
average before a run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quatrain.config.algorithms import ESTIMATORS, LOSSES
from quatrain.config.errors import installation
from quatrain.config.settings import file_layer, override_layer
from quatrain.report.plot import can_plot, style_axes
from quatrain.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
ACCURACY = "eval/accuracy_strict"
TARGET = 0.9
"""Accuracy whose first evaluation counts as `steps to 0.9`."""
ENDS = ("before", "after")

Settings = dict[str, Any]
Row = dict[str, Any]
"""A result: `variant`, `seed`, `settings` and either `error` or the figures of `figures`."""

COMMON: Settings = {
    "run.steps": 150,  # those of the committed results; the quickstart has fewer
    "eval.every_steps": 10,
    "checkpoint.every_steps": 0,  # only the last one: writing them is not what is compared
    "logging.wandb": "disabled",  # whatever the environment says
}
KIND_SETTINGS: dict[str, Settings] = {
    # One optimizer step per training step, as in the quickstart: only the advantages differ.
    "estimator": {"update.loss": "ppo_clip"},
    # Two mini-batches: with a single optimizer step the ratio is 1, and all losses have the same gradient.
    "loss": {"advantage.estimator": "grpo", "update.mini_batch_size": 16},
}
VARIANT_SETTINGS: dict[str, Settings] = {
    # The critic's head starts from zero and has 150 steps to learn; its default, 1e-5, is for large models.
    "estimator/gae": {"critic_optimizer.learning_rate": 1e-3},
    # The same critic. Completions have some tens of tokens, where the paper's alpha of 0.05 makes lambda 0.
    "estimator/length_adaptive_gae": {
        "critic_optimizer.learning_rate": 1e-3,
        "advantage.args": {"alpha": 1.0},
    },
    # A mean over sequences in the paper: 2507.18071.
    "loss/gspo": {"update.loss_aggregation": "seq_mean_token_mean"},
    # A mean over sequences in the paper: 2507.20673.
    "loss/gmpo": {"update.loss_aggregation": "seq_mean_token_mean"},
}
"""What a variant needs beside its name; those not named here need nothing."""


TITLES = {
    "estimator": "Advantage estimators, with the loss `ppo_clip`",
    "loss": "Policy losses, with `grpo`",
}


def variants() -> dict[str, Settings]:
    """The settings of every built-in advantage estimator, then of every built-in loss, by variant."""
    named = {f"estimator/{name}": {"advantage.estimator": name} for name in ESTIMATORS}
    named |= {f"loss/{name}": {"update.loss": name} for name in LOSSES}
    return {
        name: settings | KIND_SETTINGS[name.partition("/")[0]] | VARIANT_SETTINGS.get(name, {})
        for name, settings in named.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    names = list(variants())
    chosen = select(names, args.only)
    added = {} if args.steps is None else {"run.steps": args.steps}
    added |= {setting.key: setting.value for setting in override_layer(args.set)}
    failed = 0
    for seed in range(args.seeds):
        for name in chosen:
            settings = settings_of(name, seed, added)
            if any(same(row, name, settings) and "error" not in row for row in read_rows(args.out)):
                continue
            say(f"{name}, seed {seed} …")
            row = run(name, seed, settings)
            append(args.out, row)
            say(f"{name}, seed {seed}: {told(row)}")
            failed += "error" in row
    wanted = [(name, settings_of(name, seed, added)) for name in names for seed in range(args.seeds)]
    rows = latest(read_rows(args.out), wanted)
    kinds = [kind for kind in TITLES if any(_kind(row) == kind for row in rows)]
    print("\n\n".join(table(kind, TITLES[kind], rows) for kind in kinds))
    if args.figure is not None:
        if can_plot():
            draw(kinds, rows, args.figure)
        else:
            say(f"{args.figure} is not drawn: it needs matplotlib, {installation('plot')}")
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object per run")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="variants to run; patterns: gae, loss/gpg, 'loss/*'"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, help="training steps; default: those of the quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all variants")
    parser.add_argument("--figure", type=Path, help="file of the figure, as algorithms.svg")
    return parser.parse_args(arguments)


def select(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """The variants that a pattern matches, with or without their kind; None: all.

    Raises SystemExit for a pattern that matches none.
    """
    if patterns is None:
        return list(names)

    def matches(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2], pattern)

    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise SystemExit(f"--only must match a variant, got {pattern}; there are {', '.join(names)}")
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def settings_of(name: str, seed: int, added: Mapping[str, Any]) -> Settings:
    """All settings of a run, by dotted key: the quickstart's, then the variant's, then `added`."""
    quickstart = {setting.key: setting.value for setting in file_layer(None)}
    every = {**quickstart, **COMMON, **variants()[name], **added, "seed": seed}
    # What JSON gives back, so that the settings in the file compare equal.
    return dict(json.loads(json.dumps(every)))


def run(name: str, seed: int, settings: Settings) -> Row:
    """Trains one variant in a process of its own, in a folder that is deleted afterwards."""
    row: Row = {
        "variant": name,
        "seed": seed,
        "settings": settings,
        "commit": commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 2),
    }
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    with tempfile.TemporaryDirectory() as folder:
        every = {**settings, "run.dir": folder, "run.name": "run"}
        overrides = [part for key, value in every.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        command = [sys.executable, "-m", "quatrain", "train", *overrides]
        began = time.perf_counter()
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        row["wall_s"] = round(time.perf_counter() - began, 1)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return row | {"error": said[-1]}
        return row | figures(read_metrics(Path(folder) / "run" / "metrics.jsonl"))


def figures(metrics: Sequence[Mapping[str, Any]]) -> Row:
    """The figures of a run from the rows of its `metrics.jsonl`.

    `accuracy`: [step, held-out accuracy] of every evaluation; `before`, `after`: the first and the last of
    them; `steps_to_target`: None if no evaluation reached it. `train_s` is the training steps' seconds, those
    of compilation (`compile_s`) left out. Raises ValueError without two evaluations.
    """
    accuracy = [[row["step"], row[ACCURACY]] for row in metrics if row.get(ACCURACY) is not None]
    if len(accuracy) < 2:
        raise ValueError(f"a run has an evaluation before and one after training; its metrics: {accuracy}")
    step_s, compile_s = (
        sum(row[key] for row in metrics if row.get(key) is not None)
        for key in ("time/step_s", "time/compile_s")
    )
    return {
        "before": accuracy[0][1],
        "after": accuracy[-1][1],
        "steps_to_target": steps_to(TARGET, accuracy),
        "train_s": round(step_s - compile_s, 2),
        "compile_s": round(compile_s, 2),
        "accuracy": accuracy,
    }


def steps_to(target: float, accuracy: Iterable[Sequence[float]]) -> int | None:
    """The step of the first evaluation with at least `target`, even if later ones are lower; else None."""
    return next((int(step) for step, value in accuracy if value >= target), None)


def read_rows(path: Path) -> list[Row]:
    """The results in a file, in order; a last line that an interruption left incomplete is skipped."""
    rows = []
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise SystemExit(f"{path}:{number} must be one JSON object; remove this line") from None
    return rows


def append(path: Path, row: Row) -> None:
    """Add a result to the file, after an incomplete last line is removed."""
    text = path.read_text("utf-8") if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        path.write_text(complete, "utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def same(row: Row, name: str, settings: Settings) -> bool:
    """Whether a result is of this variant with these settings (the seed is one of them)."""
    return bool(row["variant"] == name and row["settings"] == settings)


def latest(rows: Sequence[Row], wanted: Sequence[tuple[str, Settings]]) -> list[Row]:
    """The last result of each wanted run, in the order of `wanted`; runs without one are left out."""
    found = ([row for row in rows if same(row, name, settings)] for name, settings in wanted)
    return [matching[-1] for matching in found if matching]


def table(kind: str, title: str, rows: Sequence[Row]) -> str:
    """The Markdown table of one kind of variants; a failed run shows as `failed` among the seeds."""
    lines = [
        f"| {title} | before | after | each seed | steps to {TARGET:g} | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, mine in _by_variant(rows, kind).items():
        done = [row for row in mine if "error" not in row]
        means = [f"{statistics.fmean(row[key] for row in done):.3f}" if done else "–" for key in ENDS]
        seeds = ", ".join("failed" if "error" in row else f"{row['after']:.3f}" for row in mine)
        reached = [row.get("steps_to_target") for row in mine]
        steps = ", ".join("–" if step is None else str(step) for step in reached)
        seconds = f"{statistics.median(row['train_s'] for row in done):.0f}" if done else "–"
        lines.append(f"| `{name}` | {' | '.join(means)} | {seeds} | {steps} | {seconds} |")
    return "\n".join(lines)


def draw(kinds: Sequence[str], rows: Sequence[Row], path: Path, *, target: float = TARGET) -> None:
    """A panel for each variant with the held-out accuracy of every seed over the steps, kind after kind.

    A dotted line is at `target`.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 5
    panels: list[tuple[str, list[Row]] | None] = []
    for kind in kinds:
        prefix = "" if kind == "estimator" or len(kinds) == 1 else f"{kind} "
        groups = [(f"{prefix}{name}", group) for name, group in _by_variant(rows, kind).items()]
        panels += [*groups, *[None] * (-len(groups) % columns)]
    height = len(panels) // columns
    if not height:
        return
    # Text stays text and ids do not change from call to call: a small file with a small diff.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quatrain"}):
        figure = Figure(figsize=(10, 1.75 * height), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(height, columns, sharex=True, sharey=True, squeeze=False)
        for axes, panel in zip(grid.flat, panels):
            if panel is None:
                axes.set_visible(False)
                continue
            title, mine = panel
            style_axes(axes, title)
            axes.label_outer()
            axes.axhline(target, color="#bbbbbb", linewidth=0.8, linestyle=":")
            for row in mine:
                if "error" not in row:
                    axes.plot(*zip(*row["accuracy"]), color="#2667b5", linewidth=1.2, alpha=0.75)
            axes.set_ylim(-0.03, 1.03)
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def told(row: Row) -> str:
    """One line about a result."""
    if "error" in row:
        return f"failed after {row['wall_s']} s: {row['error']}"
    return (
        f"{row['before']:.3f} -> {row['after']:.3f}, {row['train_s']} s of training, {row['wall_s']} s in all"
    )


def commit() -> str | None:
    """The commit of this checkout, `-dirty` if files have changed; None without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _kind(row: Row) -> str:
    return str(row["variant"]).partition("/")[0]


def _by_variant(rows: Sequence[Row], kind: str) -> dict[str, list[Row]]:
    """The results of one kind by the algorithm's name, in their order."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        if _kind(row) == kind:
            grouped.setdefault(row["variant"].partition("/")[2], []).append(row)
    return grouped


if __name__ == "__main__":
    sys.exit(main())
