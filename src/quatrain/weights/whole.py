"""The folder of a model of which the parameters are a part: its other tensors and files, and their export.

Data flow: a folder that also reads pictures -> `Whole`, beside the parameters -> `hf.save_hf`, which writes
what is trained under the folder's names and carries the rest over, byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quatrain.models.architecture import Architecture
from quatrain.models.families.multimodal import stored_name, text_tensors
from quatrain.models.lora import is_trained
from quatrain.models.spec import TensorName

BLOCK_BYTES = 64 * 2**20
"""Bytes read at a time, so that buffers are small compared to the parameters."""
PROCESSOR, IMAGE_PROCESSOR = "processor_config.json", "preprocessor_config.json"
CARRIED_FILES = (PROCESSOR, IMAGE_PROCESSOR, "video_preprocessor_config.json")
"""What processors of transformers read beside the tokenizer."""
EMBEDDINGS = "model.embed_tokens.weight"


class Raw(NamedTuple):
    """The bytes of a tensor in a safetensors file."""

    path: Path
    start: int
    num_bytes: int
    described: dict[str, Any]
    """dtype and shape, as the header has them."""

    def blocks(self) -> Iterator[bytes]:
        """Its bytes, some at a time."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for left in range(self.num_bytes, 0, -BLOCK_BYTES):
                yield file.read(min(left, BLOCK_BYTES))


@dataclass(frozen=True)
class Whole:
    """A model's config.json, and the tensors and files of its folder; a built-in model has neither."""

    config: Mapping[str, Any]
    directory: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    """The file of each tensor, by the names of the folder."""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """The settings of its image processor."""

    def names(self, names: Sequence[TensorName], arch: Architecture) -> list[TensorName]:
        """Those of `names`, tensors of `arch`, that are written, under the names of the folder.

        Frozen ones are carried over, if the folder has them.
        """
        ours, _ = text_tensors(self.files, tower=True)
        embeddings = ours.get(EMBEDDINGS, "model.language_model.embed_tokens.weight")
        return [
            each._replace(name=ours.get(each.name) or stored_name(each.name, embeddings))
            for each in names
            if is_trained(each.path, arch) or each.name not in ours
        ]

    def carried(self, written: Sequence[TensorName]) -> dict[str, Raw]:
        """The tensors that are carried over: of the tower and of other parts, without those `written`.

        Those of the text model that nobody reads stay behind, such as a copy of tied embeddings.
        """
        _, others = text_tensors(self.files)
        left = sorted({*others} - {each.name for each in written})
        return _raw({name: self.files[name] for name in left})

    def config_of(self, arch: Architecture, dtype: str) -> dict[str, Any]:
        """Its config.json, with the end tokens, the tied head and the dtype of the text model `arch`.

        All else is as it was read: training changes no other key.
        """
        config = deepcopy(dict(self.config))
        text = config.get("text_config")
        text = text if isinstance(text, dict) else config
        eos = list(arch.eos_token_ids)
        text["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
        if "eos_token_id" in config:  # where it is, it counts for the text model too
            config["eos_token_id"] = text["eos_token_id"]
        for part in (config, text):
            part |= {"tie_word_embeddings": arch.tie_embeddings, "dtype": dtype, "torch_dtype": dtype}
        return config

    def copy_files(self, directory: Path) -> None:
        """Copies what processors read into `directory`."""
        if self.directory is None:
            (directory / IMAGE_PROCESSOR).write_text(json.dumps(self.processor, indent=2) + "\n")
            return
        for name in CARRIED_FILES:
            if (source := self.directory / name).is_file():
                shutil.copyfile(source, directory / name)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits for the tensors of the tower: their names, dtypes, shapes and bytes."""
        ours, _ = text_tensors(self.files, tower=True)
        texts, _ = text_tensors(self.files)
        digest = hashlib.blake2b(digest_size=8)
        names = {ours[plain]: plain for plain in sorted({*ours} - {*texts})}
        for name, raw in _raw({name: self.files[name] for name in names}).items():
            digest.update(json.dumps([names[name], raw.described]).encode())
            for block in raw.blocks():
                digest.update(block)
        return digest.hexdigest()


def write_raw(path: Path, tensors: Mapping[str, Raw]) -> None:
    """A safetensors file of `tensors`, copied block by block."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, raw in tensors.items():
        header[name] = {**raw.described, "data_offsets": [end, end + raw.num_bytes]}
        end += raw.num_bytes
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)  # the data begins at a multiple of 8
    with path.open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for raw in tensors.values():
            for block in raw.blocks():
                file.write(block)


def _raw(files: Mapping[str, Path]) -> dict[str, Raw]:
    """Where the bytes of tensors are, each in its file."""
    headers = {path: _header(path) for path in sorted({*files.values()})}
    found = {}
    for name, path in files.items():
        data, header = headers[path]
        start, end = header[name]["data_offsets"]
        described = {key: header[name][key] for key in ("dtype", "shape")}
        found[name] = Raw(path, data + start, end - start, described)
    return found


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """(where the data begins, the header) of a safetensors file, which the library has read before."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))
