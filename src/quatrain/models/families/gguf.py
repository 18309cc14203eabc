"""What a family says of its GGUF files, and the metadata of any model in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from quatrain.config.files import Description
from quatrain.models.hf_config import Experts, Heads, Layers, Period, Positions, Positive, Width, Window

Factor = Annotated[float, Field(ge=0, le=1e12)]
"""0 stands for none."""


class GGUFKeys(Description):
    """The metadata of a model, without the name of its architecture in front."""

    block_count: Layers
    context_length: Positions
    embedding_length: Width
    feed_forward_length: Width | list[Width] = 1
    """Of models with experts alone, some converters leave it out."""
    heads: Annotated[Heads, Field(alias="attention.head_count")]
    kv_heads: Annotated[Heads | None, Field(alias="attention.head_count_kv")] = None
    key_length: Annotated[Heads | None, Field(alias="attention.key_length")] = None
    norm_eps: Annotated[float, Field(alias="attention.layer_norm_rms_epsilon", ge=0, le=1)]
    rope_theta: Annotated[Positive, Field(alias="rope.freq_base")] = 10_000.0
    rotary_dims: Annotated[Heads | None, Field(alias="rope.dimension_count")] = None
    # llama.cpp takes a factor without a type for linear scaling, and knows an older name of it.
    scaling: Annotated[str, Field(alias="rope.scaling.type")] = "linear"
    scaling_factor: Annotated[Factor | None, Field(alias="rope.scaling.factor")] = None
    linear_factor: Annotated[Factor, Field(alias="rope.scale_linear")] = 0.0
    original_length: Annotated[Positions, Field(alias="rope.scaling.original_context_length")] = 8192

    # Of some families alone (`GGUF.keys`); 0 stands for none.
    sliding_window: Annotated[Window, Field(alias="attention.sliding_window")] = 0
    pattern: Annotated[Period | list[bool | int], Field(alias="attention.sliding_window_pattern")] = 0
    scale: Annotated[Factor, Field(alias="attention.scale")] = 0.0
    attention_softcap: Annotated[Factor, Field(alias="attn_logit_softcapping")] = 0.0
    final_softcap: Annotated[Factor, Field(alias="final_logit_softcapping")] = 0.0
    local_rope_theta: Annotated[Positive | None, Field(alias="rope.freq_base_swa")] = None
    embedding_scale: Factor = 0.0
    residual_scale: Factor = 0.0
    logit_scale: Factor = 0.0
    attn_factor: Annotated[Factor, Field(alias="rope.scaling.attn_factor")] = 0.0
    full_attention_interval: Period = 0
    conv_width: Annotated[int, Field(alias="ssm.conv_kernel", ge=0, le=64)] = 0
    delta_key_size: Annotated[int, Field(alias="ssm.state_size", ge=0, le=2**12)] = 0
    delta_key_heads: Annotated[int, Field(alias="ssm.group_count", ge=0, le=2**12)] = 0
    delta_heads: Annotated[int, Field(alias="ssm.time_step_rank", ge=0, le=2**12)] = 0
    delta_values: Annotated[int, Field(alias="ssm.inner_size", ge=0, le=2**24)] = 0
    experts: Annotated[Experts, Field(alias="expert_count")] = 0
    experts_per_token: Annotated[int, Field(alias="expert_used_count", ge=0, le=2**10)] = 0
    expert_width: Annotated[Width | None, Field(alias="expert_feed_forward_length")] = None
    shared_width: Annotated[Width | None, Field(alias="expert_shared_feed_forward_length")] = None
    image_sections: Annotated[
        list[int], Field(alias="rope.dimension_sections", max_length=8, default_factory=list)
    ]
    """Of the positions of images; they change nothing in texts."""

    @property
    def head_dim(self) -> int:
        """The size of a head."""
        return self.key_length or self.embedding_length // self.heads


class GGUF(NamedTuple):
    """What is particular to a family's GGUF files."""

    name: str
    """llama.cpp's name of the architecture."""
    permuted: bool = False
    """Whether the rows of queries and keys are in llama.cpp's rotary order (0, H/2, 1, H/2 + 1, ...)."""
    keys: Mapping[str, Any] = {}
    """The metadata that only some families have, and what llama.cpp takes for a missing value."""
    config: Callable[[GGUFKeys], dict[str, Any]] = lambda keys: {}
    """The keys of config.json that these become."""
    names: Mapping[str, str] = {}
    """Names of parameters that differ from those of other families."""
    yarn: bool = False
    """Whether its rotary embeddings are `yarn`, with bounds that are no whole elements."""

    @property
    def experts(self) -> bool:
        """Whether the family has experts."""
        return "expert_count" in self.keys
