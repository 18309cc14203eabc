"""Qwen 2 and 2.5 (biases of queries, keys and values) and Qwen 3 (norms of queries and keys)."""

from __future__ import annotations

from functools import partial

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import Family, Json
from quatrain.models.families.gguf import GGUF
from quatrain.models.families.ropes import FULL, SLIDING, read_rope
from quatrain.models.hf_config import HFConfig

_DEFAULTS: Json = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def _read(c: HFConfig, *, family: str, **fields: bool) -> Architecture:
    c = c if c.use_sliding_window else c.model_copy(update={"sliding_window": None})
    num_full = c.num_hidden_layers if c.sliding_window is None else c.max_window_layers
    types = c.layer_types or [FULL if i < num_full else SLIDING for i in range(c.num_hidden_layers)]
    rope = read_rope(c)
    mixers = common.by_layer_type(c, types, lambda window: common.read_attention(c, rope, window, **fields))
    return common.architecture(family, c, mixers)


def _write(arch: Architecture) -> Json:
    windows = common.write_windows(arch)
    return {
        **windows,
        "hidden_act": arch.layers[0].mlp.activation,
        "use_sliding_window": windows["sliding_window"] is not None,
        "max_window_layers": [*windows["layer_types"], SLIDING].index(SLIDING),
    }


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification",
    _DEFAULTS,
    partial(_read, family="qwen2", qkv_bias=True, output_bias=False),
    lambda arch: {**common.write_head_dim(arch), **_write(arch)},
    GGUF("qwen2"),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification",
    {**_DEFAULTS, "head_dim": 128},
    partial(_read, family="qwen3", qk_norm=True),
    lambda arch: {**common.write_attention(arch), **_write(arch)},
    GGUF("qwen3"),
)
