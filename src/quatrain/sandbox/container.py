"""Runs a program in a container of its own, with the command line of Docker or Podman.

Data flow: `Program` and `Limits` -> `docker run` of a container that only waits -> `docker exec` of tar
(files), of the program, and of tar (files back) -> `docker rm` -> `Result`. The container ends by itself soon
after the program's time, so it also ends if the run is killed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from quatrain.sandbox.limits import (
    ENVIRONMENT,
    OPEN_FILES,
    START_S,
    WORK,
    EndedBy,
    Limits,
    Program,
    Result,
    SandboxError,
    SandboxUnavailable,
)
from quatrain.sandbox.pipes import Pipes, memory_file

_NOBODY = "65534:65534"
_LATER_S = 2 * START_S
"""Seconds after a program's time at which its container ends by itself."""
_BLOCK = 10_240
"""Bytes to which tar rounds an archive up; each file takes 1 KiB more than its content at most."""


def run(client: str, image: str, program: Program, limits: Limits) -> Result:
    """Runs a program to its end; `check` must have passed. Raises SandboxError."""
    name = f"quatrain-{uuid.uuid4().hex}"
    with ExitStack() as stack:
        stack.callback(_remove, client, name)
        _call(client, "run", *_options(name, limits), image, str(int(limits.timeout_s + _LATER_S)))
        _put(client, name, program, limits)
        environment = [f"--env={key}={value}" for key, value in ENVIRONMENT.items() if key != "PATH"]
        command = ("exec", "--interactive", f"--workdir={WORK}", *environment, name, *program.command)
        process = _started(client, *command, stdin=program.stdin, stack=stack)
        pipes = stack.enter_context(Pipes(process, limits.output_kb << 10))
        began = time.monotonic()
        ended_by: EndedBy = pipes.read(began + limits.timeout_s, lambda: None) or "exit"
        time_s = time.monotonic() - began
        exit_code: int | None = None
        files: dict[str, bytes] = {}
        missing = dict.fromkeys(program.collect, "the program was ended, and its container with it")
        if ended_by == "exit":
            pipes.drain()
            exit_code = process.wait()
            if pipes.cut_bytes:
                ended_by, exit_code = "output", None
            elif _out_of_memory(client, name):
                ended_by, exit_code = "memory", None
            elif program.collect:
                files, missing = _collected(client, name, program.collect, limits)
        return Result(
            ended_by=ended_by,
            exit_code=exit_code,
            stdout=pipes.stdout.decode(errors="replace"),
            stderr=pipes.stderr.decode(errors="replace"),
            cut_bytes=pipes.cut_bytes,
            time_s=time_s,
            files=files,
            not_collected=missing,
        )


@cache
def check(client: str, image: str | None) -> None:
    """Raises SandboxUnavailable unless `client` keeps the limits here, and has the image."""
    if not hasattr(os, "pidfd_open"):
        raise SandboxUnavailable("sandboxes need Linux")
    if image is None:
        raise SandboxUnavailable("no image is given")
    if shutil.which(client) is None:
        raise SandboxUnavailable(f"there is no `{client}`")
    try:
        about = json.loads(_call(client, "info", "--format={{json .}}"))
        _call(client, "image", "inspect", image)
    except (SandboxError, ValueError) as error:
        raise SandboxUnavailable(str(error)) from None
    # Rootless Podman ignores limits that it has no control groups for, with a warning.
    for promise, kept in _promises(about).items():
        if not kept:
            raise SandboxUnavailable(f"{client} keeps {promise} on this machine, as `{client} info` says")


def _promises(about: Mapping[str, Any]) -> dict[str, bool]:
    """What `info` says of limits and filters; Docker's form, or Podman's."""
    if (host := about.get("host")) is not None:
        controllers = host.get("cgroupControllers") or ()
        return {
            "no limit on memory": "memory" in controllers,
            "no limit on processes": "pids" in controllers,
            "no filter of system calls": bool((host.get("security") or {}).get("seccompEnabled")),
        }
    filtered = [each for each in about.get("SecurityOptions") or () if re.match("name=seccomp", each)]
    return {
        "no limit on memory": bool(about.get("MemoryLimit")) and bool(about.get("SwapLimit")),
        "no limit on processes": bool(about.get("PidsLimit")),
        "no filter of system calls": bool(filtered) and "unconfined" not in filtered[0],
    }


