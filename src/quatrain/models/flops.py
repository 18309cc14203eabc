"""Multiplications and additions that a model needs, from its shape.

Data flow: architecture and token counts -> the benchmarks, which set them against what a machine can do.
"""

from __future__ import annotations

from quatrain.models.architecture import Architecture


def linear_parameters(arch: Architecture) -> int:
    """Weights of the matrices every token is multiplied with: all layers', without embedding and head."""
    heads, kv_heads = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    attention = arch.hidden_size * (2 * heads + 2 * kv_heads)
    return arch.num_layers * (attention + 3 * arch.hidden_size * arch.intermediate_size)


def forward_flops(arch: Architecture, *, tokens: float, keys: float, scored: float) -> float:
    """Floating-point operations of a forward pass, a multiplication and an addition counting two.

    Args:
        tokens: tokens computed.
        keys: keys that a token attends to, mean over the tokens.
        scored: tokens whose logits over the vocabulary are computed.
    """
    per_token = 2 * linear_parameters(arch) + 4 * arch.num_layers * arch.num_heads * arch.head_dim * keys
    return tokens * per_token + scored * 2 * arch.hidden_size * arch.vocab_size
