"""Lines on stderr that say what a command does before its first step; the command begins, `loop/` goes on.

Without JAX, which the command imports after its first line.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class _StartUp:
    speaks: bool
    began: float
    stage: str = ""
    said_at: float = 0.0


_current: ContextVar[_StartUp | None] = ContextVar("start-up", default=None)


@contextmanager
def starting(*, speaks: bool = True) -> Iterator[None]:
    """Within the block `stage` prints, if this process `speaks`; in a block of another, as that says."""
    if _current.get() is not None:
        yield
        return
    token = _current.set(_StartUp(speaks, time.monotonic()))
    try:
        yield
    finally:
        _current.reset(token)


def stage(what: str) -> None:
    """Says in a line that `what` begins; nothing outside of `starting`."""
    current = _current.get()
    if current is None:
        return
    current.stage = what
    # Until several processes are connected, each but the first is told by its command not to speak.
    hosts = sys.modules.get("quatrain.cluster.processes")
    if hosts is not None and hosts.joined():
        current.speaks = hosts.is_main_process()
    _say(current)


def remind(after_s: float) -> None:
    """Says again which stage goes on, if nothing was said for so many seconds."""
    current = _current.get()
    if current is not None and time.monotonic() - current.said_at >= after_s:
        _say(current)


def _say(current: _StartUp) -> None:
    current.said_at = time.monotonic()
    if current.speaks:
        elapsed = clock(current.said_at - current.began)
        print(f"start | {current.stage} | {elapsed} elapsed", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """A duration as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
