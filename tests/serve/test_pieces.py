"""Weights over HTTP: a receiver has the sender's files to the byte, or refuses what came."""

import errno
import fcntl
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quatrain.servers import pieces as module
from quatrain.servers.pieces import (
    PIECE_BYTES,
    MemoryFolder,
    NotWhole,
    Pieces,
    Receiver,
    Superseded,
    changed,
    changes_of,
)

UNITS = 3 * 2**16 + 7


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(module, "MEMORY", folder)
    return folder


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.mark.parametrize(
    "places",
    [[], [0], [UNITS - 1], [0, 1, 2, 65535, 65536, 65537], [5, 2**17 + 9], [2**16, 2**17, 2**17 + 1]],
)
def test_changes_make_the_new_bytes_of_the_old(places):
    """Also of places that are further apart than two bytes can say, and at the ends."""
    before = np.arange(UNITS, dtype=np.uint16)
    after = before.copy()
    after[places] += 1
    changes = changes_of(before.tobytes(), after.tobytes())
    assert len(changes) <= 4 * (len(places) + 4)
    assert changed(before.tobytes(), changes) == after.tobytes()


def test_changes_that_are_longer_than_the_piece_are_none():
    before = np.zeros(1000, np.uint16)
    assert changes_of(before.tobytes(), (before + 1).tobytes()) is None
    assert changes_of(b"abc", b"abd") is None
    half = before.copy()
    half[:440] = 1
    changes = changes_of(before.tobytes(), half.tobytes())
    assert len(changes) < module.WORTH * 2000
    assert changed(before.tobytes(), changes) == half.tobytes()


def folder_of(path: Path, seed: int, **files: bytes):
    """A model's folder: weights of more than two pieces, of which few bytes derive from the seed."""
    path.mkdir()
    weights = np.random.default_rng(0).integers(0, 2**16, PIECE_BYTES + 1000, np.uint16)
    weights[seed * 31 :: 2**20] = seed
    (path / "model.safetensors").write_bytes(weights.tobytes())
    (path / "config.json").write_bytes(b"{}\n")
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def send(pieces, receiver):
    """The bytes that were sent."""
    begun = receiver.begin(pieces.files, PIECE_BYTES)
    sent = 0
    for number, known in enumerate(begun["digests"]):
        message = pieces.message(begun["stream"], number, known)
        if message is not None:
            sent += len(message)
            receiver.put(message)
    for name in pieces.files:
        assert (Path(begun["path"]) / name).read_bytes() == (pieces.path / name).read_bytes()
    return sent


def test_a_receiver_gets_what_it_has_not(tmp_path, receiver):
    first = Pieces.of(folder_of(tmp_path / "1", 1))
    second = Pieces.of(folder_of(tmp_path / "2", 2), first)
    third = Pieces.of(folder_of(tmp_path / "3", 3), second)
    assert first.num_bytes == 2 * PIECE_BYTES + 2003
    assert len(first.each) == 4
    assert send(first, receiver) > first.num_bytes
    assert send(first, receiver) == 0
    assert second.num_new_bytes < send(second, receiver) < 2000
    # It has missed a version, as a server that was lost, and another one is new.
    assert send(first, receiver) > 2 * PIECE_BYTES
    assert send(third, receiver) > 2 * PIECE_BYTES
    new = Receiver()
    assert send(third, new) > third.num_bytes
    new.close()


def test_other_files_take_the_place_of_those_that_were(tmp_path, receiver):
    """As of another run: of another model, or with a file more."""
    send(Pieces.of(folder_of(tmp_path / "1", 1)), receiver)
    other = Pieces.of(folder_of(tmp_path / "2", 1, more=b"abc"))
    assert send(other, receiver) > other.num_bytes
    path = receiver.begin(other.files, PIECE_BYTES)["path"]
    assert sorted(each.name for each in Path(path).iterdir()) == sorted(other.files)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", ".hidden", "", ".."])
def test_files_outside_of_the_folder_are_refused(name, receiver, memory):
    with pytest.raises(ValueError, match="must be files of one folder"):
        receiver.begin({name: 3}, PIECE_BYTES)
    assert not list(memory.iterdir())


