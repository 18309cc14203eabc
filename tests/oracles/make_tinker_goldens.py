"""Computes log-probabilities, cross-entropy and its gradient of adapters with peft (torch, CPU).

Run by `make oracles`, which needs torch; the tests that read tests/golden/tinker_*.json do not. In float64,
so that the differences of a test are those of quatrain alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens import GOLDEN, probes, read_golden
from tinker_goldens import ALPHA, KINDS, NO_TARGET, RANK, TINKER_CASES, Rows, adapter, rows_of

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def main() -> None:
    """Writes the golden file of each family."""
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
    for case in TINKER_CASES:
        model = adapted(case)
        found = {kind: computed(model, rows_of(kind)) for kind in KINDS}
        about = {"versions": {name: version(name) for name in ("torch", "transformers", "peft", "numpy")}}
        (GOLDEN / f"tinker_{case}.json").write_text(json.dumps(about | found, indent=1) + "\n")
        print(case, {kind: each["loss"] for kind, each in found.items()})


def adapted(case: str) -> Any:
    """The golden model of `case` with drawn adapters on all its matrices and the output head."""
    with tempfile.TemporaryDirectory() as folder:
        base = AutoModelForCausalLM.from_pretrained(
            read_golden(case).write_model(Path(folder)), attn_implementation="eager", dtype=torch.float64
        )
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(MODULES), lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config).double().eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = adapter(named(name), tuple(parameter.shape))
            parameter.data = torch.from_numpy(value.astype(np.float64))
    return model


def named(name: str) -> str:
    """The name of a parameter as peft saves it."""
    return name.replace(".default.", ".")


def computed(model: Any, rows: list[Rows]) -> dict[str, Any]:
    """Log-probabilities of the targets, the sum of -weight x log-probability, and its gradient."""
    model.zero_grad()
    loss, logprobs = torch.zeros((), dtype=torch.float64), []
    for each in rows:
        logits = model(input_ids=torch.from_numpy(each.tokens.astype(np.int64))[None]).logits[0]
        targets = torch.from_numpy(each.targets.astype(np.int64)).reshape(len(each.tokens), -1)
        found = torch.log_softmax(logits, dim=-1).gather(1, targets.clamp(min=0))
        found = torch.where(targets == NO_TARGET, 0.0, found)
        weights = torch.from_numpy(each.weights.astype(np.float64)).reshape(found.shape)
        loss = loss - (weights * found).sum()
        logprobs += found.reshape(-1).tolist()
    loss.backward()
    gradients = {named(n): p.grad.numpy() for n, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.item(), "logprobs": logprobs, "gradients": probes(gradients).tolist()}


if __name__ == "__main__":
    main()
