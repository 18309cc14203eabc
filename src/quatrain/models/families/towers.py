"""Towers: the part of config.json that describes one, and the sizes of pictures in preprocessor_config.json.

Data flow: both files -> `Vision`, a field of `Architecture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from quatrain.config.files import checked
from quatrain.models.blocks.vit import VisionBlock, VisionNorm
from quatrain.models.hf_config import ImageProcessorConfig, PictureConfig, VisionConfig
from quatrain.models.spec import require
from quatrain.models.vision import Vision

_SIGLIP = (
    *(("norm1", "layer_norm1"), ("norm2", "layer_norm2")),
    *(("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("v", "self_attn.v_proj")),
    *(("o", "self_attn.out_proj"), ("up", "mlp.fc1"), ("down", "mlp.fc2")),
)
_QWEN = (("norm1", "norm1"), ("norm2", "norm2"), ("qkv", "attn.qkv"), ("o", "attn.proj"))
_QWEN3 = (*_QWEN, ("up", "mlp.linear_fc1"), ("down", "mlp.linear_fc2"))
_QWEN2_5 = (*_QWEN, ("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj"))


class _Described(NamedTuple):
    """What the two files say, checked."""

    tower: VisionConfig
    pictures: PictureConfig
    processor: ImageProcessorConfig
    hidden_size: int
    """Of the text model."""


def _block(c: VisionConfig, modules: tuple[tuple[str, str], ...], act: str, norm: VisionNorm) -> VisionBlock:
    theta = None if modules is _SIGLIP else c.rope_parameters.rope_theta
    require(c.rope_parameters.rope_type == "axial", "rope_type", "axial", c.rope_parameters.rope_type)
    sizes = c.hidden_size, c.num_heads, c.intermediate_size
    return VisionBlock(*sizes, c.hidden_act or act, norm, modules, theta)


def _idefics3(given: _Described) -> Vision:
    c, processor = given.tower, given.processor
    image = c.image_size or 224
    require(image % c.patch_size == 0, "image_size", f"a multiple of patch_size {c.patch_size}", image)
    return Vision(
        "idefics3",
        given.pictures.image_token_id,
        _block(c, _SIGLIP, "gelu_pytorch_tanh", VisionNorm("layer", c.layer_norm_eps)),
        c.depth,
        c.patch_size,
        given.pictures.scale_factor,
        given.hidden_size,
        channels=c.channels,
        table_side=image // c.patch_size,
        longest_edge=processor.size.longest_edge or 4 * 364,
        tile=processor.max_image_size.longest_edge or 364,
        splits=processor.do_image_splitting,
    )


def _qwen3_vl(given: _Described) -> Vision:
    c = given.tower
    side = math.isqrt(c.num_position_embeddings)
    square = side**2 == c.num_position_embeddings
    require(square, "num_position_embeddings", "a square", c.num_position_embeddings)
    block = _block(c, _QWEN3, "gelu_pytorch_tanh", VisionNorm("layer"))
    return _qwen("qwen3_vl", given, block, table_side=side, deepstack=tuple(c.deepstack_visual_indexes or ()))


def _qwen3_5(given: _Described) -> Vision:
    return replace(_qwen3_vl(given), deepstack=())


def _qwen2_5_vl(given: _Described) -> Vision:
    c, unit = given.tower, given.tower.patch_size * given.tower.spatial_merge_size
    require(c.window_size >= unit, "window_size", f"at least {unit} pixels", c.window_size)
    whole = (7, 15, 23, 31) if c.fullatt_block_indexes is None else tuple(c.fullatt_block_indexes)
    fields: dict[str, Any] = {"window": c.window_size // unit, "whole": whole}
    return _qwen("qwen2_5_vl", given, _block(c, _QWEN2_5, "silu", VisionNorm("rms")), **fields)


def _qwen(kind: Any, given: _Described, block: VisionBlock, **fields: Any) -> Vision:
    """A tower whose pictures are one grid, with as many pixels as the processor allows."""
    c, processor = given.tower, given.processor
    for name, own in (
        ("patch_size", c.patch_size),
        ("merge_size", c.spatial_merge_size),
        ("temporal_patch_size", c.temporal_patch_size),
    ):
        found = getattr(processor, name)
        require(found in (None, own), f"{name} of the image processor", f"that of the tower, {own}", found)
    out = c.out_hidden_size or given.hidden_size
    require(out == given.hidden_size, "out_hidden_size", f"the hidden size {given.hidden_size} of texts", out)
    return Vision(
        kind,
        given.pictures.image_token_id,
        block,
        c.depth,
        c.patch_size,
        c.spatial_merge_size,
        out,
        temporal=c.temporal_patch_size,
        channels=c.channels,
        min_pixels=processor.min_pixels or processor.size.shortest_edge or 56 * 56,
        max_pixels=processor.max_pixels or processor.size.longest_edge or 28 * 28 * 1280,
        **fields,
    )


_SIZES: Mapping[str, Any] = {"hidden_size": 1152, "num_attention_heads": 16}
_SIGLIP_SIZES = {**_SIZES, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 32}
_QWEN3_SIZES = {**_SIZES, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 16}
_QWEN2_5_SIZES = {
    **_SIZES,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_hidden_layers": 32,
    "patch_size": 14,
}
_READ: dict[str, tuple[Callable[[_Described], Vision], Mapping[str, Any]]] = {
    "idefics3": (_idefics3, _SIGLIP_SIZES),
    "smolvlm": (_idefics3, _SIGLIP_SIZES),
    "qwen3_vl": (_qwen3_vl, {**_QWEN3_SIZES, "deepstack_visual_indexes": [8, 16, 24]}),
    "qwen3_5": (_qwen3_5, _QWEN3_SIZES),
    "qwen3_5_moe": (_qwen3_5, _QWEN3_SIZES),
    "qwen2_5_vl": (_qwen2_5_vl, _QWEN2_5_SIZES),
}
"""By the `model_type` of config.json; and what transformers takes for keys that are missing."""
REFUSED = {
    "gemma3": "the placeholders of its pictures attend to each other in both directions, and here attention "
    "in texts is causal",
    "gemma4": "its tower is not supported",
    "mistral3": "its tower is not supported",
}
"""Model types with a text part that is supported and a tower that is not, and why."""


def has_tower(config: Mapping[str, Any]) -> bool:
    """Whether a folder with this config.json has a tower that `read_vision` reads."""
    return config.get("model_type") in _READ and isinstance(config.get("vision_config"), Mapping)


def read_vision(
    config: Mapping[str, Any], processor: Mapping[str, Any], hidden_size: int, source: str
) -> Vision:
    """The tower that config.json describes, for texts of `hidden_size`, and the sizes of its pictures.

    `processor` are the values of preprocessor_config.json; a missing key takes the same default as in
    transformers. `source` names the file in errors. Raises ValueError for a model without a tower, for a
    tower that is not supported, and for values outside their bounds.
    """
    kind = str(config.get("model_type"))
    if not has_tower(config):
        reason = REFUSED.get(kind, "it has none, or one of another kind")
        known = ", ".join(_READ)
        raise ValueError(
            f"{source}: pictures need a model whose tower is supported ({known}); of model_type {kind}: "
            f"{reason}; use another model, or its text part alone (model.vision: none)"
        )
    try:
        read, defaults = _READ[kind]
        described = _Described(
            checked(VisionConfig, {**defaults, **config["vision_config"]}, source),
            checked(PictureConfig, config, source),
            checked(ImageProcessorConfig, processor, "the image processor"),
            hidden_size,
        )
        channels, resized = described.tower.channels, described.processor.do_resize
        require(channels == 3, "in_channels of the tower", "3, as pictures are RGB", channels)
        for name in ("image_mean", "image_std"):
            each = getattr(described.processor, name)
            three = each is None or len(each) == channels
            require(three, f"{name} of the image processor", "three numbers, one for each colour", each)
        require(resized, "do_resize of the image processor", "true: the tower reads whole patches", resized)
        return read(described)
    except ValueError as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source}: {error}") from error
