"""Mistral (a sliding window on every layer of the first models) and Ministral 3 (yarn, queries scaled by
position)."""

from __future__ import annotations

from functools import partial

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import Family, Json
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import HFConfig


def _read(c: HFConfig, *, family: str) -> Architecture:
    mixer = common.read_attention(c, read_rope(c), c.sliding_window, qkv_bias=False, output_bias=False)
    return common.architecture(family, c, [mixer] * c.num_hidden_layers)


def _write(arch: Architecture) -> Json:
    mixer = arch.layers[0].attention
    return {"head_dim": mixer.head_dim, "sliding_window": mixer.window}


_DEFAULTS: Json = {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8}
_YARN: Json = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MISTRAL = Family(
    "mistral",
    "Mistral",
    _DEFAULTS | {"sliding_window": 4096, "max_position_embeddings": 131072},
    partial(_read, family="mistral"),
    _write,
)
MINISTRAL3 = Family(
    "ministral3",
    "Ministral3",
    _DEFAULTS
    | {
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "pad_token_id": 11,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
    },
    partial(_read, family="ministral3"),
    _write,
)
