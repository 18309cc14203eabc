"""How the model's programs are compiled; and how many were, so that a shape that should not change is seen.

Stands under the rollout and the update, which log the compilations of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from quatrain.backend import Backend

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX tells its listeners of, with the seconds, for each program it compiles."""
_count = 0


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _count
    _count += event == COMPILE_EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
    """Programs compiled so far in this process; calls served from a cache in memory do not count."""
    return _count


def jit_for_backend(function: Callable[..., Any], **options: Any) -> Callable[[Backend], Any]:
    """A function of a `Backend` that returns `jax.jit(function, **options)` with its compiler options.

    Compiler options are given to `jax.jit` itself, and importing a module must not ask which devices there
    are: hence a function, which returns the same jitted function for the same backend.
    """

    @cache
    def program(backend: Backend) -> Any:
        return jax.jit(function, compiler_options=dict(backend.compiler_options) or None, **options)

    return program
