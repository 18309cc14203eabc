"""Preferences on the quickstart: DPO on pairs of a model's own answers, and RL from a reward model alone.

    python benchmarks/preferences.py runs/preferences --out results.jsonl --figure preferences.svg
    python benchmarks/preferences.py runs/preferences --out results.jsonl --only warm 'dpo*' --seeds 1

For each seed, every stage a run `NAME-SEED` of its command in the given folder:

    warm           `quatrain sft`: the quickstart's warm start, 80 steps
    dpo-1, dpo-2   `quatrain dpo`, 60 steps of 64 pairs, of the model of the stage before
    dpo-2-format   dpo-2 with answers that were cut or are not in the format as wrong ones, not left out
    rm             `quatrain rm`, 60 steps of 64 pairs, the pairs of dpo-1
    rl             `quatrain train` of the warm-started model, 100 steps, with that reward model as its
                   reward, and a pull towards the warm-started model ten times that of the quickstart
    rl-far         the same with the quickstart's pull: the policy finds what the reward model does not know

The pairs of a round are made from 8 samples for each of 480 training prompts, by the policy that the round
begins with: up to two right and wrong answers of a prompt are paired. Those of 96 prompts, the same in both
rounds and for the reward model, are not trained on.

A stage that is in `--out` with the same settings is not repeated, so that an interrupted call goes on with
the stage that it was in. At the end it prints two Markdown tables of all seeds in `--out`; accuracies are
`eval/accuracy_lenient`, greedy answers to the 200 held-out problems that `correct` finds right. `--figure`
draws them over the steps, if matplotlib is installed.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import algorithms
from algorithms import Row, Settings

import quatrain
from quatrain.config.errors import installation
from quatrain.config.settings import QUICKSTART
from quatrain.report.plot import can_plot, style_axes
from quatrain.run.metrics import read_metrics

PROMPTS, HELD_OUT, SAMPLES, PAIRS = 480, 96, 8, 2
"""Prompts that are sampled, those of them that are not trained on, samples of each, its pairs at most."""
ACCURACY, STRICT = "eval/accuracy_lenient", "eval/accuracy_strict"
PAIR_ACCURACY, REWARD = "eval/accuracy", "eval/reward"
CURVES = (ACCURACY, STRICT, PAIR_ACCURACY, REWARD, "eval/completion_length")
"""Metrics of evaluations whose values after every so many steps are kept, where a stage has them."""
COMMANDS = {
    "warm": "sft",
    "dpo-1": "dpo",
    "dpo-2": "dpo",
    "dpo-2-format": "dpo",
    "rm": "rm",
    "rl": "train",
    "rl-far": "train",
}
"""Stage -> its command, in order."""
BEFORE = {
    "dpo-1": "warm",
    "dpo-2": "dpo-1",
    "dpo-2-format": "dpo-1",
    "rm": "warm",
    "rl": "warm",
    "rl-far": "warm",
}
"""Stage -> the stage whose model it begins with."""
HAS_PAIRS = {"dpo-1": "dpo-1", "dpo-2": "dpo-2", "dpo-2-format": "dpo-2-format", "rm": "dpo-1"}
"""Stage -> the stage that made its pairs."""
EVERY: Settings = {
    "eval.every_steps": 10,
    "checkpoint.every_steps": 0,
    "logging.wandb": "disabled",
    "model.remat": "none",
}
GENERATES: Settings = {
    "data.eval": "builtin:arithmetic-heldout",
    "data.max_prompt_length": 32,
    "rollout.max_new_tokens": 16,
    "eval.num_prompts": None,
    "eval.batch_size": 256,
}
"""What the quickstart's evaluation has."""
GIVEN: Settings = {"steps": 60, "batch_size": 64, "schedule": "constant", "warmup_steps": 0}
# The pull of `k2` grows with the distance, that of `k3`, the quickstart's, does not beyond some nats.
NEAR: Settings = {"update.kl_coef": 0.5, "update.kl_estimator": "k2"}


