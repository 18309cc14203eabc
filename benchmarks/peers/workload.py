"""The workload that ours and the peers are compared on; needs the standard library alone.

Under `step.py`, `compare.py` and the scripts beside it: flags, the prompts of every step, the reward, and the
line of JSON that a measurement ends with. The defaults are the comparison's: 4 GSM8K prompts, 8 samples of
each, 64 new tokens each, whatever they say. Rows with pictures are those of `picture_data.py`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path
from typing import Any

LEARNING_RATE = 2e-6
MAX_GRAD_NORM = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The size of the workload, the same flags everywhere."""
    parser.add_argument("--data", type=Path, default=Path("../shared/data/gsm8k/train.jsonl"), metavar="FILE")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a completion; none stops early")
    parser.add_argument("--steps", type=int, default=3, help="steps measured, after one that is dropped")
    parser.add_argument(
        "--vision", choices=("frozen", "all"), help="of rows with pictures: what of a tower is trained"
    )


def peer_parser(doc: str | None) -> argparse.ArgumentParser:
    """The flags of a peer's script, which `compare.py` gives."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--model", type=Path, required=True, help="folder with the model, for transformers")
    parser.add_argument("--system-prompt", help="before each question; rows with pictures have none")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, help="sequences of a micro-batch, where the peer can choose")
    return parser


def read_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all steps, the dropped one included, in file order: the chat of each as `prompt`.

    Rows with pictures also have their files, as `images`.
    """
    count = (args.steps + 1) * args.prompts
    with args.data.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(count))]
    if len(rows) < count:
        raise ValueError(f"the data has a row for each prompt: {count} wanted, {args.data} has {len(rows)}")
    if "images" in rows[0]:
        return [row | {"images": [args.data.parent / name for name in row["images"]]} for row in rows]
    system = {"role": "system", "content": args.system_prompt}
    return [{"prompt": [system, {"role": "user", "content": row["question"]}]} for row in rows]


def read_messages(args: argparse.Namespace) -> list[list[dict[str, str]]]:
    """The chats of `read_rows`."""
    return [row["prompt"] for row in read_rows(args)]


def text_reward(completions: list[Any], **columns: Any) -> list[float]:
    """A rule that hardly ever gives the samples of a prompt the same reward, so that every step trains."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [(len(text) + 7 * len(set(text)) + sum(map(ord, text)) % 101) / 1000 for text in texts]


def num_prompt_tokens(tokenizer: Any, chats: list[list[dict[str, str]]]) -> int:
    """Of all prompts together, as the tokenizer's chat template renders them; ours must have as many."""
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats
    ]
    return sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))


def peak_rss_mib() -> float:
    """The most memory this process has held."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


def finish(measured: dict[str, Any]) -> None:
    """Print what was measured: the last line of the output, read by `compare.py`."""
    print(json.dumps(measured | {"peak_rss_mib": peak_rss_mib()}), flush=True)
