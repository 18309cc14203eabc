"""Granite 3 and the dense models of Granite 4: a Llama with factors of embeddings, scores, residuals,
logits."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import GGUFKeys, HFConfig


def _read(c: HFConfig) -> Architecture:
    mixer = common.read_attention(c, read_rope(c), scale=c.attention_multiplier)
    return common.architecture(
        "granite",
        c,
        [mixer] * c.num_hidden_layers,
        bias=bool(c.mlp_bias),
        residual_scale=c.residual_multiplier,
        embedding_scale=c.embedding_multiplier,
        logits_scale=1 / c.logits_scaling,
    )


def _write(arch: Architecture) -> Json:
    layer = arch.layers[0]
    return {
        **common.write_attention(arch, always=False),
        "mlp_bias": layer.dense.bias,
        "attention_multiplier": layer.attention.query_scale,
        "residual_multiplier": layer.residual_scale,
        "embedding_multiplier": arch.embedding_scale,
        "logits_scaling": float(f"{1 / arch.logits_scale:.12g}"),
    }


def _of_gguf(keys: GGUFKeys) -> Json:
    return {
        "attention_multiplier": keys.scale or keys.head_dim**-0.5,
        "embedding_multiplier": keys.embedding_scale or 1.0,
        "residual_multiplier": keys.residual_scale or 1.0,
        "logits_scaling": keys.logit_scale or 1.0,
    }


GRANITE = Family(
    "granite",
    "Granite",
    {"bos_token_id": 1, "eos_token_id": 2},
    _read,
    _write,
    GGUF(
        "granite",
        permuted=True,
        keys={"attention.scale": 0.0, "embedding_scale": 0.0, "residual_scale": 0.0, "logit_scale": 0.0},
        config=_of_gguf,
    ),
)
