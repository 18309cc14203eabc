"""Standard output and error without secrets, which outlive their reader: `quatrain train | head -2` goes on.

Text that cannot be written, as to a file on a full disk, is dropped and remembered: the command goes on, and
says so at its end.

Used by the command line around every command, for all that Python prints, such as a reward function. Messages
are `fitted` to the width of a terminal.
"""

import errno
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar, cast

READER_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a closed pipe and of a terminal that was hung up."""
STANDARD_FILES = 3
DEFAULT_WIDTH = 80
"""Columns of a terminal that does not tell how many it has."""
T = TypeVar("T")
Redact = Callable[[str], str]


@contextmanager
def guarded_output(redact: Redact) -> Iterator[list[OSError]]:
    """Within the block, printed text goes through `redact`, and is dropped once its reader has gone.

    Yields a list which, after the block, has the errors for which text of standard output was lost.
    """
    before = sys.stdout, sys.stderr
    _fill_closed_files()
    output, errors = (_Guarded(stream or open(os.devnull, "w"), redact) for stream in before)  # noqa: SIM115
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, errors)
    try:
        yield output.lost
    finally:
        for stream in (output, errors):
            stream.flush()
            if stream.lost:
                stream.discard()  # else the interpreter writes it again when it ends, and complains
        sys.stdout, sys.stderr = before


def fitted(text: str, stream: TextIO) -> str:
    """`text` with its lines broken between words where they are longer than the terminal of `stream` is wide.

    Elsewhere than in a terminal the text stays as it is, and so does a line that begins with a space: a
    command, which can then be copied whole. A word that is longer than the terminal, such as a path, has a
    line of its own.
    """
    try:
        width = os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):  # not a terminal, or no file at all
        return text
    lines = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    whole = (line if line.startswith(" ") else lines.fill(line) for line in text.split("\n"))
    return "\n".join(whole)


def _fill_closed_files() -> None:
    """Opens the null device where a standard file is closed: another file would take its number, and be
    written into by whatever prints there."""
    while (number := os.open(os.devnull, os.O_RDWR)) < STANDARD_FILES:
        os.set_inheritable(number, True)
    os.close(number)


class _Guarded:
    """`stream` with redacted text; its file is exchanged for the null device when its reader has gone."""

    def __init__(self, stream: TextIO, redact: Redact):
        self._stream, self._redact = stream, redact
        self.lost: list[OSError] = []

    def write(self, text: str) -> int:
        redacted = self._redact(text)
        self._try(lambda: self._stream.write(redacted), 0)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush, None)

    def discard(self) -> None:
        """Put the null device in place of the file, also for what the stream holds and for other writers."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def _try(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except OSError as error:
            if error.errno in READER_GONE:
                self.discard()
            else:
                self.lost.append(error)
            return otherwise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def console_messages(redact: Redact) -> Iterator[None]:
    """Within the block, warnings that no run writes into its log are printed as those of a run are."""
    handler = ConsoleHandler(redact)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


class Redacting(logging.Formatter):
    """Log messages in `style`, without secrets."""

    def __init__(self, style: str, redact: Redact):
        super().__init__(style)
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))


def _is_printed(name: str) -> bool:
    """Whether a logger of another library, such as huggingface_hub, prints the messages of `name` itself."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and logger.parent is not None:
        if any(type(handler) is logging.StreamHandler for handler in logger.handlers):
            return True
        logger = logger.parent
    return False


class ConsoleHandler(logging.Handler):
    """Prints messages to the current `sys.stderr`, which a live progress display replaces while it runs.

    A warning begins with `warning: `, an error with `error: `, as those of the command line do.
    """

    def __init__(self, redact: Redact):
        super().__init__()
        self.setFormatter(Redacting("%(message)s", redact))
        self.addFilter(lambda record: not getattr(record, "only_in_file", False))
        self.addFilter(lambda record: not _is_printed(record.name))

    def emit(self, record: logging.LogRecord) -> None:
        mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        try:
            print(fitted(f"{mark}{self.format(record)}", sys.stderr), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)
