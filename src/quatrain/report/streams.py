"""Standard output and error that outlive their reader: `quatrain train | head -2` goes on training.

Used by the command line around every command.
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
T = TypeVar("T")


@contextmanager
def unbroken_output() -> Iterator[None]:
    """Within the block, what is printed after the reader has gone is dropped, and no error is raised."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Unbroken(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Unbroken:
    """`stream`, whose file is exchanged for the null device when its reader has gone."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text), len(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self._try(lambda: self._stream.writelines(lines), None)

    def flush(self) -> None:
        self._try(self._stream.flush, None)

    def _try(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except OSError as error:
            if error.errno not in READER_GONE:
                raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # also for what the stream still holds, and for other writers
        os.close(null)
        return otherwise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
