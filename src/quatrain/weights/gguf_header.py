"""Reads the header of a GGUF file: metadata, and type, shape and offset of each tensor.

Data flow: a `.gguf` path -> `GGUFHeader` -> `gguf.py` (weights) and `data/gguf_tokenizer.py`. This
module reads no weights and needs neither JAX nor the `gguf` package. A model split into several files is read
like one file.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from quatrain.config.errors import shown
from quatrain.config.files import Description, checked
from quatrain.models.hf_config import TokenId

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_FETCH = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "`make smollm2` in quatrain's repository downloads it into models/"
}
"""How to get the files that the repository's configurations name."""


_NO_TOKEN = (-1, 2**32 - 1)  # what llama.cpp writes for "none", as a signed and as an unsigned number
_SpecialId = Annotated[TokenId | None, BeforeValidator(lambda value: None if value in _NO_TOKEN else value)]


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the header's tensor table."""

    name: str
    shape: tuple[int, ...]
    """In numpy's order, slowest dimension first (the file has the reverse order)."""
    type_id: int
    """ggml's number of the storage type (0 is F32, 1 is F16, 2 is Q4_0, ...)."""
    path: Path
    """The file that has its values."""
    offset: int
    """Bytes from the start of that file."""


@dataclass(frozen=True)
class GGUFHeader:
    """The content of a GGUF file except the weights."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]


class SpecialIds(Description):
    """The ids of special tokens in the metadata; None for those that the tokenizer does not have."""

    bos: Annotated[_SpecialId, Field(alias="tokenizer.ggml.bos_token_id")] = None
    eos: Annotated[_SpecialId, Field(alias="tokenizer.ggml.eos_token_id")] = None
    eot: Annotated[_SpecialId, Field(alias="tokenizer.ggml.eot_token_id")] = None
    eom: Annotated[_SpecialId, Field(alias="tokenizer.ggml.eom_token_id")] = None
    unknown: Annotated[_SpecialId, Field(alias="tokenizer.ggml.unknown_token_id")] = None
    padding: Annotated[_SpecialId, Field(alias="tokenizer.ggml.padding_token_id")] = None


def read_header(path: str | Path) -> GGUFHeader:
    """The metadata and tensor table of the GGUF file at `path` (version 2 or 3, little-endian).

    If `path` is the first file of a split model, the tensors are those of all its files, which must be in the
    same folder. Raises ValueError if a file does not exist, is not GGUF, has another version, or is truncated
    inside its header, and for a file of a split model that is not the first.
    Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    path = Path(os.path.expanduser(path))
    header = _read_one(path)
    split = checked(_Split, header.metadata, str(path))
    return header if split.count < 2 else _joined(header, split)


