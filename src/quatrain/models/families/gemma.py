"""Gemma 2 (soft caps) and the text models of Gemma 3 (norms of queries and keys, two rotary embeddings).

In both, most layers have a sliding window, norms stand before and after blocks, and embeddings are scaled.
"""

from __future__ import annotations

from collections.abc import Callable

from quatrain.config.errors import shown
from quatrain.models.architecture import Architecture
from quatrain.models.blocks.attention import Attention
from quatrain.models.families.family import (
    FULL,
    GGUF,
    SLIDING,
    Family,
    Json,
    by_layer_type,
    layer_types,
    read_attention,
    read_common,
    read_rope,
    read_sliding_rope,
    sliding_window,
    write_attention,
    write_rope,
)
from quatrain.models.hf_config import HFConfig
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


def _read(family: str, c: HFConfig, period: int, mixer: Callable[[int | None], Attention]) -> Architecture:
    """Unless config.json names their types, every `period`-th layer has full attention."""
    types = [SLIDING if (i + 1) % period else FULL for i in range(c.num_hidden_layers)]
    return read_common(
        family,
        c,
        by_layer_type(c, c.layer_types or types, mixer),
        norms="both",
        norm_offset=1.0,
        scale_embeddings=True,
        final_softcap=c.final_logit_softcapping,
    )


def _read_2(c: HFConfig, source: str) -> Architecture:
    rope = read_rope(c, source)
    fields = {"query_scalar": c.query_pre_attn_scalar, "softcap": c.attn_logit_softcapping}
    return _read("gemma2", c, 2, lambda window: read_attention(c, rope, window, **fields))


def _read_3(c: HFConfig, source: str) -> Architecture:
    if c.attn_logit_softcapping is not None:
        raise ValueError(
            f"{source} has attn_logit_softcapping = {shown(c.attn_logit_softcapping)}, which gemma3_text "
            "does not have: set it to null"
        )
    full, sliding = read_rope(c, source, by_type=True), read_sliding_rope(c, source)

    def mixer(window: int | None) -> Attention:
        rope = full if window is None else sliding
        return read_attention(c, rope, window, qk_norm=True, query_scalar=c.query_pre_attn_scalar)

    return _read("gemma3_text", c, c.sliding_window_pattern or 6, mixer)


def _write(arch: Architecture, rope: Json, pattern: Json) -> Json:
    layer = arch.layers[0]
    return {
        **rope,
        **write_attention(arch),
        "layer_types": layer_types(arch),
        **pattern,
        # transformers makes masks of sliding windows for a Gemma model without any, and needs a size.
        "sliding_window": sliding_window(arch) or arch.max_position,
        "hidden_activation": layer.mlp.activation,
        "query_pre_attn_scalar": layer.mixer.query_scalar,
        "attn_logit_softcapping": layer.mixer.softcap,
        "final_logit_softcapping": arch.final_softcap,
    }


def _write_2(arch: Architecture) -> Json:
    return _write(arch, write_rope(arch.layers[0].mixer.rope), {})


def _write_3(arch: Architecture) -> Json:
    ropes = {kind.mixer.window is None: kind.mixer.rope for kind in arch.layers}
    full, sliding = ropes.get(True) or ropes[False], ropes.get(False, Rope())
    # The pattern is for readers that do not know layer_types.
    pattern = {} if False in ropes else {"sliding_window_pattern": 1}
    return _write(arch, write_rope(full, sliding), pattern)


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2ForSequenceClassification",
    {
        **_DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    _read_2,
    _write_2,
    GGUF(
        "gemma2",
        keys={
            "attention.sliding_window": 4096,
            "attention.sliding_window_pattern": 2,
            "attention.scale": 0.0,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        scaled_by_heads=46,
    ),
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification",
    {
        **_DEFAULTS,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
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
        scaled_by_heads=62,
    ),
)
