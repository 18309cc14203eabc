"""`jax.jit` with the compiler options of a backend, and a counter of compiled programs.

Used by the rollout and the update, which log the number of compilations in each step: after the first steps,
a compilation means that an array shape changed which should not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from quatrain.backend import Backend

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""The event that JAX reports to its listeners, with a duration in seconds, for each program it compiles."""
_count = 0


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _count
    _count += event == COMPILE_EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
    """Programs compiled so far in this process; calls that reuse a program in memory do not count."""
    return _count


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
