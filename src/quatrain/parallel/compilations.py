"""Counts XLA compilations of this process, so that a shape that should not have changed is seen.

Stands under the rollout and the update, which log the compilations of each step.
"""

from __future__ import annotations

import jax

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