def _joined(first: GGUFHeader, split: _Split) -> GGUFHeader:
    """The header of a split model, of which `first` is the first part."""
    path = first.path
    end = f"-00001-of-{split.count:05}.gguf"
    if split.number or not path.name.endswith(end):
        raise ValueError(
            f"a model split into {split.count} files must be given by the first, which is called NAME{end}; "
            f"{path} is part {split.number + 1}; give the first, or restore its name"
        )
    name = path.name.removesuffix(end)
    parts = [path.with_name(f"{name}-{i + 1:05}-of-{split.count:05}.gguf") for i in range(split.count)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(
            f"{path} is the first of {split.count} parts, which must be in the same folder; missing: "
            f"{', '.join(missing[:5])}; fetch all parts"
        )
    headers = [first, *map(_read_one, parts[1:])]
    tensors = {tensor.name: tensor for each in headers for tensor in each.tensors}
    for number, each in enumerate(headers):
        own = checked(_Split, each.metadata, str(each.path))
        if (own.number, own.count) != (number, split.count):
            raise ValueError(
                f"{each.path} must be part {number + 1} of {split.count}; it is part {own.number + 1} of "
                f"{own.count}; fetch it again"
            )
    if len(tensors) != split.tensors:
        raise ValueError(
            f"{path} is the first of {split.count} parts of {split.tensors} tensors; they have "
            f"{len(tensors)}; fetch all parts again"
        )
    return replace(first, tensors=tuple(tensors.values()))


def _read_one(path: Path) -> GGUFHeader:
    if not path.is_file():
        fetch = _FETCH.get(path.name, "check the path")
        raise ValueError(f"there is no GGUF file {path}; {fetch}")
    with path.open("rb") as file:
        start = file.read(24)
        if start[:4] != _MAGIC:
            raise ValueError(
                f"a GGUF file must start with the bytes {_MAGIC!r}; {path} starts with {start[:4]!r}; "
                "give a .gguf file, or the path of a Hugging Face folder"
            )
        if len(start) < 24:
            raise ValueError(_truncated(path, len(start)))
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", start, 4)
        if version not in _VERSIONS:
            raise ValueError(
                f"GGUF versions {_VERSIONS} in little-endian order are supported; {path} has version "
                f"{version}; convert the model again with a current llama.cpp"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            metadata = _metadata(cursor, num_keys)
            table = _table(cursor, num_tensors)
            alignment = checked(_General, metadata, str(path)).alignment
            data_start = -(-cursor.position // alignment) * alignment
            tensors = tuple(TensorInfo(*entry[:3], path, entry[3] + data_start) for entry in table)
            return GGUFHeader(path, metadata, tensors)


class _General(Description):
    """The metadata that say how a file is laid out."""

    alignment: Annotated[int, Field(alias="general.alignment", ge=1, le=2**20)] = _DEFAULT_ALIGNMENT


class _Split(Description):
    """The metadata of one file of a model in several files."""

    number: Annotated[int, Field(alias="split.no", ge=0)] = 0
    count: Annotated[int, Field(alias="split.count", ge=0, le=10_000)] = 1
    tensors: Annotated[int, Field(alias="split.tensors.count")] = 0


def _metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"{cursor.path} has the key {shown(key)} twice; fetch it again")
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata


def _table(cursor: _Cursor, num_tensors: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    table: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        entry = cursor.tensor()
        if entry[0] in table:
            raise ValueError(f"{cursor.path} has the tensor {shown(entry[0])} twice; fetch it again")
        table[entry[0]] = entry
    return list(table.values())


def _truncated(path: Path, size: int) -> str:
    return f"the GGUF file {path} ends inside its header ({size} bytes); it is truncated: fetch it again"


class _Cursor:
    """Reads the little-endian fields of a GGUF header in sequence."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data = data
        self.path = path
        self.position = 24

    def take(self, count: int) -> int:
        """Advances the position by `count` bytes; returns the position before."""
        start = self.position
        if start + count > len(self.data):
            raise ValueError(_truncated(self.path, len(self.data)))
        self.position = start + count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.take(size)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"strings in a GGUF file must be UTF-8; {self.path} has one at byte {start} that is not"
            ) from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(self.code(kind))

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind == _ARRAY:
            raise ValueError(
                f"arrays of arrays are not supported; {self.path} has one at byte {self.position}; "
                "fetch it again"
            )
        code = self.code(kind)
        start = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))

    def code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(
                f"GGUF value types must be 0 to 12; {self.path} has {kind} at byte {self.position - 4}; "
                "the file is damaged: download it again"
            )
        return _SCALARS[kind]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dims = self.scalar("I")
        if num_dims > _MAX_DIMS:
            raise ValueError(
                f"a tensor must have at most {_MAX_DIMS} dimensions; {shown(name)} in {self.path} has "
                f"{num_dims}; fetch it again"
            )
        start = self.take(8 * num_dims)
        shape = struct.unpack_from(f"<{num_dims}Q", self.data, start)
        return name, tuple(reversed(shape)), self.scalar("I"), self.scalar("Q")
