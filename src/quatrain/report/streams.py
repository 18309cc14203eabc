"""Standard output and error without secrets, which outlive their reader: `quatrain train | head -2` goes on.

Text for a file on a full disk is dropped.

Used by the command line around every command, for all that Python prints, such as a reward function.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar, cast

READER_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a closed pipe and of a terminal that was hung up."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a file, to which the output goes, that cannot grow now."""
T = TypeVar("T")


@contextmanager
def guarded_output(redact: Callable[[str], str]) -> Iterator[None]:
    """Within the block, printed text goes through `redact`, and is dropped once its reader has gone."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Guarded(stream, redact)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Guarded:
    """`stream` with redacted text; its file is exchanged for the null device when its reader has gone."""

    def __init__(self, stream: TextIO, redact: Callable[[str], str]):
        self._stream, self._redact = stream, redact

    def write(self, text: str) -> int:
        redacted = self._redact(text)
        self._try(lambda: self._stream.write(redacted), 0)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush, None)

    def _try(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except OSError as error:
            if error.errno in DISK_FULL:
                return otherwise
            if error.errno not in READER_GONE:
                raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # also for what the stream still holds, and for other writers
        os.close(null)
        return otherwise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
