"""Rollouts with and without drafts (`rollout.speculate`): tokens of a decode step, and seconds, side by side.

    python benchmarks/speculation.py [models/SmolLM2-135M-Instruct.Q4_1.gguf] [--data train.jsonl] \\
        [--drafts 1 2 4] [--json speculation.json]
    python benchmarks/speculation.py --small        # builtin models alone, to see that it runs

Workloads: `quickstart`, the quickstart's model after its warm start and after its training, on its own
prompts; `gsm8k`, the model on questions of `--data`, sampled at temperature 1 and 0.6, and greedily; `agent`,
the model in `--turns` turns, in each of which it is asked to write a JSON record again with one change.

Each way runs `--rounds` + 1 times, in turns with the others, in one process; the first round compiles and is
dropped. Figures: tokens of a decode step of a sequence and the fraction of drafts that were right, which do
not depend on the machine; the median over rounds of the seconds of rollout and of decoding, divided by those
without drafts of the same round; and the fraction of sequences whose tokens are those without drafts
(others differ by rounding).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import quatrain
from quatrain.loop.stages import build_engine
from quatrain.types.metrics import Metric

CHANGES = ("quantity", "unit_price", "status", "warehouse", "priority", "customer")
RECORD = {
    "order": "A-20417",
    "customer": "Lindqvist and Sons",
    "status": "open",
    "item": "oak table, 180 cm",
    "quantity": 4,
    "unit_price": 312.5,
    "warehouse": "north",
    "priority": "normal",
}


class Records:
    """An environment: each turn asks for the record again, with another value of one field."""

    def reset(self, number: int) -> str:
        """Asks for the first change."""
        self._rng = np.random.default_rng(number)
        return "\n\n" + self._asks()

    def step(self, completion: str) -> quatrain.StepResult:
        """Asks for the next change, whatever the answer was."""
        return quatrain.StepResult([{"role": "user", "content": self._asks()}])

    def _asks(self) -> str:
        field, value = self._rng.choice(CHANGES), int(self._rng.integers(2, 99))
        return f'Change "{field}" to {value}. Answer with the whole record as JSON.'


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/gsm8k/train.jsonl"))
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="of a rollout of the model")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of a completion")
    parser.add_argument("--turns", type=int, default=4, help="of the agent")
    parser.add_argument("--only", nargs="+", default=[], help="workloads, by the beginnings of their names")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path, help="file the figures are written to")
    args = parser.parse_args()
    if args.small:
        args.model, args.rounds, args.drafts, args.prompts, args.tokens, args.turns = "", 1, [2], 2, 16, 2
    report: dict[str, Any] = {}
    with TemporaryDirectory(prefix="speculation-") as folder:
        for name, settings, rows in workloads(args, Path(folder)):
            if not args.only or name.startswith(tuple(args.only)):
                report[name] = measured(args, settings, rows)
                print(name, json.dumps(report[name], indent=2), flush=True)
    report["load of the machine"] = os.getloadavg()
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


def workloads(args: Any, folder: Path) -> Any:
    """(name, settings, rows of `given`, or None for the prompts of the quickstart) of each workload."""
    for steps in (0, 100):
        name, path = f"quickstart after {steps} steps", folder / f"steps-{steps}"
        if not args.only or name.startswith(tuple(args.only)):
            trained = trained_quickstart(path, steps, small=args.small)
            yield name, {"model.path": trained}, None
    questions = gsm8k(args)
    model = {"model.path": args.model or "builtin:tiny", "data.max_prompt_length": 1024}
    model |= {"model.dtype": "float32", "model.param_dtype": "float32", "sft.steps": 0}
    model |= {"data.batch_size": args.prompts, "rollout.max_new_tokens": args.tokens}
    for name, temperature in (("at 1", 1.0), ("at 0.6", 0.6), ("greedy", 0.0)):
        how = {"rollout.temperature": temperature, "rollout.n": 8 if temperature else 1}
        yield f"gsm8k {name}", {**model, **how}, questions
    record = json.dumps(RECORD, indent=1)
    asked = [
        {"prompt": [{"role": "user", "content": f"The record of an order:\n{record}"}], "number": i}
        for i in range(args.prompts)
    ]
    agent = {
        "rollout.environment": f"{__file__}:Records",
        "rollout.max_turns": args.turns,
        "rollout.n": 4,
        "rollout.max_new_tokens": args.turns * args.tokens,
        "rollout.max_environment_tokens": args.turns * 200,
        "reward.functions": "{environment: 1.0}",
    }
    for name, temperature in (("at 1", 1.0), ("at 0.6", 0.6)):
        yield f"agent {name}", {**model, **agent, "rollout.temperature": temperature}, asked


def gsm8k(args: Any) -> list[dict[str, Any]]:
    """The questions of the model's rollouts; short ones of our own with `--small`."""
    if args.small:
        return [{"prompt": [{"role": "user", "content": f"Tom has {i} apples"}]} for i in range(args.prompts)]
    with args.data.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(args.prompts))]
    asks = "Think step by step, and give the answer after ####."
    return [{"prompt": [{"role": "user", "content": f"{row['question']}\n{asks}"}]} for row in rows]


