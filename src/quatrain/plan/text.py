"""Tables and warnings as lines of at most 100 columns; used by all outputs of `quatrain plan`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 100
GAP = "  "
UNBROKEN = "\N{NO-BREAK SPACE}"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), wrap: bool = False) -> Iterator[str]:
    """The lines of `rows`; columns `right` are aligned to the right, and the last is wrapped if `wrap`."""
    *widths, last = (max(map(len, column)) for column in zip(*rows, strict=True))
    last = WIDTH - sum(widths) - len(GAP) * len(widths) if wrap else last
    for *cells, text in rows:
        padded = [c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(cells, widths))]
        first, *more = wrapped(text, last) if wrap else [text.rjust(last) if len(cells) in right else text]
        yield GAP.join((*padded, first)).rstrip()
        yield from (" " * (WIDTH - last) + line for line in more)


def wrapped(text: str, width: int = WIDTH, indent: str = "") -> list[str]:
    """`text` in lines of `width`, which are not broken next to an operator; one empty line of no text."""
    for operator in ("/", "x"):
        text = text.replace(f" {operator} ", f"{UNBROKEN}{operator}{UNBROKEN}")
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(UNBROKEN, " ") for line in lines] or [""]


def warning_lines(warnings: Iterable[str]) -> Iterator[str]:
    """Each of `warnings`, wrapped."""
    for warning in warnings:
        yield from wrapped(f"warning: {warning}", indent=GAP)