def _options(name: str, limits: Limits) -> list[str]:
    size, memory = f"{limits.files_mb}m", f"{limits.memory_mb}m"
    return [
        "--detach",
        "--rm",
        "--init",
        "--pull=never",
        f"--name={name}",
        "--network=none",
        "--read-only",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--user={_NOBODY}",
        f"--memory={memory}",
        f"--memory-swap={memory}",
        # The one that waits, and the one that reaps, are not the program's.
        f"--pids-limit={limits.num_processes + 2}",
        f"--tmpfs=/tmp:rw,exec,nosuid,nodev,size={size},nr_inodes={limits.num_files},mode=1777",
        f"--shm-size={size}",
        f"--ulimit=nofile={OPEN_FILES}:{OPEN_FILES}",
        f"--ulimit=fsize={limits.files_mb << 20}:{limits.files_mb << 20}",
        "--ulimit=core=0:0",
        "--log-driver=none",
        "--entrypoint=sleep",
    ]


def _put(client: str, name: str, program: Program, limits: Limits) -> None:
    """Makes the program's folder with its files."""
    size = sum(len(content) for content in program.files.values())
    if size > limits.files_mb << 20:
        raise ValueError(
            f"the {len(program.files)} files of a program, {size} bytes, do not fit into "
            f"files_mb={limits.files_mb}"
        )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in program.files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    make = f"mkdir -p {WORK} && exec tar -x -f - -C {WORK}"
    _call(client, "exec", "--interactive", name, "sh", "-c", make, stdin=packed.getvalue())


def _collected(
    client: str, name: str, names: Sequence[str], limits: Limits
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Contents of the named files, and why others have none.

    The archive is read, and nothing of it is written to a disk. It was made in the container, so a link leads
    to what the program could read itself.
    """
    missing = dict.fromkeys(names, "No such file, or not a regular one")
    most = (limits.files_mb << 20) + 1024 * len(names) + _BLOCK
    with ExitStack() as stack:
        asked = ("exec", name, "tar", "-c", "-f", "-", "-C", WORK, "--", *names)
        process = _started(client, *asked, stdin=b"", stack=stack)
        pipes = stack.enter_context(Pipes(process, most))
        if pipes.read(time.monotonic() + START_S, lambda: None) is not None:
            return {}, dict.fromkeys(names, "the files are larger than files_mb together, or took too long")
        pipes.drain()
    files = _unpacked(bytes(pipes.stdout), names)
    return files, {name: why for name, why in missing.items() if name not in files}


def _unpacked(packed: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """Contents of the named files of an archive, into which a program that still runs may have written."""
    files: dict[str, bytes] = {}
    # tarfile raises ValueError too for numbers that it cannot read.
    with (
        suppress(tarfile.TarError, ValueError, OverflowError, EOFError),
        tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive,
    ):
        for entry in archive:
            path = str(PurePosixPath(entry.name))
            wanted = [each for each in names if str(PurePosixPath(each)) == path]
            # A sparse file may be of any size, whatever the archive's.
            regular = entry.isreg() and not entry.issparse()
            if wanted and regular and (opened := archive.extractfile(entry)) is not None:
                files[wanted[0]] = opened.read()
    return files


def _out_of_memory(client: str, name: str) -> bool:
    """Whether the kernel ended a process of the container for its memory."""
    return _call(client, "inspect", "--format={{.State.OOMKilled}}", name).strip() == b"true"


def _remove(client: str, name: str) -> None:
    with suppress(SandboxError):  # it ends by itself
        _call(client, "rm", "--force", name)


def _started(client: str, *words: str, stdin: bytes, stack: ExitStack) -> subprocess.Popen[bytes]:
    """A command of the client, which ends with `stack`."""
    process = subprocess.Popen(
        [client, *words],
        stdin=stack.enter_context(memory_file(stdin)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _call(client: str, *words: str, stdin: bytes = b"") -> bytes:
    """What a command of the client prints; raises SandboxError with what it says if it fails."""
    what = f"`{client} {words[0]}`"
    try:
        done = subprocess.run(
            [client, *words], input=stdin, capture_output=True, timeout=START_S, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{what} failed: {error}") from None
    if done.returncode:
        raise SandboxError(f"{what} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
