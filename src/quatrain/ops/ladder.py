"""The few sizes that shapes are rounded up to, so that data never causes a new compilation for long."""

from __future__ import annotations


def round_up(size: int, minimum: int = 16) -> int:
    """The smallest of 2^k and 3·2^k that is at least `size` and `minimum`: at most a third is padding."""
    target, rung = max(size, minimum), 1
    while rung < target:
        rung *= 2
    return 3 * rung // 4 if 3 * rung // 4 >= target and rung >= 4 else rung