def test_pieces_of_another_size_are_refused(receiver):
    with pytest.raises(ValueError, match=r"pieces of 16777216 bytes.* of 5; send them with this version"):
        receiver.begin({"a": 3}, 5)


def message_of(stream, number, content, digest=None):
    said = {"stream": stream, "number": number, "digest": digest or module._digest(content), "changes": False}
    return json.dumps(said).encode() + b"\n" + content


def test_a_late_piece_does_not_overwrite_a_newer_one(receiver, monkeypatch):
    """Catches a put that was checked before another sender began, and is written after that one's piece:
    the receiver would have the old bytes, and claim the new digest."""
    plain, reached, go_on = module._digest, threading.Event(), threading.Event()

    def slow(content):
        if content == b"old":
            reached.set()
            assert go_on.wait(10)
        return plain(content)

    begun = receiver.begin({"a": 3}, PIECE_BYTES)
    late = message_of(begun["stream"], 0, b"old")
    monkeypatch.setattr(module, "_digest", slow)
    with ThreadPoolExecutor() as threads:
        put = threads.submit(receiver.put, late)
        assert reached.wait(10)
        newer = receiver.begin({"a": 3}, PIECE_BYTES)["stream"]
        digest = receiver.put(message_of(newer, 0, b"new"))
        go_on.set()
        assert isinstance(put.exception(10), Superseded)
    again = receiver.begin({"a": 3}, PIECE_BYTES)
    assert again["digests"] == [digest]
    assert (Path(again["path"]) / "a").read_bytes() == b"new"


@pytest.mark.parametrize("size", [5, 1])
def test_a_piece_must_have_its_size(size, receiver):
    """Catches a piece that is too long, and so overwrites the one behind it, or makes the file longer."""
    begun = receiver.begin({"a": 3}, PIECE_BYTES)
    with pytest.raises(ValueError, match=rf"piece 0 of a must have 3 bytes; it has {size}; send it again"):
        receiver.put(message_of(begun["stream"], 0, bytes(size)))
    assert (Path(begun["path"]) / "a").stat().st_size == 3
    assert receiver.begin({"a": 3}, PIECE_BYTES)["digests"] == [None]


def test_a_sender_that_has_not_begun_is_told_so(receiver):
    """Catches a plain ValueError, by which a run would end: the server was started again meanwhile."""
    for stream in ("", "of the server before"):
        with pytest.raises(Superseded, match="begin again"):
            receiver.put(message_of(stream, 0, b"abc"))


def test_files_without_room_are_refused_with_both_sizes(receiver, memory, monkeypatch):
    """Catches files that are taken for which there is no room, which a full disk would show much later."""
    kept = send_small(receiver)
    sizes = r"they have 1125899\.9 GB, and .* has .* GB left; free space there, enlarge .*memory .*shm-size"
    with pytest.raises(ValueError, match=sizes):
        receiver.begin({"a": 2**50}, PIECE_BYTES)
    assert not list(memory.iterdir())
    assert receiver.begin(kept, PIECE_BYTES)["digests"] == [None]

    def full(file, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"they have 0\.0 GB, and .*memory has .* GB left; free space there"):
        receiver.begin({"b": 3}, PIECE_BYTES)
    assert not list(memory.iterdir())


def test_room_is_taken_when_files_begin(receiver):
    """Catches a full memory that shows only when the last pieces come."""
    path = Path(receiver.begin({"a": 2**20, "empty": 0}, PIECE_BYTES)["path"])
    assert (path / "a").stat().st_blocks * 512 >= 2**20
    assert (path / "empty").stat().st_size == 0


def send_small(receiver):
    files = {"a": 3}
    receiver.put(message_of(receiver.begin(files, PIECE_BYTES)["stream"], 0, b"abc"))
    return files


