"""Routing replay on the quickstart: the gap of sampler and trainer with it and without, and what is learned.

    python benchmarks/replay.py runs/replay --figure replay.svg
    python benchmarks/replay.py runs/replay --seeds 3 --steps 150

Trains the quickstart with the model `builtin:tiny_moe` (2 of 8 experts a token, 4 layers) in float32, in
bfloat16 with routing replay and without it (`rollout.record_routes: false`), and a dense model
(`builtin:tiny`) in bfloat16, each in a run `NAME_sSEED` in the given folder. Runs that are there with all
steps are not repeated. Prints a Markdown table, means and greatest values over all steps and seeds:

    gap, mean, max  `rollout/logprob_diff_mean` and `_max`, in nats
    changed         `moe/replay_changed`
    before, after   held-out accuracy of each seed

`--figure` draws the greatest gap and the accuracy over the steps, if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from quatrain.config.settings import QUICKSTART
from quatrain.report.plot import style_axes
from quatrain.run.metrics import read_metrics

MOE = "model.path=builtin:tiny_moe"
VARIANTS = {
    "float32": ("float32, replayed", (MOE,)),
    "replayed": ("bfloat16, replayed", (MOE, "model.dtype=bfloat16")),
    "live": ("bfloat16, not replayed", (MOE, "model.dtype=bfloat16", "rollout.record_routes=false")),
    "dense": ("bfloat16, dense model", ("model.dtype=bfloat16",)),
}
GAP, CHANGED, ACCURACY = "rollout/logprob_diff_{}", "moe/replay_changed", "eval/accuracy_lenient"
COLOURS = {"float32": "#999999", "replayed": "#2667b5", "live": "#c44536", "dense": "#3a7d44"}
Rows = list[dict[str, float]]


def run(folder: Path, name: str, seed: int, steps: int, more: list[str]) -> Rows:
    """The metrics of a run, which is trained if it is not there."""
    path = folder / f"{name}_s{seed}" / "metrics.jsonl"
    if not path.is_file() or read_metrics(path)[-1]["step"] < steps:
        settings = [*VARIANTS[name][1], f"seed={seed}", f"run.steps={steps}", "checkpoint.every_steps=0"]
        settings += [f"run.dir={folder}", f"run.name={name}_s{seed}", *more]
        command = [sys.executable, "-m", "quatrain", "train", str(QUICKSTART)]
        subprocess.run([*command, *(part for each in settings for part in ("--set", each))], check=True)
    return read_metrics(path)


def values(runs: list[Rows], key: str) -> np.ndarray:
    """All values of a metric."""
    return np.array([row[key] for rows in runs for row in rows if key in row])


def line(name: str, runs: list[Rows]) -> str:
    """The row of the table of one variant."""
    gap, largest, changed = (values(runs, key) for key in (GAP.format("mean"), GAP.format("max"), CHANGED))
    ends = [[row[ACCURACY] for row in rows if ACCURACY in row] for rows in runs]
    before, after = (", ".join(f"{each[end]:.3f}" for each in ends) for end in (0, -1))
    share = f"{100 * changed.mean():.2f} %" if changed.size else "–"
    gaps = f"{gap.mean():.1e} | {np.median(largest):.1e} | {largest.max():.1e}"
    return f"| {VARIANTS[name][0]} | {gaps} | {share} | {before} | {after} |"


def draw(found: dict[str, list[Rows]], path: Path) -> None:
    """The greatest gap of each step, on a logarithmic scale, and the held-out accuracy."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quatrain"}):
        figure = Figure(figsize=(9, 3), layout="constrained")
        FigureCanvasAgg(figure)
        panels = zip(figure.subplots(1, 2), (GAP.format("max"), ACCURACY), strict=True)
        for axes, key in panels:
            style_axes(axes, {ACCURACY: "held-out accuracy"}.get(key, "greatest gap of a token, nats"))
            for name, runs in found.items():
                for number, rows in enumerate(runs):
                    points = [(row["step"], row[key]) for row in rows if key in row]
                    label = None if number else VARIANTS[name][0]
                    axes.plot(*zip(*points), color=COLOURS[name], linewidth=1.1, alpha=0.7, label=label)
            axes.set_xlabel("training step")
            if key == ACCURACY:
                axes.set_ylim(-0.03, 1.03)
                axes.legend(frameon=False, fontsize="small", loc="lower right")
            else:
                axes.set_yscale("log")
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Trains what is missing, prints the table, and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each variant")
    parser.add_argument("--steps", type=int, default=150, help="training steps")
    parser.add_argument("--figure", type=Path, help="file of the figure, as replay.svg")
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs, as key=value")
    given = parser.parse_args()
    seeds = range(given.seeds)
    found = {
        name: [run(given.folder, name, seed, given.steps, given.set) for seed in seeds] for name in VARIANTS
    }
    print("| | gap, mean | max, median of steps | max of all | changed | before | after |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        print(line(name, runs))
    if given.figure is not None:
        draw(found, given.figure)


if __name__ == "__main__":
    main()
