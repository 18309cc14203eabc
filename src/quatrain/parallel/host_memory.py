"""The host's memory: what compiling leaves behind is given back.

Under the update, which compiles the largest programs and needs most memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from quatrain.parallel.compilations import num_compilations


@contextmanager
def trim_after_compiling() -> Iterator[None]:
    """Gives back free memory at the end of a block in which something was compiled."""
    before = num_compilations()
    yield
    if num_compilations() > before:
        trim_free_memory()


def trim_free_memory() -> None:
    """Returns to the system what is free, where the C library is glibc; a few hundredths of a second.

    The library keeps what it was given in small pieces, as a compiler asks for it: of a process with a small
    model, about a fifth.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
