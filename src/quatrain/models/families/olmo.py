"""OLMo 2 (norms after the blocks, norms of queries and keys over all heads), OLMo 3 (sliding windows) and
OLMoE (norms before the blocks, experts)."""

from __future__ import annotations

from quatrain.models.architecture import POST, Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import read_rope, read_sliding_rope, write_rope
from quatrain.models.hf_config import HFConfig

_NORMS: Json = {"qk_norm": True, "norm_over_heads": True}


def _read_2(c: HFConfig) -> Architecture:
    mixer = common.read_attention(c, read_rope(c), **_NORMS)
    return common.architecture("olmo2", c, [mixer] * c.num_hidden_layers, norms=POST)


def _read_3(c: HFConfig) -> Architecture:
    """Unless config.json names their types, every fourth layer has full attention, whose rope alone is
    scaled."""
    types = common.layer_types(c, lambda i: (i + 1) % 4 == 0)
    ropes = read_rope(c, by_type=True), read_sliding_rope(c, c.rope_theta)
    return common.architecture("olmo3", c, common.attentions(c, types, *ropes, **_NORMS), norms=POST)


def _read_experts(c: HFConfig) -> Architecture:
    mixer = common.read_attention(c, read_rope(c), clip=c.clip_qkv, **_NORMS)
    layers = c.num_hidden_layers
    return common.architecture("olmoe", c, [mixer] * layers, [common.read_experts(c, 64)] * layers)


def _write_experts(arch: Architecture) -> Json:
    experts, mixer = common.write_experts(arch), arch.attentions[0]
    keys = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
    own: Json = {"clip_qkv": mixer.clip, "attention_bias": mixer.qkv_bias}
    return {key: experts[key] for key in keys} | own


def _write(arch: Architecture) -> Json:
    return common.write_attention(arch, always=False)


def _write_3(arch: Architecture) -> Json:
    full, sliding = common.by_window(arch)
    windows = common.write_windows(arch, always=True)
    return {**_write(arch), **windows, **write_rope(full.rope, sliding.rope)}


_DEFAULTS: Json = {"eos_token_id": 50279, "pad_token_id": 1, "rms_norm_eps": 1e-5}
OLMO2 = Family(
    "olmo2",
    "Olmo2",
    _DEFAULTS,
    _read_2,
    _write,
    GGUF("olmo2"),
)
OLMO3 = Family(
    "olmo3",
    "Olmo3",
    _DEFAULTS | {"sliding_window": 4096, "rope_theta": 500_000.0},
    _read_3,
    _write_3,
    None,
)
OLMOE = Family(
    "olmoe",
    "Olmoe",
    _DEFAULTS | {"num_experts_per_tok": 8, "norm_topk_prob": False, "max_position_embeddings": 4096},
    _read_experts,
    _write_experts,
    GGUF("olmoe", keys={"expert_count": 0, "expert_used_count": 8}, config=common.experts_of_gguf),
)
