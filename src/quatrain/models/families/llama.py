"""Llama 2 and 3, and models of the same architecture, such as SmolLM2."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.families.family import (
    GGUF,
    Family,
    Json,
    read_attention,
    read_common,
    read_rope,
    write_attention,
    write_rope,
)
from quatrain.models.hf_config import HFConfig


def _read(c: HFConfig, source: str) -> Architecture:
    mixer = read_attention(c, read_rope(c, source))
    return read_common("llama", c, [mixer] * c.num_hidden_layers, mlp_bias=bool(c.mlp_bias))


def _write(arch: Architecture) -> Json:
    layer = arch.layers[0]
    return {
        **write_rope(layer.mixer.rope),
        **write_attention(arch),
        "hidden_act": layer.mlp.activation,
        "mlp_bias": layer.mlp.bias,
    }


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    {"bos_token_id": 1, "eos_token_id": 2},
    _read,
    _write,
    GGUF("llama", permuted=True),
)
