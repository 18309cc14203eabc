"""The keys of config.json, generation_config.json and GGUF files that are read, with their types and bounds.

Data flow: a file's values -> `config.files.checked` -> an instance of these -> `families/`. The bounds are
far above any known model; they keep a wrong number from taking all memory.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from quatrain.config.files import Description

MAX_LAYERS = 2**10
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Heads = Annotated[int, Field(ge=1, le=2**12)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Positions = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Share = Annotated[float, Field(gt=0, le=1)]
Factors = Annotated[list[Positive], Field(max_length=2**11)]
Multiplier = Annotated[float, Field(gt=0, le=1e6)]
Window = Annotated[int, Field(ge=0, le=2**31 - 1)]
Period = Annotated[int, Field(ge=0, le=2**10)]
"""Of so many layers, the last has full attention."""
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Experts = Annotated[int, Field(ge=0, le=2**16 - 1)]
MAX_TOKEN_IDS = 1_000


def _whole(value: object) -> object:
    """A whole number that JSON has as 50.0, as tools that average or scale settings write it, as 50."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _top_k(value: object) -> object:
    """0, transformers' value for all tokens, for vLLM's -1."""
    whole = _whole(value)
    return 0 if whole == -1 else whole


def _as_token_ids(value: object) -> tuple[int, ...]:
    ids = () if value is None else value if isinstance(value, list | tuple) else (value,)
    ids = [_whole(each) for each in ids]
    if len(ids) > MAX_TOKEN_IDS or any(type(each) is not int or not 0 <= each < 2**31 for each in ids):
        raise PydanticCustomError("token_ids", "must be a token id, a list of token ids, or null")
    return tuple(ids)


TokenIds = Annotated[tuple[int, ...], BeforeValidator(_as_token_ids)]


class GenerationConfig(Description):
    """generation_config.json: the tokens that end a completion; settings of sampling, for the export."""

    eos_token_id: TokenIds = ()
    unk_token_id: Annotated[TokenId | None, BeforeValidator(_whole)] = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_top_k)] = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Positive | None = None
    no_repeat_ngram_size: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_whole)] = None


class ClassifierConfig(Description):
    """What config.json says of a classifier."""

    architectures: list[str] | None = None
    id2label: dict[str, Any] | None = None
    num_labels: Annotated[int, Field(ge=0, le=10**6)] | None = None


class RopeConfig(Description, extra="allow"):
    """Rotary embeddings: `rope_parameters` or, in older files, `rope_scaling`.

    Other keys are kept in `model_extra`, for the error that names them (`families/ropes.py`).
    """

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    max_position_embeddings: Positions | None = None
    partial_rotary_factor: Share | None = None
    attention_factor: Positive | None = None
    attn_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Annotated[float, Field(ge=0, le=1e12)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e12)] | None = None
    truncate: bool | None = None
    short_factor: Factors | None = None
    long_factor: Factors | None = None
    llama_4_scaling_beta: Annotated[float, Field(ge=0, le=1e12)] | None = None
    mrope_section: Annotated[list[Annotated[int, Field(ge=0, le=2**12)]], Field(max_length=8)] | None = None
    mrope_interleaved: bool | None = None


class RopeParameters(RopeConfig):
    """Rotary embeddings, or those of each type of layer."""

    full_attention: RopeConfig | None = None
    sliding_attention: RopeConfig | None = None


class LayerConfig(Description, extra="forbid"):
    """What some layers have otherwise."""

    head_dim: Annotated[int, Field(ge=1, le=2**12)] | None = None
    num_key_value_heads: Heads | None = None


