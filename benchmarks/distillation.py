"""A teacher on the quickstart: what is learned from rewards, from a teacher, and from both, and how fast.

    python benchmarks/distillation.py --teacher runs/teacher --out results.jsonl --figure distill.svg
    python benchmarks/distillation.py --teacher runs/teacher --only GRPO both --seeds 1 --out results.jsonl
    python benchmarks/distillation.py --teacher runs/teacher --only 'half*' --out results.jsonl
    python benchmarks/distillation.py --hint models/SmolLM2-135M-Instruct.Q4_1.gguf

A variant is the quickstart (`quatrain train` without arguments) for 60 steps with an evaluation every 5, and
the settings below; the student is the quickstart's after its warm start. `--teacher` is the folder of a run:
the quickstart of 150 steps, trained first if it is missing, whose `final/` teaches. Runs, results and figure
are those of `algorithms.py`, whose `--help` explains them; the table has the training steps until an
evaluation gives 0.95 or more.

The variants `half, …` have a student of half the teacher's width with random weights of the seed, written
beside the teacher's folder, and 40 steps after the warm start; their table is about 0.9.

`--hint MODEL` trains nothing: it compares what a model says of the answers to 32 sums with what it says as
its own teacher that is told the right answer (`distill.prompt`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import algorithms
import jax
import numpy as np
from algorithms import COMMON, Row, Settings

from quatrain.config.settings import file_layer
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.tokenizer import encode, load_tokenizer, render, save_tokenizer
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params
from quatrain.types.batches import RolloutBatch
from quatrain.update.teacher_prompts import TeacherPrompts
from quatrain.update.teacher_scores import TopWords, model_scores
from quatrain.weights.hf import save_hf
from quatrain.weights.load_model import load_model

TARGET, HALF_TARGET = 0.95, 0.9
STEPS: Settings = {"run.steps": 60, "eval.every_steps": 5}
HALF_STEPS: Settings = {**STEPS, "sft.steps": 200, "run.steps": 40}
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
HALF: dict[str, Settings] = {
    "half, sampled": ALONE,
    "half, reverse KL": {**ALONE, "distill.loss": "reverse_kl"},
    "half, reverse KL, top 8": {**ALONE, "distill.loss": "reverse_kl", "distill.top_k": 8},
}
"""The variants of a student of another shape."""
HINT = "The answer is {answer}."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hint", metavar="MODEL", help="compare a model with itself, told the answer")
    parser.add_argument("--teacher", type=Path, help="folder of the teacher's run")
    parser.add_argument("--out", type=Path, help="results, one JSON object per run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants to run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to SEEDS - 1")
    parser.add_argument("--steps", type=int, help="training steps; default: 60, and 40 for half")
    parser.add_argument("--figure", type=Path, help="file of the figure, as distill.svg")
    args = parser.parse_args(arguments)
    if args.hint is not None:
        print(hinted(args.hint))
        return 0
    if args.teacher is None or args.out is None:
        parser.error("--teacher and --out are needed, or --hint")
    names = algorithms.select([*VARIANTS, *HALF], args.only)
    if not (args.teacher / "final").is_dir():
        train_teacher(args.teacher)
    failed = 0
    for seed in range(args.seeds):
        for name in names:
            settings = settings_of(name, seed, args.teacher, args.steps)
            if any(
                algorithms.same(row, name, settings) and "error" not in row
                for row in algorithms.read_rows(args.out)
            ):
                continue
            algorithms.say(f"{name}, seed {seed} …")
            if name in HALF and not (student := student_of(args.teacher, seed)).is_dir():
                write_student(student, seed)
            row = algorithms.run(name, seed, settings)
            algorithms.append(args.out, row)
            algorithms.say(f"{name}, seed {seed}: {algorithms.told(row)}")
            failed += "error" in row
    wanted = [
        (name, settings_of(name, seed, args.teacher, args.steps))
        for name in (*VARIANTS, *HALF)
        for seed in range(args.seeds)
    ]
    rows = algorithms.latest(algorithms.read_rows(args.out), wanted)
    print(f"{table(list(VARIANTS), rows, TARGET)}\n\n{table(list(HALF), rows, HALF_TARGET)}")
    if args.figure is not None and algorithms.can_plot():
        shown = [row | {"variant": f"teacher/{row['variant']}"} for row in rows if row["variant"] in FIGURE]
        algorithms.draw(["teacher"], shown, args.figure, target=TARGET)
    return 1 if failed else 0


def settings_of(name: str, seed: int, teacher: Path, steps: int | None = None) -> Settings:
    """All settings of a run, by dotted key: the quickstart's, then the variant's."""
    quickstart = {setting.key: setting.value for setting in file_layer(None)}
    half = name in HALF
    own, length = (HALF[name], HALF_STEPS) if half else (VARIANTS[name], STEPS)
    taught = {"distill.teacher": str(teacher / "final")} if own else {}
    student = {"model.path": str(student_of(teacher, seed))} if half else {}
    asked = {} if steps is None else {"run.steps": steps}
    every = {**quickstart, **COMMON, **length, **taught, **student, **own, **asked, "seed": seed}
    return dict(json.loads(json.dumps(every)))


def student_of(teacher: Path, seed: int) -> Path:
    """The folder of the student of half the width."""
    return teacher.parent / f"{teacher.name}-half-{seed}"


def write_student(folder: Path, seed: int) -> None:
    """A model of half the width of the quickstart's, with random weights, and its tokenizer."""
    tokenizer = builtin_tokenizer()
    arch = builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
    layers = tuple(replace(kind, mlp=replace(kind.mlp, width=kind.mlp.width // 2)) for kind in arch.layers)
    arch = replace(arch, hidden_size=arch.hidden_size // 2, layers=layers)
    save_hf(folder, arch, init_params(arch, jax.random.key(seed)))
    save_tokenizer(tokenizer, folder)


def train_teacher(folder: Path) -> None:
    """The quickstart, with the steps of COMMON; raises SystemExit if it fails."""
    where = {"run.dir": str(folder.parent), "run.name": folder.name, **COMMON}
    overrides = [part for key, value in where.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("QUATRAIN_")}
    done = subprocess.run([sys.executable, "-m", "quatrain", "train", *overrides], env=environ)
    if done.returncode:
        raise SystemExit("the teacher could not be trained")


def table(names: Sequence[str], rows: Sequence[Row], target: float) -> str:
    """The Markdown table: steps to `target`, the first and the last accuracy of each seed."""
    lines = [f"| | steps to {target:g} | accuracy before | at the end |", "|---|---|---|---|"]
    for name in names:
        done = [row for row in rows if row["variant"] == name and "error" not in row]
        steps = [algorithms.steps_to(target, row["accuracy"]) for row in done]
        reached = ", ".join("–" if step is None else str(step) for step in steps)
        before, after = (", ".join(f"{row[end]:.3f}" for row in done) for end in algorithms.ENDS)
        if done:
            lines.append(f"| {name} | {reached} | {before} | {after} |")
    return "\n".join(lines)


def hinted(path: str) -> str:
    """The Markdown table of mean log-probabilities, without and with the prompt HINT, of answers to sums."""
    tokenizer, model = load_tokenizer(path), load_model(path)
    spec, planner = PolicySpec(model.arch), MicroBatchPlanner(rows=8)
    top = TopWords(64, model.arch.vocab_size)
    lines = ["| answers | policy | told the answer | likelier for | 64 words |", "|---|---|---|---|---|"]
    for name, shift in (("right", 0), ("wrong by one", 1)):
        rollouts = sums(tokenizer, shift)
        prompts = TeacherPrompts(HINT, tokenizer)
        table = prompts.table(rollouts, [True] * len(rollouts))
        told = model_scores(model.params, table, model=spec, planner=planner, top=top)
        own = model_scores(model.params, TokenTable.of(rollouts), model=spec, planner=planner, top=None)
        mask, logprobs = rollouts.completion_mask, prompts.back(told.logprobs, table, rollouts)
        assert told.word_logprobs is not None, "words are asked for"
        mass = 1 - np.exp(told.word_logprobs[table.completion_mask][:, -1]).mean()
        likelier = (logprobs.sum(axis=1, where=mask) > own.logprobs.sum(axis=1, where=mask)).mean()
        means = f"{own.logprobs[mask].mean():.2f} | {logprobs[mask].mean():.2f}"
        lines.append(f"| {name} | {means} | {likelier:.0%} | {mass:.2f} |")
    return "\n".join(lines)


def sums(tokenizer: Any, shift: int) -> RolloutBatch:
    """Sums of three numbers with their answers, to which `shift` is added, as completions."""
    rng = np.random.default_rng(0)
    rows = []
    for a, b, c in rng.integers(2, 60, (32, 3)).tolist():
        question = f"Tom has {a} coins, finds {b} more and then {c} more. How many coins has he now?"
        rows.append((({"role": "user", "content": question},), a + b + c))
    pieces = [
        (render(tokenizer, prompt).ids, encode(tokenizer, str(answer + shift), add_special_tokens=False))
        for prompt, answer in rows
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in pieces)
    ids = np.zeros((len(rows), width), np.int32)
    attention, scored = np.zeros(ids.shape, bool), np.zeros(ids.shape, bool)
    for row, (prompt, answer) in enumerate(pieces):
        first, end = len(prompt), len(prompt) + len(answer)
        ids[row, :end] = prompt + answer
        attention[row, :end] = True
        scored[row, first:end] = True
    return RolloutBatch(
        input_ids=ids,
        attention_mask=attention,
        completion_mask=scored,
        rollout_logprobs=np.zeros(ids.shape, np.float32),
        policy_version=np.where(scored, 0, -1).astype(np.int32),
        finish_reason=np.full(len(rows), "stop"),
        group_ids=np.arange(len(rows)),
        prompts=tuple(prompt for prompt, _ in rows),
        completions=("",) * len(rows),
        columns={"answer": tuple(str(answer) for _, answer in rows)},
    )


if __name__ == "__main__":
    sys.exit(main())
