"""Recipes of Tinker's cookbook against `quatrain serve --train`: what they learn, and how fast.

    make test-tinker smollm2                                  # installs the client, and SmolLM2
    python benchmarks/tinker_recipes.py runs/tinker --out results.jsonl --figure tinker.svg
    python benchmarks/tinker_recipes.py runs/tinker --out results.jsonl --only sft 'rl-*'

    sft            `chat_sl` on the cookbook's example conversations, SmolLM2, 30 steps
    rl-0 … rl-2    `math_rl env=arithmetic loss_fn=importance_sampling`, SmolLM2, 40 steps, three seeds
    quickstart     the cookbook's `rl.train` on the quickstart's warm-started model, 60 steps
    step           a step of `rl-*` beside a step of `quatrain train` on the same prompts, adapters and batch
    calls          seconds of a call of `forward` and of 64 samples at once, the built-in model

Each item has a server of its own, and a folder in the given one. Its figures are added to `--out` when it
ends; a later call skips what is there. Seconds are for comparison within one file from one quiet machine:
`load` is the load average before an item. At the end it prints a Markdown table of all items in `--out`, and
draws the curves, if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import algorithms
from algorithms import Row

from quatrain.config.errors import installation
from quatrain.data.builtin import SPLITS, builtin_rows
from quatrain.report.plot import can_plot, style_axes
from quatrain.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "tinker"))

import tinker_server as ts  # noqa: E402

ITEMS = ("sft", "rl-0", "rl-1", "rl-2", "quickstart", "step", "calls")
NLL, REWARD, ACCURACY = "train_mean_nll", "env/all/reward/total", "test/accuracy"
CURVES = {"sft": NLL, "rl": REWARD, "quickstart": ACCURACY}
TITLES = {NLL: "SFT: nll of a token", REWARD: "RL: reward", ACCURACY: "quickstart: held-out accuracy"}
GROUPS, SAMPLES, RL_STEPS, RATE = 32, 4, 40, 1e-4
STEPS_OF_STEP = 12
"""Steps of each side of `step`, of which the first half, with what compiles, is left out."""
MOST_S = 4 * 3600
"""Of a recipe: 40 steps of SmolLM2 take longer than a test may."""
RECIPE = (
    "env=arithmetic", "loss_fn=importance_sampling", "renderer_name=role_colon", f"groups_per_batch={GROUPS}",
    f"group_size={SAMPLES}", f"learning_rate={RATE}", "save_every=0", "eval_every=0",
)  # fmt: skip
PEFT: dict[str, Any] = {
    "lora.rank": 32,
    "lora.alpha": 32,
    "lora.targets": ["all-linear", "lm_head"],
    "rollout.lora": "adapter",
    "rollout.n": SAMPLES,
    "rollout.max_new_tokens": 5,
    "data.batch_size": GROUPS,
    "update.loss": "reinforce",
    "update.kl_coef": 0,
    "advantage.estimator": "reinforce",
    "optimizer.learning_rate": RATE,
    "eval.every_steps": 0,
    "eval.before": False,
    "eval.final_num_prompts": 1,
    "checkpoint.every_steps": 0,
}


def smollm2() -> str:
    if not ts.SMOLLM2.is_file():
        sys.exit(f"{ts.SMOLLM2} is missing: make smollm2")
    return str(ts.SMOLLM2)


def seconds_of(steps: Sequence[Row], key: str) -> float:
    """The median of the later half."""
    found = [step[key] for step in steps if key in step]
    return round(statistics.median(found[len(found) // 2 :]), 3)


def curve(steps: Sequence[Row], key: str) -> list[list[float]]:
    return [[step["step"], round(step[key], 4)] for step in steps if key in step]


def sft(place: Path) -> Row:
    (package,) = ts.CLIENT.parents[1].glob("lib/python*/site-packages/tinker_cookbook")
    words = [
        f"dataset={package}/example_data/conversations.jsonl", "renderer_name=role_colon", "batch_size=8",
        "num_epochs=2", "max_steps=30", "learning_rate=3e-4", "save_every=0",
    ]  # fmt: skip
    with ts.served(place, model=smollm2()) as server:
        steps = ts.run_recipe(
            server, "chat_sl.train", place, f"model_name={server.base}", *words, timeout=MOST_S
        )
        memory = server.memory_mb()[1]
    losses = curve(steps, NLL)
    return {
        "first": losses[0][1],
        "last": losses[-1][1],
        NLL: losses,
        "step_s": seconds_of(steps, "time/step"),
        "resident_mb": memory,
    }


def rl(place: Path, seed: int) -> Row:
    with ts.served(place, f"seed={seed}", model=smollm2()) as server:
        words = [f"model_name={server.base}", *RECIPE, f"max_steps={RL_STEPS}"]
        steps = ts.run_recipe(server, "math_rl.train", place, *words, timeout=MOST_S)
        memory = server.memory_mb()[1]
    rewards = curve(steps, REWARD)
    values = [value for _, value in rewards]
    kl = [abs(step["optim/kl_sample_train_v1"]) for step in steps if "optim/kl_sample_train_v1" in step]
    return {
        "first": round(statistics.fmean(values[:5]), 4),
        "last": round(statistics.fmean(values[-5:]), 4),
        REWARD: rewards,
        "step_s": seconds_of(steps, "time/total"),
        "kl_sample_train_most": max(kl, default=None),
        "resident_mb": memory,
    }


def quickstart(place: Path) -> Row:
    settings = [
        f"run.dir={place}",
        "run.name=warm",
        "seed=0",
        "eval.every_steps=0",
        "checkpoint.every_steps=0",
    ]
    quatrain(place, "sft", settings)
    files = []
    for split in SPLITS:
        rows = (json.dumps({key: row[key] for key in ("prompt", "answer")}) for row in builtin_rows(split))
        files.append(place / f"{split}.jsonl")
        files[-1].write_text("\n".join(rows) + "\n")
    with ts.served(place, model=str(place / "warm" / "final")) as server:
        began = time.perf_counter()
        ts.run_program(server, "quickstart", place / "program", *files, 60, 2e-3)
        wall = time.perf_counter() - began
        memory = server.memory_mb()[1]
    steps = [json.loads(line) for line in (place / "program/log/metrics.jsonl").read_text().splitlines()]
    accuracies = curve(steps, ACCURACY)
    return {
        "first": accuracies[0][1],
        "last": accuracies[-1][1],
        ACCURACY: accuracies,
        "step_s": seconds_of(steps, "time/total"),
        "program_s": round(wall, 1),
        "resident_mb": memory,
    }


def step(place: Path) -> Row:
    """The recipe's prompts, as its own program sent them, are those of the run beside it."""
    with ts.served(place, model=smollm2()) as server:
        words = [f"model_name={server.base}", *RECIPE, f"max_steps={STEPS_OF_STEP}"]
        steps = ts.run_recipe(server, "math_rl.train", place, *words, timeout=MOST_S)
    from quatrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2())
    lines = (place / "tokens.jsonl").read_text().splitlines()
    sent = list(dict.fromkeys(tuple(json.loads(line)[0]) for line in lines))
    rows = [{"prompt": text, "answer": str(sum_of(text))} for text in map(tokenizer.decode, sent)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        **PEFT,
        "model.path": smollm2(),
        "run.steps": STEPS_OF_STEP,
        "data.train": str(place / "prompts.jsonl"),
    }
    own |= {
        "data.eval": str(place / "prompts.jsonl"),
        "run.dir": str(place),
        "run.name": "train",
        "sft.steps": 0,
    }
    # A text that is encoded again may have a few tokens more.
    own |= {"data.max_prompt_length": max(map(len, sent)) + 8}
    quatrain(place, "train", [f"{key}={json.dumps(value)}" for key, value in own.items()])
    metrics = read_metrics(place / "train" / "metrics.jsonl")
    taken = {
        "recipe_s": seconds_of(steps, "time/total"),
        "train_s": seconds_of(metrics, "time/step_s"),
    }
    return {**taken, "ratio": round(taken["recipe_s"] / taken["train_s"], 3)}


