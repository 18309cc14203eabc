"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import HFConfig


def _read(c: HFConfig) -> Architecture:
    mixer = common.read_attention(c, read_rope(c), c.sliding_window, qkv_bias=False, output_bias=False)
    names = {"module": "block_sparse_moe", "names": ("w1", "w3", "w2")}
    experts = common.read_experts(c, 8, renormalise=True, **names)
    layers = c.num_hidden_layers
    return common.architecture("mixtral", c, [mixer] * layers, [experts] * layers)


def _write(arch: Architecture) -> Json:
    window = {"sliding_window": arch.layers[0].mixer.window}
    return {**common.write_head_dim(arch), **common.write_local_experts(arch), **window}


MIXTRAL = Family(
    "mixtral",
    "Mixtral",
    {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
    },
    _read,
    _write,
    GGUF(
        "llama",
        permuted=True,
        keys={"expert_count": 0, "expert_used_count": 2},
        config=common.experts_of_gguf,
    ),
)
