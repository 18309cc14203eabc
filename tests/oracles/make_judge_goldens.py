"""Has transformers and peft (torch, CPU) read what a run of `quatrain rm` exports, and keeps their scores.

Run by `make oracles`, which needs torch; the tests that read tests/golden/judges.json do not. transformers
reads the merged model with the tokenizer and the chat template beside it, padded on either side; peft loads
the adapters and the score head onto the language model that they were trained on. All scores are the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from classifiers import TO_SCORE, TRAINED, trained_classifier
from goldens import GOLDEN

LARGEST = 5e-6
"""Of the differences between scores of one model; the scores are about 1."""


def main() -> None:
    logging.set_verbosity_error()
    scores = {}
    for case in TRAINED:
        with tempfile.TemporaryDirectory() as folder:
            base, final = Path(folder) / "base", Path(folder) / "final"
            trained_classifier(final, case, base)
            scores[case] = check(base, final)
        print(f"{case}: {np.round(scores[case], 3)}")
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "numpy")}
    written = {"scores": scores, "versions": versions}
    (GOLDEN / "judges.json").write_text(json.dumps(written, indent=2) + "\n")


def check(base: Path, final: Path) -> list[float]:
    """The scores of `TO_SCORE`; raises AssertionError if one reading differs from another."""
    options: dict[str, Any] = {"attn_implementation": "eager", "num_labels": 1}
    tokenizer = AutoTokenizer.from_pretrained(final)
    model = AutoModelForSequenceClassification.from_pretrained(final, attn_implementation="eager").eval()
    sequences = [ids_of(tokenizer, prompt, completion) for prompt, completion in TO_SCORE]
    with torch.no_grad():
        alone = [float(model(input_ids=torch.tensor([ids])).logits) for ids in sequences]
    assert np.std(alone) > 0.1, "the scores say nothing"
    for side in ("left", "right"):
        off = np.abs(np.array(batch(model, tokenizer, sequences, side)) - alone).max()
        assert off < LARGEST, f"scores padded on the {side} differ by {off}"
    loaded = AutoModelForSequenceClassification.from_pretrained(base, **options).eval()
    loaded.config.pad_token_id = model.config.pad_token_id
    peft = PeftModel.from_pretrained(loaded, final / "adapter").eval()
    off = np.abs(np.array(batch(peft, tokenizer, sequences, "left")) - alone).max()
    assert off < LARGEST, f"scores with peft differ by {off}"
    return alone


def ids_of(tokenizer: Any, prompt: Any, completion: str) -> list[int]:
    """The ids of a prompt and its completion, as whoever uses transformers gets them."""
    if isinstance(prompt, str):
        return tokenizer(prompt + completion)["input_ids"]
    messages = [*prompt, {"role": "assistant", "content": completion}]
    return tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]


@torch.no_grad()
def batch(model: Any, tokenizer: Any, sequences: list[list[int]], side: str) -> list[float]:
    """The scores of all sequences in one padded batch."""
    padded = tokenizer.pad({"input_ids": sequences}, padding_side=side, return_tensors="pt")
    return model(**padded).logits[:, 0].tolist()


if __name__ == "__main__":
    main()
