"""Damage as disks and interrupted copies do it, to one file of a folder."""

from __future__ import annotations

import random
from pathlib import Path

KINDS = ("flip", "flip", "flip", "truncate", "zeros", "garbage", "empty", "delete")
"""A third of the damage is a single flipped bit, the hardest to see."""


def damage(folder: Path, rng: random.Random) -> str:
    """Damages a random file below `folder`; returns what was done, such as `flip 12 d/0a1b`."""
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    kind = rng.choice(KINDS)
    content = bytearray(file.read_bytes())
    where = rng.randrange(len(content)) if content else 0
    if kind == "delete":
        file.unlink()
    elif kind == "flip" and content:
        content[where] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        content[where : where + 64] = bytes(len(content[where : where + 64]))
    elif kind == "garbage":
        content[:] = rng.randbytes(len(content))
    elif kind == "truncate":
        del content[where:]
    elif kind == "empty":
        content.clear()
    if kind != "delete":
        file.write_bytes(content)
    return f"{kind} {where} {file.relative_to(folder)}"