def trained_quickstart(folder: Path, steps: int, *, small: bool) -> str:
    """The folder of the quickstart's model after its warm start and so many training steps."""
    keys: dict[str, Any] = {"run.dir": folder, "run.steps": steps or 1, "checkpoint.every_steps": 0}
    keys |= {"eval.every_steps": 0, "eval.num_prompts": 8}
    if not steps:  # a run has a step; without a rate it changes nothing
        keys["optimizer.learning_rate"] = 1e-12
    if small:
        keys |= {"sft.steps": 1, "run.steps": 1}
    return str(quatrain.train(_loaded(keys)).run / "final")


def _loaded(keys: Mapping[str, Any]) -> Any:
    return quatrain.load_config(overrides=[f"{key}={value}" for key, value in keys.items()])


def measured(args: Any, settings: Mapping[str, Any], rows: Sequence[Any] | None) -> dict[str, Any]:
    """The figures of one workload, by the number of drafts."""
    name = "given rows"
    given = {} if rows is None else {name: rows}
    settings = settings if rows is None else {**settings, "data.train": name}
    ways = [0, *args.drafts]
    configs = [_loaded({**settings, "rollout.speculate": drafts}).config for drafts in ways]
    config = configs[0]
    policy = quatrain.load_policy(config)
    how: dict[str, Any] = {"seed": config.seed, "rows": given, "turns": policy.turns}
    prompts = quatrain.load_prompts(config.data.train, config.data, policy.tokenizer, **how)
    engines = [build_engine(each, policy) for each in configs]
    for engine in engines:
        engine.sync_weights(policy.params, 0)
    found: list[list[Any]] = [[] for _ in ways]
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(args.rounds + 1):
        for i, engine in enumerate(engines):
            began = time.perf_counter()
            found[i].append(engine.generate(prompts.batch(number, config.data.batch_size), step=number))
            seconds[i].append(time.perf_counter() - began)
    for engine in engines:
        engine.close()
    return {
        f"{drafts} drafts": _figures(*zip(found[i][1:], seconds[i][1:], found[0][1:], seconds[0][1:]))
        for i, drafts in enumerate(ways)
    }


def _figures(*rounds: Any) -> dict[str, float]:
    """Of (batch, seconds, batch without drafts, its seconds) of each round."""
    batches, seconds, plain, of_plain = zip(*rounds, strict=True)
    same = [
        np.array_equal(one[mask], other[other_mask])
        for batch, base in zip(batches, plain, strict=True)
        for one, mask, other, other_mask in zip(
            batch.input_ids, batch.completion_mask, base.input_ids, base.completion_mask, strict=True
        )
    ]

    def decode_s(batch: Any) -> float:
        return float(batch.metrics["rollout/decode_s"].result())

    def mean(name: str, otherwise: float) -> float:
        metrics = [batch.metrics[name] for batch in batches if name in batch.metrics]
        return reduce(Metric.combine, metrics).result() if metrics else otherwise

    pairs = list(zip(batches, plain, strict=True))
    return {
        "tokens a decode step": mean("rollout/tokens_per_decode_step", 1.0),
        "drafts accepted": mean("rollout/draft_accept_fraction", 0.0),
        "seconds": statistics.median(seconds),
        "seconds / without": statistics.median(
            one / other for one, other in zip(seconds, of_plain, strict=True)
        ),
        "decode seconds / without": statistics.median(
            decode_s(batch) / decode_s(base) for batch, base in pairs
        ),
        "completion tokens": float(np.mean([batch.completion_mask.sum() for batch in batches])),
        "same tokens": float(np.mean(same)),
    }


if __name__ == "__main__":
    main()
