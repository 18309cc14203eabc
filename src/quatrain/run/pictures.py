"""Pictures of samples as small files of a run, which readers see beside the completions.

Data flow: messages with `Picture`s -> `named`, for records (`samples.py`); their pictures -> `write_picture`
-> `pictures/NAME.webp` -> the run page, which shows them smaller still. A content with pictures is a list of
parts: `{"type": "image", "picture": NAME, "size": [width, height]}`, the others are texts or as they came.
"""

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quatrain.data.messages import named_picture
from quatrain.data.pictures import decoded
from quatrain.types.pictures import Picture

KEPT_SIDE = 512
"""Pixels of the longer side of a kept picture, at most."""
DRAWN_SIDE = 128
"""A picture whose longer side is at most so many pixels keeps each of them: a drawing would be blurred."""
PICTURE = "picture"
"""The key of a part that names a picture."""
OF_RECORD = "pictures"
"""The key of a record with the `Picture`s that its messages name, until it is written."""
MOST_SIDE = 2**20
"""A longer side, in pixels, is none of a picture."""
_NAME = re.compile(r"[0-9a-f]{16}")
_FORMAT, _QUALITY = "WEBP", 80


def named(value: Any) -> Any:
    """`value` with a part that names it in the place of each `Picture`.

    Of a mapping with a picture in it, the part is all that is left: its other keys say where it came from.
    """
    if isinstance(value, Picture):
        return named_picture(value)
    if isinstance(value, Mapping):
        picture = next((inner for inner in value.values() if isinstance(inner, Picture)), None)
        return named(picture) if picture else {name: named(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(named, value)) if type(value) in (list, tuple) else value
    return value


def mark_of(part: Any) -> str | None:
    """How a terminal shows a part with a picture, `[image 640x480 3f2a9c]`; None for anything else.

    The part may have been read from a file that others wrote: a name is 16 hexadecimal digits, and no path.
    """
    if not isinstance(part, Mapping):
        return None
    name, size = part.get(PICTURE), part.get("size")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(size, list | tuple):
        return None
    if len(size) != 2 or not all(type(side) is int and 1 <= side <= MOST_SIDE for side in size):
        return None
    return f"[image {size[0]}x{size[1]} {name[:6]}]"


def content_text(content: Any) -> str:
    """A message's content for readers of text, with a mark in the place of each picture."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(map(_part_text, content))


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return mark_of(part) or str(part if text is None else text)


def write_picture(folder: Path, picture: Picture) -> None:
    """Write `NAME.webp` of a picture into `folder`, unless it is there; an error if it cannot be read."""
    path = folder / f"{picture.name}.webp"
    if path.exists():
        return
    folder.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_bytes(_encoded(decoded(picture), KEPT_SIDE))
    draft.replace(path)


def kept_picture(folder: Path, name: str) -> bytes | None:
    """The file of a picture in the folder `pictures/` of a run; None if there is none."""
    try:
        return (folder / f"{name}.webp").read_bytes() if _NAME.fullmatch(name) else None
    except OSError:
        return None


def smaller(encoded: bytes, side: int) -> bytes | None:
    """A kept picture with a longer side of at most `side` pixels; None if it is none.

    It is encoded anew from its pixels, so that nothing else of a file that others wrote is in a page.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(encoded), formats=(_FORMAT,)) as image:
            return _encoded(image, side) if max(image.size) <= KEPT_SIDE else None
    except (OSError, ValueError, SyntaxError):  # what Pillow raises for damaged files
        return None


def _encoded(image: Any, side: int) -> bytes:
    drawn, small, out = max(image.size) <= DRAWN_SIDE, image.convert("RGB"), io.BytesIO()
    small.thumbnail((side, side))
    small.save(out, _FORMAT, quality=_QUALITY, lossless=drawn)
    return out.getvalue()