class Sample(NamedTuple):
    """An answer to a prompt: right and in the format, wrong, or neither (None)."""

    prompt: str
    answer: str
    right: bool | None


def split_by_prompt(samples: Sequence[Sample], held_out: int) -> tuple[list[Sample], list[Sample]]:
    """The samples of all prompts but the last `held_out`, by first appearance, and the samples of those."""
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    kept = set(prompts[len(prompts) - held_out :])
    return [s for s in samples if s.prompt not in kept], [s for s in samples if s.prompt in kept]


def pairs_of(samples: Sequence[Sample], most: int) -> list[dict[str, str]]:
    """The first right answer of each prompt with its first wrong one, and so on, `most` of a prompt.

    An answer is in one pair. Answers that are neither and empty ones, of which no pair can be made, are left
    out, and so are prompts all of whose answers are right, or wrong.
    """
    answers: dict[str, tuple[list[str], list[str]]] = {}
    for prompt, answer, right in samples:
        wrong_and_right = answers.setdefault(prompt, ([], []))
        if right is not None and answer.strip():
            wrong_and_right[right].append(answer)
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, (wrong, right) in answers.items()
        for chosen, rejected in list(zip(right, wrong))[:most]
    ]


def sampled(model: Path, seed: int, step: int) -> list[Sample]:
    """SAMPLES answers of a model to each of the first PROMPTS training prompts, judged by `correct`.

    Prompts are the JSON of their messages. Answers that were cut are neither right nor wrong. `step` makes
    the random numbers those of another step.
    """
    settings = [f"seed={seed}", f"model.path={model}", "sft.steps=0", f"rollout.n={SAMPLES}"]
    config = quatrain.load_config(QUICKSTART, [*settings, "update.kl_coef=0"], environ={}).config
    policy = quatrain.load_policy(config)
    prompts = quatrain.load_prompts(config.data.train, config.data, policy.tokenizer, seed=config.seed)
    stages = quatrain.build_stages(config, policy, steps=1)
    try:
        stages.rollout.sync_weights(policy.params, 0)
        judged = quatrain.collect(stages, prompts.batch(0, PROMPTS), step=step)
    finally:
        stages.reward.close()
    rollouts, values = judged.rollouts, dict(zip(judged.function_names, judged.rewards_per_function))
    rows = zip(
        rollouts.prompts, rollouts.completions, rollouts.finish_reason, values["correct"], values["format"]
    )
    return [
        Sample(json.dumps(prompt), answer, None if cut != "stop" or correct > format_ else bool(correct))
        for prompt, answer, cut, correct, format_ in rows
    ]


def write_pairs(folder: Path, stage: str, seed: int) -> Row:
    """Makes the files of the pairs of a round, trained on and held out; figures of the samples."""
    model = folder / f"{BEFORE[stage]}-{seed}" / "final"
    samples = sampled(model, seed, step=1 if BEFORE[stage] == "warm" else 2)
    judged = [sample._replace(right=bool(sample.right)) for sample in samples]
    used = judged if stage == "dpo-2-format" else samples
    for path, part in zip(pair_files(folder, stage, seed), split_by_prompt(used, HELD_OUT)):
        rows = (pair | {"prompt": json.loads(pair["prompt"])} for pair in pairs_of(part, PAIRS))
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return {
        "sampled_right": round(statistics.fmean(sample.right is True for sample in samples), 4),
        "sampled_neither": round(statistics.fmean(sample.right is None for sample in samples), 4),
    }


def pair_files(folder: Path, stage: str, seed: int) -> tuple[Path, Path]:
    """The files of the pairs that a stage trains on, and of those that it does not."""
    made_for = HAS_PAIRS[stage]
    return folder / f"pairs-{made_for}-{seed}.jsonl", folder / f"pairs-{made_for}-{seed}-held-out.jsonl"


