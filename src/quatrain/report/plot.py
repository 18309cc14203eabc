"""Plots the reward and accuracy of a run over its steps.

Reads `metrics.jsonl`, which `sinks` writes; needs the extra `plot`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quatrain.report.metrics import read_metrics

REWARD = "reward/mean"
ACCURACIES = {"eval/accuracy_strict": "strict", "eval/accuracy_lenient": "lenient"}
_INK, _MUTED, _BLUE, _ORANGE = "#222222", "#8a8a8a", "#2667b5", "#d9742b"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_run(run_dir: str | Path, output: str | Path) -> None:
    """Draw the training reward (line) and the evaluation accuracies (points) of a run to a PNG file.

    Raises ValueError if matplotlib is not installed, and if the run has logged neither metric.
    """
    if not can_plot():
        raise ValueError("a plot needs matplotlib, which is not installed: `pip install 'quatrain[plot]'`")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(run_dir) / "metrics.jsonl"
    rows = read_metrics(path)
    rewards = _series(rows, REWARD)
    accuracies = {label: _series(rows, name) for name, label in ACCURACIES.items()}
    if not rewards[0] and not any(steps for steps, _ in accuracies.values()):
        raise ValueError(f"a plot needs `{REWARD}` or `eval/accuracy_strict`: {path} has neither")
    figure = Figure(figsize=(8, 3.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    style_axes(left, "Training reward, mean of a step")
    style_axes(right, "Held-out accuracy")
    if rewards[0]:
        left.plot(*rewards, color=_BLUE, linewidth=1.6)
    for (label, (steps, values)), color in zip(accuracies.items(), (_BLUE, _ORANGE)):
        if steps:
            right.plot(steps, values, color=color, linewidth=1.0, marker="o", markersize=4, label=label)
    right.set_ylim(-0.03, 1.03)
    if right.get_lines():
        right.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=_INK)
    figure.savefig(output, facecolor="white")


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
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
