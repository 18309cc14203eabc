"""The host's memory: what compiling leaves behind is given back.

Under the update, whose largest programs come last.
"""

from __future__ import annotations

import ctypes
import sys


def give_back_free_memory() -> None:
    """Returns to the system what is free, where the C library is glibc; a few hundredths of a second.

    The library keeps what it was given in small pieces, as a compiler asks for it: of a process with a small
    model, about a fifth.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
