"""Memory of this process: its peak, and the return of what the compiler has freed to the operating system.

Used by the update, which compiles the largest programs and has the highest peak, and by runs, which log it.
"""

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

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


def peak_bytes() -> int | None:
    """The most bytes that were in use so far on any device of this process; None where nothing tells.

    The devices of a CPU do not tell: there it is the largest resident set of the process, its children not
    counted.
    """
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in statistics if "peak_bytes_in_use" in stats]
    if peaks:
        return max(peaks)
    if sys.platform == "linux":  # `ru_maxrss` is inherited from the process that started this one
        resident = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        if resident:
            return 1024 * int(resident[1])
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
