"""What a worker process (`worker.py`) does first: it ends with its run, and limits its memory.

This module imports little, because workers must start quickly.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quatrain.cluster.launcher import end_with_parent

LOAD_TIMEOUT_S = 120.0
"""Time limit of importing the module of a user's function or class."""


def enter(settings: Mapping[str, Any]) -> None:
    """Makes this process a worker of its `parent`; `memory_mb` limits its memory, or is None."""
    end_with_parent(settings["parent"])
    _outlive_stops()
    _limit_memory(settings["memory_mb"])


def _outlive_stops() -> None:
    """Ignores what stops a run, which may come to all its processes: the run ends its workers when it ends.

    By a handler, not SIG_IGN, which the programs that a function starts would inherit.
    """
    stops = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: None) for number in stops}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


def _limit_memory(memory_mb: int | None) -> None:
    """Limits this process's private memory, and lets the kernel end it first if the machine has none left.

    RLIMIT_DATA counts private writable memory; RLIMIT_AS would also count what libraries only reserve.
    """
    with contextlib.suppress(OSError):  # only Linux has this file
        Path("/proc/self/oom_score_adj").write_text("1000")
    if memory_mb is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = memory_mb << 20 if hard == resource.RLIM_INFINITY else min(memory_mb << 20, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
