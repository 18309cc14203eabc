"""A process that `quatrain launch` has started ends with its launcher, even if that is killed.

The command line calls `end_with_launcher` first of all; `launch.py` sets the variable. The workers of reward
functions end with their run in the same way. Only Linux tells a process that its parent has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping

LAUNCHER = "QUATRAIN_LAUNCHER"
"""Environment variable with the launcher's process id."""
_PR_SET_PDEATHSIG = 1


def end_with_launcher(environ: MutableMapping[str, str]) -> None:
    """Have the system kill this process when its launcher ends; does nothing without one.

    The variable is removed: programs that this process starts are no children of the launcher.
    """
    launcher = environ.pop(LAUNCHER, None)
    if launcher is not None:
        end_with_parent(int(launcher))


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when process `parent` ends, also in a loop in C code then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)
