"""The data that training on given data is compared on; needs the standard library alone.

GSM8K's solutions as demonstrations; as pairs, each solution beside the same one with wrong numbers: lengths
and shared beginnings are those of right and wrong samples of a model. Rows are in the file's order.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

TASKS = ("sft", "dpo", "rm")


def add_given_arguments(parser: argparse.ArgumentParser) -> None:
    """The size of the workload, the same flags everywhere."""
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/gsm8k/train.jsonl"), metavar="FILE")
    parser.add_argument("--examples", type=int, default=16, help="examples, or pairs, of an optimizer step")
    parser.add_argument("--steps", type=int, default=3, help="steps measured, after one that is dropped")


def rows(args: argparse.Namespace) -> list[dict[str, object]]:
    """The rows of all steps, the dropped one included, in the conversational form both sides read."""
    count = (args.steps + 1) * args.examples
    with args.data.open(encoding="utf-8") as lines:
        given = [json.loads(line) for line, _ in zip(lines, range(count))]
    if len(given) < count:
        raise ValueError(f"the data has a row for each example: {count} wanted, {args.data} has {len(given)}")
    made = []
    for number, row in enumerate(given):
        prompt = [{"role": "user", "content": row["question"]}]
        right = re.sub(r"<<.*?>>", "", row["answer"])
        if args.task == "sft":
            made.append({"messages": [*prompt, {"role": "assistant", "content": right}]})
        else:
            answers = {"chosen": right, "rejected": wrong(right, random.Random(number))}
            of_assistant = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
            made.append({"prompt": prompt, **of_assistant})
    return made


def wrong(solution: str, draw: random.Random) -> str:
    """The solution with a wrong result, and wrong numbers from some line on."""
    lines = solution.split("\n")
    first = draw.randrange(len(lines))
    changed = [re.sub(r"\d+", lambda found: str(int(found[0]) + draw.randint(1, 9)), line) for line in lines]
    return "\n".join([*lines[:first], *changed[first:]])