class HFConfig(GenerationConfig):
    """config.json of a causal language model."""

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: Annotated[int, Field(ge=1, le=2**12)] | None = None
    max_position_embeddings: Positions | None = None
    rms_norm_eps: Annotated[float, Field(ge=0, le=1)] = 1e-6
    rope_theta: Positive | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeConfig | None = None
    rope_local_base_freq: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    partial_rotary_factor: Share | None = None
    no_rope_layers: Annotated[list[int], Field(max_length=MAX_LAYERS)] | None = None
    no_rope_layer_interval: Period = 4
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    embedding_multiplier: Multiplier = 1.0
    residual_multiplier: Multiplier = 1.0
    attention_multiplier: Multiplier = 1.0
    logits_scaling: Multiplier = 1.0
    use_sliding_window: bool | None = None
    sliding_window: Window | None = None
    sliding_window_pattern: Period | None = None
    max_window_layers: Window = 28
    full_attention_interval: Period | None = None
    linear_conv_kernel_dim: Annotated[int, Field(ge=1, le=64)] = 4
    linear_key_head_dim: Annotated[int, Field(ge=1, le=2**12)] = 128
    linear_value_head_dim: Annotated[int, Field(ge=1, le=2**12)] = 128
    linear_num_key_heads: Heads = 16
    linear_num_value_heads: Heads = 32
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    num_experts_per_tok: Annotated[int, Field(ge=1, le=2**10)] = 8
    moe_intermediate_size: Width | None = None
    shared_expert_intermediate_size: Annotated[int, Field(ge=0, le=2**20)] | None = None
    norm_topk_prob: bool | None = None
    qkv_bias: bool | None = None
    clip_qkv: Positive | None = None
    swiglu_limit: Positive = 7.0
    swiglu_alpha: Positive = 1.702
    decoder_sparse_step: Annotated[int, Field(ge=0, le=MAX_LAYERS)] | None = None
    mlp_only_layers: Annotated[list[int], Field(max_length=MAX_LAYERS)] | None = None
    layer_types: Annotated[list[str], Field(max_length=MAX_LAYERS)] | None = None
    use_bidirectional_attention: bool | str | None = None
    global_head_dim: Annotated[int, Field(ge=1, le=2**12)] | None = None
    num_global_key_value_heads: Heads | None = None
    per_layer_config: dict[str, LayerConfig] | None = None
    attention_k_eq_v: bool | None = None
    num_kv_shared_layers: Annotated[int, Field(ge=0, le=MAX_LAYERS)] = 0
    use_double_wide_mlp: bool | None = None
    enable_moe_block: bool | None = None
    hidden_size_per_layer_input: Annotated[int, Field(ge=0, le=2**16)] = 0
    vocab_size_per_layer_input: Vocabulary | None = None
    quantization_config: Any = None
    bos_token_id: TokenId | None = None
    pad_token_id: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None


Blocks = Annotated[list[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]], Field(max_length=MAX_LAYERS)]
Pixels = Annotated[int, Field(ge=1, le=2**31 - 1)]
Side = Annotated[int, Field(ge=1, le=2**14)]
Few = Annotated[int, Field(ge=1, le=64)]


class AxialRope(Description):
    """Rotary embeddings of rows and columns."""

    rope_type: str = "axial"
    rope_theta: Positive = 10_000.0


class VisionConfig(Description):
    """`vision_config` of config.json, with the names of keys that several families have."""

    depth: Annotated[Layers, Field(validation_alias=AliasChoices("depth", "num_hidden_layers"))]
    hidden_size: Width
    intermediate_size: Width
    num_heads: Annotated[Heads, Field(validation_alias=AliasChoices("num_heads", "num_attention_heads"))]
    channels: Annotated[
        Few, Field(validation_alias=AliasChoices("in_channels", "in_chans", "num_channels"))
    ] = 3
    patch_size: Side
    hidden_act: str | None = None
    layer_norm_eps: Annotated[float, Field(ge=0, le=1)] = 1e-6
    image_size: Side | None = None
    spatial_merge_size: Few = 2
    temporal_patch_size: Few = 2
    out_hidden_size: Width | None = None
    num_position_embeddings: Annotated[int, Field(ge=1, le=2**24)] = 2304
    deepstack_visual_indexes: Blocks | None = None
    window_size: Side = 112
    fullatt_block_indexes: Blocks | None = None
    rope_parameters: AxialRope = AxialRope()


class ImageSize(Description):
    """How large pictures become."""

    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class ImageProcessorConfig(Description):
    """What preprocessor_config.json says of the sizes of pictures, and of how pixels become numbers."""

    size: ImageSize = ImageSize()
    max_image_size: ImageSize = ImageSize()
    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None
    do_resize: bool = True
    do_image_splitting: bool = True
    patch_size: Side | None = None
    merge_size: Few | None = None
    temporal_patch_size: Few | None = None
    do_rescale: bool | None = None
    rescale_factor: Positive | None = None
    do_normalize: bool | None = None
    image_mean: Annotated[list[Annotated[float, Field(ge=-1e6, le=1e6)]], Field(max_length=8)] | None = None
    image_std: Annotated[list[Positive], Field(max_length=8)] | None = None
    resample: Annotated[int, Field(ge=0, le=5)] | None = None


class PictureConfig(Description):
    """What config.json says of pictures, beside the tower."""

    image_token_id: TokenId
    scale_factor: Few = 2


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
