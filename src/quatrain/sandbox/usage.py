"""How much memory the processes of a sandbox use, from what Linux says of them in /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_KIB = 1024
_MOST_MAPS = 16 << 20
"""Bytes of /proc/PID/maps of all processes that a look reads: some 200,000 mappings."""
_PRIVATE = re.compile(rb"^(?:RssAnon|VmSwap|VmPTE):\s*(\d+)", re.MULTILINE)
_TABLES = re.compile(rb"^VmPTE:\s*(\d+)", re.MULTILINE)
_PROPORTIONAL = re.compile(rb"^(?:Pss_Anon|SwapPss):\s*(\d+)", re.MULTILINE)
# Shared memory without a file, as a line of /proc/PID/maps: first, last, access, offset, device, inode, name.
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s \S+ \S+ (\d+)\s+/dev/zero \(deleted\)$", re.MULTILINE)


def descendants(root: int) -> list[int]:
    """The processes below `root`, which have not all been waited for."""
    found: list[int] = []
    open_ends = [root]
    while open_ends:
        tasks = _PROC / str(open_ends.pop()) / "task"
        threads: list[str] = []
        with suppress(OSError):  # it has ended; `Path.glob` would raise where it ends meanwhile
            threads = os.listdir(tasks)
        for thread in threads:
            with suppress(OSError):
                children = [int(number) for number in (tasks / thread / "children").read_bytes().split()]
                found += children
                open_ends += children
    return found


def memory_bytes(processes: Sequence[int], enough: int) -> int:
    """Bytes of memory that the processes use for themselves, page tables and swapped pages included.

    Memory that they share among themselves counts once, where the kernel tells: always that of one mapping,
    and what a fork has not yet written only once the simple sum has reached `enough`. Shared memory without a
    file counts in full, because its pages stay also while no process has them in its tables. More than
    `_MOST_MAPS` of mappings count as more than `enough`.
    """
    total = sum(_private(process) for process in processes)
    if total > enough:
        total = sum(_proportional(process) for process in processes)
    shared: dict[bytes, int] = {}
    num_read = 0
    for process in processes:
        maps = _read(process, "maps")
        num_read += len(maps)
        if num_read > _MOST_MAPS:  # the kernel's own memory, and each look would take seconds
            return enough + 1
        for first, last, inode in _SHARED.findall(maps):
            size = int(last, 16) - int(first, 16)
            shared[inode] = max(size, shared.get(inode, 0))
    return total + sum(shared.values())


def _private(process: int) -> int:
    return _KIB * sum(int(value) for value in _PRIVATE.findall(_read(process, "status")))


def _proportional(process: int) -> int:
    exact = _PROPORTIONAL.findall(_read(process, "smaps_rollup"))
    tables = _TABLES.findall(_read(process, "status"))
    return _KIB * sum(int(value) for value in (*exact, *tables)) if exact else _private(process)


def _read(process: int, name: str) -> bytes:
    with suppress(OSError):  # it has ended
        return (_PROC / str(process) / name).read_bytes()
    return b""
