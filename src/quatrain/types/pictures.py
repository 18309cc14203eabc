"""Pictures of a prompt, and which of its tokens stand for them.

Data flow: `data/pictures.py` reads a `Picture` -> the tokens of a text with placeholders, and `Pictures`,
which say by place what a token is, never by its id -> prompts, pieces and batches carry them as an array
beside the tokens -> the engine and the update look the features of a placeholder up by its picture.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PICTURES = "pictures"
"""The column of a `Completion` whose later turns brought pictures: a `Picture` or None for each token of the
sequence, from the first of the prompt to the last that stands for one, or further. So it may end before the
tokens do, which are text from there on. Without the column the prompt alone has pictures."""
IN_JSON = "quatrain.picture"
"""The key that marks a picture among values of JSON."""
TEXT = 0
"""The entry of `Pictures.ids` of a token that stands for no picture."""


@dataclass(frozen=True, eq=False)
class Picture:
    """An encoded picture; two with the same bytes are the same one."""

    id: int
    """The first 63 bits of a digest of the encoded bytes; never TEXT. The same in every process."""
    size: tuple[int, int]
    """Width and height in pixels, as a person sees it: after the rotation that the file asks for."""
    source: bytes | Path = field(repr=False)
    """The encoded bytes, or the file that has them."""

    @classmethod
    def of(cls, source: bytes | Path, size: tuple[int, int]) -> Picture:
        """The picture of these bytes, or of this file, whose size was read before."""
        digest = hashlib.blake2b(_bytes_of(source), digest_size=8).digest()
        return cls(max(int.from_bytes(digest, "big") >> 1, 1), size, source)

    @property
    def encoded(self) -> bytes:
        """The encoded bytes."""
        return _bytes_of(self.source)

    @property
    def name(self) -> str:
        """The id as 16 hexadecimal digits, which people and file names see."""
        return f"{self.id:016x}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


def _bytes_of(source: bytes | Path) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


@dataclass(frozen=True, eq=False)
class Pictures:
    """Which picture each token stands for: of a sequence [T], or of a batch [B, T].

    The placeholders of a picture follow one another in its order, though other tokens may stand between them
    (rows of tiles). So the number of a placeholder within its picture is the number of tokens before it that
    stand for the same one, modulo the placeholders that the picture has: it may stand in a text twice.
    """

    ids: np.ndarray
    """int64 ids of pictures; TEXT where a token stands for none."""
    by_id: Mapping[int, Picture]
    """Every picture of `ids`; there may be more."""

    @classmethod
    def of(cls, tokens: Iterable[Picture | None]) -> Pictures | None:
        """Of a sequence, from the picture of each token; None if no token stands for one."""
        listed = list(tokens)
        by_id = {picture.id: picture for picture in listed if picture is not None}
        ids = np.array([TEXT if picture is None else picture.id for picture in listed], np.int64)
        return cls(ids, by_id) if by_id else None

    def __getitem__(self, place: int | slice | np.ndarray) -> Pictures:
        """Those of some tokens, or of one or several rows of a batch."""
        return Pictures(self.ids[place], self.by_id)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def used(self) -> tuple[Picture, ...]:
        """The pictures that a token stands for, each once, in the order of their first tokens."""
        present, first = np.unique(self.ids, return_index=True)
        ordered = present[np.argsort(first)]
        return tuple(self.by_id[int(number)] for number in ordered if number != TEXT)

    def per_token(self) -> np.ndarray:
        """[T] object: the picture of each token of a sequence, or None; rows of a piece's column."""
        rows = np.full(self.ids.shape, None, object)
        for place in np.flatnonzero(self.ids):
            rows[place] = self.by_id[int(self.ids[place])]
        return rows


class Tokens(NamedTuple):
    """Token ids of a text, and the pictures among them: what templates render to."""

    ids: list[int]
    pictures: Pictures | None = None
    """None: the text has no picture."""


def stacked(rows: Iterable[Pictures | None], width: int) -> Pictures | None:
    """[B, width] of B sequences, TEXT behind the end of each; None if no token stands for a picture."""
    each = list(rows)
    by_id = {number: picture for row in each if row is not None for number, picture in row.by_id.items()}
    if not by_id:
        return None
    ids = np.zeros((len(each), width), np.int64)
    for number, row in enumerate(each):
        if row is not None:
            ids[number, : len(row)] = row.ids
    return Pictures(ids, by_id)


def joined(*parts: tuple[Pictures | None, int]) -> Pictures | None:
    """Of sequences of so many tokens each, one behind another; None if none has a picture."""
    if all(each is None for each, _ in parts):
        return None
    ids = [np.zeros(count, np.int64) if each is None else each.ids for each, count in parts]
    by_id = {key: value for each, _ in parts if each is not None for key, value in each.by_id.items()}
    return Pictures(np.concatenate(ids), by_id)


def plain_pictures(pictures: Pictures | None) -> dict[str, Any] | None:
    """As values of JSON, arrays and `Picture`s, of which other processes are told (`PicturesInJson`)."""
    return None if pictures is None else {"ids": pictures.ids, "used": [*pictures.used]}


def pictures_of_plain(values: Mapping[str, Any] | None) -> Pictures | None:
    """The inverse of `plain_pictures`."""
    return None if values is None else Pictures(values["ids"], {each.id: each for each in values["used"]})


class PicturesInJson:
    """Pictures among values of JSON: the bytes of each stand in a text once, where it comes first."""

    def __init__(self, known: Iterable[Picture] = ()) -> None:
        """`known` are pictures that who reads has."""
        self._known = {picture.id: picture for picture in known}

    def written(self, value: Any) -> dict[str, Any]:
        """For `json.dumps`, its `default`; raises TypeError for anything but a picture."""
        if not isinstance(value, Picture):
            raise TypeError(f"{type(value).__name__} is not a value that JSON has")
        content = None if value.id in self._known else base64.b64encode(value.encoded).decode()
        self._known[value.id] = value
        return {IN_JSON: value.name, "size": value.size, "content": content}

    def read(self, values: dict[str, Any]) -> Any:
        """For `json.loads`, its `object_hook`: the picture that `values` stand for, or `values`."""
        if IN_JSON not in values:
            return values
        if values["content"] is not None:
            picture = Picture.of(base64.b64decode(values["content"]), tuple(values["size"]))
            self._known[picture.id] = picture
        return self._known[int(values[IN_JSON], 16)]