def sum_of(text: str) -> int:
    """The result of the last sum in a prompt of the arithmetic recipe."""
    a, _, b = text.rpartition("What is ")[2].partition("?")[0].split()
    return int(a) + int(b)


def calls(place: Path) -> Row:
    with ts.served(place) as server:
        return dict(ts.run_program(server, "calls", place / "program"))


def quatrain(place: Path, command: str, settings: Sequence[str]) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "quatrain", command, *words],
        env=environ,
        cwd=place,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def run(item: str, folder: Path) -> Row:
    """The figures of an item, or its error."""
    place = folder / item
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    row: Row = {
        "variant": item,
        "commit": algorithms.commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 2),
    }
    began = time.perf_counter()
    try:
        made = rl(place, int(item[3:])) if item.startswith("rl-") else globals()[item](place)
    except (AssertionError, RuntimeError, OSError) as error:
        made = {"error": str(error)[-2000:]}
    return {**row, "wall_s": round(time.perf_counter() - began, 1), **made}


def table(rows: Sequence[Row]) -> str:
    """All figures but curves, a line for each item."""
    lines = ["| item | first | last | seconds a step | wall, s | resident, MB | further |", "|---" * 7 + "|"]
    shown = ("first", "last", "step_s", "wall_s", "resident_mb")
    hidden = {*shown, *TITLES, "variant", "commit", "machine", "load"}
    for row in rows:
        further = ", ".join(f"{key} {value}" for key, value in row.items() if key not in hidden)
        cells = [row["variant"], *(str(row.get(key, "–")) for key in shown), further]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """The loss, rewards and accuracies over the steps."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quatrain"}):
        figure = Figure(figsize=(10, 2.6), layout="constrained")
        FigureCanvasAgg(figure)
        titles = {key: title for key, title in TITLES.items() if any(row.get(key) for row in rows)}
        panels = figure.subplots(1, len(titles), squeeze=False)[0]
        for axes, (key, title) in zip(panels, titles.items(), strict=True):
            style_axes(axes, title)
            for row in rows:
                if row.get(key):
                    axes.plot(*zip(*row[key], strict=True), color="#2667b5", linewidth=1.2, alpha=0.75)
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing, prints the table, and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object per item")
    parser.add_argument("--only", nargs="+", metavar="ITEM", help="items to run")
    parser.add_argument("--figure", type=Path, help="file of the figure, as tinker.svg")
    args = parser.parse_args(arguments)
    if args.figure and not can_plot():
        parser.error(f"--figure needs matplotlib: {installation('plot')}")
    folder = args.folder.resolve()
    for item in algorithms.select(list(ITEMS), args.only):
        done = {row["variant"] for row in algorithms.read_rows(args.out) if "error" not in row}
        if item in done:
            continue
        row = run(item, folder)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{item}: {row['wall_s']} s {row.get('error', '')}", flush=True)
    latest = {row["variant"]: row for row in algorithms.read_rows(args.out)}
    rows = [latest[item] for item in ITEMS if item in latest]
    print(table(rows))
    if args.figure:
        draw(rows, args.figure)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