def test_files_that_cannot_be_made_leave_nothing_that_is_claimed(receiver, memory):
    """Catches a second begin of the same files that gets the digests of those that were removed."""
    send_small(receiver)
    for _ in range(2):
        with pytest.raises(OSError, match="File name too long"):
            receiver.begin({"a": 3, "n" * 300: 3}, PIECE_BYTES)
        assert not list(memory.iterdir())
    assert receiver.begin({"a": 3}, PIECE_BYTES)["digests"] == [None]


def test_files_that_are_not_whole_are_not_to_be_loaded(receiver):
    """Catches half a model that is loaded because nobody asks the receiver."""
    begun = receiver.begin({"a": 3, "b": 3}, PIECE_BYTES)
    path = begun["path"]
    receiver.put(message_of(begun["stream"], 0, b"abc"))
    with pytest.raises(NotWhole, match=rf"{path} lacks 1 of 2 pieces; begin again"):
        receiver.check_whole(path)
    receiver.put(message_of(begun["stream"], 1, b"abc"))
    receiver.check_whole(path)
    receiver.check_whole("/another/folder")
    receiver.close()
    with pytest.raises(NotWhole, match=r"lacks all pieces"):
        receiver.check_whole(path)


def test_what_is_not_the_piece_is_refused_and_forgotten(tmp_path, receiver):
    pieces = Pieces.of(folder_of(tmp_path / "1", 1))
    send(pieces, receiver)
    begun = receiver.begin(pieces.files, PIECE_BYTES)
    message = pieces.message(begun["stream"], 0, None)
    with pytest.raises(ValueError, match=r"piece 0 of config.json must have the digest"):
        receiver.put(message[:-1] + b"x")
    # Nobody takes the piece for the one that it was.
    assert receiver.begin(pieces.files, PIECE_BYTES)["digests"][0] is None
    with pytest.raises(ValueError, match="another sender has begun"):
        receiver.put(message)
    for bad in (b"", b"{}\n", b"[1]\nabc", b"\xff\n"):
        with pytest.raises(ValueError, match="must begin with a line of JSON"):
            receiver.put(bad)
    stream = receiver.begin(pieces.files, PIECE_BYTES)["stream"]
    for number in (-1, 4, "0", None):
        said = {"stream": stream, "number": number, "digest": "", "changes": False}
        with pytest.raises(ValueError, match="begin again"):
            receiver.put(json.dumps(said).encode() + b"\n")
    for changes in (b"", b"ab" * 2, np.array([65535, 65535, 1, 1, 1], np.uint16).tobytes()):
        said = {"stream": stream, "number": 3, "digest": "", "changes": True}
        with pytest.raises(ValueError, match="changes must"):
            receiver.put(json.dumps(said).encode() + b"\n" + changes)


def test_folders_of_processes_that_were_killed_are_removed(memory):
    """They hold memory; not the folder of one that lives."""
    lives = MemoryFolder(10)
    killed, making = memory / f"{module.PREFIX}killed", memory / f"{module.PREFIX}making"
    for folder in (killed, making):
        folder.mkdir()
    (killed / module.LOCK).touch()
    (killed / "model.safetensors").write_bytes(bytes(10))
    other = MemoryFolder(10)
    assert sorted(memory.iterdir()) == sorted([lives.path, making, other.path])
    for folder in (lives, other, other):
        folder.close()
    assert list(memory.iterdir()) == [making]


def test_without_room_in_memory_files_are_temporary_and_it_is_said(memory, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 1, 9))
    folder = MemoryFolder(10)
    assert folder.path.parent != memory
    assert "weights of 0.0 GB are kept in" in caplog.text
    assert "--shm-size" in caplog.text
    folder.close()
    assert not folder.path.exists()


def test_a_folder_that_was_removed_while_it_was_made_is_made_again(memory, monkeypatch):
    """By another process, which found it before it was locked."""
    plain, removed = fcntl.flock, []

    def slow(file, how):
        if how == fcntl.LOCK_EX and not removed:
            removed.append(Path(os.readlink(f"/proc/self/fd/{file}")).parent)
            shutil.rmtree(removed[0])
        plain(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    folder = MemoryFolder(10)
    assert folder.path != removed[0]
    assert folder.path.exists()
    folder.close()
