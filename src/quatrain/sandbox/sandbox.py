"""`Sandbox`: runs programs that a policy wrote, with limits, without network, files or secrets of the run.

Data flow: a reward function, tool or environment -> `Sandbox.run` -> `bubblewrap.py` or `container.py` ->
`Result`. Whatever the program does, it costs its own result alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from quatrain.sandbox import bubblewrap, container
from quatrain.sandbox.limits import WORK, Limits, Program, Result, SandboxUnavailable

Kind = Literal["auto", "bubblewrap", "docker", "podman"]
_SOURCE = "main.py"
_OF_SANDBOX = ("/proc", "/dev", "/dev/shm", "/tmp")
"""Folders of which a sandbox has its own."""


class Sandbox:
    """Runs programs, each in a sandbox of its own; from any number of threads and processes at once.

    Args:
        kind: "bubblewrap": new namespaces, with the system and the Python of this process. "docker",
            "podman": a container of `image`. "auto": the first of them that works here.
        timeout_s: seconds from start to end.
        memory_mb: MiB of memory of all processes together.
        files_mb: MiB of files, which are in memory: in /tmp, and as much again in /dev/shm.
        num_files: files and folders in them.
        num_processes: processes and threads at a time.
        output_kb: KiB of standard output, and of standard error.
        readable: folders and files of this machine that programs may also read ("bubblewrap").
        image: an image that is there ("docker" and "podman").

    Raises SandboxUnavailable, a ValueError, if this machine cannot give that isolation: nothing weaker takes
    its place.
    """

    def __init__(
        self,
        kind: Kind = "auto",
        *,
        timeout_s: float = Limits.timeout_s,
        memory_mb: int = Limits.memory_mb,
        files_mb: int = Limits.files_mb,
        num_files: int = Limits.num_files,
        num_processes: int = Limits.num_processes,
        output_kb: int = Limits.output_kb,
        readable: Sequence[str | Path] = (),
        image: str | None = None,
    ):
        self.limits = Limits(timeout_s, memory_mb, files_mb, num_files, num_processes, output_kb)
        if kind not in get_args(Kind):
            raise ValueError(f"kind is one of {', '.join(get_args(Kind))}, not {kind!r}")
        self.image = image
        self._readable = () if kind in ("docker", "podman") else _readable(readable)
        if readable and kind in ("docker", "podman"):
            raise ValueError(f"readable is for bubblewrap; give {kind} an image that has these files")
        reasons = {}
        for each in get_args(Kind)[1:] if kind == "auto" else (kind,):
            try:
                self._check(each)
            except SandboxUnavailable as error:
                reasons[each] = str(error)
            else:
                self.kind: Kind = each
                return
        said = "; ".join(f"{each}: {reason}" for each, reason in reasons.items())
        raise SandboxUnavailable(f"no sandbox for programs that a policy wrote, see docs/sandbox.md: {said}")

    def run(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        collect: Sequence[str] = (),
    ) -> Result:
        """Runs a command to its end, and returns what is known of it.

        Args:
            command: the program and its arguments, each of up to 128 KiB; no shell reads them.
            stdin: what its standard input has.
            files: by their names in the folder in which it starts, what they contain.
            collect: names of files of which the content is wanted when it has ended.

        Raises ValueError for input that does not fit into the limits, and SandboxError if the sandbox itself
        fails.
        """
        program = Program(
            tuple(_bytes(word).decode() for word in command),
            _bytes(stdin),
            {name: _bytes(content) for name, content in (files or {}).items()},
            tuple(collect),
        )
        if self.kind == "bubblewrap":
            return bubblewrap.run(program, self.limits, self._readable)
        return container.run(self.kind, str(self.image), program, self.limits)

    def run_python(
        self,
        source: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        collect: Sequence[str] = (),
    ) -> Result:
        """`run` with a Python program, the file main.py.

        In bubblewrap, it is run by the Python of this process, with its packages; in a container by the
        `python3` of the image. Raises as `run`, and ValueError if `files` has a main.py too.
        """
        files = files or {}
        if any(PurePosixPath(name) == PurePosixPath(_SOURCE) for name in files):
            raise ValueError(f"the file {_SOURCE} is the program itself; give another file another name")
        files = {**files, _SOURCE: source}
        python = sys.executable if self.kind == "bubblewrap" else "python3"
        return self.run((python, _SOURCE), stdin=stdin, files=files, collect=collect)

    def _check(self, kind: str) -> None:
        if kind == "bubblewrap":
            bubblewrap.check(sys.executable, self._readable)
        else:
            container.check(kind, self.image)


def _readable(more: Sequence[str | Path]) -> tuple[str, ...]:
    """The folders that hold this Python with its packages, and `more`."""
    home = Path(os.path.expanduser("~")).absolute()
    found: list[Path] = []
    for path in (sys.base_prefix, sys.prefix, *more):
        place = Path(path).absolute()
        target = place.resolve()
        if not place.exists():
            raise ValueError(f"what programs may read must exist, and {place} does not")
        # The home folder may be a link, and so may the folders above it.
        if any(each.is_relative_to(target) for each in (home, home.resolve(), Path("/etc"))):
            raise ValueError(
                f"programs of a policy would read {place}, which holds the home folder or the system's "
                "settings; run quatrain in a virtual environment, or name a smaller folder"
            )
        if place.is_relative_to(WORK) or any(Path(each).is_relative_to(place) for each in _OF_SANDBOX):
            raise ValueError(
                f"{place} cannot be readable: a sandbox has its own {', '.join(_OF_SANDBOX)} and {WORK}; "
                "move what programs may read to another folder, which may be below /tmp"
            )
        # Through a link, a folder below another is not there.
        for each in (place, target):
            if not any(each.is_relative_to(other) for other in (Path("/usr"), *found)):
                found.append(each)
                break
    return tuple(map(str, found))


def _bytes(text: str | bytes) -> bytes:
    # A policy's text may have halves of surrogate pairs.
    return text.encode(errors="replace") if isinstance(text, str) else text
