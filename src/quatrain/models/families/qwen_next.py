"""Qwen3-Next and the text models of Qwen3.5: Gated DeltaNet in three of four layers, gated attention with
rotary embeddings of a part of each head in the others. Experts take the place of MLPs in their variants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quatrain.models.architecture import Architecture
from quatrain.models.blocks.delta import GatedDeltaNet
from quatrain.models.blocks.experts import FUSED, Experts
from quatrain.models.blocks.mlp import Dense
from quatrain.models.families import common
from quatrain.models.families.common import GGUF, Family, Json, read_experts, read_mlps, write_experts
from quatrain.models.families.ropes import FULL, read_rope
from quatrain.models.hf_config import GGUFKeys, HFConfig
from quatrain.models.layers import Norm
from quatrain.models.spec import require

LINEAR = "linear_attention"
_PREDICTOR = ("mtp.",)
"""The predictor of several tokens, which published folders have beside the model."""
_DEFAULTS: Json = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
}


def _read(c: HFConfig, *, family: str, experts: int, grouped: bool = False) -> Architecture:
    """`experts`: how many there are if config.json does not say it."""
    require(c.hidden_act in (None, "silu"), "hidden_act", "silu", c.hidden_act)
    interval = c.full_attention_interval or 4
    types = common.layer_types(c, lambda i: (i + 1) % interval == 0, LINEAR)
    heads = c.linear_num_key_heads, c.linear_num_value_heads
    sizes = c.linear_key_head_dim, c.linear_value_head_dim
    delta = GatedDeltaNet(*heads, *sizes, c.linear_conv_kernel_dim, grouped)
    full = common.read_attention(c, read_rope(c, partial=True), qk_norm=True, gate=True)
    mixers = [delta if kind == LINEAR else full for kind in types]
    mlps: Sequence[Dense | Experts] = read_mlps(c, experts) if experts else ()
    if family == QWEN3_5_MOE.model_type:  # in every layer, whatever mlp_only_layers says
        stacked = {"names": FUSED, "stacked": True, "renormalise": True}
        mlps = [read_experts(c, experts, **stacked)] * c.num_hidden_layers
    return common.architecture(family, c, mixers, mlps, norm=Norm(c.rms_norm_eps, 1.0))


def _write(arch: Architecture) -> Json:
    written = {
        **common.write_attention(arch),
        **common.write_share(arch),
        "layer_types": [LINEAR if isinstance(kind.mixer, GatedDeltaNet) else FULL for kind in arch.layers],
    }
    for delta in arch.deltas[:1]:
        written |= {
            "linear_conv_kernel_dim": delta.conv_width,
            "linear_key_head_dim": delta.key_size,
            "linear_value_head_dim": delta.value_size,
            "linear_num_key_heads": delta.num_key_heads,
            "linear_num_value_heads": delta.num_heads,
        }
    return written


def _of_gguf(keys: GGUFKeys) -> Json:
    return {
        "full_attention_interval": keys.full_attention_interval,
        "linear_conv_kernel_dim": keys.conv_width,
        "linear_key_head_dim": keys.delta_key_size,
        "linear_value_head_dim": keys.delta_values // max(keys.delta_heads, 1),
        "linear_num_key_heads": keys.delta_key_heads,
        "linear_num_value_heads": keys.delta_heads,
    }


_EXPERTS: Json = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3Next",
    {
        **_DEFAULTS,
        **_EXPERTS,
        "intermediate_size": 5632,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    partial(_read, family="qwen3_next", experts=512, grouped=True),
    lambda arch: {**_write(arch), **write_experts(arch)},
    unread=_PREDICTOR,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5",
    {**_DEFAULTS, "num_key_value_heads": 4},
    partial(_read, family="qwen3_5_text", experts=0),
    _write,
    GGUF(
        "qwen35",
        keys={
            "full_attention_interval": 4,
            **{f"ssm.{key}": 0 for key in ("conv_kernel", "state_size", "group_count")},
            **{f"ssm.{key}": 0 for key in ("time_step_rank", "inner_size")},
            "rope.dimension_sections": [],
        },
        config=_of_gguf,
        names={"mlp_norm": "post_attention_norm"},
    ),
    unread=_PREDICTOR,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    {**_DEFAULTS, **_EXPERTS, "intermediate_size": 512, "num_experts_per_tok": 8},
    partial(_read, family="qwen3_5_moe_text", experts=256),
    lambda arch: {**_write(arch), **write_experts(arch)},
    omitted=("intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"),
    unread=_PREDICTOR,
)
