"""Ends a worker process with all that it has started, programs in sessions of their own included.

`worker_script.py` calls `guarded`, which leaves a guard between the run and the worker: a small process that
adopts what the worker's programs leave behind, so that all of it stays below the guard, and that ends all of
it when the worker or the run ends, however that happens. `worker_process.py` calls `end_descendants` of the
guard when the run ends a worker. Only Linux adopts (`PR_SET_CHILD_SUBREAPER`) and lists processes in /proc;
elsewhere a worker ends with its process group alone. Other interpreters than the run's import this file: it
needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ENDS_WITHIN_S = 2.0
"""Seconds after which processes that are not ended by SIGKILL, those of another user, are left."""
_POLL_S = 0.002
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_PROC = Path("/proc")
_IS_LINUX = sys.platform == "linux"


def guarded(parent: int, *files: int) -> int:
    """Goes on in a child of this process, which becomes its guard; returns the process id of the guard.

    The guard closes `files`. It ends as the child does, after all else that is below it; if `parent` ends, so
    do all. Where processes are not adopted, this process goes on, and the result is `parent`.
    """
    if not _IS_LINUX:
        return parent
    guard = os.getpid()
    # SIGCHLD, which waits until it is asked for, tells of both ends: of a child, and of the parent. Signals
    # that stop a run may come to all its processes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPS}
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)
    child = os.fork()
    if child:
        _guard(child, parent, files)
    # What the child sends to its process group does not reach the guard.
    os.setsid()
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return guard


def end_descendants(root: int) -> None:
    """Kills the processes below `root`, and those that they start meanwhile; does nothing without /proc."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    # Again and again: a process that is killed may have started another since the list was made, and what it
    # leaves is adopted only then.
    while _IS_LINUX and (living := _living_descendants(root)) and time.monotonic() < deadline:
        for process in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_S)


def is_stopped(process: int) -> bool:
    """Whether a process is stopped (SIGSTOP); False without /proc."""
    status = _status(_PROC / str(process))
    return status is not None and status[0] in "Tt"


def _guard(child: int, parent: int, files: Sequence[int]) -> NoReturn:
    faulthandler.disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nothing, file)
    for file in files:
        os.close(file)
    # The parent is asked for, as well as waited for: it may have ended before its signal was ordered.
    status = None
    while status is None and os.getppid() == parent:
        signal.sigwait({signal.SIGCHLD})
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    status = ended[1]
    # First what is left, then the guard, with the worker's status: whoever reads that may take it that all
    # has ended.
    end_descendants(os.getpid())
    _end_as(os.waitstatus_to_exitcode(status or 0))


def _end_as(exit_code: int) -> NoReturn:
    """Ends this process with the status that a process with this exit code had."""
    if exit_code >= 0:
        os._exit(exit_code)
    _prctl(_PR_SET_DUMPABLE, 0)  # the child's core is enough
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(-exit_code, signal.SIG_DFL)
    os.kill(os.getpid(), -exit_code)
    os._exit(128 - exit_code)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _living_descendants(root: int) -> list[int]:
    """The processes below `root` that have not ended."""
    children: dict[int, list[tuple[int, str]]] = {}
    for folder in _PROC.glob("[0-9]*"):
        if (status := _status(folder)) is not None:
            children.setdefault(status[1], []).append((int(folder.name), status[0]))
    found, below = [], [root]
    while below:
        for process, state in children.get(below.pop(), ()):
            below.append(process)
            if state not in "ZX":
                found.append(process)
    return found


def _status(folder: Path) -> tuple[str, int] | None:
    """State and parent of the process with this folder in /proc; None if it has gone."""
    try:  # its name, in brackets, may have brackets and spaces
        state, parent, *_ = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return state, int(parent)
