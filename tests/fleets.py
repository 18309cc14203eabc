"""Fleets in tests: one that hangs ends with an error."""

import threading
from contextlib import contextmanager


@contextmanager
def closing(fleet, limit_s):
    """`fleet`, which is closed after the block, and after `limit_s` seconds whatever it waits for."""
    watch = threading.Timer(limit_s, fleet.close)
    watch.start()
    try:
        yield fleet
    finally:
        watch.cancel()
        fleet.close()
