"""How the model's programs are compiled; and how many were, so that a shape that should not change is seen.

Stands under the rollout and the update, which log the compilations of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

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


def with_barriers(function: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    """What gives `jax.jit(function, **options)`, in which `jax.lax.optimization_barrier` holds.

    On a CPU, XLA takes barriers away before it merges and fuses: what the backward pass is to compute again
    would be computed once and kept, and what is to be made once would be made wherever it is used. The
    devices have to be known for that, which importing must not ask for.
    """

    @cache
    def program() -> Any:
        on_cpu = jax.default_backend() == "cpu"
        kept = {"xla_disable_hlo_passes": "cse_barrier_expander"} if on_cpu else None
        return jax.jit(function, compiler_options=kept, **options)

    return program
