"""Small models with towers: their config.json, and what their preprocessor_config.json says of sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quatrain.models.architecture import Architecture
from quatrain.models.families import architecture_from_hf
from quatrain.models.vision import TrainedVision

PLACEHOLDER = 90
VIDEO = 91
VISION_START = 92
_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
_QWEN_IDS = {"image_token_id": PLACEHOLDER, "video_token_id": VIDEO, "vision_start_token_id": VISION_START}
_QWEN_SIZES = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}


def _idefics3(model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "image_token_id": PLACEHOLDER,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": {**_TEXT, "model_type": "llama", "rms_norm_eps": 1e-5},
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 2,
            "layer_norm_eps": 1e-5,
        },
    }


def _mrope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5e5, "mrope_section": sections, **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "idefics3": _idefics3("idefics3"),
    "smolvlm": _idefics3("smolvlm"),
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        **_QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_parameters": _mrope([2, 1, 1], mrope_interleaved=True),
        },
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen3_vl_vision",
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        **_QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": _mrope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
        },
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5_vision", "num_position_embeddings": 36},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **_QWEN_IDS,
        "tie_word_embeddings": False,
        "text_config": {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": _mrope([2, 1, 1]),
        },
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen2_5_vl_vision",
            "hidden_act": "silu",
            "window_size": 32,
            "fullatt_block_indexes": [1, 3],
        },
    },
}
"""By model type."""
PROCESSORS: dict[str, dict[str, Any]] = {
    "idefics3": {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}},
    "smolvlm": {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}},
    "qwen3_vl": _QWEN_SIZES,
    "qwen3_5": _QWEN_SIZES,
    "qwen2_5_vl": _QWEN_SIZES,
}
"""The values of their preprocessor_config.json."""


def seeing(model_type: str, trained: TrainedVision = "all") -> Architecture:
    """The small model of this type, with its tower."""
    arch = architecture_from_hf(CONFIGS[model_type], vision=PROCESSORS[model_type])
    assert arch.vision is not None
    return replace(arch, vision=replace(arch.vision, trained=trained))
