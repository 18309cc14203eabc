"""The pixels of a picture are those of its model's image processor, in the order that the tower reads."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageOps
from towers import PROCESSORS, seeing
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

import quatrain
from quatrain.config.schema import DataConfig
from quatrain.data.pictures import PictureReader
from quatrain.data.pixels import Pixels, with_limits
from quatrain.data.policy import Policy
from quatrain.models.feature_store import FeatureStore
from quatrain.parallel.mesh import one_device

RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (30, 50, 4), np.uint8)
RGBA = Image.fromarray(COLOURS)
RGB = Image.fromarray(COLOURS[..., :3])
OWN = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.01}
"""Other numbers than any processor's defaults."""


def on_white(image):
    pixels = np.asarray(image).astype(float)
    share = pixels[..., 3:] / 255
    return Image.fromarray(np.floor(pixels[..., :3] * share + 255 * (1 - share) + 0.5).astype(np.uint8))


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize(
    ("image", "options"),
    [
        (RGB, {"format": "PNG"}),
        (RGB.convert("L"), {"format": "PNG"}),
        (RGB.convert("P"), {"format": "GIF"}),
        (RGB.convert("CMYK"), {"format": "JPEG", "quality": 90}),
        (RGB, {"format": "JPEG", "exif": rotated()}),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_pixels_are_the_processors(image, options, model_type) -> None:
    stream = io.BytesIO()
    image.save(stream, **options)
    picture = PictureReader().read(stream.getvalue())
    person = ImageOps.exif_transpose(Image.open(io.BytesIO(picture.encoded))).convert("RGB")
    assert picture.size == person.size
    assert_as_processed(model_type, picture, person)


def test_transparent_pictures_are_processed_on_white() -> None:
    stream = io.BytesIO()
    RGBA.save(stream, "PNG")
    picture = PictureReader().read(stream.getvalue())
    white = np.asarray(on_white(RGBA)).astype(int)
    # Alpha is blended in whole numbers, which may round the other way.
    found = np.asarray(Image.alpha_composite(Image.new("RGBA", RGBA.size, "white"), RGBA).convert("RGB"))
    assert abs(found - white).max() <= 1
    assert_as_processed("qwen3_vl", picture, Image.fromarray(found))


def assert_as_processed(model_type, picture, person) -> None:
    vision = seeing(model_type).vision
    kinds = {"qwen3_vl": Qwen2VLImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}
    # An idefics3 folder has the same processor.
    assert {**Idefics3ImageProcessorPil().to_dict(), "image_processor_type": 0} == {
        **SmolVLMImageProcessorPil().to_dict(),
        "image_processor_type": 0,
    }
    for own in ({}, OWN):
        processor = kinds[model_type](**PROCESSORS[model_type], temporal_patch_size=2, **own)
        if model_type == "smolvlm":
            processor = kinds[model_type](**PROCESSORS[model_type], **own)
        expected = processor(images=[person], return_tensors="np")["pixel_values"]
        if not vision.has_grid:
            expected = in_blocks(expected[0], vision)
        found = Pixels(vision, own | {"do_resize": False, "size": {"longest_edge": 3}})(picture)
        assert found.dtype == np.float32
        assert found.shape == (vision.num_patches(picture.size), vision.patch_values)
        np.testing.assert_array_equal(found, expected)


def in_blocks(tiles, vision):
    """The patches of tiles, block by block of neighbours that become one feature."""
    patches, side = [], vision.patch
    for tile in tiles:
        for top in range(0, vision.tile, vision.unit):
            for left in range(0, vision.tile, vision.unit):
                for row in range(vision.merge):
                    for column in range(vision.merge):
                        y, x = top + row * side, left + column * side
                        patches.append(tile[:, y : y + side, x : x + side].ravel())
    return np.array(patches)


def test_limits_of_pixels_are_those_of_the_configuration() -> None:
    vision, size = seeing("qwen3_vl").vision, (400, 200)
    assert with_limits(vision, DataConfig()) is vision
    few = with_limits(vision, DataConfig(image_max_pixels=512))
    assert few.seen_size(size) == (32, 16)
    assert few.min_pixels == vision.min_pixels
    many = with_limits(vision, DataConfig(image_min_pixels=4096))
    assert many.num_placeholders((8, 8)) == 64
    assert many.max_pixels == vision.max_pixels
    with pytest.raises(ValueError, match=r"of one placeholder, 64; got 63 .* raise the one"):
        with_limits(vision, DataConfig(image_max_pixels=63, image_min_pixels=1))
    with pytest.raises(ValueError, match=r"got 512 and data\.image_min_pixels=513"):
        with_limits(vision, DataConfig(image_max_pixels=512, image_min_pixels=513))
    with pytest.raises(ValueError, match=r"this one cuts it into tiles of \d+ pixels; unset both"):
        with_limits(seeing("smolvlm").vision, DataConfig(image_max_pixels=512))


def test_another_model_of_a_run_has_the_pixels_of_its_own_folder(tmp_path):
    """The fault: a teacher or a critic that was trained with other means read the policy's numbers."""
    arch = seeing("qwen3_vl", "frozen")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSORS["qwen3_vl"], **OWN}))
    own = Pixels(arch.vision, PROCESSORS["qwen3_vl"])
    store = FeatureStore(arch, one_device(), "float32", 1, own, frozen=dict)
    beside = Policy.store_beside(SimpleNamespace(store=store), arch, str(tmp_path), store.mesh)
    picture = PictureReader().read(RGB)
    expected = Pixels(arch.vision, {**PROCESSORS["qwen3_vl"], **OWN})(picture)
    np.testing.assert_array_equal(beside._pixels(picture), expected)
    assert np.abs(own(picture) - expected).max() > 0.1
    blind = replace(arch, vision=None)
    assert Policy.store_beside(SimpleNamespace(store=store), blind, str(tmp_path), store.mesh) is None


@pytest.mark.parametrize(("limits", "seen"), [((), (176, 80)), (("data.image_max_pixels=1024",), (32, 16))])
def test_rewards_learn_the_size_in_which_a_model_sees_a_picture(limits, seen):
    """Coordinates of the resized picture compared with those of the file's, or without the run's limits."""
    settings = ("model.path=builtin:tiny_vl", "data.train=builtin:shapes", *limits)
    assert quatrain.seen_size((200, 100), quatrain.load_config(overrides=settings, environ={}).config) == seen


def test_a_model_without_a_tower_sees_no_size():
    """Catches the advice to set `model.vision` to none, which it is."""
    with pytest.raises(ValueError, match=r"builtin:tiny \(model\.path\) has none; give the configuration of"):
        quatrain.seen_size((200, 100), quatrain.load_config(overrides=(), environ={}).config)
