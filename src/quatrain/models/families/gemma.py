"""Gemma 2 (soft caps) and the text models of Gemma 3 (norms of queries and keys, two rotary embeddings).

In both, most layers have a sliding window, norms stand before and after blocks, and embeddings are scaled.
"""

from __future__ import annotations

from collections.abc import Callable

from quatrain.config.errors import shown
from quatrain.models.architecture import Architecture
from quatrain.models.blocks.attention import Attention
from quatrain.models.families import common
from quatrain.models.families.common import FULL, GGUF, SLIDING, Family, Json
from quatrain.models.hf_config import HFConfig
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


def _read(family: str, c: HFConfig, period: int, mixer: Callable[[int | None], Attention]) -> Architecture:
    """Unless config.json names their types, every `period`-th layer has full attention."""
    types = c.layer_types or [SLIDING if (i + 1) % period else FULL for i in range(c.num_hidden_layers)]
    traits: Json = {"norms": "both", "norm": Norm(c.rms_norm_eps, 1.0), "scale_embeddings": True}
    mixers, cap = common.by_layer_type(c, types, mixer), c.final_logit_softcapping
    return common.architecture(family, c, mixers, final_softcap=cap, **traits)


def _read_2(c: HFConfig) -> Architecture:
    rope = common.read_rope(c)
    fields = {"query_scalar": c.query_pre_attn_scalar, "softcap": c.attn_logit_softcapping}
    return _read("gemma2", c, 2, lambda window: common.read_attention(c, rope, window, **fields))


def _read_3(c: HFConfig) -> Architecture:
    if c.attn_logit_softcapping is not None:
        cap = shown(c.attn_logit_softcapping)
        raise ValueError(f"attn_logit_softcapping = {cap}, which gemma3_text does not have: set it to null")
    full, sliding = common.read_rope(c, by_type=True), common.read_sliding_rope(c)

    def mixer(window: int | None) -> Attention:
        rope = full if window is None else sliding
        return common.read_attention(c, rope, window, qk_norm=True, query_scalar=c.query_pre_attn_scalar)

    return _read("gemma3_text", c, c.sliding_window_pattern or 6, mixer)


def _write(arch: Architecture) -> Json:
    layer, windows = arch.layers[0], common.write_windows(arch)
    # transformers makes masks of sliding windows for a Gemma model without any, and needs a size.
    windows["sliding_window"] = windows["sliding_window"] or arch.max_position
    return {
        **common.write_attention(arch),
        **windows,
        "hidden_activation": layer.mlp.activation,
        "query_pre_attn_scalar": layer.mixer.query_scalar,
        "attn_logit_softcapping": layer.mixer.softcap,
        "final_logit_softcapping": arch.final_softcap,
    }


def _write_3(arch: Architecture) -> Json:
    ropes = {kind.mixer.window is None: kind.mixer.rope for kind in arch.layers}
    full, sliding = ropes.get(True) or ropes[False], ropes.get(False, Rope())
    # The pattern is for readers that do not know layer_types.
    pattern = {} if False in ropes else {"sliding_window_pattern": 1}
    return {**_write(arch), **common.write_rope(full, sliding), **pattern}


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2ForSequenceClassification",
    _DEFAULTS
    | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
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
        scaled_by_heads=46,
    ),
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification",
    _DEFAULTS | {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
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
