"""Phi-3, Phi-4 and Phi-4-mini: fused projections, rotary embeddings over a part of a head, longrope."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import HFConfig, RopeConfig


def _named(rope: RopeConfig | None) -> RopeConfig | None:
    """Rope settings with the name of today: `su` and `yarn` are what the first files call longrope."""
    if rope is None or not {rope.rope_type, rope.type} & {"su", "yarn"}:
        return rope
    return rope.model_copy(update={"rope_type": "longrope", "type": None})


def _read(c: HFConfig) -> Architecture:
    ropes = {"rope_scaling": _named(c.rope_scaling), "rope_parameters": _named(c.rope_parameters)}
    rope = read_rope(c.model_copy(update=ropes), partial=True)
    mixer = common.read_attention(c, rope, c.sliding_window, qkv_bias=False, output_bias=False, fused=True)
    return common.architecture("phi3", c, [mixer] * c.num_hidden_layers, fused=True)


def _write(arch: Architecture) -> Json:
    mixer, rope = arch.layers[0].mixer, arch.layers[0].mixer.rope
    scaling: Json = {}
    if rope and rope.kind == "longrope":
        scaling["original_max_position_embeddings"] = rope.original_max_position
        if not {"factor", "attention_factor"} & dict(rope.written).keys():
            # transformers 4 refuses other keys of rope_scaling than these
            factors = {"short_factor": [*rope.short_factors], "long_factor": [*rope.long_factors]}
            scaling["rope_scaling"] = {"type": "longrope", **factors}
    return {**common.write_head_dim(arch), **scaling, "sliding_window": mixer.window}


PHI3 = Family(
    "phi3",
    "Phi3",
    {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    },
    _read,
    _write,
    GGUF(
        "phi3",
        keys={"attention.sliding_window": 0, "rope.scaling.attn_factor": 0.0},
        config=lambda keys: {"sliding_window": keys.sliding_window or None},
    ),
)
