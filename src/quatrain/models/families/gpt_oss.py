"""gpt-oss: attention sinks, windows on every other layer, yarn, experts with biases and a clamped gate."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.blocks.experts import FUSED, Experts
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json, read_experts, write_local_experts
from quatrain.models.families.ropes import read_rope
from quatrain.models.hf_config import GGUFKeys, HFConfig


def _read(c: HFConfig) -> Architecture:
    """Unless config.json names their types, every other layer has a window, from the first."""
    mixers = common.attentions(c, common.layer_types(c, lambda i: i % 2 == 1), read_rope(c), sinks=True)
    experts = read_experts(
        c,
        128,
        renormalise=True,
        clamp=(c.swiglu_limit, c.swiglu_alpha),
        bias=True,
        names=FUSED,
        stacked=True,
        transposed=True,
    )
    return common.architecture("gpt_oss", c, mixers, [experts] * len(mixers))


def _write(arch: Architecture) -> Json:
    mlp = arch.layers[0].mlp
    assert isinstance(mlp, Experts), mlp
    assert mlp.clamp, mlp
    return {
        **common.write_attention(arch),
        **common.write_windows(arch, always=True),
        **write_local_experts(arch),
        "swiglu_limit": mlp.clamp[0],
        "swiglu_alpha": mlp.clamp[1],
    }


def _of_gguf(keys: GGUFKeys) -> Json:
    return {
        "num_local_experts": keys.experts,
        "num_experts_per_tok": keys.experts_per_token,
        "intermediate_size": keys.expert_width,
        "sliding_window": keys.sliding_window,
    }


_YARN: Json = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = Family(
    "gpt_oss",
    "GptOss",
    {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
        "rope_theta": 150000.0,
    },
    _read,
    _write,
    GGUF(
        "gpt-oss",
        keys={
            "attention.sliding_window": 128,
            "expert_count": 0,
            "expert_used_count": 4,
            "expert_feed_forward_length": 1,
        },
        config=_of_gguf,
        names={"mlp_norm": "post_attention_norm"},
        yarn=True,
    ),
)
