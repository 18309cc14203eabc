"""`jax.jit` with the compiler options of a backend; how many programs were compiled, and how long it took.

Used by the rollout and the update, which log the number of compilations in each step (after the first steps,
a compilation means that an array shape changed which should not), and by the progress display. JAX reports
the begin and the end of three activities to listeners: tracing a function, lowering it, and compiling it or
reading it from the compilation cache. All three count as time spent compiling.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax

from quatrain.backend import Backend

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""The event that JAX reports to its listeners, with a duration in seconds, for each program it compiles."""
_ACTIVITIES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    COMPILE_EVENT,
)


class _Record:
    """Programs compiled so far and seconds during which any thread compiled; `watchers` are called."""

    def __init__(self) -> None:
        self.count = 0
        self.watchers: list[Callable[[], None]] = []
        self._seconds = 0.0
        self._began = 0.0
        self._depth = 0
        """Activities going on, one inside the other or in several threads."""
        self._lock = threading.Lock()

    def begin(self, event: str, value: float, **kwargs: str | int) -> None:
        if event not in _ACTIVITIES:
            return
        with self._lock:
            # Only the outermost counts: tracing a function traces and compiles others within it.
            if not self._depth:
                self._began = time.perf_counter()
            self._depth += 1
        if event == COMPILE_EVENT:
            # A copy, because another thread may end its watching meanwhile.
            for watcher in tuple(self.watchers):
                watcher()

    def end(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event not in _ACTIVITIES:
            return
        with self._lock:
            self.count += event == COMPILE_EVENT
            if not self._depth:  # its begin was not reported
                self._seconds += duration_secs
                return
            self._depth -= 1
            if not self._depth:
                self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        """Seconds spent compiling so far, those of a program still being compiled included.

        Two threads that compile at the same time count once.
        """
        with self._lock:
            return self._seconds + (time.perf_counter() - self._began if self._depth else 0.0)

    def current_s(self) -> float | None:
        """Seconds since this process began to compile a program; None while it compiles nothing."""
        with self._lock:
            return time.perf_counter() - self._began if self._depth else None


_record = _Record()
compile_seconds, compiling_for_s = _record.seconds, _record.current_s
jax.monitoring.register_scalar_listener(_record.begin)
jax.monitoring.register_event_duration_secs_listener(_record.end)


def num_compilations() -> int:
    """Programs that this process has compiled or read from the compilation cache so far.

    Calls of a program that is in memory already do not count.
    """
    return _record.count


@contextmanager
def watching_compilations(watcher: Callable[[], None]) -> Iterator[None]:
    """Within the block, `watcher` is called before each program is compiled, in the thread that compiles."""
    _record.watchers.append(watcher)
    try:
        yield
    finally:
        _record.watchers.remove(watcher)


def jit_for_backend(function: Callable[..., Any], **options: Any) -> Callable[[Backend], Any]:
    """A function of a `Backend` that returns `jax.jit(function, **options)` with its compiler options.

    `jax.jit` takes compiler options when the jitted function is created, but importing a module must not ask
    JAX for its devices. Therefore this returns a function of the backend, called at run time; for the same
    backend it always returns the same jitted function.
    """

    @cache
    def program(backend: Backend) -> Any:
        return jax.jit(function, compiler_options=dict(backend.compiler_options) or None, **options)

    return program
