"""A tokenizer whose prompts have pictures, small pictures, and a sampler that says what it is told."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
from chat_templates import FAMILIES, tokenizer_of
from PIL import Image
from towers import seeing

from quatrain.data.expansion import with_vision
from quatrain.types.batches import Prompt
from quatrain.types.pictures import TEXT, Pictures
from quatrain.types.piece import Piece
from quatrain.types.sampler import Progress, Request, Sampler

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def seeing_tokenizer() -> Any:
    """Of a Qwen3-VL whose pictures have a placeholder for each 8 x 8 pixels, at least four."""
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]}
    )
    tokenizer.chat_template = TEMPLATE
    vision = seeing("qwen3_vl").vision
    assert vision is not None
    return with_vision(
        tokenizer, replace(vision, placeholder_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    )


def square(shade: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.new("RGB", size, (shade, 0, 0))


def encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def shades(pictures: Pictures | None, size: int) -> list[int | None]:
    """Of each token the red of its picture, or None for text."""
    if pictures is None:
        return [None] * size
    red = {
        picture.id: Image.open(io.BytesIO(picture.encoded)).convert("RGB").getpixel((0, 0))[0]
        for picture in pictures.used
    }
    return [None if number == TEXT else red[number] for number in pictures.ids.tolist()]


class Says(Sampler):
    """Ends each turn at once with the next of `texts`, the last again and again; keeps the requests."""

    cannot_see = None

    def __init__(self, tokenizer: Any, *texts: str):
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.asked: list[Prompt] = []

    def load(self, weights: Any, version: int) -> None:
        """Nothing to load."""

    def start(self, requests: Sequence[Request], listener: Any) -> Future[list[int]]:
        for number, request in enumerate(requests):
            self.asked.append(request.prompt)
            text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
            tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
            listener(number, Progress(Piece(tokens, [-1.0] * len(tokens), [0] * len(tokens)), "stop"))
        keys: Future[list[int]] = Future()
        keys.set_result(list(range(len(requests))))
        return keys


def prompt_of(tokenizer: Any, messages: Sequence[Any], group: int = 0) -> Prompt:
    """A prompt of messages whose parts are read."""
    from quatrain.data.tokenizer import render

    found = render(tokenizer, messages)
    ids = np.array(found.ids, np.int32)
    return Prompt(group, ids, tuple(messages), {"number": group}, pictures=found.pictures)
