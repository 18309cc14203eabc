"""OLMo 2 (norms after the blocks, norms of queries and keys over all heads) and OLMo 3 (sliding windows)."""

from __future__ import annotations

from quatrain.models.architecture import POST, Architecture
from quatrain.models.blocks.attention import Attention
from quatrain.models.families import common
from quatrain.models.families.common import Family, Json
from quatrain.models.families.gguf import GGUF
from quatrain.models.families.ropes import FULL, SLIDING, read_rope, read_sliding_rope, write_rope
from quatrain.models.hf_config import HFConfig
from quatrain.models.rope import Rope

_NORMS: Json = {"qk_norm": True, "norm_over_heads": True}


def _read_2(c: HFConfig) -> Architecture:
    mixer = common.read_attention(c, read_rope(c), **_NORMS)
    return common.architecture("olmo2", c, [mixer] * c.num_hidden_layers, norms=POST)


def _read_3(c: HFConfig) -> Architecture:
    """Unless config.json names their types, every fourth layer has full attention, whose rope alone is
    scaled."""
    types = c.layer_types or [SLIDING if (i + 1) % 4 else FULL for i in range(c.num_hidden_layers)]
    full, sliding = read_rope(c, by_type=True), read_sliding_rope(c, c.rope_theta)

    def mixer(window: int | None) -> Attention:
        return common.read_attention(c, full if window is None else sliding, window, **_NORMS)

    return common.architecture("olmo3", c, common.by_layer_type(c, types, mixer), norms=POST)


def _write(arch: Architecture) -> Json:
    return {**common.write_attention(arch, always=False), "hidden_act": arch.layers[0].mlp.activation}


def _write_3(arch: Architecture) -> Json:
    ropes = {kind.mixer.window is None: kind.mixer.rope or Rope() for kind in arch.layers}
    written = write_rope(ropes.get(True) or ropes[False], ropes.get(False) or ropes[True])
    return {**_write(arch), **common.write_windows(arch, always=True), **written}


_DEFAULTS: Json = {"eos_token_id": 50279, "pad_token_id": 1, "rms_norm_eps": 1e-5}
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    "Olmo2ForSequenceClassification",
    _DEFAULTS,
    _read_2,
    _write,
    GGUF("olmo2"),
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    "Olmo3ForSequenceClassification",
    _DEFAULTS | {"sliding_window": 4096, "rope_theta": 500_000.0},
    _read_3,
    _write_3,
    None,
)
