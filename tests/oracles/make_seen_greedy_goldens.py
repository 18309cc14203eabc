"""Writes tests/golden/seen_greedy.json: what transformers generates greedily after a text with pictures.

Run by `make oracles`, behind make_tower_goldens.py, whose models and inputs these are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from make_tower_goldens import _InDouble, inputs_of
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens import GOLDEN, draw
from towers import CASES, CONFIGS, seeing

TOKENS = 10


def main() -> None:
    """Each model computes in float64."""
    logging.set_verbosity_error()
    modeling_qwen3_5.torch = _InDouble()
    found = {case: tokens_of(case) for case in CASES}
    (GOLDEN / "seen_greedy.json").write_text(json.dumps(found) + "\n")


@torch.no_grad()
def tokens_of(case: str) -> dict[str, list[Any]]:
    """The likeliest tokens, one after another, and their log-probabilities."""
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**CONFIGS[case])).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    model = model.double()
    for name, tensor in model.named_parameters():
        tensor.copy_(torch.from_numpy(draw(name, tuple(tensor.shape))))
    vision = seeing(case).vision
    assert vision is not None
    inputs: dict[str, Any] = inputs_of(case, model, vision)
    positions = inputs.pop("position_ids", None)
    before = inputs["input_ids"].shape[1]
    how = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "do_sample": False}
    made = model.generate(**inputs, **how, return_dict_in_generate=True, output_logits=True)
    generated = made.sequences
    tokens = generated[0, before:].tolist()
    scores = torch.cat(made.logits).double().log_softmax(-1)  # which `generate` rounds to float32
    logprobs = [round(float(row[token]), 6) for row, token in zip(scores, tokens, strict=True)]
    if positions is not None:
        # The same without a cache, at positions that are said: `generate` derives them in another way.
        behind = int(positions.max()) + 1 + torch.arange(TOKENS)
        kinds = inputs.pop("mm_token_type_ids")
        inputs |= {
            "input_ids": generated,
            "attention_mask": torch.ones_like(generated),
            "position_ids": torch.cat([positions, behind.expand(3, 1, -1)], dim=-1),
            "mm_token_type_ids": torch.cat([kinds, torch.zeros(1, TOKENS, dtype=kinds.dtype)], dim=-1),
        }
        whole = model(**inputs, use_cache=False).logits[0, before - 1 : -1].log_softmax(-1)
        assert torch.allclose(whole, scores, atol=1e-4)
    print(case, tokens)
    return {"tokens": tokens, "logprobs": logprobs}


if __name__ == "__main__":
    main()
