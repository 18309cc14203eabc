"""Whether a run learns what a peer's run learns, and in what time: mean rewards over steps and over seconds.

    python benchmarks/learning.py --peer trl
    python benchmarks/learning.py --peer trl --seeds 0 --steps 3 --out /tmp/learning

SmolLM2-135M-Instruct in float32 learns the task of `peers/record_task.py` with the settings of
`configs/record_smollm2_cpu.yaml`: the same prompts in the same order, rewards, sampling, loss, optimizer and
batch on both sides. Runs of each seed go one after the other, ours and the peer's in turns, each a process of
its own with an empty cache of compiled programs. Seconds are counted from before the first rollout, with
compilation. Writes `learning.json` and `learning.png` into `--out`, and prints JSON:

- `mean_reward`: over all steps of a run, of each seed (where both sides learn the same, they differ as seeds
  do); `last_five`: over the last steps alone.
- `steps_to`, `seconds_to`: of each level of reward, the first step whose mean over seeds, smoothed over three
  steps, is at least it, and the seconds until its end, in the mean of the seeds; `times_faster`: their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from compare import BENCHMARKS, ENVIRONMENTS, PEERS, environment, run, say, write_model, write_once
from peers.record_task import write_rows

CONFIG = BENCHMARKS.parent / "configs" / "record_smollm2_cpu.yaml"
PEER_SCRIPT = "trl_learning.py"
LEVELS = (0.3, 0.5, 0.7, 0.9)
SMOOTHED = 3
Runs = list[list[dict[str, float]]]
"""Of each seed, of each step: `reward`, and `seconds` until its end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", choices=("trl",), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path("learning"), metavar="FOLDER")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    rows, count = args.out / "rows.jsonl", args.steps * config["data"]["batch_size"]
    write_rows(rows, count)
    write_rows(rows.with_name("held_out.jsonl"), config["eval"]["final_num_prompts"], skip=count)
    python = environment(PEERS[args.peer])
    model = ENVIRONMENTS / "models" / Path(config["model"]["path"]).stem
    write_once(model / "tokenizer_config.json", write_model, model)
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], args.peer: []}
    load = os.getloadavg()[0]
    for seed in args.seeds:
        for side, runs in sides.items():
            say(f"seed {seed}: {side}")
            began = time.perf_counter()
            if side == "ours":
                measured = ours(rows, seed, args.steps, config)
            else:
                measured = theirs(python, model, rows, seed, args.steps, config)
            runs.append({**measured, "seed": seed, "process_s": round(time.perf_counter() - began, 1)})
            rewards = [round(step["reward"], 2) for step in measured["steps"]]
            say(f"  {rewards}, {measured['steps'][-1]['seconds']:.0f} s")
            (args.out / "learning.json").write_text(json.dumps(sides, indent=1))
        prompts = {json.dumps(runs[-1]["prompt_tokens"]) for runs in sides.values()}
        if len(prompts) > 1:
            raise SystemExit(f"both sides have the same prompts: their tokens in each step are {prompts}")
    curves = {side: [each["steps"] for each in runs] for side, runs in sides.items()}
    draw(curves, args.out / "learning.png")
    print(
        json.dumps(
            {**comparison(curves["ours"], curves[args.peer]), "load_average_before": round(load, 2)}, indent=2
        )
    )


def ours(rows: Path, seed: int, steps: int, config: dict[str, Any]) -> dict[str, Any]:
    """A run of `quatrain train`."""
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        given = {
            "data.train": rows.resolve(),
            "data.eval": rows.resolve().with_name("held_out.jsonl"),
            "model.path": BENCHMARKS.parent / config["model"]["path"],
            "reward.functions": json.dumps({f"{BENCHMARKS / 'peers' / 'record_task.py'}:record": 1.0}),
            "seed": seed,
            "run.steps": steps,
            "run.dir": folder,
            "run.name": "run",
            "run.compilation_cache": Path(folder) / "programs",
        }
        settings = [f"--set={key}={value}" for key, value in given.items()]
        run([sys.executable, "-m", "quatrain", "train", str(CONFIG), *settings])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    logged = [row for row in map(json.loads, lines) if "reward/mean" in row]
    seconds, found = 0.0, []
    for row in logged:
        seconds += row["time/step_s"]
        found.append({"seconds": seconds, "reward": row["reward/mean"]})
    return {"steps": found, "prompt_tokens": [row["length/prompt/mean"] for row in logged]}


def theirs(
    python: Path, model: Path, rows: Path, seed: int, steps: int, config: dict[str, Any]
) -> dict[str, Any]:
    """A run of the peer, with the configuration's numbers."""
    settings = {
        "prompts": config["data"]["batch_size"],
        "samples": config["rollout"]["n"],
        "tokens": config["rollout"]["max_new_tokens"],
        "learning_rate": float(config["optimizer"]["learning_rate"]),
        "steps": steps,
    }
    script = str(BENCHMARKS / "peers" / PEER_SCRIPT)
    words = ["--model", str(model), "--data", str(rows), "--settings", json.dumps(settings)]
    words += ["--seed", str(seed), "--threads", str(os.cpu_count())]
    return json.loads(run([str(python), script, *words]).splitlines()[-1])


def comparison(ours: Runs, theirs: Runs) -> dict[str, Any]:
    """What the documentation of this file names."""
    found: dict[str, Any] = {
        "mean_reward": {
            name: [round(statistics.mean(step["reward"] for step in run), 3) for run in runs]
            for name, runs in (("ours", ours), ("theirs", theirs))
        },
        "last_five": {
            name: [round(statistics.mean(step["reward"] for step in run[-5:]), 3) for run in runs]
            for name, runs in (("ours", ours), ("theirs", theirs))
        },
        "levels": [],
    }
    for level in LEVELS:
        steps = [first_step(runs, level) for runs in (ours, theirs)]
        row: dict[str, Any] = {"reward": level, "steps_to": steps}
        if None not in steps:
            seconds = [
                mean_of(runs, "seconds")[step - 1] for runs, step in zip((ours, theirs), steps, strict=True)
            ]
            row |= {
                "seconds_to": [round(each, 1) for each in seconds],
                "times_faster": round(seconds[1] / seconds[0], 2),
            }
        found["levels"].append(row)
    return found


def mean_of(runs: Runs, key: str) -> list[float]:
    """Over the seeds, of each step."""
    return [statistics.mean(step[key] for step in each) for each in zip(*runs, strict=True)]


def first_step(runs: Runs, level: float) -> int | None:
    """The number of the first step at which the smoothed mean reward is at least `level`."""
    means = mean_of(runs, "reward")
    for step in range(SMOOTHED, len(means) + 1):
        if statistics.mean(means[step - SMOOTHED : step]) >= level:
            return step
    return None


def draw(curves: dict[str, Runs], path: Path) -> None:
    """Mean rewards, with the band of the seeds, over steps and over seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for side, runs in curves.items():
        rewards = mean_of(runs, "reward")
        each = list(zip(*([step["reward"] for step in run] for run in runs), strict=True))
        for axis, places in zip(axes, (range(1, len(rewards) + 1), mean_of(runs, "seconds")), strict=True):
            axis.plot(places, rewards, label="quatrain" if side == "ours" else side.upper())
            axis.fill_between(places, [min(e) for e in each], [max(e) for e in each], alpha=0.2)
    axes[0].set(xlabel="training step", ylabel="mean reward of the samples")
    axes[1].set(xlabel="seconds since training began, with compilation")
    axes[1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
