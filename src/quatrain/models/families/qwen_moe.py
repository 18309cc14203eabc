"""Qwen 3 with experts."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import Family, Json
from quatrain.models.families.experts import read_mlps, write_experts
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import HFConfig


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


_DEFAULTS: Json = {"max_position_embeddings": 32768, "sliding_window": 4096}
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
    None,
)
