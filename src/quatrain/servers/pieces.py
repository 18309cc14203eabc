"""Weights over HTTP: the files of a model's folder in pieces, of which only what has changed is sent.

Data flow: a folder -> `Pieces`, with what changed since those before -> `message` for each piece that the
other side has not -> `Receiver`, which has the same files in its memory -> their path, for any loader.
vLLM's workers import this module: it needs numpy and the standard library alone.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import uuid
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PIECE_BYTES = 2**24
LONGEST_MESSAGE = PIECE_BYTES + 2**12
"""Bytes of a message: a piece behind a line that describes it."""
WORTH = 0.9
"""Changes are sent in place of a piece if they have at most this share of its bytes."""
GAP = 2**16
"""Most units of two bytes from one place in changes to the next, which two bytes can say."""
MEMORY = Path("/dev/shm")
"""Where a Linux machine has files in memory."""
PREFIX = "quatrain-weights-"
LOCK = "lock"
SAID = ("number", "digest", "stream", "changes")
"""What the first line of a message says."""

logger = logging.getLogger(__name__)


class Superseded(ValueError):
    """What came is of a sender whose files the receiver has no more: another has begun, or nobody has."""


class NotWhole(ValueError):
    """Files are to be loaded of which pieces have not come."""


class MemoryFolder:
    """A folder in this machine's memory, or among temporary files if `num_bytes` have no room there.

    It is removed by `close`, at the end of the process, or, if that was killed, by the next one that is made.
    """

    def __init__(self, num_bytes: int):
        parent, _ = _roomiest(num_bytes)
        if MEMORY.is_dir() and parent != MEMORY:
            logger.warning(
                "weights of %.1f GB are kept in %s, because %s, which is memory, has %.1f GB left; "
                "enlarge it (of a container: --shm-size)",
                *(num_bytes / 1e9, parent, MEMORY, shutil.disk_usage(MEMORY).free / 1e9),
            )
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            # Held as long as the process lives, by which others know that the folder is in use.
            lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.path.exists():  # another process may have found it before it was locked, and removed it
                break
            os.close(lock)
        self._end = weakref.finalize(self, _end, self.path, lock)

    def close(self) -> None:
        """Removes it. May be called again."""
        self._end()


def _end(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _roomiest(num_bytes: int) -> tuple[Path, int]:
    """Where a folder of so many bytes belongs, in memory or among temporary files; the bytes free there."""
    if MEMORY.is_dir():
        _remove_left_behind(MEMORY)
        if (free := shutil.disk_usage(MEMORY).free) >= num_bytes:
            return MEMORY, free
    temporary = Path(tempfile.gettempdir())
    return temporary, shutil.disk_usage(temporary).free


def _remove_left_behind(parent: Path) -> None:
    """Removes the folders of processes that were killed: they hold memory."""
    for folder in parent.glob(f"{PREFIX}*"):
        # A folder that is just being made has no lock yet; others may be another user's.
        with suppress(OSError), (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


class Piece(NamedTuple):
    """A part of a file: where it is, its digest, and how it differs from the piece of digest `before`."""

    file: Path
    start: int
    size: int
    digest: str
    before: str | None = None
    changes: bytes | None = None
    """As `changes_of`; None if they are not worth while."""

    @property
    def num_new_bytes(self) -> int:
        """Bytes that are sent to who has the piece before."""
        if self.digest == self.before:
            return 0
        return self.size if self.changes is None else len(self.changes)


class Pieces(NamedTuple):
    """The pieces of the files of the folder `path`, in order."""

    path: Path
    files: dict[str, int]
    """The size of each file."""
    each: list[Piece]

    @classmethod
    def of(cls, path: Path, before: Pieces | None = None) -> Pieces:
        """Those of a folder without subfolders, compared with the pieces `before`, whose files still exist.

        All files are read, in several threads.
        """
        sizes = {file.name: file.stat().st_size for file in path.iterdir()}
        old = {(piece.file.name, *piece[1:3]): piece for piece in (before.each if before else ())}

        def piece(place: tuple[Path, int, int]) -> Piece:
            content, was = _read(*place), old.get((place[0].name, *place[1:]))
            digest = _digest(content)
            if was is None or was.digest == digest:
                return Piece(*place, digest, was and was.digest)
            return Piece(*place, digest, was.digest, changes_of(_read(*was[:3]), content))

        with ThreadPoolExecutor() as threads:  # numpy and hashlib work at the same time there
            return cls(path, sizes, list(threads.map(piece, _places(path, sizes))))

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def num_bytes(self) -> int:
        """Of the whole folder."""
        return sum(self.files.values())

    @property
    def num_new_bytes(self) -> int:
        """Bytes that are sent to who has the pieces before."""
        return sum(piece.num_new_bytes for piece in self.each)

    def forget_changes(self) -> None:
        """Frees the changes: from now on, who has the pieces before is sent whole ones, as who has none."""
        self.each[:] = [piece._replace(changes=None) for piece in self.each]

    def message(self, stream: str, number: int, known: str | None) -> bytes | None:
        """What gives the receiver of `stream` a piece of which it has the one with the digest `known`.

        A line of JSON, and the bytes behind it; None if it has this very piece.
        """
        piece = self.each[number]
        if known == piece.digest:
            return None
        changes = None if known is None or known != piece.before else piece.changes
        said = dict(zip(SAID, (number, piece.digest, stream, changes is not None), strict=True))
        content = _read(*piece[:3]) if changes is None else changes
        return json.dumps(said).encode() + b"\n" + content


class Receiver:
    """The files that a sender has, in this machine's memory.

    One sender at a time: one that begins later takes the files over, and messages of an earlier one are
    refused (Superseded). Methods may be called in several threads. They raise ValueError for what cannot be
    taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._folder: MemoryFolder | None = None
        self._files: dict[str, int] = {}
        self._places: list[tuple[Path, int, int]] = []
        self._digests: list[str | None] = []
        self._stream = ""
        """The sender that began last; empty: none has."""

    def begin(self, files: Mapping[str, int], piece_bytes: int) -> dict[str, Any]:
        """Takes files of these sizes, by their names, in pieces of so many bytes.

        Returns the `stream`, which messages name, the `path` of the files, and the `digests` of the pieces
        that it has, null where it has none. Raises ValueError if there is no room for the files.
        """
        plain = all(name and name == Path(name).name and not name.startswith(".") for name in files)
        if not plain or piece_bytes != PIECE_BYTES:
            raise ValueError(
                f"weights must be files of one folder in pieces of {PIECE_BYTES} bytes; got {[*files]} in "
                f"pieces of {piece_bytes}; send them with this version of quatrain"
            )
        with self._lock:
            if files != self._files or self._folder is None:
                self._make(dict(files))
            self._stream = uuid.uuid4().hex
            return {"stream": self._stream, "path": str(self._path), "digests": list(self._digests)}

    def put(self, message: bytes) -> str:
        """Takes a message of `Pieces.message`; the digest of the piece.

        Raises ValueError unless it is of the sender that began last, and the piece has its digest then.
        """
        line, _, content = message.partition(b"\n")
        try:
            said: Mapping[str, Any] = json.loads(line)
            number, digest, stream, partial = (said[key] for key in SAID)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"a message must begin with a line of JSON that has {', '.join(SAID)}"
            ) from error
        with self._lock:
            file, start, size = self._place(stream, number)
            # Until it is written, and if it comes out wrong, nobody takes it for the piece that it was.
            self._digests[number] = None
            before = _read(file, start, size) if partial else b""
        if partial:
            content = changed(before, content)
        if len(content) != size:
            raise ValueError(
                f"piece {number} of {file.name} must have {size} bytes; it has {len(content)}; send it "
                "again, whole"
            )
        if (found := _digest(content)) != digest:
            raise ValueError(
                f"piece {number} of {file.name} must have the digest {digest} when it has come; it has "
                f"{found}; send it again, whole"
            )
        with self._lock:
            # Once more: another sender may have put a newer piece in its place meanwhile.
            self._place(stream, number)
            self._digests[number] = None
            with file.open("r+b") as opened:
                opened.seek(start)
                opened.write(content)
            self._digests[number] = digest
        return digest

    def check_whole(self, path: str) -> None:
        """Raises NotWhole if `path` is one that a receiver gave, and does not have all pieces now."""
        if not Path(path).parent.name.startswith(PREFIX):
            return
        with self._lock:
            own = self._folder is not None and Path(path) == self._path
            lacking = self._digests.count(None)
            if lacking or not own:
                what = f"{lacking} of {len(self._digests)} pieces" if own else "all pieces"
                raise NotWhole(
                    f"files that are sent must be whole before they are loaded: {path} lacks {what}; begin "
                    "again, and send these"
                )

    def close(self) -> None:
        """Removes the files."""
        with self._lock:
            self._remove()

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return _model(self._folder)

    def _place(self, stream: str, number: int) -> tuple[Path, int, int]:
        """File, start and size of a piece that the sender of `stream` sends; the lock is held."""
        if not self._stream or stream != self._stream:
            raise Superseded("another sender has begun to send weights to this server; begin again")
        if number not in range(len(self._places)):
            raise ValueError(
                f"a piece must have a number below {len(self._places)}, how many there are of the files; "
                f"got {number!r}; begin again"
            )
        return self._places[number]

    def _remove(self) -> None:
        if self._folder is not None:
            self._folder.close()
        self._forget()

    def _make(self, files: dict[str, int]) -> None:
        self._remove()
        folder = _folder_for(files)
        self._folder, self._files, self._places = folder, files, _places(_model(folder), files)
        self._digests = [None] * len(self._places)


