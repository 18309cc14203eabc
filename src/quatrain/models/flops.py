"""Floating-point operations of a model, computed from its architecture.

Data flow: architecture and token counts -> benchmarks, which divide them by time and by the device's peak;
architecture -> the packer of micro-batches, which balances the cost of sequences.
"""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.ops.packing import PackingCost


def linear_parameters(arch: Architecture) -> int:
    """Elements of the weight matrices of all layers; the embedding and the output head do not count."""
    heads, kv_heads = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    attention = arch.hidden_size * (2 * heads + 2 * kv_heads)
    return arch.num_layers * (attention + 3 * arch.hidden_size * arch.intermediate_size)


def packing_cost(arch: Architecture) -> PackingCost:
    """Multiplications of one layer for a sequence, which the packer balances over data shards."""
    per_token = linear_parameters(arch) / arch.num_layers
    return PackingCost(linear=per_token, quadratic=float(arch.num_heads * arch.head_dim))


def forward_flops(arch: Architecture, *, tokens: float, keys: float, scored: float) -> float:
    """Floating-point operations of a forward pass; a multiply-add counts as two.

    Args:
        tokens: tokens that the layers compute.
        keys: keys that a token attends to, averaged over the tokens.
        scored: tokens for which the output head computes logits.
    """
    per_token = 2 * linear_parameters(arch) + 4 * arch.num_layers * arch.num_heads * arch.head_dim * keys
    return tokens * per_token + scored * 2 * arch.hidden_size * arch.vocab_size
