"""Loads adapters that quatrain exports with peft (torch, CPU), and compares its logits with quatrain's own.

Run by `make oracles`. For each small model of the golden files: adapters with random A and B on all matrices,
on queries, keys and values alone, and on the output head, alone and beside the others. peft loads the
exported folder onto the base and computes with the adapters beside it, and merged into it; quatrain does the
same. With adapters on the head the gradients of the log-probability of all next tokens are compared too.
Differences are asserted, and printed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens import CASES, read_golden

from quatrain.config.schema import LoraConfig
from quatrain.forward.specs import PolicySpec, head_logprobs
from quatrain.models.decoder import forward, logits
from quatrain.models.families import architecture_from_hf
from quatrain.models.lora import (
    adapter_names,
    adapters_of,
    merged,
    merged_architecture,
    with_adapters,
    with_lora,
    with_trained,
)
from quatrain.models.params import leaf_at
from quatrain.weights.adapter import save_adapter
from quatrain.weights.hf import load_hf

LARGEST = 2e-4
"""Of the logits' differences; their standard deviation is about 1."""
INPUTS = ("input_ids", "position_ids", "attention_mask")
LARGEST_OF_DELTA = 1e-3
"""For DeltaNet, which divides by the lengths of keys: in float64, half a float32 rounding of each weight
changes the same logits by up to 2e-4 (qwen3_5_text, adapters on all matrices; quatrain differs by 5e-4)."""
TARGETS: tuple[tuple[Any, ...], ...] = (("qkv", "o", "gate_up", "down"), ("qkv",))
HEAD = "lm_head"
EXPERTS = ("experts_gate_up", "experts_down")


def main() -> None:
    logging.set_verbosity_error()
    for case in CASES:
        for targets in targets_of(case):
            print(f"{case}, adapters on {', '.join(targets)}: {check(case, targets)}")


def targets_of(case: str) -> tuple[tuple[Any, ...], ...]:
    """What adapters are on; of a model with experts, also on these, with and without other matrices."""
    layers = architecture_from_hf(read_golden(case).config).kinds
    matrices = {name for kind in layers for name in kind.matrices()}
    known = tuple(name for name in TARGETS[0] if name in matrices)
    of_experts = ((*known, *EXPERTS), EXPERTS[1:]) if EXPERTS[0] in matrices else ()
    return known, TARGETS[1], (HEAD,), (*known, HEAD), *of_experts


def check(case: str, targets: tuple[Any, ...]) -> str:
    """The largest differences between peft and quatrain; raises AssertionError if one is too large."""
    model = read_golden(case)
    arrays = {name: getattr(model, name) for name in INPUTS}
    with tempfile.TemporaryDirectory() as folder:
        base, adapter = model.write_model(Path(folder) / "base"), Path(folder) / "adapter"
        arch, params = load_hf(base)
        # With three times the scale, half a rounding of each weight changes logits of gemma4_text by 4e-4.
        arch = with_lora(
            arch.for_length(arrays["input_ids"].shape[1]), LoraConfig(rank=4, alpha=4.0, targets=targets)
        )
        params = drawn(with_adapters(params, arch, jax.random.key(0)), arch)
        save_adapter(adapter, arch, params, base=str(base))
        theirs = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
        plain = run(theirs, arrays)
        peft = PeftModel.from_pretrained(theirs, adapter).eval()
        with_peft = run(peft, arrays)
        by_peft = gradients_by_peft(peft, arrays) if HEAD in targets else {}
        merged_by_peft = run(peft.merge_and_unload(), arrays)
    ours = own_logits(arch, params, arrays)
    merged_by_us = own_logits(merged_architecture(arch), merged(params, arch), arrays)
    real = arrays["attention_mask"] > 0
    changed = np.abs(with_peft - plain)[real].max()
    assert changed > 0.1, f"{case}: the adapters change the logits by {changed} only"
    # Where the head is the embeddings, peft merges its adapters into these too, which changes the inputs.
    tied = arch.tie_embeddings and HEAD in targets
    off = {
        "adapters": np.abs(with_peft - ours)[real].max(),
        "merged": np.abs((with_peft if tied else merged_by_peft) - merged_by_us)[real].max(),
    }
    if by_peft:
        off["gradients"] = largest_difference(own_gradients(arch, params, arrays), by_peft)
    largest = LARGEST_OF_DELTA if arch.deltas else LARGEST
    assert max(off.values()) < largest, f"{case}: logits of peft and quatrain differ: {off}"
    return f"changed by {changed:.2f}; " + ", ".join(f"{name} {value:.1e}" for name, value in off.items())


def drawn(params: Any, arch: Any) -> Any:
    """`params` with random A and B: after training, neither is what it was at the start."""
    leaves, structure = jax.tree.flatten(adapters_of(params))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    values = [0.3 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    return with_trained(params, jax.tree.unflatten(structure, values), arch)


def own_logits(arch: Any, params: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """[B, T, V] logits by quatrain."""
    inputs = (jnp.asarray(arrays[name]) for name in INPUTS)
    return np.asarray(logits(params, arch, forward(params, arch, *inputs).hidden))


def own_gradients(arch: Any, params: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By peft's names, of the sum of the log-probabilities of next tokens, by quatrain in tiles of logits."""
    places, targets = next_tokens(arrays)
    policy = PolicySpec(arch)

    def total(adapters: Any) -> jax.Array:
        whole = with_trained(params, adapters, arch)
        hidden = forward(whole, arch, *(jnp.asarray(arrays[name]) for name in INPUTS)).hidden[places]
        return head_logprobs(whole, policy, hidden, jnp.asarray(targets), jnp.int32(len(targets)))[0].sum()

    found = jax.tree.map(np.asarray, jax.jit(jax.grad(total))(adapters_of(params)))
    names = [name for name in adapter_names(arch) if not name.stacked]
    return {name.name: name.of(leaf_at(found, name.path)) for name in names}


def gradients_by_peft(model: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same by torch."""
    places, targets = next_tokens(arrays)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    logprobs = model(**tensors, use_cache=False).logits.float().log_softmax(-1)[places]
    logprobs[torch.arange(len(targets)), torch.from_numpy(targets)].sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name.replace(".default", ""): grad.numpy() for name, grad in found.items()}


def next_tokens(arrays: dict[str, np.ndarray]) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Where there is a token and one after it, and the latter."""
    real, ids = arrays["attention_mask"] > 0, arrays["input_ids"]
    rows, columns = np.nonzero(real[:, :-1] & real[:, 1:])
    return (rows, columns), ids[rows, columns + 1].astype(np.int64)


def largest_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Of each array relative to its largest element."""
    assert {*ours} <= {*theirs}, "peft has all adapters"
    return max(float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()) for name in ours)


@torch.no_grad()
def run(model: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """[B, T, V] logits by torch."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return model(**tensors, use_cache=False).logits.float().numpy()


if __name__ == "__main__":
    main()
