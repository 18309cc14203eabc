"""The pixels of a picture as a tower reads them, made by the image processors of transformers.

Data flow: `Picture` -> `decoded` -> the processor of its model -> `Pixels`, patches on the host ->
`tower.patches_of`. The sizes are those of `Vision`, which alone says how a picture is resized; the processor
resizes to them, and its numbers are those that the model was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from quatrain.config.schema import Config, DataConfig
from quatrain.data.pictures import decoded
from quatrain.data.tokenizer import load_tokenizer
from quatrain.models.vision import Vision
from quatrain.types.pictures import Picture
from quatrain.weights.load_model import BUILTIN, load_architecture

_SETTINGS = (
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "resample",
)
"""Settings that are read of preprocessor_config.json: how pixels become numbers."""


class Pixels:
    """Makes the pixels of pictures for a tower; threads may share one.

    `processor` has the values of preprocessor_config.json; what it lacks has transformers' default.
    """

    def __init__(self, vision: Vision, processor: Mapping[str, Any] = {}):
        self._vision = vision
        self._settings = {name: processor[name] for name in _SETTINGS if processor.get(name) is not None}

    def __call__(self, picture: Picture) -> np.ndarray:
        """[patches, values of a patch] float32, in merge order: block row, block column, row, column.

        A block has `merge` x `merge` patches; of tiles, one grid follows the other. The values of a patch are
        channels, times, rows and columns. Raises `BadPicture` as `decoded` does.
        """
        found = self._processor(images=[decoded(picture)], return_tensors="np")["pixel_values"]
        pixels = np.asarray(found, np.float32)
        return pixels if self._vision.has_grid else self._in_merge_order(pixels[0])

    def _in_merge_order(self, tiles: np.ndarray) -> np.ndarray:
        """The patches of tiles [N, channels, side, side]."""
        vision = self._vision
        blocks, m, p = vision.tile // vision.unit, vision.merge, vision.patch
        parts = tiles.reshape(len(tiles), vision.channels, blocks, m, p, blocks, m, p)
        return parts.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, vision.patch_values)

    @cached_property
    def _processor(self) -> Any:
        # The names that end with Pil: the others need torchvision.
        vision = self._vision
        if vision.has_grid:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            return Qwen2VLImageProcessorPil(
                **self._settings,
                size={"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels},
                patch_size=vision.patch,
                merge_size=vision.merge,
                temporal_patch_size=vision.temporal,
            )
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        return Idefics3ImageProcessorPil(
            **self._settings,
            size={"longest_edge": vision.longest_edge},
            max_image_size={"longest_edge": vision.tile},
            do_image_splitting=vision.splits,
        )


def seen_size(size: tuple[int, int], config: Config) -> tuple[int, int]:
    """Width and height to which the model of `config` has a picture of `size` resized.

    For reward functions and environments of models whose answers have coordinates: those in pixels are of
    this size. Reads no weights. Raises ValueError for a model without a supported tower, and for a picture
    whose sides are too different.
    """
    path = config.model.path
    # Of a built-in model the vocabulary has its tokenizer's size; the picture does not depend on it.
    own = len(load_tokenizer(config.model.tokenizer)) if path.startswith(BUILTIN) else None
    vision = load_architecture(path, vocab_size=own, vision=None).vision
    if vision is None:
        raise ValueError(
            f"quatrain.seen_size needs a model with a supported tower; {path} (model.path) has none; give "
            "the configuration of a model that sees (docs/images.md)"
        )
    return with_limits(vision, config.data).seen_size(size)


def with_limits(vision: Vision, data: DataConfig) -> Vision:
    """`vision` with the limits that the configuration sets for the pixels of a picture.

    Raises ValueError for limits that the model's pictures do not have, and for a least above the most.
    """
    low, high = data.image_min_pixels, data.image_max_pixels
    if low is None and high is None:
        return vision
    if not vision.has_grid:
        raise ValueError(
            "data.image_min_pixels and data.image_max_pixels are for models that see a picture in its own "
            f"size; this one cuts it into tiles of {vision.tile} pixels; unset both"
        )
    limited = replace(
        vision,
        min_pixels=vision.min_pixels if low is None else low,
        max_pixels=vision.max_pixels if high is None else high,
    )
    if limited.max_pixels < max(limited.min_pixels, vision.unit**2):
        raise ValueError(
            "data.image_max_pixels must be at least the least pixels of a picture, and those of one "
            f"placeholder, {vision.unit**2}; got {limited.max_pixels} and data.image_min_pixels="
            f"{limited.min_pixels}; raise the one, or lower the other"
        )
    return limited
