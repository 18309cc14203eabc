"""Greedy answers of transformers `generate` on the CPU; run by `evaluation.py`.

Of each token it also notes what a tie would look like: the second likeliest token, and by how much less
likely it is.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor
from workload import finish


class Seconds(LogitsProcessor):
    """Of each token the second likeliest, and the difference of the two log-probabilities."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], list[float]]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        top = scores.topk(2, dim=-1)
        gaps = top.values[:, 0] - top.values[:, 1]
        self.steps.append((top.indices[:, 1].tolist(), gaps.tolist()))
        return scores


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the model, for transformers")
    parser.add_argument("--chats", type=Path, required=True, help="a chat as JSON in each line")
    parser.add_argument("--tokens", type=int, required=True, help="most new tokens of an answer")
    parser.add_argument("--rows", type=int, default=16, help="chats at a time")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    stops = model.generation_config.eos_token_id
    stops = {stops} if isinstance(stops, int) else set(stops)
    chats, answers = [json.loads(line) for line in args.chats.read_text().splitlines()], []
    for start in range(0, len(chats), args.rows):
        inputs = tokenizer.apply_chat_template(
            chats[start : start + args.rows],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        seconds = Seconds()
        sequences = model.generate(
            **inputs, do_sample=False, max_new_tokens=args.tokens, logits_processor=[seconds]
        )
        for row, new in enumerate(sequences[:, inputs["input_ids"].shape[1] :].tolist()):
            length = next((at + 1 for at, token in enumerate(new) if token in stops), len(new))
            answers.append(
                {
                    "prompt": inputs["input_ids"][row][inputs["attention_mask"][row] == 1].tolist(),
                    "tokens": new[:length],
                    "text": tokenizer.decode(new[:length], skip_special_tokens=True),
                    "seconds": [each[0][row] for each in seconds.steps[:length]],
                    "gaps": [each[1][row] for each in seconds.steps[:length]],
                }
            )
    finish(
        {
            "peer": f"transformers {version('transformers')} generate, torch {version('torch')}",
            "stop_ids": sorted(stops),
            "answers": answers,
        }
    )


if __name__ == "__main__":
    main()
