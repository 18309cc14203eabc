"""SmolLM3: a Llama without rotary embeddings in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import HFConfig
from quatrain.models.spec import require


def _read(c: HFConfig) -> Architecture:
    layers, every, rope = c.num_hidden_layers, c.no_rope_layer_interval, read_rope(c)
    require(every > 0 or bool(c.no_rope_layers), "no_rope_layer_interval", "a positive number", every)
    rotated = c.no_rope_layers or [int((i + 1) % every != 0) for i in range(layers)]  # 1: with rope
    require(len(rotated) >= layers, "no_rope_layers", f"a list of {layers} entries or more", rotated)
    window = c.sliding_window if c.use_sliding_window else None
    types = common.layer_types(c, lambda i: bool(rotated[i]) or not window)
    turned = zip(common.attentions(c, types, rope), rotated, strict=False)
    mixers = [mixer if with_rope else replace(mixer, rope=None) for mixer, with_rope in turned]
    return common.architecture("smollm3", c, mixers, bias=bool(c.mlp_bias))


def _write(arch: Architecture) -> Json:
    layer, windows = arch.layers[0], common.write_windows(arch)
    return {
        **common.write_attention(arch, always=False),
        **windows,
        "mlp_bias": layer.dense.bias,
        "no_rope_layers": [int(kind.mixer.rope is not None) for kind in arch.layers],
        "use_sliding_window": windows["sliding_window"] is not None,
    }


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3",
    {
        "rope_theta": 2e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "pad_token_id": 128004,
        "num_key_value_heads": 4,
    },
    _read,
    _write,
    GGUF("smollm3", permuted=True),
)
