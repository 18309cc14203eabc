"""GLM-4 and GLM-4 0414: interleaved rotary embeddings over half of a head; the latter with norms after
blocks."""

from __future__ import annotations

from functools import partial

from quatrain.models.architecture import PRE, Architecture, Norms
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import HFConfig

_BOTH: Norms = (
    ("attention_norm", "input_layernorm"),
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("mlp_norm", "post_attention_layernorm"),
    ("post_mlp_norm", "post_mlp_layernorm"),
)


def _read(c: HFConfig, *, family: str, norms: Norms) -> Architecture:
    mixer = common.read_attention(c, read_rope(c, partial=True, interleaved=True), output_bias=False)
    return common.architecture(family, c, [mixer] * c.num_hidden_layers, fused=True, norms=norms)


def _write(arch: Architecture) -> Json:
    return {**common.write_attention(arch), **common.write_share(arch)}


_DEFAULTS: Json = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
}
GLM = Family("glm", "Glm", _DEFAULTS, partial(_read, family="glm", norms=PRE), _write)
GLM4 = Family("glm4", "Glm4", _DEFAULTS, partial(_read, family="glm4", norms=_BOTH), _write, GGUF("glm4"))
