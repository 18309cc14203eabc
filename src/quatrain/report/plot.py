"""Plots the rewards, accuracies and lengths of a run over its steps; of one on given data losses and margins.

Reads `metrics.jsonl`, which `report.writer` writes; needs the extra `plot`.
"""

import importlib.util
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quatrain.config.errors import installation
from quatrain.run.metrics import read_metrics

REWARD = "reward/mean"
TRAINING, HELDOUT = "Training reward, mean of a step", "Held-out accuracy"
GIVEN, PREFERRED = "Loss on given data, nats", "Pairs whose better answer has the larger reward"
GIVEN_TASKS = ("sft", "dpo", "rm")
LENGTHS = {
    "length/completion/mean": "completion, mean",
    "length/completion/max": "completion, maximum",
    "length/prompt/mean": "prompt, mean",
}
MOST_FUNCTIONS = 6
"""Reward functions that the plot has room for; the run page shows all."""
_FUNCTION = re.compile(r"reward/(?!greedy/)(.+)/mean")
_ACCURACY = re.compile(r"eval/(.*)accuracy_(strict|lenient)")
_INK, _MUTED = "#222222", "#8a8a8a"
_COLORS = ("#2667b5", "#d9742b", "#2a8a57", "#8a4fb0", "#b8393f", "#0f8b99")

_Series = tuple[list[int], list[float]]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_run(run_dir: str | Path, output: str | Path) -> None:
    """Draw what `plotted` finds in a run to a PNG file, with the run's name above.

    Raises ValueError if matplotlib is not installed, and if the run logged neither rewards nor accuracies nor
    the loss of given data.
    """
    if not can_plot():
        raise ValueError(f"a plot needs matplotlib, which is not installed: {installation('plot')}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    path = Path(run_dir) / "metrics.jsonl"
    panels = plotted(read_metrics(path))
    if not any(panels.get(title) for title in (TRAINING, HELDOUT, GIVEN)):
        raise ValueError(
            f"a plot needs `{REWARD}`, `eval/accuracy_lenient` or the loss of given data: {path} has none"
        )
    figure = Figure(figsize=(9, 5.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(Path(run_dir).resolve().name, fontsize=11, color=_INK, x=0.01, ha="left")
    for axes, (title, lines) in zip(figure.subplots(2, 2).flat, panels.items()):
        style_axes(axes, title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _draw_lines(axes, lines)
        if title in (HELDOUT, PREFERRED):
            axes.set_ylim(-0.03, 1.03)
    figure.savefig(output, facecolor="white")


def plotted(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, _Series]]:
    """The lines with values of each panel, by the panel's title and the line's label."""
    logged = dict.fromkeys(name for row in rows for name in row)
    functions = {name: match[1] for name in logged if (match := _FUNCTION.fullmatch(name))}
    accuracies = {name: f"{match[1]}{match[2]}" for name in logged if (match := _ACCURACY.fullmatch(name))}
    # A warm start logs the loss of its last step, at step 0.
    tasks = {task for task in GIVEN_TASKS for row in rows if f"{task}/loss" in row and row["step"]}
    panels: dict[str, dict[str, str]] = {
        TRAINING: {REWARD: ""},
        "Reward of each function, unweighted": dict(list(functions.items())[:MOST_FUNCTIONS]),
        HELDOUT: accuracies,
        "Tokens": LENGTHS,
    }
    for task in tasks:
        panels = {
            GIVEN: {f"{task}/loss": "training", "eval/loss": "held out"},
            PREFERRED: {f"{task}/accuracy": "training", "eval/accuracy": "held out"},
            "Margin of rewards": {f"{task}/margin": "training", "eval/margin": "held out"},
            HELDOUT: accuracies,
        }
    return {
        title: {label: series for name, label in names.items() if (series := _series(rows, name))[0]}
        for title, names in panels.items()
    }


def _draw_lines(axes: Any, lines: Mapping[str, _Series]) -> None:
    for (label, (steps, values)), color in zip(lines.items(), itertools.cycle(_COLORS)):
        # Few values, such as those of evaluations, are marked, because a single one would be invisible.
        marker = {"marker": "o", "markersize": 3.5} if len(steps) < 30 else {}
        axes.plot(steps, values, color=color, linewidth=1.4, label=label, **marker)
    if any(lines):
        axes.legend(
            loc="best", facecolor="white", edgecolor="none", framealpha=0.85, fontsize=8, labelcolor=_INK
        )


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> _Series:
    """Steps and values of the rows that have a number under `name`."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def style_axes(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=9, color=_INK, loc="left")
    axes.set_xlabel("step", fontsize=8, color=_MUTED)
    axes.tick_params(labelsize=8, colors=_MUTED, length=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cccccc")
