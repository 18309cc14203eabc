"""What a sandboxed program may use, and what is known after it has ended.

Data flow: `sandbox.py` gives a `Program` and `Limits` to `bubblewrap.py` or `container.py`, and a `Result`
comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

EndedBy = Literal["exit", "time", "memory", "output", "files"]
WORK = "/tmp/work"
"""The folder in which a program starts."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": WORK,
    # Libraries would start a thread for each core of the machine, and threads count as processes.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All environment variables of a program; nothing comes from the run."""
LONGEST_WORD = (1 << 17) - 1
"""Bytes of an argument of a program: with a null byte behind them the kernel's MAX_ARG_STRLEN."""
START_S = 30.0
"""Seconds that a sandbox may take to start, on a busy machine."""
OPEN_FILES = 256
"""Files that a process may have open."""


class SandboxUnavailable(ValueError):
    """This machine cannot give the isolation that was asked for; the text says why."""


class SandboxError(RuntimeError):
    """A sandbox could not be started or ended; the program is not at fault."""


@dataclass(frozen=True)
class Limits:
    """What one program, with all that it starts, may use; docs/sandbox.md says how each limit is kept."""

    timeout_s: float = 10.0
    memory_mb: int = 512
    files_mb: int = 64
    num_files: int = 4096
    num_processes: int = 64
    output_kb: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind, what = (int | float, "number") if name == "timeout_s" else (int, "whole number")
            if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < 1 << 31:
                raise ValueError(f"{name} must be a {what} above 0, not {value!r}")


@dataclass(frozen=True)
class Program:
    """A command with its input, the files in its folder, and the names of those to bring back."""

    command: tuple[str, ...]
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    collect: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command or any("\0" in word for word in self.command):
            raise ValueError(
                f"a command has at least one word and no null characters, but this is {self.command}"
            )
        if (longest := max(len(word.encode()) for word in self.command)) > LONGEST_WORD:
            raise ValueError(
                f"a word of a command has at most {LONGEST_WORD} bytes, which Linux takes, but this has one "
                f"of {longest}; give a long text as a file, or as stdin"
            )
        for name in (*self.files, *self.collect):
            parts = PurePosixPath(name).parts
            if not parts or ".." in parts or name.startswith("/") or "\0" in name or not _is_utf8(name):
                raise ValueError(
                    "files are named relative to the program's folder, without '..', in valid Unicode, but "
                    f"this is {name!r}"
                )


def _is_utf8(text: str) -> bool:
    """Whether a text has no halves of surrogate pairs, which a policy may write in JSON."""
    return text == text.encode(errors="replace").decode()


@dataclass(frozen=True)
class Result:
    """How a program ended, and what it wrote.

    Attributes:
        ended_by: "exit": by itself, also if a signal ended it; else the limit that it exceeded.
        exit_code: its exit code, 128 + number after a signal; None if it was ended for a limit.
        stdout, stderr: the first `output_kb` KiB of each, as UTF-8 with replacements.
        cut_bytes: bytes that were written beyond those and read; if any, `ended_by` is not "exit".
        time_s: seconds from its start to its end.
        files: the contents of the files of `collect`.
        not_collected: for each other name of `collect`, why there is no content.
    """

    ended_by: EndedBy
    exit_code: int | None
    stdout: str
    stderr: str
    cut_bytes: int
    time_s: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    not_collected: Mapping[str, str] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.ended_by == "exit" and self.exit_code == 0

    def __str__(self) -> str:
        """What a model may read: output and errors, and how it ended unless with exit code 0."""
        how = "" if self.succeeded else f"[ended by {self.ended_by}]"
        if self.ended_by == "exit" and not self.succeeded:
            how = f"[exit code {self.exit_code}]"
        cut = f"[{self.cut_bytes} more bytes]" if self.cut_bytes else ""
        return "\n".join(part.strip("\n") for part in (self.stdout, self.stderr, cut, how) if part)
