"""Qwen 2 and 2.5 (biases of queries, keys and values) and Qwen 3 (norms of queries and keys)."""

from __future__ import annotations

from functools import partial
from typing import Any

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import SLIDING, read_rope
from quatrain.models.hf_config import HFConfig

_DEFAULTS: Json = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def _read(c: HFConfig, *, family: str, **fields: Any) -> Architecture:
    c = c if c.use_sliding_window else c.model_copy(update={"sliding_window": None})
    num_full = c.num_hidden_layers if c.sliding_window is None else c.max_window_layers
    types = common.layer_types(c, lambda i: i < num_full)
    return common.architecture(family, c, common.attentions(c, types, read_rope(c), **fields))


def _write(arch: Architecture) -> Json:
    windows = common.write_windows(arch)
    return {
        **windows,
        "use_sliding_window": windows["sliding_window"] is not None,
        "max_window_layers": [*windows["layer_types"], SLIDING].index(SLIDING),
    }


QWEN2 = Family(
    "qwen2",
    "Qwen2",
    _DEFAULTS,
    partial(_read, family="qwen2", qkv_bias=True, output_bias=False),
    lambda arch: {**common.write_head_dim(arch), **_write(arch)},
    GGUF("qwen2"),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3",
    {**_DEFAULTS, "head_dim": 128},
    partial(_read, family="qwen3", qk_norm=True),
    lambda arch: {**common.write_attention(arch), **_write(arch)},
    GGUF("qwen3"),
)
