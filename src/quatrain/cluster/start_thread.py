"""Starts threads of this process, for all rooms."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any


def start_thread(target: Callable[..., Any], *args: Any, name: str) -> threading.Thread:
    """Calls `target(*args)` in a new daemon thread, with the caller's context, which has the run's log.

    Raises RuntimeError if the system has no more threads.
    """
    run = copy_context().run
    thread = threading.Thread(target=run, args=(target, *args), name=name, daemon=True)
    thread.start()
    return thread
