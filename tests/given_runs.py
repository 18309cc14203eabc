"""Small runs on data that exist: sums, as demonstrations and as pairs of an answer and its opposite."""

import json

from quatrain.config.load import load_config

ROWS = 22
"""Rows that are trained on: three batches of 8, the last of which has 6."""
TASKS = ("sft", "dpo", "rm")


def write_sums(path, first, count):
    """Sums that are all different, each with its answer, and with one that denies it."""
    numbers = [(number, 3 * number % 17) for number in range(first, first + count)]
    rows = [
        {
            "prompt": f"{a} + {b} =",
            "completion": f" {a + b}",
            "chosen": f" {a + b}",
            "rejected": f" not {a + b}",
        }
        for a, b in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def given_run(folder, name, task, *overrides):
    """The configuration of a run of 6 steps, 2 epochs, with an evaluation and a checkpoint every 2 steps."""
    data = folder / f"{task}.jsonl"
    if not data.exists():
        write_sums(data, 10, ROWS)
        write_sums(folder / f"{task}_eval.jsonl", 50, 9)
    columns = {"sft": ("prompt", "completion")}.get(task, ("prompt", "chosen", "rejected"))
    for path in (data, folder / f"{task}_eval.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({key: row[key] for key in columns}) + "\n" for row in rows))
    own = folder / "given.yaml"  # without the keys of the quickstart
    own.write_text("model: {path: builtin:tiny, remat: none}\n")
    settings = (
        f"{task}.data={data}",
        f"{task}.eval={folder / f'{task}_eval.jsonl'}",
        f"{task}.batch_size=8",
        f"{task}.epochs=2",
        f"{task}.warmup_steps=0",
        "update.max_tokens_per_device=64",
        "eval.every_steps=2",
        "checkpoint.every_steps=2",
        f"run.dir={folder}",
        f"run.name={name}",
    )
    return load_config(own, (*settings, *overrides), environ={}, task=task)
