"""The supported families of models, one file each, and the way from config.json to `Architecture` and back.

Data flow: config.json -> `Architecture` -> parameters and forward pass; export goes the other way. To add a
family, write its file and add it to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from quatrain.config.errors import shown
from quatrain.config.files import checked
from quatrain.models.architecture import Architecture
from quatrain.models.families.common import Family, Json, write_common
from quatrain.models.families.gemma import GEMMA2, GEMMA3
from quatrain.models.families.gemma4 import GEMMA4
from quatrain.models.families.glm import GLM, GLM4
from quatrain.models.families.gpt_oss import GPT_OSS
from quatrain.models.families.granite import GRANITE
from quatrain.models.families.llama import LLAMA
from quatrain.models.families.mistral import MINISTRAL3, MISTRAL
from quatrain.models.families.mixtral import MIXTRAL
from quatrain.models.families.multimodal import text_config
from quatrain.models.families.olmo import OLMO2, OLMO3, OLMOE
from quatrain.models.families.phi import PHI3
from quatrain.models.families.qwen import QWEN2, QWEN3
from quatrain.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from quatrain.models.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from quatrain.models.families.ropes import with_sections
from quatrain.models.families.smollm import SMOLLM3
from quatrain.models.families.towers import read_vision
from quatrain.models.hf_config import HFConfig

FAMILIES = {
    family.model_type: family
    for family in (
        *(LLAMA, QWEN2, QWEN3, GEMMA2, GEMMA3, GEMMA4),
        *(MISTRAL, MINISTRAL3, OLMO2, OLMO3, SMOLLM3, GRANITE, PHI3, GLM, GLM4, QWEN3_NEXT, QWEN3_5),
        *(QWEN3_MOE, MIXTRAL, OLMOE, QWEN2_MOE, GPT_OSS, QWEN3_5_MOE),
    )
}
"""The supported families, keyed by the `model_type` of config.json."""
_UNSUPPORTED = {
    "quantization_config": "quantised weights are not supported: use the original model or a .gguf file",
    "use_bidirectional_attention": "only causal attention is supported",
}
_TINY: Json = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes of the text models of all of these."""
_BUILTIN: dict[str, Json] = {
    "tiny": {
        "model_type": "llama",
        **_TINY,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
    },
    "tiny_moe": {
        "model_type": "qwen3_moe",
        **_TINY,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 144,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "bos_token_id": None,
    },
    "tiny_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text",
            **_TINY,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": 128,
            "deepstack_visual_indexes": [],
        },
        "tie_word_embeddings": True,
    },
}
BUILTIN_PROCESSOR: Json = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 16 * 16, "longest_edge": 128 * 128},
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""preprocessor_config.json of the built-in model with a tower."""


_COUSINS = {
    "cohere": ("llama", "layer norms and blocks side by side"),
    "cohere2": ("llama", "layer norms and blocks side by side"),
    "deepseek_v2": ("llama", "latent attention and experts"),
    "deepseek_v3": ("llama", "latent attention and experts"),
    "gemma": ("gemma2", "no norms after its blocks"),
    "gemma3n": ("gemma3_text", "several streams of hidden states"),
    "glm4_moe": ("qwen3_moe", "a router with groups of experts"),
    "gpt_neox": ("llama", "layer norms and no gate in its MLP"),
    "granitemoe": ("granite", "experts whose tensors are fused"),
    "granitemoehybrid": ("granite", "state-space layers or experts"),
    "llama4": ("llama", "experts"),
    "llama4_text": ("llama", "experts"),
    "ministral": ("mistral", "windows on some layers alone"),
    "olmo": ("olmo2", "layer norms without weights"),
    "phi": ("phi3", "layer norms and blocks side by side"),
    "phimoe": ("mixtral", "layer norms and another router"),
    "qwen2_vl": ("qwen2", "rotary positions of pictures"),
    "qwen3_vl_moe": ("qwen3_moe", "rotary positions of pictures"),
    "starcoder2": ("llama", "layer norms and no gate in its MLP"),
}
"""Of other model types: the nearest supported one, and what they have that it lacks."""


def family_of(arch: Architecture) -> Family:
    """The family of a model."""
    return FAMILIES[arch.family]


def builtin_config(name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Json:
    """config.json of the model `builtin:NAME`, for a tokenizer of `vocab_size` tokens.

    `tiny` is a Llama of about 0.8 M parameters, which trains on two CPU cores in minutes; `tiny_moe` is a
    Qwen3-MoE of about 2 M parameters, a quarter of whose experts compute a token; `tiny_vl` is a Qwen3-VL of
    about 1 M parameters, of whose tokenizer the last three tokens are the start of a picture, its placeholder
    and its end. Raises ValueError for another name.
    """
    if name not in _BUILTIN:
        known = ", ".join(f"builtin:{known}" for known in _BUILTIN)
        raise ValueError(f"unknown builtin model builtin:{name}; the builtin models are: {known}")
    config, of_text = _BUILTIN[name], {"vocab_size": vocab_size, "eos_token_id": list(eos_token_ids)}
    if "text_config" not in config:
        return {**config, **of_text}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    of_pictures = dict(zip(names, range(vocab_size - len(names), vocab_size), strict=True))
    return {**config, **of_pictures, "text_config": {**config["text_config"], **of_text}}


def builtin_architecture(name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Architecture:
    """The architecture of the model `builtin:NAME` (`builtin_config`), with its tower if it has one."""
    config = builtin_config(name, vocab_size, eos_token_ids)
    vision = BUILTIN_PROCESSOR if "vision_config" in config else None
    return architecture_from_hf(config, f"builtin:{name}", vision=vision)


def architecture_from_hf(
    config: Mapping[str, Any],
    source: str = "config.json",
    *,
    vision: Mapping[str, Any] | None = None,
) -> Architecture:
    """The architecture that the values of a Hugging Face config.json describe; `source` names the file.

    Reads the layout of transformers 5 (`rope_parameters`) and the older one (`rope_theta`,
    `rope_scaling`, `rope_local_base_freq`); a missing key takes the same default as in transformers.
    Of a model that also reads pictures, it is that of the text part (`multimodal.py`); with its tower if
    `vision` is given, the values of preprocessor_config.json ({}: transformers' defaults). Raises ValueError
    for a value outside its bounds (`HFConfig`), for what the decoder does not support, and for `vision` of a
    model without a supported tower.
    """
    whole, config = config, text_config(config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known, near = ", ".join(FAMILIES), _nearest(str(family))
        raise ValueError(f"unsupported model_type {shown(family)} in {source}; supported: {known}{near}")
    values = {**FAMILIES[family].defaults, **config}
    for key, remedy in _UNSUPPORTED.items():
        value = values.get(key)
        # Harmless: what is of images alone, and MXFP4, which `weights/mxfp4.py` reads.
        packed = isinstance(value, Mapping) and value.get("quant_method") == "mxfp4"
        if value and value != "vision" and not packed:
            raise ValueError(f"{source} has {key} = {shown(value)}: {remedy}")
    hf_config = checked(HFConfig, values, source)
    try:
        arch = FAMILIES[family].read(hf_config)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    if vision is None:
        return arch
    tower = read_vision(whole, vision, arch.hidden_size, source)
    if tower.has_grid:
        alternating = tower.kind == "qwen3_vl"
        arch = arch.with_ropes(lambda rope: with_sections(rope, hf_config, alternating=alternating))
    try:
        return replace(arch, vision=tower)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _nearest(model_type: str) -> str:
    """A clause that names the nearest supported model type and what differs; empty if none is near."""
    if model_type in _COUSINS:
        nearest, differs = _COUSINS[model_type]
        return f"; it is nearest to {nearest}, but has {differs}"
    near = get_close_matches(model_type, list(FAMILIES), 1)
    return f"; did you mean {near[0]}?" if near else ""


def architecture_to_hf(arch: Architecture) -> Json:
    """The contents of a config.json, except the dtype, from which transformers 4 and 5 build the model."""
    family = family_of(arch)
    score = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if arch.head == "value_head" else {}
    names = {"architectures": [family.classifier if score else family.hf_class], "model_type": arch.family}
    config = {**names, **write_common(arch), **family.write(arch), **score}
    return {key: value for key, value in config.items() if key not in family.omitted}
