"""Host memory: returns memory that the compiler has freed to the operating system.

Used by the update, which compiles the largest programs and has the highest peak of memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from quatrain.parallel.compilations import num_compilations


@contextmanager
def trim_after_compiling() -> Iterator[None]:
    """Calls `trim_free_memory` at the end of the block if a program was compiled in it."""
    before = num_compilations()
    yield
    if num_compilations() > before:
        trim_free_memory()


def trim_free_memory() -> None:
    """Returns free heap memory to the operating system (`malloc_trim`); does nothing without glibc on Linux.

    glibc keeps memory that was allocated in small pieces, as a compiler does; in a process with a small model
    this is about a fifth of its memory. The call takes a few hundredths of a second.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