def _model(folder: MemoryFolder) -> Path:
    return folder.path / "model"


def _folder_for(files: Mapping[str, int]) -> MemoryFolder:
    """A folder with these files, empty, for which there is room; nothing is left where that fails."""
    num_bytes = sum(files.values())
    place, free = _roomiest(num_bytes)
    if free < num_bytes:
        raise ValueError(_no_room(num_bytes, place, free))
    folder = MemoryFolder(num_bytes)
    try:
        _model(folder).mkdir()
        for name, size in files.items():
            with (_model(folder) / name).open("wb") as file:
                file.truncate(size)
                _reserve(file.fileno(), size)
    except BaseException as error:
        free = shutil.disk_usage(folder.path).free
        folder.close()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ValueError(_no_room(num_bytes, folder.path.parent, free)) from error
        raise
    return folder


def _reserve(file: int, size: int) -> None:
    """Takes the room for the bytes of an open file now, where the system can: others may fill it later."""
    if not size or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # what file systems say that cannot
            raise


def _no_room(num_bytes: int, place: Path, free: int) -> str:
    return (
        f"weights that are sent must fit into the memory of the server's machine, or among its temporary "
        f"files: they have {num_bytes / 1e9:.1f} GB, and {place} has {free / 1e9:.1f} GB left; free space "
        f"there, enlarge {MEMORY} (of a container: --shm-size), or set rollout.stream_weights to false"
    )


