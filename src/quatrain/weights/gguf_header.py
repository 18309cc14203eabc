"""Reads the header of a GGUF file: metadata, and type, shape and offset of each tensor.

Data flow: a `.gguf` path -> `GGUFHeader` -> `gguf.py` (weights) and `data/gguf_tokenizer.py`. This
module reads no weights and needs neither JAX nor the `gguf` package. A model split into several files is read
like one file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from quatrain.config.buckets import local_copy
from quatrain.config.errors import shown
from quatrain.config.files import Description, checked
from quatrain.config.places import is_bucket, local_path
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
    same folder. Raises ValueError if a file does not exist, is not GGUF or is damaged, and for a file of a
    split model that is not the first.
    Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    header = _read_one(_local(path))
    split = checked(_Split, header.metadata, str(header.path))
    return header if split.count < 2 else _joined(header, split)


def _local(path: str | Path) -> Path:
    """Where the file is on this machine: one in a bucket is copied, with the other parts of a split model."""
    if not is_bucket(path):
        return local_path(path)
    folder, _, name = str(path).rpartition("/")
    return local_copy(folder, [name.replace("-00001-of-", "-*-of-")]) / name


def _joined(first: GGUFHeader, split: _Split) -> GGUFHeader:
    """The header of a split model, of which `first` is the first part."""
    path, count = first.path, split.count
    end = f"-00001-of-{count:05}.gguf"
    if split.number or not path.name.endswith(end):
        raise ValueError(
            f"a model split into {count} files must be given by the first, which is called NAME{end}; "
            f"{path} is part {split.number + 1}; give the first, or restore its name"
        )
    name = path.name.removesuffix(end)
    parts = [path.with_name(f"{name}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(
            f"{path} is the first of {count} parts, which must be in the same folder; missing: "
            f"{', '.join(missing[:5])}; fetch all parts"
        )
    tensors: dict[str, TensorInfo] = {}
    for number, header in enumerate([first, *map(_read_one, parts[1:])]):
        part = checked(_Split, header.metadata, str(header.path))
        if (part.number, part.count) != (number, count):
            raise ValueError(
                f"{header.path} must be part {number + 1} of {count}; it is part {part.number + 1} of "
                f"{part.count}; fetch it again"
            )
        tensors |= {tensor.name: tensor for tensor in header.tensors}
    if len(tensors) != split.tensors:
        raise ValueError(
            f"{path} is the first of {count} parts of {split.tensors} tensors; they have {len(tensors)}; "
            "fetch all parts again"
        )
    return replace(first, tensors=tuple(tensors.values()))


def _read_one(path: Path) -> GGUFHeader:
    if not path.is_file():
        raise ValueError(f"there is no GGUF file {path}; {_FETCH.get(path.name, 'check the path')}")
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
        if start != _MAGIC:
            raise ValueError(
                f"a GGUF file must start with the bytes {_MAGIC!r}; {path} starts with {start!r}; give a "
                ".gguf file, or the path of a Hugging Face folder"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            version, num_tensors, num_keys = cursor.numbers("IQQ")
            if version not in _VERSIONS:
                raise ValueError(
                    f"GGUF versions {_VERSIONS} in little-endian order are supported; {path} has version "
                    f"{version}; convert the model again with a current llama.cpp"
                )
            metadata = cursor.named("key", num_keys, cursor.value)
            table = cursor.named("tensor", num_tensors, cursor.tensor)
            alignment = checked(_General, metadata, str(path)).alignment
            start_of_data = -(-cursor.position // alignment) * alignment
    tensors = (
        TensorInfo(name, shape, kind, path, start_of_data + offset)
        for name, (shape, kind, offset) in table.items()
    )
    return GGUFHeader(path, metadata, tuple(tensors))


class _General(Description):
    """The metadata that say how a file is laid out."""

    alignment: Annotated[int, Field(alias="general.alignment", ge=1, le=2**20)] = _DEFAULT_ALIGNMENT


class _Split(Description):
    """The metadata of one file of a model in several files."""

    number: Annotated[int, Field(alias="split.no", ge=0)] = 0
    count: Annotated[int, Field(alias="split.count", ge=0, le=10_000)] = 1
    tensors: Annotated[int, Field(alias="split.tensors.count")] = 0


# Not the package's `GGUFReader`: it takes 30 times as long for the 150,000 words of a tokenizer, reads a
# string that is cut off as if it were whole, and loops over a wrong length of an array.
class _Cursor:
    """Reads the little-endian fields of a GGUF header in sequence."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.position = data, path, len(_MAGIC)

    def damaged(self, problem: str) -> ValueError:
        """The error of a file whose header breaks a rule of the format."""
        return ValueError(
            f"{self.path}, before byte {self.position}: {problem}; the file is damaged: fetch it again"
        )

    def take(self, count: int) -> int:
        """Advances the position by `count` bytes; returns the position before."""
        start, size = self.position, len(self.data)
        # Before anything is read or allocated: a length in the file may be any 64-bit number.
        if start + count > size:
            raise ValueError(
                f"the GGUF file {self.path} ends inside its header ({size} bytes); it is truncated: fetch it "
                "again"
            )
        self.position = start + count
        return start

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """Numbers of the types that `codes` names, as in `struct`."""
        return struct.unpack_from("<" + codes, self.data, self.take(struct.calcsize("<" + codes)))

    def string(self) -> str:
        (size,) = self.numbers("Q")
        start = self.take(size)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged("strings must be UTF-8, and one is not") from error

    def named(self, what: str, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        """`count` entries by their names, each of which `read` reads after its name."""
        entries: dict[str, Any] = {}
        for _ in range(count):
            name = self.string()
            # The last of two would win silently, and with it the shape or the scale of a tensor.
            if name in entries:
                raise self.damaged(f"it has the {what} {shown(name)} twice")
            entries[name] = read()
        return entries

    def value(self) -> Any:
        (kind,) = self.numbers("I")
        return self.array() if kind == _ARRAY else self.values(kind, 1)[0]

    def array(self) -> list[Any]:
        kind, count = self.numbers("IQ")
        if kind == _ARRAY:
            raise self.damaged("arrays of arrays are not supported")
        return self.values(kind, count)

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.damaged(f"value types must be 0 to 12, and one has {kind}")
        start = self.take(count * struct.calcsize("<" + _SCALARS[kind]))
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, start))

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """(shape, type, offset)."""
        (num_dims,) = self.numbers("I")
        if num_dims > _MAX_DIMS:
            raise self.damaged(f"a tensor must have at most {_MAX_DIMS} dimensions, and one has {num_dims}")
        *reversed_shape, kind, offset = self.numbers(f"{num_dims}QIQ")
        return tuple(reversed(reversed_shape)), kind, offset
