"""Reads the pictures of rows and messages, and decodes them.

Data flow: a source in a row or in an environment's message (a path, a data URL, bytes, a PIL picture) ->
`PictureReader` -> `Picture`s in the parts of messages, `{"type": "image", "image": Picture}` ->
`tokenizer.render`, and `decoded` -> `pixels.Pixels`. Nothing is fetched from a network: no request leaves a
run because a row says so.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quatrain.config.errors import installation, shown
from quatrain.data.messages import is_picture, text_of
from quatrain.types.pictures import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is opened; never EPS, for which Pillow runs a program."""
MAX_BYTES = 2**25
"""Size of the largest encoded picture."""
MAX_PIXELS, MAX_SIDE, MAX_RATIO = 50_000_000, 16_384, 200
"""Of a picture: its most pixels, its longest side, and below which factor a side is longer than the other."""
MAX_PICTURES = 64
"""Pictures of a prompt."""
IMAGES, IMAGE = "images", "image"
"""The columns with the pictures of a row; reward functions get `images`, in the order of the prompt."""
MARK = "<image>"
"""Where a picture of the column stands in a text, as in verl's data."""
_PLACES = ("image", "path", "url", "bytes", "image_url")
"""Fields of a part with its picture, in the order in which they are looked for."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_ORIENTATION = 0x0112


class BadPicture(ValueError):
    """A picture that cannot be used; `data.on_bad_image` says what becomes of a row of data with it."""


@dataclass(frozen=True)
class PictureReader:
    """Reads pictures from sources, and puts them into messages."""

    root: Path | None = None
    """The folder of paths, below which they stay; None: paths are refused."""
    verify: bool = True
    """Whether each picture is decoded once; else only its header is read."""

    def read(self, source: Any) -> Picture:
        """The picture of a source; raises `BadPicture` with the reason, and what to do."""
        if isinstance(source, Picture):
            return source
        if isinstance(source, Mapping):  # as data sets of the Hub have them; also OpenAI's {"url": …}
            source = next((source[name] for name in ("bytes", "path", "url") if source.get(name)), source)
        if isinstance(source, str):
            return self._of_text(source)
        if isinstance(source, Path):
            return self._of_file(str(source))
        if isinstance(source, bytes | bytearray | memoryview):
            return self._of_bytes(bytes(source), "a picture of bytes")
        if is_pil(source):
            return self._of_bytes(_encoded(source), "a PIL picture")
        raise BadPicture(
            "a picture must be a path, a data URL, bytes, a PIL picture or {'bytes': …, 'path': …}; got "
            f"{shown(source)}; correct the row, or rename the column"
        )

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with each source read, in the columns of pictures and in messages of any column."""
        columns, known = (IMAGES, IMAGE), dict[int, Any]()
        read = {name: self._messages(value, known) for name, value in row.items() if name not in columns}
        for name in columns:
            if name in row:
                several = [self.read(source) for source in _listed(row[name])]
                read[name] = several if isinstance(row[name], list | tuple) else next(iter(several), None)
        return {name: read[name] for name in row}

    def _messages(self, value: Any, known: dict[int, Any]) -> Any:
        """Messages with each source in a part read; other values as they are.

        `known` has the parts that were read, by their `id`: the prompt may be a part of another column.
        """
        if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
            return value
        return [
            {**each, "content": [self._part(part, known) for part in each["content"]]}
            if isinstance(each.get("content"), list)
            else each
            for each in value
        ]

    def _part(self, part: Any, known: dict[int, Any]) -> Any:
        if not is_picture_part(part):
            return part
        if id(part) not in known:
            source = next((part[name] for name in _PLACES if part.get(name) is not None), None)
            known[id(part)] = {"type": "image"} | ({} if source is None else {"image": self.read(source)})
        return known[id(part)]

    def placed(self, messages: Sequence[Any], given: Sequence[Any] | None = None) -> list[Any]:
        """Messages whose pictures are read and in their places; `given` are those of the row's column.

        A part without a source is the next of them; else `<image>` in a text is; without either, they stand
        before the text of the first user's message. Raises `BadPicture` if the numbers differ.
        """
        placed = self._messages(list(messages), {})
        if given is not None:
            placed = _filled(placed, [self.read(source) for source in given])
        number = 0
        for part in _parts(placed):
            if is_picture_part(part):
                number += 1
                if not is_picture(part):
                    raise BadPicture(
                        "a part of the type `image` must have a picture (`image`, `path`, `url` or `bytes`), "
                        f"or the row a column `{IMAGES}` with the next one; it has neither; correct the row"
                    )
        if number > MAX_PICTURES:
            raise BadPicture(f"a prompt must have at most {MAX_PICTURES} pictures; it has {number}")
        return placed

    def _of_text(self, text: str) -> Picture:
        scheme = _URL.match(text)
        if scheme is None:
            return self._of_file(text)
        if scheme[1].lower() in ("http", "https"):
            raise BadPicture(
                f"a picture must not be a URL of the network ({shown(text)}): no request leaves a run "
                "because of its data; download the data set first, and give paths or bytes"
            )
        front = _DATA_URL.match(text)
        if front is None:
            raise BadPicture(
                f"a picture's URL must begin with data:image/TYPE;base64, and not as {shown(text[:40])}; "
                "give a path, or a data URL"
            )
        if len(text) > MAX_BYTES * 4 // 3 + 100:
            raise BadPicture(_too_large("a data URL", len(text) * 3 // 4))
        try:
            content = base64.b64decode(text[front.end() :], validate=True)
        except binascii.Error as error:
            raise BadPicture(f"a data URL must be base64; {shown(text[:40])} is not: {error}") from error
        return self._of_bytes(content, "a data URL")

    def _of_file(self, name: str) -> Picture:
        if self.root is None:
            raise BadPicture(
                f"a path of a picture must be below a folder, and there is none for {shown(name)}; set "
                "data.image_root, or give bytes"
            )
        try:
            root, path = self.root.resolve(), (self.root / name).resolve()
            if not path.is_relative_to(root):
                raise BadPicture(
                    f"a path of a picture must stay below the folder {root}; {shown(name)} leaves it; set "
                    "data.image_root to the folder that has all pictures"
                )
            if not path.is_file():
                raise BadPicture(
                    f"there is no file {shown(name)} of a picture (looked in {root}); correct the path, or "
                    "set data.image_root to the folder that has all pictures"
                )
            if path.stat().st_size > MAX_BYTES:
                raise BadPicture(_too_large(shown(name), path.stat().st_size))
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # no permission, a name that is too long or has a null byte
            if isinstance(error, BadPicture):
                raise
            raise BadPicture(f"the picture {shown(name)} cannot be read: {error!s:.200}") from error
        return replace(self._of_bytes(content, shown(name)), source=path)

    def _of_bytes(self, content: bytes, name: str) -> Picture:
        """The picture of these bytes, which messages call `name`."""
        size = _checked(content, name)
        picture = Picture.of(content, size)
        if self.verify:
            _decode(content, name)
        return picture


def decoded(picture: Picture) -> Image:
    """The picture as the model sees it: RGB, rotated as its file asks, transparent places on white.

    Of several frames it is the first. Raises `BadPicture` for a file that has changed, or is truncated.
    """
    content = picture.encoded
    if isinstance(picture.source, Path) and Picture.of(content, picture.size) != picture:
        raise BadPicture(f"the file of a picture must not change during a run; {picture.source} has changed")
    return _decode(content, picture.name)


class Lent:
    """A picture for reward functions, which get a copy of their arguments: the copy is a PIL picture."""

    def __init__(self, picture: Picture):
        self._picture = picture

    def __reduce__(self) -> tuple[Any, ...]:
        return opened, (self._picture.encoded,)


def opened(content: bytes) -> Image:
    """The picture of encoded bytes, as `decoded` has it, but decoded when it is first used."""
    with _bad_picture("a picture"):
        image = _open(content)
        # Rotation and colours cannot wait.
        return image if image.mode == "RGB" and _orientation(image) == 1 else _as_seen(image)


def url_part(picture: Picture) -> dict[str, Any]:
    """A picture as a part of OpenAI's form, with a data URL."""
    return {"type": "image_url", "image_url": {"url": url_of(picture)}}


def url_of(picture: Picture) -> str:
    """A picture as a data URL."""
    content = picture.encoded
    kind = (_open(content).format or "png").lower()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def is_picture_part(part: Any) -> bool:
    """Whether a part of a message's content is a picture, read or not."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def column_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The pictures in the column `images`, or `image`, of a row; None if it has neither column."""
    names = [name for name in (IMAGES, IMAGE) if name in row]
    filled = [name for name in names if _listed(row[name])]
    if len(filled) > 1:
        raise BadPicture(
            f"a row must have its pictures in one column; `{IMAGES}` and `{IMAGE}` have some; remove one"
        )
    return _listed(row[(filled or names)[0]]) if names else None


def has_pictures(row: Mapping[str, Any]) -> bool:
    """Whether a row has pictures, in messages or in a column for them."""
    return _in_messages(row) or any(_listed(row.get(name)) for name in (IMAGES, IMAGE))


def has_unseen(row: Mapping[str, Any]) -> bool:
    """Whether a row has what can only be pictures, in messages or a column for them, where none are seen.

    A text in such a column may be about something else, unless a text of the row has a place for it.
    """
    given = [source for name in (IMAGES, IMAGE) for source in _listed(row.get(name))]
    if _in_messages(row) or any(is_pil(each) or isinstance(each, bytes | Mapping) for each in given):
        return True
    texts = [value for value in row.values() if isinstance(value, str)]
    texts += [text_of(each) for value in row.values() if isinstance(value, list) for each in value]
    return bool(given) and any(MARK in text for text in texts)


def _in_messages(row: Mapping[str, Any]) -> bool:
    lists = [value for value in row.values() if isinstance(value, list)]
    return any(is_picture_part(part) for messages in lists for part in _parts(messages))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _parts(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        if isinstance(message, Mapping) and isinstance(message.get("content"), list):
            yield from message["content"]


def _filled(messages: list[Any], given: list[Picture]) -> list[Any]:
    """The messages with all of `given` in their places, of one form of data."""
    own = [part for part in _parts(messages) if is_picture_part(part)]
    places = sum("image" not in part for part in own)
    if own:
        fill = _in_parts
    else:
        places = sum(text_of(message).count(MARK) for message in messages)
        fill = _in_texts
        if not places and given:
            return _before_first(messages, given)
    if places != len(given):
        what = "parts of the type `image` without a picture of their own" if own else f"times {MARK}"
        raise BadPicture(
            f"a prompt must have as many places for pictures as the column `{IMAGES}` has pictures; it has "
            f"{places} {what} and {len(given)} pictures; correct the row"
        )
    rest = iter(given)
    return [fill(message, rest) for message in messages] if given else messages


def _in_parts(message: Any, rest: Iterator[Picture]) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    parts = [
        {"type": "image", "image": next(rest)} if is_picture_part(part) and "image" not in part else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _in_texts(message: Any, rest: Iterator[Picture]) -> Any:
    first, *others = text_of(message).split(MARK)
    if not others:
        return message
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image", "image": next(rest)}, {"type": "text", "text": text}]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _before_first(messages: list[Any], given: list[Picture]) -> list[Any]:
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in given]
            if text := text_of(message):
                parts.append({"type": "text", "text": text})
            return [*messages[:number], {**message, "content": parts}, *messages[number + 1 :]]
    raise BadPicture(
        f"the pictures of the column `{IMAGES}` stand before the text of the first message of the role "
        f"`user`; there is none; put a part of the type `image`, or {MARK}, where each belongs"
    )


def is_pil(value: Any) -> bool:
    """Whether a value is a PIL picture; imports nothing."""
    return any(each.__module__ == "PIL.Image" and each.__name__ == "Image" for each in type(value).__mro__)


def of_pixels(pixels: np.ndarray) -> Image:
    """The PIL picture of [height, width, 3] uint8."""
    image: Image = _pil().fromarray(pixels)
    return image


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"pictures need Pillow: {installation('vision')}") from error
    return Image


def _too_large(name: str, num_bytes: int) -> str:
    return (
        f"an encoded picture must have at most {MAX_BYTES >> 20} MiB; {name} has {num_bytes >> 20} MiB; make "
        "it smaller"
    )


def _open(content: bytes) -> Image:
    image: Image = _pil().open(io.BytesIO(content), formats=FORMATS)
    return image


@contextmanager
def _bad_picture(name: str) -> Iterator[None]:
    """Any error of the block is a `BadPicture` of the picture `name`."""
    try:
        yield
    except BadPicture:
        raise
    except Exception as error:  # for a broken file, Pillow raises SyntaxError, struct.error and others
        reason = f"{error!s:.200}"
        if "DecompressionBomb" in type(error).__name__:
            reason = f"it has more than {MAX_PIXELS} pixels"
        elif "cannot identify" in reason:
            reason = "it is none of PNG, JPEG, WebP, GIF and BMP"
        raise BadPicture(f"{name} must be a whole picture: {reason}; replace it") from error


def _checked(content: bytes, name: str) -> tuple[int, int]:
    """Width and height of an encoded picture, rotated; raises `BadPicture` before anything is decoded."""
    if len(content) > MAX_BYTES:
        raise BadPicture(_too_large(name, len(content)))
    with _bad_picture(name):
        image = _open(content)
        size = image.size[::-1] if _orientation(image) >= 5 else image.size
    _check_size(size, name)
    return size


def _check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    rules = {
        f"at most {MAX_PIXELS} pixels": width * height <= MAX_PIXELS,
        f"sides of at most {MAX_SIDE} pixels": max(size) <= MAX_SIDE,
        f"sides of which none is {MAX_RATIO} times as long as the other": max(size) < MAX_RATIO * min(size),
    }
    for rule, holds in rules.items():
        if not holds:
            raise BadPicture(f"a picture must have {rule}; {name} is {width}x{height}; cut or resize it")


def _decode(content: bytes, name: str) -> Image:
    with _bad_picture(name):
        return _as_seen(_open(content))


def _orientation(image: Image) -> int:
    """How a picture is rotated, 1 to 8, as EXIF numbers it; read without decoding."""
    # Without this, Pillow decodes a PNG, to look for EXIF behind the pixels.
    if image.format == "PNG" and not {"exif", "Raw profile type exif"} & image.info.keys():
        return 1
    orientation = image.getexif().get(_ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def _as_seen(image: Image) -> Image:
    """A decoded RGB picture, rotated, on white; grey of 16 bits is scaled (Pillow cuts it off at 255)."""
    Image = _pil()
    orientation = _orientation(image)
    image.load()
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise BadPicture(
            f"a PIL picture must have 8 bits, or 16 bits of grey; its mode is {image.mode!r}; convert it"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    image = image.convert("RGB")
    turn = Image.Transpose
    turns = [turn.FLIP_LEFT_RIGHT, turn.ROTATE_180, turn.FLIP_TOP_BOTTOM, turn.TRANSPOSE, turn.ROTATE_270]
    turns += [turn.TRANSVERSE, turn.ROTATE_90]
    return image if orientation == 1 else image.transpose(turns[orientation - 2])


def _encoded(image: Image) -> bytes:
    """A PIL picture as PNG, as it is seen."""
    _check_size(image.size, "a PIL picture")
    with _bad_picture("a PIL picture"):
        stream = io.BytesIO()
        _as_seen(image).save(stream, "PNG", compress_level=1)
    return stream.getvalue()
