"""Optimizer steps of ours on given data: supervised training, DPO or a reward model.

    python benchmarks/given.py --task sft --steps 3 --data train.jsonl
    python benchmarks/given.py --task dpo --set update.max_tokens_per_device=4096

A run of the command on SmolLM2-135M-Instruct in float32, in a temporary folder: 16 examples or pairs of GSM8K
an optimizer step (`peers/given_workload.py`), packed, in the file's order. The first of `--steps` + 1 steps
compiles and is dropped, and so is one that compiles later; the compilations of each step are in the output.
Prints JSON, as `step.py` does, with the loss of each step.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
from peers.given_workload import add_given_arguments, rows
from peers.workload import LEARNING_RATE, MAX_GRAD_NORM, finish

import quatrain

COMPILES_S = 0.1
"""Seconds of compiling in a step from which it has compiled a program of the model, not of a metric."""
MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_given_arguments(parser)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    task, given = args.task, "given rows"
    keys: dict[str, object] = {
        "model.path": MODEL,
        "model.dtype": "float32",
        "model.param_dtype": "float32",
        "model.remat": "dots",
        f"{task}.data": given,
        f"{task}.steps": args.steps + 1,
        f"{task}.batch_size": args.examples,
        f"{task}.learning_rate": LEARNING_RATE,
        f"{task}.schedule": "constant",
        f"{task}.warmup_steps": 0,
        "optimizer.max_grad_norm": MAX_GRAD_NORM,
        "data.shuffle": "false",
        "checkpoint.every_steps": 0,
    }
    steps: list[dict[str, float]] = []
    with TemporaryDirectory(prefix="given-") as folder:
        overrides = [f"{key}={value}" for key, value in keys.items()] + [f"run.dir={folder}", *args.set]
        resolved = quatrain.load_config(overrides=overrides, task=task, environ=os.environ)
        quatrain.train(
            resolved,
            rows={given: rows(args)},
            on_step=lambda step, metrics: steps.append(dict(metrics)),
        )
    update = resolved.config.update
    compiled = [step.get("time/compile_s", 0.0) > COMPILES_S for step in steps]
    measured = [step for step, new in zip(steps[1:], compiled[1:], strict=True) if not new] or steps[1:]
    finish(
        {
            "losses": [step[f"{task}/loss"] for step in steps],
            "compile_s": [round(step.get("time/compile_s", 0.0), 2) for step in steps],
            "compilations": compiled[1:],
            "tokens": [step["batch/tokens"] for step in steps],
            "padding_fraction": [round(step["batch/padding_fraction"], 3) for step in steps],
            "shared_fraction": [round(step["batch/shared_fraction"], 3) for step in steps],
            "setting": {
                "dtype": "float32",
                "max_tokens_per_device": update.max_tokens_per_device,
                "set": args.set,
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
            },
            "steps": [{"step_s": round(step["time/step_s"], 4)} for step in measured],
        }
    )


if __name__ == "__main__":
    main()