def settings_of(stage: str, folder: Path, seed: int) -> Settings:
    """What is set for a stage, by dotted key."""
    command, own = COMMANDS[stage], dict[str, Any]()
    if stage in BEFORE:
        own["model.path"] = str(folder / f"{BEFORE[stage]}-{seed}" / "final")
    if stage in HAS_PAIRS:
        data, held_out = map(str, pair_files(folder, stage, seed))
        rate = {"dpo": 3e-4, "rm": 1e-3}[command]
        given = {**GIVEN, "data": data, "eval": held_out, "learning_rate": rate}
        own |= {f"{command}.{key}": value for key, value in given.items()}
    if command == "dpo":
        own |= {"dpo.beta": 0.1, **GENERATES}
    if command == "train":
        judge = folder / f"rm-{seed}" / "final"
        own |= {"sft.steps": 0, "reward.functions": {f"model:{judge}": 1.0}}
    if stage == "rl":
        own |= NEAR
    return {**EVERY, **own, "seed": seed}


def run(stage: str, folder: Path, seed: int) -> Row:
    """Runs a stage, in a process of its own, and gives its figures or its error."""
    settings, command = settings_of(stage, folder, seed), COMMANDS[stage]
    row: Row = {
        "variant": stage,
        "seed": seed,
        "settings": settings,
        "commit": algorithms.commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 2),
    }
    began = time.perf_counter()
    if HAS_PAIRS.get(stage) == stage:
        row |= write_pairs(folder, stage, seed)
        row["sampling_s"] = round(time.perf_counter() - began, 1)
    if stage in HAS_PAIRS:
        counts = (path.read_text("utf-8").count("\n") for path in pair_files(folder, stage, seed))
        row["pairs"], row["held_out_pairs"] = counts
    shutil.rmtree(folder / f"{stage}-{seed}", ignore_errors=True)  # of an interrupted call
    every = {**settings, "run.dir": str(folder), "run.name": f"{stage}-{seed}"}
    overrides = [part for key, value in every.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    # The other commands take of the quickstart what they read only where it is not named.
    file = [str(QUICKSTART)] if command == "train" else []
    words = [sys.executable, "-m", "quatrain", command, *file, *overrides]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    row["wall_s"] = round(time.perf_counter() - began, 1)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return row | {"error": said[-1]}
    return row | figures(read_metrics(folder / f"{stage}-{seed}" / "metrics.jsonl"))


def figures(metrics: Sequence[Mapping[str, Any]]) -> Row:
    """[step, value] of every evaluation of the metrics CURVES, and the first and the last training loss."""
    curves = {key: [[r["step"], r[key]] for r in metrics if r.get(key) is not None] for key in CURVES}
    losses = [row[key] for row in metrics for key in ("dpo/loss", "rm/loss") if key in row]
    found: Row = {key: curve for key, curve in curves.items() if curve}
    return found | ({"losses": [losses[0], losses[-1]]} if losses else {})


def tables(rows: Sequence[Row]) -> str:
    """Two Markdown tables, a line for each seed; a stage that is missing or failed shows as –.

    Behind an accuracy, where a reward function asks for the format, that of right answers in it.
    """
    found = {(row["seed"], row["variant"]): row for row in rows if "error" not in row}

    def shown(seed: int, stage: str, key: str = ACCURACY, end: int = -1) -> str:
        row = found.get((seed, stage), {})
        if not row.get(key):
            return "–"
        strict = row.get(STRICT) if key == ACCURACY else None
        return f"{row[key][end][1]:.3f}" + (f" ({strict[end][1]:.3f})" if strict else "")

    def trained(seed: int, stage: str) -> list[str]:
        row = found.get((seed, stage), {})
        pairs = f"{row['pairs']} + {row['held_out_pairs']}" if row else "–"
        return [pairs, shown(seed, stage, PAIR_ACCURACY), shown(seed, stage)]

    def best(seed: int) -> str:
        curve = found.get((seed, "rl-far"), {}).get(ACCURACY)
        return "–" if not curve else "{1:.3f} at step {0}".format(*max(curve, key=lambda point: point[1]))

    dpo = [
        "| seed | warm start | round 1: pairs | ranked right | accuracy | round 2: pairs | ranked right | "
    ]
    dpo[0] += "accuracy | accuracy with the other pairs |"
    rl = ["| seed | reward model ranks right | accuracy before | after | score before | after | "]
    rl[0] += "quickstart's pull: best accuracy | after | score after |"
    for part in (dpo, rl):
        part.append("|" + "---|" * (part[0].count("|") - 1))
    for seed in sorted({seed for seed, _ in found}):
        cells = [shown(seed, "warm"), *trained(seed, "dpo-1"), *trained(seed, "dpo-2")]
        dpo.append(f"| {seed} | {' | '.join([*cells, shown(seed, 'dpo-2-format')])} |")
        cells = [shown(seed, "rm", PAIR_ACCURACY)]
        cells += [shown(seed, "rl", key, end) for key in (ACCURACY, REWARD) for end in (0, -1)]
        cells += [best(seed), shown(seed, "rl-far"), shown(seed, "rl-far", REWARD)]
        rl.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n\n".join("\n".join(part) for part in (dpo, rl))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Held-out accuracy over the steps of both rounds, and of RL, and the reward model's mean score there.

    `rl-far` is red.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dpo = {"dpo-1": 0, "dpo-2": GIVEN["steps"]}
    panels = {
        "DPO, two rounds: held-out accuracy": (dpo, ACCURACY),
        "RL by the reward model: accuracy": ({"rl": 0, "rl-far": 0}, ACCURACY),
        "RL by the reward model: its mean score": ({"rl": 0, "rl-far": 0}, REWARD),
    }
    # Text stays text and ids do not change from call to call: a small file with a small diff.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "quatrain"}):
        figure = Figure(figsize=(10, 2.6), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, (title, (firsts, key)) in zip(figure.subplots(1, 3), panels.items()):
            style_axes(axes, title)
            axes.set_xlabel("optimizer step" if firsts is dpo else "training step")
            for row in rows:
                if (stage := row["variant"]) in firsts and key in row:
                    points = [(firsts[stage] + step, value) for step, value in row[key]]
                    colour = "#c44536" if stage == "rl-far" else "#2667b5"
                    axes.plot(*zip(*points), color=colour, linewidth=1.2, alpha=0.75)
            if firsts is dpo:
                axes.axvline(dpo["dpo-2"], color="#bbbbbb", linewidth=0.8, linestyle=":")
            if key == ACCURACY:
                axes.set_ylim(-0.03, 1.03)
        figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing, prints the tables, and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object per stage")
    parser.add_argument(
        "--only", nargs="+", metavar="STAGE", help="stages to run; those before must be there"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--figure", type=Path, help="file of the figure, as preferences.svg")
    args = parser.parse_args(arguments)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen, failed = algorithms.select(list(COMMANDS), args.only), False
    for seed in range(args.seeds):
        for stage in chosen:
            before = algorithms.latest(
                algorithms.read_rows(args.out), [(stage, settings_of(stage, folder, seed))]
            )
            if before and "error" not in before[0]:
                continue
            algorithms.say(f"{stage}, seed {seed} …")
            row = run(stage, folder, seed)
            algorithms.append(args.out, row)
            algorithms.say(f"{stage}, seed {seed}: {row.get('error', 'done')}, {row['wall_s']} s")
            if "error" in row:  # the stages after it need its model
                failed = True
                break
    done = {(row["seed"], row["variant"]): row for row in algorithms.read_rows(args.out)}
    rows = [done[key] for key in sorted(done)]
    print(tables(rows))
    if args.figure is not None:
        if can_plot():
            draw(rows, args.figure)
        else:
            algorithms.say(f"{args.figure} is not drawn: it needs matplotlib, {installation('plot')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
