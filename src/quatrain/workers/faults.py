"""What users' code does wrong in an episode, as one exception, and the words for it.

Environments, tools and agents raise it where they are called, and it comes out of the process in which that
was (`worker_script.py`): whatever users' code does costs its episode and never the run. Other interpreters
than the run's import this file.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

from quatrain.config.secrets import redact

LONGEST_ERROR = 2000
"""Characters of an exception's text that is shown."""
SHOWN_FRAMES = 5
_PACKAGE = Path(__file__).parents[1]

T = TypeVar("T")
FaultKind = Literal["error", "invalid", "too_long", "timeout", "crash"]


class Fault(Exception):
    """What users' code did wrong; it ends the episode, which gets the reward of an error, never the run.

    `kind` is "error" for an exception, "invalid" for a value that is not allowed, "too_long" for text that no
    context has room for, "timeout" for a call that took too long, and "crash" for the end of its process.
    `detail` are the last lines of code of an exception, or of a method that took too long. It can be pickled,
    and holds nothing of the user's objects.
    """

    def __init__(self, message: str, kind: FaultKind, detail: str = ""):
        super().__init__(message, kind, detail)  # what an unpickled exception is made of
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return str(self.args[0])


def fault_of(what: str, error: BaseException) -> Fault:
    """The fault of `what`, which raised `error`."""
    if isinstance(error, Fault):
        return error.with_traceback(None)
    detail = "".join(traceback.format_tb(error.__traceback__, limit=-SHOWN_FRAMES))
    return Fault(f"{what} raised {format_error(error)}", "error", detail)


def run_guarded(what: str, work: Callable[[], T]) -> T:
    """What `work` returns; whatever it raises is a Fault, and `what` names it.

    The user's interrupt is raised as it is.
    """
    try:
        return work()
    except BaseException as error:  # includes SystemExit, which would end the run
        if is_interrupt(error):
            raise
        fault = fault_of(what, error)
    # Raised out of the handler and without what led to it: a fault is kept as long as its episode, and a
    # traceback would keep the frames, and so the values, of the environment in memory as long.
    fault.__cause__ = fault.__context__ = None
    raise fault


def is_interrupt(error: BaseException) -> bool:
    """Whether the user interrupts the run, of which Python tells the main thread alone."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def format_error(error: BaseException) -> str:
    """An exception in one line: class, text and place, without secrets; a long text is left out whole."""
    text = ""
    with suppress(Exception):  # of the exception's own __str__
        text = str(error)
    # Whole or not at all: part of a secret cannot be redacted.
    text = redact(text, os.environ) if len(text) <= LONGEST_ERROR else f"a text of {len(text)} characters"
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    # A place in this package would send the user to look for the mistake there.
    elsewhere = frames and _PACKAGE not in Path(frames[0].filename).parents
    place = f" ({Path(frames[0].filename).name}, line {frames[0].lineno})" if elsewhere else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
