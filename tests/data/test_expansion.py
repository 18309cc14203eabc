"""Pictures stand among tokens as the processors of transformers write them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from chat_templates import FAMILIES, tokenizer_of
from PIL import Image
from seeing import TEMPLATE, seeing_tokenizer, square
from towers import PROCESSORS, seeing
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from quatrain.data.expansion import Expansion, with_vision
from quatrain.data.pictures import BadPicture, PictureReader
from quatrain.data.tokenizer import render, render_completed
from quatrain.data.turns import TurnTemplate
from quatrain.types.pictures import TEXT

READER = PictureReader()
ONE, TWO, WIDE = (
    {"type": "image", "image": READER.read(square(shade, size))}
    for shade, size in ((10, (16, 16)), (20, (16, 16)), (30, (40, 24)))
)
SIZES = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
OF_TILES = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>")


def of_tiles(model_type, **changed):
    """A tower for the tiles of SIZES, of 49 placeholders each."""
    vision = seeing(model_type).vision
    return replace(vision, patch=2, merge=2, longest_edge=84, tile=28, splits=True, **changed)


def say(text):
    return {"type": "text", "text": text}


def user(*content):
    return {"role": "user", "content": [*content]}


@pytest.fixture(scope="module")
def tokenizer():
    return seeing_tokenizer()


@pytest.fixture(scope="module")
def tiled():
    """The tokenizer of a SmolVLM, with its own template."""
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    tokenizer.add_special_tokens({"additional_special_tokens": [*OF_TILES, "<end_of_utterance>"]})
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    own = tokenizer.convert_tokens_to_ids("<image>")
    return with_vision(tokenizer, of_tiles("smolvlm", placeholder_id=own))


def sizes(count):
    """Of pictures, among them lines, squares, and those at the limits of processors."""
    rng = np.random.default_rng(0)
    few = [(1, 1), (8, 8), (28, 28), (29, 28), (84, 84), (1, 150), (199, 1), (64, 64), (300, 7), (85, 28)]
    drawn = np.exp(rng.uniform(0, np.log(300), (count, 2))).astype(int) + 1
    return few + [(w, h) for w, h in drawn.tolist() if max(w, h) < 200 * min(w, h)]


def test_tiles_are_written_as_by_the_processor() -> None:
    names = {"fake_image_token": OF_TILES[1], "image_token": "<image>", "global_image_tag": "<global-img>"}
    own = SimpleNamespace(**names, image_seq_len=49)
    for splits in (True, False):
        processor = Idefics3ImageProcessorPil(**SIZES, do_image_splitting=splits)
        expansion = Expansion(replace(of_tiles("idefics3"), splits=splits), "<image>")
        written = set()
        for size in sizes(200):
            found = processor(images=[Image.new("RGB", size)], return_row_col_info=True, return_tensors="np")
            expected = Idefics3Processor.replace_image_token(own, found, 0)
            assert expansion.written(size) == expected, size
            assert expected.count("<image>") == expansion.vision.num_placeholders(size), size
            written.add(expected)
        assert len(written) == (5 if splits else 1)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_a_grid_has_as_many_placeholders_as_by_the_processor(model_type) -> None:
    vision, pad = seeing(model_type).vision, "<|image_pad|>"
    processor = Qwen2VLImageProcessorPil(**PROCESSORS[model_type])
    own = SimpleNamespace(image_token=pad, image_processor=processor)
    for size in sizes(200):
        found = processor(images=[Image.new("RGB", size)], return_tensors="np")
        expected = Qwen3VLProcessor.replace_image_token(own, found, 0)
        assert Expansion(vision, pad).written(size) == expected, size
        assert found["pixel_values"].shape == (vision.num_patches(size), vision.patch_values)


def test_a_prompt_has_the_ids_of_the_processor(tiled) -> None:
    pictures = [part["image"] for part in (ONE, WIDE, TWO)]
    messages = [
        {"role": "system", "content": "Be brief."},
        user(ONE, say("one\n\n"), WIDE, TWO, say(" and?")),
    ]
    image_processor = Idefics3ImageProcessorPil(**SIZES)
    processor = Idefics3Processor(image_processor, tokenizer_of_idefics(tiled), image_seq_len=49)
    written = [{**messages[0], "content": [say("Be brief.")]}, user(*map(plain, messages[1]["content"]))]
    text = tiled.apply_chat_template(written, tokenize=False, add_generation_prompt=True)
    images = [Image.new("RGB", picture.size) for picture in pictures]
    expected = processor(images=images, text=text, add_special_tokens=False)["input_ids"][0]
    found = render(tiled, messages)
    assert found.ids == expected
    own = tiled.convert_tokens_to_ids("<image>")
    assert (found.pictures.ids != TEXT).tolist() == [index == own for index in found.ids]
    counts = [int((found.pictures.ids == picture.id).sum()) for picture in pictures]
    assert counts == [49 * 10, 49 * 7, 49 * 10]
    assert [each.id for each in found.pictures.used] == [picture.id for picture in pictures]


def tokenizer_of_idefics(tokenizer):
    """The same tokenizer: the processor adds its special tokens to it, which it has."""
    before = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [*OF_TILES, "<end_of_utterance>"]})
    assert len(tokenizer) == before
    return tokenizer


def plain(part):
    return {"type": "image"} if part["type"] == "image" else part


def test_pictures_are_marked_by_place_in_a_prompt_and_in_a_later_turn(tokenizer) -> None:
    template = TurnTemplate(tokenizer, [tokenizer.eos_token_id])
    prompt = (user(ONE, TWO, say("Which?"), WIDE),)
    found = template.prompt(prompt)
    assert found.ids == render(tokenizer, prompt).ids
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    marks = [int(each) for each in found.pictures.ids if each != TEXT]
    assert marks == [ONE["image"].id] * 4 + [TWO["image"].id] * 4 + [WIDE["image"].id] * 15
    assert [index == pad for index in found.ids] == (found.pictures.ids != TEXT).tolist()
    text = tokenizer.decode([index for index in found.ids if index != pad])
    assert text.count("<|vision_start|><|vision_end|>") == 3
    assert "<|vision_end|>Which?<|vision_start|>" in text
    # The sampled placeholder is text, and only the new picture is in the suffix.
    sampled = [pad, tokenizer.eos_token_id]
    suffix = template.suffix(prompt, sampled, [user(say("And"), TWO)])
    assert [int(each) for each in suffix.pictures.ids if each != TEXT] == [TWO["image"].id] * 4
    assert "user\nAnd<|vision_start|><|image_pad|>" in tokenizer.decode(suffix.ids)
    assert template.suffix(prompt, sampled, [{"role": "user", "content": "And"}]).pictures is None
    assert template.suffix(prompt, sampled[:1], [user(TWO)]).pictures is not None  # it was cut


def test_a_text_prompt_has_the_ids_of_a_model_that_does_not_see(tokenizer) -> None:
    blind = tokenizer_of(FAMILIES["qwen2.5"])
    blind.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "How much is 1 + 1?"}]
    assert render(tokenizer, messages) == render(blind, messages)
    assert render(tokenizer, "1 + 1") == render(blind, "1 + 1")
    assert render(blind, "<|image_pad|> <row_1_col_1>").pictures is None
    for call in (lambda: render(blind, [user(ONE)]), lambda: TurnTemplate(blind, [0]).prompt((user(ONE),))):
        with pytest.raises(ValueError, match=r"does not see pictures, .* set model\.vision"):
            call()
    with pytest.raises(ValueError, match="with its answer, as reward models do, must have no pictures"):
        render_completed(tokenizer, [user(ONE)], "7")


@pytest.mark.parametrize("text", ["<|image_pad|>", "a<|vision_start|>", "<|vision_end|>", "<|video_pad|>"])
def test_a_text_that_forges_a_picture_is_refused(tokenizer, text) -> None:
    found = text.removeprefix("a").replace("|", r"\|")
    for messages in (
        text,
        [{"role": "user", "content": text}],
        [user(ONE, say(text))],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "thinking": text},
            user(ONE),
        ],
    ):
        with pytest.raises(BadPicture, match=f"a text must not have {found}"):
            render(tokenizer, messages)
    template = TurnTemplate(tokenizer, [tokenizer.eos_token_id])
    with pytest.raises(BadPicture, match=f"a text must not have {found}"):
        template.suffix((user(ONE),), [1], [{"role": "user", "content": text}])


@pytest.mark.parametrize("text", ["<image>", "<row_1_col_7>", "<row_12_col_34>", "<global-img>", OF_TILES[1]])
def test_a_text_that_forges_a_tile_is_refused(tiled, text) -> None:
    with pytest.raises(BadPicture, match=f"a text must not have {text}, which stands for pictures"):
        render(tiled, [user(ONE, say(f"see {text}"))])
    assert render(tiled, [user(say("<|image_pad|> <row_a_col_1>"))]).pictures is None


def test_a_template_writes_each_picture_and_a_tokenizer_has_the_placeholder(tokenizer) -> None:
    deaf, joined = seeing_tokenizer(), seeing_tokenizer()
    deaf.chat_template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    with pytest.raises(BadPicture, match="once for each of the 1 pictures; it writes it 0 times"):
        render(deaf, [user(ONE, say("a"))])
    joined.chat_template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
    assert render(joined, [user(ONE, say("a"), TWO)]).pictures is not None
    with pytest.raises(ValueError, match="must have 8 placeholders in 2 runs; its tokens have 8 in 1"):
        render(joined, [user(ONE, TWO)])
    vision = tokenizer.expansion.vision
    with pytest.raises(ValueError, match=f"must have the token {len(tokenizer)}"):
        with_vision(seeing_tokenizer(), replace(vision, placeholder_id=len(tokenizer)))
