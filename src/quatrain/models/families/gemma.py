"""Gemma 2 (soft caps) and the text models of Gemma 3 (norms of queries and keys, two rotary embeddings)."""

from __future__ import annotations

from functools import partial
from typing import Any

from quatrain.config.errors import shown
from quatrain.models.architecture import BOTH, Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import FULL, SLIDING, read_rope, read_sliding_rope, write_rope
from quatrain.models.hf_config import GGUFKeys, HFConfig
from quatrain.models.layers import Norm
from quatrain.models.rope import Rope

_DEFAULTS: Json = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}


def _read(
    family: str, c: HFConfig, period: int, rope: Rope, sliding: Rope | None, **fields: Any
) -> Architecture:
    """Unless config.json names their types, every `period`-th layer has full attention."""
    types = common.layer_types(c, lambda i: (i + 1) % period == 0)
    scale = float(c.query_pre_attn_scalar or 256) ** -0.5
    mixers = common.attentions(c, types, rope, sliding, scale=scale, **fields)
    traits: Json = {"norms": BOTH, "norm": Norm(c.rms_norm_eps, 1.0), "embedding_scale": c.hidden_size**0.5}
    return common.architecture(family, c, mixers, final_softcap=c.final_logit_softcapping, **traits)


def _read_2(c: HFConfig) -> Architecture:
    return _read("gemma2", c, 2, read_rope(c), None, softcap=c.attn_logit_softcapping)


def _read_3(c: HFConfig) -> Architecture:
    if c.attn_logit_softcapping is not None:
        cap = shown(c.attn_logit_softcapping)
        raise ValueError(f"attn_logit_softcapping = {cap}, which gemma3_text does not have: set it to null")
    ropes = read_rope(c, by_type=True), read_sliding_rope(c, c.rope_local_base_freq)
    return _read("gemma3_text", c, c.sliding_window_pattern or 6, *ropes, qk_norm=True)


def _write(arch: Architecture) -> Json:
    layer = arch.layers[0]
    scalar = round(layer.attention.query_scale**-2, 9)
    return {
        **common.write_attention(arch),
        **common.write_windows(arch, always=True),
        "hidden_activation": layer.mlp.activation,
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "attn_logit_softcapping": layer.attention.softcap,
        "final_logit_softcapping": arch.final_softcap,
    }


def _write_3(arch: Architecture) -> Json:
    full, sliding = common.by_window(arch)
    local = (sliding.window and sliding.rope) or Rope()
    # The pattern is for readers that do not know layer_types.
    pattern = {} if sliding.window else {"sliding_window_pattern": 1}
    ropes = {**write_rope(full.rope, local), "rope_local_base_freq": local.theta}
    return {**_write(arch), **ropes, **pattern}


def _of_gguf(keys: GGUFKeys, *, scaled_by_heads: int) -> Json:
    """Windows and scales; llama.cpp scales queries by hidden size / heads in models with that many layers."""
    by_heads = keys.block_count == scaled_by_heads
    scalar = keys.embedding_length // keys.heads if by_heads else keys.head_dim
    layers, pattern = range(keys.block_count), keys.pattern
    # If it is a number, every so many layers the last has full attention; with 0 none has.
    slides = pattern if isinstance(pattern, list) else [not pattern or (i + 1) % pattern > 0 for i in layers]
    return {
        "query_pre_attn_scalar": keys.scale**-2 if keys.scale else scalar,
        "sliding_window": keys.sliding_window,
        "layer_types": [SLIDING if slide and keys.sliding_window else FULL for slide in slides],
        "attn_logit_softcapping": keys.attention_softcap or None,
        "final_logit_softcapping": keys.final_softcap or None,
        "rope_local_base_freq": keys.local_rope_theta,
    }


GEMMA2 = Family(
    "gemma2",
    "Gemma2",
    _DEFAULTS
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    _read_2,
    _write,
    GGUF(
        "gemma2",
        keys={
            "attention.sliding_window": 4096,
            "attention.sliding_window_pattern": 2,
            "attention.scale": 0.0,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        config=partial(_of_gguf, scaled_by_heads=46),
    ),
    omitted=("hidden_act",),
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3",
    _DEFAULTS
    | {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    _read_3,
    _write_3,
    GGUF(
        "gemma3",
        keys={
            "attention.sliding_window": 0,
            "attention.sliding_window_pattern": 6,
            "attention.scale": 0.0,
            "final_logit_softcapping": 0.0,
            "rope.freq_base_swa": 10_000.0,
        },
        config=partial(_of_gguf, scaled_by_heads=62),
    ),
    omitted=("hidden_act",),
)
