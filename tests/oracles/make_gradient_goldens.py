"""Gradients of the golden models by torch, of which tests/golden/gradients.npz keeps two numbers a tensor.

Run by `make oracles`, which needs torch; the tests that read the file do not. Here the whole gradients of
torch and quatrain are compared, tensor by tensor.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens import CASES, GOLDEN, Golden, golden_gradients, probes, read_golden
from make_goldens import tensors_of

LARGEST = 1e-4
"""Of a tensor's differences, as a share of the norm of its gradient."""


def main() -> None:
    logging.set_verbosity_error()
    kept = {}
    for case in CASES:
        golden = read_golden(case)
        theirs, ours = torch_gradients(golden), golden_gradients(golden)
        assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
        off = {name: np.abs(ours[name] - g).max() / np.linalg.norm(g) for name, g in theirs.items()}
        worst = max(off, key=lambda name: off[name])
        assert off[worst] < LARGEST, f"{case}: the gradients of {worst} differ by {off[worst]}"
        kept[case] = probes(theirs)
        print(f"{case}: {len(off)} gradients, the largest difference {off[worst]:.1e} of the norm ({worst})")
    np.savez_compressed(GOLDEN / "gradients.npz", **kept)


def torch_gradients(golden: Golden) -> dict[str, np.ndarray]:
    """The gradient of each tensor of the mean cross-entropy of all tokens with a predecessor, by torch."""
    config = AutoConfig.for_model(**golden.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # else a token that happens to be it has no gradient
    weights = golden.weights()
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            tensor.copy_(torch.from_numpy(weights[name]))
    inputs = {name: torch.from_numpy(value) for name, value in golden.inputs.items()}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    real = inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1] > 0
    loss = torch.nn.functional.cross_entropy(logits[real], inputs["input_ids"][:, 1:][real])
    loss.backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    main()
