"""Expands the place of each picture, which a chat template writes, into the placeholders that it has.

Data flow: text of a chat template -> `expanded` -> `Tokens`, of which the placeholders of each picture are
marked; `with_vision` puts on a tokenizer what its model sees with. A picture is expanded in the text, before
it is tokenised, so that only expanded ids exist; how many placeholders it has follows from its size. Then
the runs of placeholders among the ids are compared with the sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from quatrain.config.errors import shown
from quatrain.data.messages import is_picture, pictures_of
from quatrain.data.pictures import BadPicture
from quatrain.types.pictures import Picture, Pictures, Tokens

if TYPE_CHECKING:
    from quatrain.models.vision import Vision

_OF_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_FAKE, _WHOLE = "<fake_token_around_image>", "<global-img>"
_TILE = re.compile(r"<row_\d+_col_\d+>")
BLIND = (
    "the model does not see pictures, and a prompt has some; set model.vision to frozen, projector or all, "
    "with a model that has a tower, or remove them"
)


@dataclass(frozen=True)
class Expansion:
    """What stands in a text for the pictures that a model sees."""

    vision: Vision
    placeholder: str
    """The text of the token `vision.placeholder_id`; templates write it once for each picture."""

    def written(self, size: tuple[int, int]) -> str:
        """What takes the place of one placeholder, for a picture of this size."""
        if self.vision.has_grid:
            return self.placeholder * self.vision.num_placeholders(size)
        rows, columns = self.vision.tiles(size)
        of_tile = self.placeholder * (self.vision.num_placeholders(size) // (rows * columns + 1))
        lines = (
            "".join(f"{_FAKE}<row_{row + 1}_col_{column + 1}>{of_tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return "".join(lines) + ("\n" if rows else "") + f"{_FAKE}{_WHOLE}{of_tile}{_FAKE}"

    def forged(self, text: str) -> str | None:
        """The first string in a text that only expansions may write; None if it has none."""
        others = _OF_QWEN if self.vision.has_grid else (_FAKE, _WHOLE)
        tile = None if self.vision.has_grid else _TILE.search(text)
        found = next((each for each in (self.placeholder, *others) if each in text), None)
        return found or (tile and tile[0])

    def text(self, text: str, pictures: Sequence[Picture]) -> str:
        """A text in which each placeholder is what its picture has; raises `BadPicture` for other numbers."""
        pieces = text.split(self.placeholder)
        if len(pieces) != len(pictures) + 1:
            raise BadPicture(
                f"the chat template must write {self.placeholder} once for each of the {len(pictures)} "
                f"pictures; it writes it {len(pieces) - 1} times; set data.chat_template to one that writes "
                "the parts of messages that are pictures"
            )
        each = [_written(self, picture.size) for picture in pictures]
        return "".join(chain.from_iterable(zip(pieces, [*each, ""], strict=True)))

    def marked(self, ids: list[int], pictures: Sequence[Picture]) -> Tokens:
        """Tokens of an expanded text; raises ValueError unless their placeholders are those of the sizes."""
        found = [len([*run]) for is_own, run in groupby(ids, self.vision.placeholder_id.__eq__) if is_own]
        runs = [_runs(self, picture.size) for picture in pictures]
        if found != [*chain.from_iterable(runs)]:
            raise ValueError(
                f"the {len(pictures)} pictures of a text must have {sum(map(sum, runs))} placeholders in "
                f"{sum(map(len, runs))} runs; its tokens have {sum(found)} in {len(found)}; set "
                f"model.tokenizer to that of the model, with {self.placeholder} as one token, and a chat "
                "template that writes something between two pictures"
            )
        of_each = chain.from_iterable(
            [picture] * sum(run) for picture, run in zip(pictures, runs, strict=True)
        )
        own = self.vision.placeholder_id
        return Tokens(ids, Pictures.of(next(of_each) if index == own else None for index in ids))


@lru_cache(maxsize=4096)
def _written(expansion: Expansion, size: tuple[int, int]) -> str:
    return expansion.written(size)


@lru_cache(maxsize=4096)
def _runs(expansion: Expansion, size: tuple[int, int]) -> tuple[int, ...]:
    """The lengths of the runs of placeholders of a picture."""
    placeholder = expansion.placeholder
    found = re.findall(f"(?:{re.escape(placeholder)})+", _written(expansion, size))
    return tuple(len(run) // len(placeholder) for run in found)


def with_vision(tokenizer: Any, vision: Vision | None) -> Any:
    """`tokenizer`, whose prompts have the pictures that `vision` sees; changed in place.

    Raises ValueError for a tokenizer without the token of placeholders.
    """
    tokenizer.expansion = None
    if vision is not None:
        token = tokenizer.convert_ids_to_tokens(vision.placeholder_id)
        if not isinstance(token, str) or tokenizer.convert_tokens_to_ids(token) != vision.placeholder_id:
            raise ValueError(
                f"a tokenizer must have the token {vision.placeholder_id}, which its model reads pictures in "
                f"place of; it has {len(tokenizer)} tokens; set model.tokenizer to that of the model"
            )
        tokenizer.expansion = Expansion(vision, token)
    return tokenizer


def sees(tokenizer: Any) -> bool:
    """Whether the model of a tokenizer sees pictures."""
    return getattr(tokenizer, "expansion", None) is not None


def expanded(
    tokenizer: Any,
    text: str,
    messages: str | Sequence[Mapping[str, Any]],
    encode: Callable[[str], list[int]],
) -> Tokens:
    """The tokens of a text, made by `encode`, which a template has written of `messages`.

    Raises ValueError where pictures are not seen, and `BadPicture` for a text that has of itself what stands
    for a picture.
    """
    pictures, expansion = pictures_of(messages), getattr(tokenizer, "expansion", None)
    if expansion is None:
        if pictures:
            raise ValueError(BLIND)
        return Tokens(encode(text))
    for each in _texts(messages):
        if (found := expansion.forged(each)) is not None:
            raise BadPicture(
                f"a text must not have {found}, which stands for pictures; {shown(each)} has it; give the "
                "picture as a part of the message, or remove it"
            )
    return (
        expansion.marked(encode(expansion.text(text, pictures)), pictures)
        if pictures
        else Tokens(encode(text))
    )


def _texts(value: Any) -> Iterator[str]:
    """The texts in messages."""
    if isinstance(value, str):
        yield value
    elif not is_picture(value):
        inner = value.values() if isinstance(value, Mapping) else value
        for each in inner if isinstance(inner, list | tuple) or isinstance(value, Mapping) else ():
            yield from _texts(each)
