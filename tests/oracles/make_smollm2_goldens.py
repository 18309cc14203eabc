"""Writes what Hugging Face transformers makes of SmolLM2-135M-Instruct, for the tests to compare with.

Needs torch, transformers, accelerate and gguf; the tests need none of them but transformers. Run from the
repository's root, after `make smollm2`:

    python tests/oracles/make_smollm2_goldens.py

transformers' own reading of the GGUF tokenizer knows no `smollm` splitting rule and falls back to GPT-2's,
which cuts two spaces before a digit otherwise (16 of the 2638 GSM8K test texts). The rule of the published
tokenizer (each digit alone, then GPT-2's) is put in its place here; nothing else is changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_PROMPTS = 8
NUM_NEW_TOKENS = 32
NUM_TEXTS = 400
STRANGE_TEXTS = (
    "",
    " ",
    "\n\n\t  x",
    "1234567890",
    "cost  5 and   66 dollars",
    "3.14159, 1,234 and -7%",
    "I'll we've DON'T can't 'S",
    "naïve café — “quoted” … ½ ²",
    "日本語のテキスト と 한국어",
    "🙂👩‍👩‍👧 emoji",
    "e\u0301 decomposed, \u00e9 composed",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<think>\n1+1=2\n</think>\n<answer>2</answer>",
    "def f(x):\n    return x**2  # square\n",
    "٣٤٥ Ⅷ ५",
    "trailing spaces   ",
    "\r\nwindows\r\n",
    "<repo_name><empty_output>a",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--gsm8k", type=Path, default=Path("../shared/data/gsm8k/test.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("tests/golden"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(args.model)
    rows = [json.loads(line) for line in args.gsm8k.read_text("utf-8").splitlines()]
    write(args.output / "tokenizer_smollm2.json", tokenizer_golden(tokenizer, rows))
    write(args.output / "smollm2_greedy.json", greedy_golden(args.model, tokenizer, rows))


def load_tokenizer(model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def tokenizer_golden(tokenizer: Any, rows: list[dict[str, str]]) -> dict[str, Any]:
    texts = [row[column] for row in rows[: NUM_TEXTS // 2] for column in ("question", "answer")]
    return {
        "strange": [{"text": text, "ids": tokenizer.encode(text)} for text in STRANGE_TEXTS],
        "gsm8k_test_sha256": [digest(tokenizer.encode(text)) for text in texts],
    }


def digest(ids: list[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


@torch.no_grad()
def greedy_golden(model: Path, tokenizer: Any, rows: list[dict[str, str]]) -> dict[str, Any]:
    network = AutoModelForCausalLM.from_pretrained(
        str(model.parent), gguf_file=model.name, dtype=torch.float32
    ).eval()
    prompts = []
    for row in rows[:NUM_PROMPTS]:
        messages = [{"role": "user", "content": row["question"]}]
        prompt_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        made = network.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            eos_token_id=2,
            pad_token_id=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        completion_ids = made.sequences[0, len(prompt_ids) :].tolist()
        logprobs = torch.log_softmax(torch.cat(made.logits).double(), dim=-1)
        best = logprobs.topk(2).values
        prompts.append(
            {
                "question": row["question"],
                "prompt_ids": prompt_ids,
                "completion_ids": completion_ids,
                "completion": tokenizer.decode(completion_ids),
                "logprobs": [round(value, 6) for value in best[:, 0].tolist()],
                "smallest_gap": round(float((best[:, 0] - best[:, 1]).min()), 6),
            }
        )
    return {"prompts": prompts}


def write(path: Path, golden: dict[str, Any]) -> None:
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers", "gguf")}
    made_by = {"python": platform.python_version(), **versions}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"made_by": made_by, **golden}) + "\n")


if __name__ == "__main__":
    main()
