"""Llama 2 and 3, and models of the same architecture, such as SmolLM2."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import HFConfig


def _read(c: HFConfig) -> Architecture:
    mixer = common.read_attention(c, read_rope(c))
    return common.architecture("llama", c, [mixer] * c.num_hidden_layers, bias=bool(c.mlp_bias))


def _write(arch: Architecture) -> Json:
    return {**common.write_attention(arch), "mlp_bias": arch.layers[0].dense.bias}


_DEFAULTS: Json = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = Family("llama", "Llama", _DEFAULTS, _read, _write, GGUF("llama", permuted=True))
