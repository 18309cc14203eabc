"""Qwen 2 with experts, one of which all tokens share, and Qwen 3 with experts."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import HFConfig


def _read_2(c: HFConfig) -> Architecture:
    """Unless config.json names their types, every other layer has a window, from the first, if any has."""
    windows = range(0, c.max_window_layers, 2) if c.use_sliding_window else range(0)
    types, biased = common.layer_types(c, lambda i: i not in windows), c.qkv_bias is not False
    mixers = common.attentions(c, types, read_rope(c), qkv_bias=biased, output_bias=False)
    return common.architecture("qwen2_moe", c, mixers, common.read_mlps(c, 60))


def _write_2(arch: Architecture) -> Json:
    windows = common.write_windows(arch)
    return {
        **windows,
        **common.write_experts(arch),
        "qkv_bias": arch.attentions[0].qkv_bias,
        "use_sliding_window": windows["sliding_window"] is not None,
        "sliding_window": windows["sliding_window"] or 0,
        "max_window_layers": arch.num_layers,
    }


def _read_3(c: HFConfig) -> Architecture:
    """A window is of all layers."""
    window = c.sliding_window if c.use_sliding_window else None
    mixer = common.read_attention(c, read_rope(c), window, qk_norm=True)
    return common.architecture("qwen3_moe", c, [mixer] * c.num_hidden_layers, common.read_mlps(c, 128))


def _write_3(arch: Architecture) -> Json:
    window = arch.layers[0].mixer.window
    return {
        **common.write_attention(arch),
        **common.write_experts(arch),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


_DEFAULTS: Json = {"max_position_embeddings": 32768, "sliding_window": 4096}
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2Moe",
    {
        **_DEFAULTS,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
    },
    _read_2,
    _write_2,
    GGUF(
        "qwen2moe",
        keys={**common.EXPERT_KEYS, "expert_shared_feed_forward_length": 1},
        # llama.cpp has experts in all layers, and weights that are parts of the softmax over all.
        config=lambda keys: {
            **common.experts_of_gguf(keys),
            "shared_expert_intermediate_size": keys.shared_width,
        },
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    {
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    _read_3,
    _write_3,
    # llama.cpp has weights that sum to 1, whatever norm_topk_prob says.
    GGUF(
        "qwen3moe",
        keys=common.EXPERT_KEYS,
        config=lambda keys: {**common.experts_of_gguf(keys), "norm_topk_prob": True},
    ),
)
