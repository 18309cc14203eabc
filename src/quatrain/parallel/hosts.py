"""Which process this is among those that train together.

Stands under every room that writes files or prints: only the main process does.
"""

from __future__ import annotations

import jax


def is_main_process() -> bool:
    """True in the one process that writes the run's files and talks to the user (process 0)."""
    return jax.process_index() == 0


def num_processes() -> int:
    """Processes that train together; 1 unless `jax.distributed` was initialised."""
    return jax.process_count()
