"""The folder of a checkpoint of the training server: written whole, and read whole or not at all.

Data flow: `Trained` -> `contents` -> the files of a folder that peft loads, with the optimizer's moments
beside them, and `meta.json`, which has a digest of each -> `read_checkpoint` -> `Trained`. `store.py` keeps
these folders; `quatrain export` reads one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field
from safetensors import SafetensorError
from safetensors.numpy import load, save

from quatrain.config.dump import sections_yaml
from quatrain.config.errors import disk_is_full, listed
from quatrain.config.files import Description, checked, read_json
from quatrain.config.places import local_path
from quatrain.config.schema import Config
from quatrain.serve.tinker.calls import Base, LoraRequest, Refused, Trained
from quatrain.serve.tinker.training import ALPHA, adapted
from quatrain.weights.adapter import WEIGHTS, adapter_files

Kind = Literal["weights", "sampler_weights"]
TYPES = {"weights": "training", "sampler_weights": "sampler"}
"""What the interface calls the kinds of checkpoints in its records."""
META, CONFIG, MOMENTS = "meta.json", "config.yaml", "moments.safetensors"
DRAFT = "~draft"
"""The end of the names of what is being written; no checkpoint is named so."""


class Missing(Refused):
    """There is no such training run or checkpoint, or it is another owner's."""


class File(Description):
    num_bytes: int = Field(ge=0)
    sha256: str


class Lora(Description):
    rank: int = Field(ge=1)
    seed: int | None = None
    train_mlp: bool
    train_attn: bool
    train_unembed: bool


class Meta(Description):
    """`meta.json`: what is in the folder of a checkpoint, and whose it is."""

    model_id: str
    kind: Kind
    name: str
    base_model: str
    fingerprint: str
    """Of the base's frozen parameters."""
    model: int
    step: int = Field(ge=0)
    lora: Lora
    created: float
    """Seconds since 1970, as `expires`."""
    expires: float | None = None
    user_metadata: dict[str, str] | None = None
    files: dict[str, File]

    @property
    def path(self) -> str:
        """How clients call it."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def record(self) -> dict[str, Any]:
        """A `Checkpoint` of the interface."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": TYPES[self.kind],
            "time": time_of(self.created),
            "tinker_path": self.path,
            "size_bytes": sum(file.num_bytes for file in self.files.values()),
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": None if self.expires is None else time_of(self.expires),
        }


def contents(trained: Trained, base: Base, config: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each file of a checkpoint that has a digest; `config` loads the base.

    Raises Refused for numbers that are not finite.
    """
    moments = trained.moments or {}
    arrays = {**trained.adapters, **moments}
    if bad := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise Refused(
            f"weights that are not finite are not saved; these are not: {listed(bad)}; go back to an "
            "earlier checkpoint, with a smaller learning rate"
        )
    path, arch = str(config["model"]["path"]), adapted(base.arch, trained.lora.rank)
    yield from adapter_files(arch, trained.adapters, base=path, fingerprint=base.fingerprint).items()
    if trained.moments is not None:
        # Not `ascontiguousarray`, which gives the count a dimension: the step would be another program then.
        yield MOMENTS, save({name: np.asarray(array, order="C") for name, array in moments.items()})


def what_loads(config: Config) -> dict[str, Any]:
    """The part of a configuration that loads the base, with absolute paths.

    The lengths are among it: of some models the architecture depends on them.
    """
    model: dict[str, Any] = config.model.model_dump(mode="json")
    data: dict[str, Any] = {"max_prompt_length": config.data.max_prompt_length}
    data["chat_template"] = config.data.chat_template
    for section, key in ((model, "path"), (model, "tokenizer"), (data, "chat_template")):
        # A template may be its text, which is too long for a path.
        with suppress(OSError):
            if section[key] and (own := local_path(section[key])).exists():
                section[key] = str(own.resolve())
    lengths = {"rollout": config.rollout.max_new_tokens, "eval": config.eval.max_new_tokens}
    most = {section: {"max_new_tokens": most} for section, most in lengths.items()}
    return {"seed": config.seed, "model": model, "data": data, **most}


def config_of(config: Mapping[str, Any], lora: LoraRequest) -> bytes:
    """`config.yaml`: what loads the base, and the adapters.

    It has no digest: whoever moves the base may correct it, and the base has a fingerprint.
    """
    return sections_yaml({**config, "lora": {"rank": lora.rank, "alpha": ALPHA}}).encode()


def read_checkpoint(folder: Path) -> tuple[Meta, Trained]:
    """The checkpoint in `folder`, every byte that is read compared with the digests of its `meta.json`.

    Raises Missing if there is none, and Refused with the file that is damaged.
    """
    meta = read_meta(folder)
    contents = {name: _whole(folder / name, file) for name, file in meta.files.items()}
    try:
        adapters = load(contents[WEIGHTS])
        moments = load(contents[MOMENTS]) if MOMENTS in contents else None
    except (SafetensorError, KeyError) as error:
        raise _damaged(folder, f"its tensors cannot be read ({error})") from error
    return meta, Trained(LoraRequest(**meta.lora.model_dump()), meta.model, meta.step, adapters, moments)


def read_meta(folder: Path) -> Meta:
    try:
        values = read_json(folder / META)
    except FileNotFoundError as error:
        if not folder.exists():
            raise Missing(f"there is no checkpoint in {folder}") from error
        raise _damaged(folder, f"it has no {META}") from error
    except (OSError, ValueError) as error:
        raise _damaged(folder, str(error)) from error
    if values.pop("sha256", None) != _digest(values):
        raise _damaged(folder, f"{META} is not as it was written")
    try:
        return checked(Meta, values, str(folder / META))
    except ValueError as error:
        raise _damaged(folder, str(error)) from error


def _whole(path: Path, file: File) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _damaged(path.parent, f"{path.name} cannot be read ({error.strerror})") from error
    if len(content) != file.num_bytes:
        raise _damaged(path.parent, f"{path.name} has {len(content)} of {file.num_bytes} bytes")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise _damaged(path.parent, f"{path.name} is not as it was written")
    return content


def _damaged(folder: Path, what: str) -> Refused:
    return Refused(f"the checkpoint in {folder} is damaged: {what}; use another one, and delete this one")


@contextmanager
def told(what: str) -> Iterator[None]:
    """An error of the disk in the block is one that its owner can mend: what was there is unchanged."""
    try:
        yield
    except OSError as error:
        remedy = "free space" if disk_is_full(error) else "see to the server's folder"
        raise Refused(
            f"{what} could not be written ({error.strerror or error}); what was saved before is unchanged; "
            f"{remedy}, and save again"
        ) from error


def write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, content: bytes) -> None:
    draft = path.with_name(path.name + DRAFT)
    try:
        write(draft, content)
        draft.replace(path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def as_json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def signed(meta: Mapping[str, Any]) -> bytes:
    return as_json({**meta, "sha256": _digest(meta)})


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def time_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
