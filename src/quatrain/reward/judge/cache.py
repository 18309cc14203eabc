"""Judgements on disk, by the content of the question: each is asked for once, also by a run that is resumed.

A file for each judgement, written at once (a draft that takes its place), so that several processes may use
a folder, and a run that is killed leaves whole ones. Those of a judge whose weights change lie in a folder of
each weights, and go with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

from quatrain.reward.judge.judgements import Judgement

logger = logging.getLogger(__name__)

_WEIGHTS = re.compile("[0-9a-f]{16}")
"""The name of a folder of the judgements of some weights: their digest."""


def key_of(*content: Any) -> str:
    """What a judgement is kept under: a digest of JSON values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class JudgementCache:
    """The judgements in `folder`; None: in this process. Not `keeps`: nothing is kept."""

    def __init__(self, folder: Path | None = None, *, keeps: bool = True):
        self.folder, self._keeps = folder, keeps
        self.most_weights: int | None = None
        """Weights whose judgements stay, those that were begun last; None: all."""
        self._here: dict[str, Judgement] = {}
        self._file = Reported("judgements", "they are used, and a run that is resumed asks for them again")
        self.damaged = 0
        """Entries that were damaged, and are asked for again."""

    def begin(self, weights: str) -> None:
        """From now on the weights with this digest judge, which others did before.

        Removes from the folder what was judged by others than the last `most_weights`, and from the memory of
        this process what the others have judged. That the folder cannot be written is for `put` to report.
        """
        self._here.clear()
        if self.folder is None or not self._keeps:
            return
        own = self.folder / weights
        try:
            own.mkdir(parents=True, exist_ok=True)
            os.utime(own)  # the last one again, if a run that is resumed comes back to it
        except OSError:
            return
        if self.most_weights is None:
            return
        each = [path for path in self.folder.iterdir() if _WEIGHTS.fullmatch(path.name)]
        each.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in each[: -self.most_weights]:
            try:
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("the judgements of old weights in %s cannot be removed: %s", path, error)

    def get(self, key: str, weights: str = "") -> Judgement | None:
        """What was put under `key`; None for nothing, and for an entry that is damaged, which is reported.

        `weights`: those that judge, if they change, as `begin` has them.
        """
        if self.folder is None:
            return self._here.get(key)
        path = self._path(key, weights)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            entry = json.loads(content)
            found, digest = Judgement(entry["score"], entry["reason"]), entry["sha256"]
            if type(found.score) is not float or digest != _digest(key, found):
                raise ValueError("its digest is that of other content")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.damaged += 1
            logger.warning(
                "the judgement in %s is damaged (%s: %s); it is asked for again and replaced",
                *(path, type(error).__name__, error),
            )
            return None
        return found

    def put(self, key: str, judgement: Judgement, weights: str = "") -> None:
        """Keep a judgement; one that cannot be written, as on a full disk, is reported and not kept."""
        if not self._keeps:
            return
        if self.folder is None:
            self._here[key] = judgement
            return
        entry = {**judgement._asdict(), "sha256": _digest(key, judgement)}
        self._file.write(self._path(key, weights), json.dumps(entry, ensure_ascii=True))

    def _path(self, key: str, weights: str) -> Path:
        assert self.folder is not None
        return self.folder / weights / key[:2] / f"{key}.json"


class Reported:
    """Writes files; that `what` cannot be written costs a warning, with what `then` happens, until it can."""

    def __init__(self, what: str, then: str):
        self._what, self._then = what, then
        self._fails = False

    def write(self, path: Path, text: str) -> None:
        """`write_at_once`, which may fail: the run goes on."""
        try:
            write_at_once(path, text)
        except OSError as error:
            if not self._fails:
                logger.warning("%s cannot be written (%s); %s", self._what, error, self._then)
            self._fails = True
        else:
            self._fails = False


def write_at_once(path: Path, text: str) -> None:
    """Replaces a file whole, so that nobody reads a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _digest(key: str, judgement: Judgement) -> str:
    return key_of(key, judgement.score, judgement.reason)
