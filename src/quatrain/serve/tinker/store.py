"""The checkpoints of training clients: folders on disk, each complete or absent, and the records of them.

Data flow: `Trained` of a training client -> `Store.save` -> a folder that peft loads, with the optimizer's
moments beside it -> `Store.load`; `read_checkpoint` -> `quatrain export`. A client's folder is
`{state}/{model_id with "_" for ":"}`: `training_run.json`, `config.yaml`, what `journal.py` writes, and
`weights/{name}/` and `sampler_weights/{name}/`.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from filelock import FileLock, Timeout

from quatrain.config.errors import listed, shown
from quatrain.config.files import Description, checked, read_json
from quatrain.serve.tinker.calls import Base, LoraRequest, Refused, Trained, Units
from quatrain.serve.tinker.checkpoint import (
    CONFIG,
    DRAFT,
    META,
    TYPES,
    Kind,
    Lora,
    Meta,
    Missing,
    as_json,
    config_of,
    contents,
    read_checkpoint,
    read_meta,
    replace,
    signed,
    sync,
    time_of,
    told,
    write,
)
from quatrain.weights.adapter import check_base

RUN = "training_run.json"
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
OLD, GONE = "~old", "~gone"
"""Ends of the names of folders that are being replaced and deleted, as `DRAFT` of those being written."""
LONGEST_TTL_S = 10 * 365 * 86400

logger = logging.getLogger(__name__)


class _Run(Description):
    """`training_run.json`."""

    model_id: str
    owner: str
    base_model: str
    lora: Lora
    user_metadata: dict[str, str] | None = None
    created: float


class Store:
    """The checkpoints in `folder`, which this process alone writes; `config`: as `what_loads` gives it.

    A method may be called by any thread; `save` and `load` are work of the device's. Owners are hashes of
    their keys, and see what is theirs alone: of others' it is said that there is none. Raises ValueError if
    the folder cannot be written or another process uses it.
    """

    def __init__(self, folder: Path, base: Base, config: Mapping[str, Any]):
        self.folder = folder.absolute()
        self._base, self._config = base, config
        self._changing = threading.RLock()
        """Held while folders get other names, and while one is read."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / ".lock", thread_local=False)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"only one server may write the checkpoints in {self.folder}, and another one uses it; end "
                "that one, or set tinker.state to another folder"
            ) from error
        except (OSError, NotImplementedError) as error:
            raise ValueError(
                f"the folder of checkpoints must be writable: {self.folder} is not ({error}); set "
                "tinker.state to another folder"
            ) from error
        self._recover()
        self.expire(time.time())

    def close(self) -> None:
        """Lets another process use the folder."""
        self._lock.release()

    def run_folder(self, model_id: str) -> Path:
        """The folder of a training client; raises Missing for a text that is no id of one."""
        if not MODEL_ID.fullmatch(model_id):
            raise Missing(f"there is no training run {shown(model_id)}")
        return self.folder / model_id.replace(":", "_")

    def note_run(
        self, owner: str, model_id: str, lora: LoraRequest, user_metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Makes the folder of a new training client; raises Refused if that cannot be written."""
        folder = self.run_folder(model_id)
        run = {
            "model_id": model_id,
            "owner": owner,
            "base_model": self._base.name,
            "lora": asdict(lora),
            "user_metadata": _texts(user_metadata),
            "created": time.time(),
        }
        with told(f"the folder of {model_id}"):
            folder.mkdir(parents=True, exist_ok=True)
            replace(folder / CONFIG, config_of(self._config, lora))
            replace(folder / RUN, as_json(run))

    def save(
        self,
        owner: str,
        model_id: str,
        kind: Kind,
        name: str,
        trained: Trained,
        *,
        overwrite: bool = False,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, Any] | None = None,
    ) -> Units[str]:
        """Writes a checkpoint, a unit for each file; returns how clients call it.

        Raises Refused for a name that none can have or that is taken, for numbers that are not finite, and
        if it cannot be written: then what was there before is unchanged.
        """
        place = self._own_run(owner, model_id) / kind / _name(name)
        expires = _expiry(ttl_seconds)
        if self._taken(place) and not overwrite:
            raise Refused(
                f"a checkpoint must have a new name: {model_id} has {kind}/{name}; choose another name, or "
                "save with overwrite=True"
            )
        draft = place.with_name(name + DRAFT)
        written: dict[str, dict[str, Any]] = {}
        with told(f"checkpoint {kind}/{name} of {model_id}"):
            try:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
                write(draft / CONFIG, config_of(self._config, trained.lora))
                for file, content in contents(trained, self._base, self._config):
                    # Of the bytes in memory, not of the file: what goes wrong on its way to disk is found.
                    digest = hashlib.sha256(content).hexdigest()
                    write(draft / file, content)
                    written[file] = {"num_bytes": len(content), "sha256": digest}
                    yield
                meta = {
                    "model_id": model_id,
                    "kind": kind,
                    "name": name,
                    "base_model": self._base.name,
                    "fingerprint": self._base.fingerprint,
                    "model": trained.model,
                    "step": trained.step,
                    "lora": asdict(trained.lora),
                    "created": time.time(),
                    "expires": expires,
                    "user_metadata": _texts(user_metadata),
                    "files": written,
                }
                write(draft / META, signed(meta))
                sync(draft)
                self._put(draft, place)
            finally:  # also if it was not finished
                shutil.rmtree(draft, ignore_errors=True)
        return f"tinker://{model_id}/{kind}/{name}"

    def load(self, owner: str, path: str) -> Trained:
        """The checkpoint that clients call `path`, whole.

        Raises Missing if there is none of this owner, and Refused if it is damaged or of another base.
        """
        place = self._place(owner, path)
        with self._changing:  # a save under its name would change the files while they are read
            meta, trained = read_checkpoint(place)
        try:
            check_base(meta.fingerprint, self._base.fingerprint, self._base.name, place)
        except ValueError as error:
            raise Refused(str(error)) from error
        return trained

    def runs(self, owner: str) -> list[dict[str, Any]]:
        """A `TrainingRun` of the interface for each training client of this owner, the newest first."""
        found = [self._run_record(run) for run in self._runs(owner)]
        return sorted(found, key=lambda run: run["last_request_time"], reverse=True)

    def run(self, owner: str, model_id: str) -> dict[str, Any]:
        """The `TrainingRun` of one training client; raises Missing."""
        self._own_run(owner, model_id)
        return self._run_record(self._read_run(self.run_folder(model_id)))

    def checkpoints(self, owner: str, model_id: str | None = None) -> list[dict[str, Any]]:
        """A `Checkpoint` of the interface for each of this owner's, or of one client's, the newest first.

        Raises Missing if there is no such client.
        """
        if model_id is not None:
            self._own_run(owner, model_id)
        ids = [run.model_id for run in self._runs(owner)] if model_id is None else [model_id]
        return [meta.record() for meta in _newest_first(meta for each in ids for meta in self._metas(each))]

    def info(self, owner: str, path: str) -> dict[str, Any]:
        """A `WeightsInfoResponse` of the interface; raises Missing or Refused as `load`."""
        meta = read_meta(self._place(owner, path))
        # A program makes its client by this name, and the served model may have been moved.
        same = meta.fingerprint == self._base.fingerprint
        return {
            "base_model": self._base.name if same else meta.base_model,
            "is_lora": True,
            "lora_rank": meta.lora.rank,
            "train_unembed": meta.lora.train_unembed,
            "train_mlp": meta.lora.train_mlp,
            "train_attn": meta.lora.train_attn,
        }

    def delete(self, owner: str, path: str) -> None:
        """Removes a checkpoint; raises Missing."""
        with told(f"the end of {path}"):
            self._remove(self._place(owner, path))

    def set_ttl(self, owner: str, path: str, ttl_seconds: int | None) -> None:
        """Lets a checkpoint expire in so many seconds from now; None: never. Raises Missing or Refused."""
        place, expires = self._place(owner, path), _expiry(ttl_seconds)
        with self._changing, told(path):
            meta = read_meta(place).model_dump(mode="json")
            replace(place / META, signed({**meta, "expires": expires}))

    def expire(self, now: float) -> list[str]:
        """Removes what has expired by `now`, in seconds since 1970; returns how clients called it."""
        gone = []
        for folder in self._run_folders():
            for meta, place in _folders(folder):
                if not _expired(meta, now):
                    continue
                try:
                    self._remove(place)
                except OSError as error:
                    logger.warning("%s has expired and could not be removed: %s", meta.path, error)
                else:
                    gone.append(meta.path)
        if gone:
            logger.info("checkpoints have expired and are removed: %s", listed(gone))
        return gone

    def _place(self, owner: str, path: str) -> Path:
        """The folder of a checkpoint of this owner; nothing but a folder in that of the server."""
        model_id, kind, name = _parts(path)
        place = self._own_run(owner, model_id) / kind / name
        if not self._taken(place):
            known = listed(f"{meta.kind}/{meta.name}" for meta in _newest_first(self._metas(model_id)))
            raise Missing(f"there is no checkpoint {path}; the checkpoints of {model_id}: {known}")
        return place

    def _taken(self, place: Path) -> bool:
        """Whether a folder is a checkpoint, which has not expired."""
        if not place.is_dir():
            return False
        try:
            return not _expired(read_meta(place), time.time())
        except Refused:  # damaged
            return True

    def _own_run(self, owner: str, model_id: str) -> Path:
        folder = self.run_folder(model_id)
        if (folder / RUN).is_file():
            run = self._read_run(folder)
            if (run.owner, run.model_id) == (owner, model_id):  # other ids may have the same folder
                return folder
        raise Missing(f"there is no training run {model_id}")

    def _read_run(self, folder: Path) -> _Run:
        try:
            return checked(
                _Run, read_json(folder / RUN), str(folder / RUN), remedy="it is damaged; remove it"
            )
        except (OSError, ValueError) as error:
            raise Refused(str(error)) from error

    def _run_folders(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"*/{RUN}"))

    def _runs(self, owner: str) -> Iterator[_Run]:
        for folder in self._run_folders():
            try:
                run = self._read_run(folder)
            except Refused as error:
                logger.warning("a training run is left out: %s", error)
                continue
            if run.owner == owner:
                yield run

    def _metas(self, model_id: str) -> Iterator[Meta]:
        now = time.time()
        return (meta for meta, _ in _folders(self.run_folder(model_id)) if not _expired(meta, now))

    def _run_record(self, run: _Run) -> dict[str, Any]:
        metas = _newest_first(self._metas(run.model_id))
        last = {kind: next((meta for meta in metas if meta.kind == kind), None) for kind in TYPES}
        journal = self.run_folder(run.model_id) / "metrics.jsonl"
        times = [run.created, *(meta.created for meta in metas)]
        times += [journal.stat().st_mtime] if journal.exists() else []
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": run.owner[:12],
            "is_lora": True,
            "corrupted": False,
            "lora_rank": run.lora.rank,
            "last_request_time": time_of(max(times)),
            "last_checkpoint": None if (meta := last["weights"]) is None else meta.record(),
            "last_sampler_checkpoint": None if (meta := last["sampler_weights"]) is None else meta.record(),
            "user_metadata": run.user_metadata,
        }

    def _put(self, draft: Path, place: Path) -> None:
        """Gives a complete draft its name; at no moment there is neither it nor what it replaces."""
        old = place.with_name(place.name + OLD)
        with self._changing:
            if place.exists():
                place.rename(old)
            try:
                draft.rename(place)
            except OSError:
                if old.exists():
                    old.rename(place)
                raise
            sync(place.parent)
            sync(place.parent.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _remove(self, place: Path) -> None:
        gone = place.with_name(place.name + GONE)
        with self._changing:
            shutil.rmtree(gone, ignore_errors=True)
            place.rename(gone)  # first: half a checkpoint would be taken for a damaged one
        shutil.rmtree(gone, ignore_errors=True)

    def _recover(self) -> None:
        """After a process that was killed: what it replaced is back if the new one is not, the rest goes."""
        for old in self.folder.glob(f"*/*/*{OLD}"):
            place = old.with_name(old.name.removesuffix(OLD))
            if not place.exists():
                old.rename(place)
        for end in (DRAFT, OLD, GONE):
            for left in self.folder.glob(f"*/*/*{end}"):
                shutil.rmtree(left, ignore_errors=True)


def paged(name: str, records: Sequence[Any], limit: int, offset: int) -> dict[str, Any]:
    """An answer of the interface with `limit` of the records from `offset` on, and a `Cursor`."""
    limit, offset = max(limit, 0), max(offset, 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(records)}
    return {name: list(records[offset : offset + limit]), "cursor": cursor}


def _parts(path: str) -> tuple[str, str, str]:
    """(model_id, kind, name) of how clients call a checkpoint."""
    model_id, kind, name = (*path.removeprefix("tinker://").split("/"), "", "")[:3]
    given = path == f"tinker://{model_id}/{kind}/{name}" and MODEL_ID.fullmatch(model_id) and kind in TYPES
    if not given:
        raise Missing(
            "a checkpoint is called tinker://MODEL_ID/weights/NAME or tinker://MODEL_ID/sampler_weights/NAME;"
            f" got {shown(path)}"
        )
    return model_id, kind, _name(name)


def _name(name: str) -> str:
    if not NAME.fullmatch(name) or name == "." or ".." in name:
        raise Refused(
            "the name of a checkpoint must have 1 to 128 letters, digits, dots, underscores and dashes, no "
            f"two dots in a row; got {shown(name)}"
        )
    return name


def _expiry(ttl_seconds: int | None) -> float | None:
    if ttl_seconds is not None and not 1 <= ttl_seconds <= LONGEST_TTL_S:
        raise Refused(
            f"ttl_seconds must be 1 to {LONGEST_TTL_S} (10 years), or none for a checkpoint that stays; got "
            f"{shown(ttl_seconds)}"
        )
    return None if ttl_seconds is None else time.time() + ttl_seconds


def _expired(meta: Meta, now: float) -> bool:
    return meta.expires is not None and meta.expires <= now


def _folders(run: Path) -> Iterator[tuple[Meta, Path]]:
    """The checkpoints of a training client; one that is damaged is told and left out."""
    for place in (path for kind in get_args(Kind) for path in sorted(run.glob(f"{kind}/*"))):
        if not NAME.fullmatch(place.name):
            continue
        try:
            yield read_meta(place), place
        except Missing:  # removed since
            continue
        except Refused as error:
            logger.warning("a checkpoint is left out: %s", error)


def _newest_first(metas: Iterator[Meta]) -> list[Meta]:
    return sorted(metas, key=lambda meta: meta.created, reverse=True)


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {str(name): str(value) for name, value in metadata.items()}
