"""Tables and warnings in lines of at most 80 columns; used by all outputs of `quatrain plan`."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 80
GAP = "  "
INDENT = "    "
UNBROKEN = "\N{NO-BREAK SPACE}"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """The lines of `rows`; columns `right` are aligned to the right; a long last cell has its own lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, text in rows:
        padded = [c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(cells, widths))]
        line = GAP.join((*padded, text)).rstrip()
        if len(line) <= WIDTH:
            yield line
        else:
            yield GAP.join(padded).rstrip()
            yield from (INDENT + part for part in wrapped(text, WIDTH - len(INDENT)))


def wrapped(text: str, width: int = WIDTH, indent: str = "") -> list[str]:
    """`text` in lines of `width`, not broken at an operator or after `--set`; one empty line of no text."""
    for whole in (" / ", " x ", "--set "):
        text = text.replace(whole, whole.replace(" ", UNBROKEN))
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(UNBROKEN, " ") for line in lines] or [""]


def warning_lines(warnings: Iterable[str]) -> Iterator[str]:
    """Each of `warnings`, wrapped."""
    for warning in warnings:
        yield from wrapped(f"warning: {warning}", indent=GAP)