def _places(folder: Path, files: Mapping[str, int]) -> list[tuple[Path, int, int]]:
    """File, start and size of each piece, in the order that both sides number them by."""
    return [
        (folder / name, start, min(PIECE_BYTES, size - start))
        for name, size in sorted(files.items())
        for start in range(0, size, PIECE_BYTES)
    ]


def changes_of(before: bytes, after: bytes) -> bytes | None:
    """What makes `after` of `before`, of the same length; None if it is not `WORTH` sending.

    Units of two bytes, an element of bfloat16 or half one of float32: the distance of each that changed from
    the one before, less one, then their values. Units that did not change are among them where the distance
    would be more than GAP; the first unit always is.
    """
    if len(after) % 2:
        return None
    old, new = (np.frombuffer(content, np.uint16) for content in (before, after))
    differs = old != new
    if 4 * (int(differs.sum()) + len(new) // GAP + 1) > WORTH * len(after):
        return None
    differs[::GAP] = True
    places = np.flatnonzero(differs)
    return (np.diff(places) - 1).astype(np.uint16).tobytes() + new[places].tobytes()


def changed(before: bytes, changes: bytes) -> bytes:
    """The inverse of `changes_of`; raises ValueError if `changes` are none of `before`."""
    units = np.frombuffer(before, np.uint16).copy()
    both = np.frombuffer(changes, np.uint16)
    if len(both) % 2 != 1:
        raise ValueError("changes must have one distance less than values; send the piece whole")
    gaps, values = both[: len(both) // 2], both[len(both) // 2 :]
    places = np.concatenate([[0], np.cumsum(gaps.astype(np.int64) + 1)])
    if places[-1] >= len(units):
        raise ValueError("changes must be within the piece; send it whole")
    units[places] = values
    return units.tobytes()


def _read(file: Path, start: int, size: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read(size)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
