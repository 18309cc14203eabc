"""Qwen 2 with experts, one of which all tokens share, and Qwen 3 with experts."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.blocks.attention import Attention
from quatrain.models.families import common
from quatrain.models.families.common import Family, Json
from quatrain.models.families.experts import EXPERT_KEYS, experts_of_gguf, read_mlps, write_experts
from quatrain.models.families.gguf import GGUF, GGUFKeys
from quatrain.models.families.ropes import FULL, SLIDING, read_rope
from quatrain.models.hf_config import HFConfig


def _read_2(c: HFConfig) -> Architecture:
    """Unless config.json names their types, every other layer has a window, from the first, if any has."""
    windows = range(0, c.max_window_layers, 2) if c.use_sliding_window else range(0)
    types = c.layer_types or [SLIDING if i in windows else FULL for i in range(c.num_hidden_layers)]
    rope, bias = read_rope(c), c.qkv_bias is not False

    def mixer(window: int | None) -> Attention:
        return common.read_attention(c, rope, window, qkv_bias=bias, output_bias=False)

    return common.architecture("qwen2_moe", c, common.by_layer_type(c, types, mixer), read_mlps(c, 60))


def _write_2(arch: Architecture) -> Json:
    windows = common.write_windows(arch)
    return {
        **windows,
        **write_experts(arch),
        "qkv_bias": arch.attentions[0].qkv_bias,
        "use_sliding_window": windows["sliding_window"] is not None,
        "sliding_window": windows["sliding_window"] or 0,
        "max_window_layers": arch.num_layers,
    }


def _read_3(c: HFConfig) -> Architecture:
    """A window is of all layers."""
    window = c.sliding_window if c.use_sliding_window else None
    mixer = common.read_attention(c, read_rope(c), window, qk_norm=True)
    return common.architecture("qwen3_moe", c, [mixer] * c.num_hidden_layers, read_mlps(c, 128))


def _write_3(arch: Architecture) -> Json:
    window = arch.layers[0].mixer.window
    return {
        **common.write_attention(arch),
        **write_experts(arch),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def _of_gguf_2(keys: GGUFKeys) -> Json:
    """llama.cpp has experts in all layers, and weights that are parts of the softmax over all."""
    return {**experts_of_gguf(keys), "shared_expert_intermediate_size": keys.shared_width}


def _of_gguf_3(keys: GGUFKeys) -> Json:
    """llama.cpp has experts in all layers, and weights that sum to 1."""
    return {**experts_of_gguf(keys), "norm_topk_prob": True}


_DEFAULTS: Json = {"max_position_embeddings": 32768, "sliding_window": 4096}
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "Qwen2MoeForSequenceClassification",
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
        keys={**EXPERT_KEYS, "expert_shared_feed_forward_length": 1},
        config=_of_gguf_2,
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForSequenceClassification",
    {
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    _read_3,
    _write_3,
    GGUF(
        "qwen3moe",
        keys=EXPERT_KEYS,
        config=_of_gguf_3,
    ),
)
