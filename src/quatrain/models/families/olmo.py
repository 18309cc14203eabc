"""OLMo 2 (norms after the blocks, norms of queries and keys over all heads), OLMo 3 (sliding windows) and
OLMoE (norms before the blocks, experts)."""

from __future__ import annotations

from quatrain.models.architecture import POST, Architecture
from quatrain.models.blocks.attention import Attention
from quatrain.models.families import common
from quatrain.models.families.common import Family, Json
from quatrain.models.families.experts import experts_of_gguf, num_experts, read_experts, write_experts
from quatrain.models.families.gguf import GGUF
from quatrain.models.families.ropes import FULL, SLIDING, read_rope, read_sliding_rope, write_rope
from quatrain.models.hf_config import HFConfig
from quatrain.models.rope import Rope

_NORMS: Json = {"qk_norm": True, "norm_over_heads": True}


def _read_2(c: HFConfig) -> Architecture:
    mixer = common.read_attention(c, read_rope(c), **_NORMS)
    return common.architecture("olmo2", c, [mixer] * c.num_hidden_layers, norms=POST)


def _read_3(c: HFConfig) -> Architecture:
    """Unless config.json names their types, every fourth layer has full attention, whose rope alone is
    scaled."""
    types = c.layer_types or [SLIDING if (i + 1) % 4 else FULL for i in range(c.num_hidden_layers)]
    full, sliding = read_rope(c, by_type=True), read_sliding_rope(c, c.rope_theta)

    def mixer(window: int | None) -> Attention:
        return common.read_attention(c, full if window is None else sliding, window, **_NORMS)

    return common.architecture("olmo3", c, common.by_layer_type(c, types, mixer), norms=POST)


def _read_experts(c: HFConfig) -> Architecture:
    mixer = common.read_attention(c, read_rope(c), clip=c.clip_qkv, **_NORMS)
    experts = read_experts(c, num_experts(c, 64))
    return common.architecture("olmoe", c, [mixer] * c.num_hidden_layers, [experts] * c.num_hidden_layers)


def _write_experts(arch: Architecture) -> Json:
    experts = write_experts(arch)
    keys = ("hidden_act", "num_experts", "num_experts_per_tok", "norm_topk_prob")
    mixer = arch.attentions[0]
    own: Json = {"intermediate_size": experts["moe_intermediate_size"], "clip_qkv": mixer.clip}
    return {**{key: experts[key] for key in keys}, **own, "attention_bias": mixer.qkv_bias}


def _write(arch: Architecture) -> Json:
    return {**common.write_attention(arch, always=False), "hidden_act": arch.layers[0].mlp.activation}


def _write_3(arch: Architecture) -> Json:
    ropes = {kind.mixer.window is None: kind.mixer.rope or Rope() for kind in arch.layers}
    written = write_rope(ropes.get(True) or ropes[False], ropes.get(False) or ropes[True])
    return {**_write(arch), **common.write_windows(arch, always=True), **written}


_DEFAULTS: Json = {"eos_token_id": 50279, "pad_token_id": 1, "rms_norm_eps": 1e-5}
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    "Olmo2ForSequenceClassification",
    _DEFAULTS,
    _read_2,
    _write,
    GGUF("olmo2"),
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    "Olmo3ForSequenceClassification",
    _DEFAULTS | {"sliding_window": 4096, "rope_theta": 500_000.0},
    _read_3,
    _write_3,
    None,
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    "OlmoeForSequenceClassification",
    _DEFAULTS | {"num_experts_per_tok": 8, "norm_topk_prob": False},
    _read_experts,
    _write_experts,
    GGUF("olmoe", keys={"expert_count": 0, "expert_used_count": 8}, config=experts_of_gguf),
)
