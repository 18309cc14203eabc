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
from episode_trees import MOST_NEW_TOKENS, draw_episodes, episode_gradients, leaf_rows
from goldens import CASES, GOLDEN, Golden, golden_gradients, probes, read_golden
from make_goldens import as_stored, tensors_of

LARGEST = 1e-4
"""Of a tensor's differences, as a share of the norm of its gradient."""
LARGEST_OF_EPISODES = 1e-5
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def main() -> None:
    """Of the golden models in the arguments, whose numbers replace those in the file; or of all."""
    logging.set_verbosity_error()
    chosen, kept = sys.argv[1:] or list(CASES), {}
    if sys.argv[1:]:
        with np.load(GOLDEN / "gradients.npz") as file:
            kept = dict(file)
    for case in chosen:
        golden = read_golden(case)
        kept[case] = compared(case, torch_gradients(golden), golden_gradients(golden), LARGEST)
        np.savez_compressed(GOLDEN / "gradients.npz", **kept)
    for aggregation in AGGREGATIONS if chosen == list(CASES) else ():
        case = f"episodes_{aggregation}"
        ours = episode_gradients(aggregation, leaf_rows(draw_episodes(8), owners=1))
        kept[case] = compared(case, torch_episode_gradients(aggregation), ours, LARGEST_OF_EPISODES)
    np.savez_compressed(GOLDEN / "gradients.npz", **kept)


def compared(
    case: str, theirs: dict[str, np.ndarray], ours: dict[str, np.ndarray], largest: float
) -> np.ndarray:
    """What is kept of the gradients by torch; raises AssertionError where ours differ by more."""
    assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
    # An expert without a token has no gradient: there the difference itself counts.
    off = {name: np.abs(ours[name] - g).max() / (np.linalg.norm(g) or 1) for name, g in theirs.items()}
    worst = max(off, key=lambda name: off[name])
    assert off[worst] < largest, f"{case}: the gradients of {worst} differ by {off[worst]}"
    print(f"{case}: {len(off)} gradients, the largest difference {off[worst]:.1e} of the norm ({worst})")
    return probes(theirs)


def torch_model(golden: Golden) -> torch.nn.Module:
    """The model of transformers with the weights of `golden`."""
    config = AutoConfig.for_model(**golden.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # else a token that happens to be it has no gradient
    weights = golden.weights()
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            tensor.copy_(torch.from_numpy(weights[name]))
    return model


def torch_gradients(golden: Golden) -> dict[str, np.ndarray]:
    """The gradient of each tensor of the mean cross-entropy of all tokens with a predecessor, by torch."""
    model = torch_model(golden)
    inputs = {name: torch.from_numpy(value) for name, value in golden.inputs.items()}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    real = inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1] > 0
    loss = torch.nn.functional.cross_entropy(logits[real], inputs["input_ids"][:, 1:][real])
    loss.backward()
    grads = as_stored(model, {name: parameter.grad for name, parameter in model.named_parameters()})
    return {name: grad.numpy() for name, grad in grads.items()}


def torch_episode_gradients(aggregation: str) -> dict[str, np.ndarray]:
    """As `episode_gradients` of `draw_episodes(8)`, in float64: the sum over the turns, one after another."""
    model = torch_model(read_golden("qwen2")).double()
    episodes = draw_episodes(8)
    lengths = [sum(len(turn.sampled) for turn in episode.turns) for episode in episodes]
    for episode, length in zip(episodes, lengths, strict=True):
        weight = {
            "token_mean": 1 / sum(lengths),
            "seq_mean_token_mean": 1 / (length * len(episodes)),
            "seq_mean_token_sum": 1 / len(episodes),
            "seq_mean_token_sum_norm": 1 / (len(episodes) * MOST_NEW_TOKENS),
        }[aggregation]
        for number, turn in enumerate(episode.turns):
            context, sampled = episode.context(number), torch.tensor(turn.sampled)
            ids = torch.tensor([[*context, *turn.sampled]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1]
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, sampled[:, None])
            (-weight * episode.reward * logprobs.sum()).backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    main()
