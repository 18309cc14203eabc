"""Runs a program in new namespaces, with bubblewrap (`bwrap`) of the distribution.

Data flow: `Program` and `Limits` -> `bwrap` -> a shell in the namespaces, which waits -> limits and files are
given to it from outside -> it becomes the program -> `Result`. Nothing on the machine's disks is written: the
program's folder is in memory, and is read from outside only once all processes have ended.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

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
from quatrain.sandbox.seccomp import machine, seccomp_filter
from quatrain.sandbox.usage import descendants, memory_bytes

_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives")
_INPUT = "/tmp/.input"
# It waits for its limits and its input; without an answer, the run has ended.
_SHELL = f'printf r; IFS= read -r go || exit 125; cd {WORK} || exit 125; unset OLDPWD; exec "$@" <{_INPUT}'
_STARTED = "started"
_END_S = 10.0
_OWN_UIDS = range(60_000, 65_000)
_HIGH_UIDS = range(0x70000000, 0x7FFFFFFF)
"""Users that neither systemd nor ranges of containers give away (systemd.io/UIDS-GIDS)."""
_NAMESPACE_COUNTS = (5, 14)
"""The version of Linux since which processes are counted for each user namespace."""
_NEEDS_SIZE = (0, 7)
_NO_CORE = 1
"""Bytes of a core file. Where /proc/sys/kernel/core_pattern names a program, 0 does not keep the kernel from
starting it, as root and outside; 1 does, and is less than any core file (fs/coredump.c)."""


def run(program: Program, limits: Limits, readable: Sequence[str]) -> Result:
    """Runs a program to its end; `check` must have passed. Raises SandboxError."""
    with ExitStack() as stack:
        box = _start(program.command, limits, readable, stack)
        stack.callback(box.kill)
        box.put(program, limits)
        began = time.monotonic()
        box.go()
        ended_by: EndedBy = box.pipes.read(began + limits.timeout_s, lambda: box.exceeded(limits)) or "exit"
        time_s = time.monotonic() - began
        exit_code = box.end()
        if ended_by == "exit" and box.pipes.cut_bytes:  # read after its end: it does not depend on the time
            ended_by = "output"
        files, not_collected = box.collected(program.collect, limits)
        return Result(
            ended_by=ended_by,
            exit_code=exit_code if ended_by == "exit" else None,
            stdout=box.pipes.stdout.decode(errors="replace"),
            stderr=box.pipes.stderr.decode(errors="replace"),
            cut_bytes=box.pipes.cut_bytes,
            time_s=time_s,
            files=files,
            not_collected=not_collected,
        )


@cache
def check(python: str, readable: tuple[str, ...]) -> None:
    """Raises SandboxUnavailable unless a program can be run here as `run` promises, and `python` starts."""
    if sys.platform != "linux":
        raise SandboxUnavailable("bubblewrap needs Linux")
    if _bwrap() is None:
        raise SandboxUnavailable("there is no `bwrap`; install the distribution's package bubblewrap")
    said = subprocess.run([str(_bwrap()), "--version"], capture_output=True, text=True).stdout
    version = _version(said)
    if version < _NEEDS_SIZE:
        raise SandboxUnavailable(f"bubblewrap 0.7 or newer is needed to limit files, and this is {said!r}")
    if machine() is None:
        raise SandboxUnavailable(
            f"there is a filter of system calls for x86_64 and aarch64, and this is {platform.machine()}"
        )
    if _own_uid() is None:
        if os.geteuid() == 0 and _maps_root():
            raise SandboxUnavailable("processes of root cannot be counted, and there is no other user")
        if _version(platform.release()) < _NAMESPACE_COUNTS:
            raise SandboxUnavailable(
                f"without root, processes are counted since Linux 5.14, and this is {platform.release()}"
            )
    elif shutil.which("setpriv") is None:
        raise SandboxUnavailable("as root, `setpriv` of util-linux is needed")
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise SandboxUnavailable("Linux does not list the children of processes (CONFIG_PROC_CHILDREN)")
    limits = Limits(timeout_s=START_S)
    shown = ("cat", "/proc/self/status", "/proc/self/limits")
    try:
        result = run(Program(shown), limits, readable)
        started = run(Program((python, "-c", f"print({_STARTED!r})")), limits, readable)
    except SandboxError as error:
        raise SandboxUnavailable(str(error)) from None
    # What the kernel says of the process, not what was asked for.
    for promise, pattern, most in (
        ("a filter of system calls", r"Seccomp:\s*(2)\n", 2),
        ("no new privileges", r"NoNewPrivs:\s*(1)\n", 1),
        ("no capabilities", r"CapPrm:\s*0+\nCapEff:\s*(0)+\n", 0),
        ("a limit on processes", r"Max processes +(\d+) ", _processes(limits)),
        ("a limit on memory", r"Max data size +(\d+) ", limits.memory_mb << 20),
        ("a limit on files", r"Max file size +(\d+) ", limits.files_mb << 20),
        ("a limit on core files", r"Max core file size +(\d+) ", _NO_CORE),
    ):
        found = re.search(pattern, result.stdout)
        if not result.succeeded or found is None or int(found[1]) > most:
            raise SandboxUnavailable(f"a program in bubblewrap does not have {promise}: {result}")
    # Every program would fail as if it were wrong.
    if started.stdout != f"{_STARTED}\n":
        who = "this user" if _own_uid() is None else "a user of its own"
        said = "; ".join(str(started).splitlines())
        raise SandboxUnavailable(
            f"programs must be able to start this Python, and {python} did not start ({said}); they run as "
            f"{who} and see {', '.join(('/usr', *readable))}; let every user read and execute these "
            "(chmod -R a+rX FOLDER), name in `readable` where their links lead, or use a Python that is "
            "installed elsewhere"
        )


@dataclass
class _Box:
    """A sandbox whose shell waits, and then its program."""

    monitor: subprocess.Popen[bytes]
    init: int
    """Process 1 of the namespace, by its number here; everything in the sandbox is below it."""
    init_file: int
    work: int
    """The file system of /tmp in the sandbox; it lives until this is closed."""
    shared: int
    """That of /dev/shm."""
    owner: int | None
    pipes: Pipes

    def put(self, program: Program, limits: Limits) -> None:
        """Gives the waiting shell its limits, its input and its files."""
        with _waiting(self.pipes):
            self._limit(limits)
        files = {PurePosixPath(_INPUT).name: program.stdin}
        folder = PurePosixPath(WORK).name
        files |= {f"{folder}/{name}": content for name, content in program.files.items()}
        try:
            os.mkdir(folder, dir_fd=self.work)
            self._own(folder)
            for name, content in files.items():
                self._write(PurePosixPath(name), content)
        except OSError as error:
            size = sum(len(content) for content in files.values())
            raise ValueError(
                f"the input and {len(program.files)} files of a program, {size} bytes, do not fit into "
                f"files_mb={limits.files_mb}, or cannot be written: {error.strerror}"
            ) from None

    def _limit(self, limits: Limits) -> None:
        """Gives the waiting shell its limits, which the program keeps; raises OSError if it has ended."""
        shell = next(iter(descendants(self.init)), None)
        if shell is None:
            raise ProcessLookupError("process 1 of its namespace has no other")
        data, processes = limits.memory_mb << 20, _processes(limits)
        for what, limit in (
            (resource.RLIMIT_DATA, data),
            (resource.RLIMIT_NPROC, processes),
            (resource.RLIMIT_FSIZE, limits.files_mb << 20),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, _NO_CORE),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            # Of a sandbox that has lost its run at the only moment at which it could outlive it.
            (resource.RLIMIT_CPU, int(limits.timeout_s * (os.cpu_count() or 1)) + 2),
        ):
            hard = resource.prlimit(shell, what)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.prlimit(shell, what, (limit, limit))

    def go(self) -> None:
        """Lets the shell become the program."""
        assert self.monitor.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which is seen when it is read
            self.monitor.stdin.write(b"\n")
            self.monitor.stdin.close()

    def exceeded(self, limits: Limits) -> EndedBy | None:
        """Which limit is exceeded of those that the kernel does not keep."""
        most = limits.memory_mb << 20
        if memory_bytes(descendants(self.init), most) > most:
            return "memory"
        return "files" if self._num_files() > limits.num_files else None

    def kill(self) -> None:
        """Kills process 1 of the namespace, with which the kernel ends all others."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init_file, signal.SIGKILL)

    def end(self) -> int:
        """Ends all that is left, and returns the exit code; raises SandboxError if something stays."""
        self.kill()
        try:
            exit_code = self.monitor.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.monitor.kill()
            raise SandboxError(f"a sandbox did not end within {_END_S:g} s") from None
        # Its parent may have ended before: it is a child of somebody else then, perhaps of this process.
        waiting = select.poll()
        waiting.register(self.init_file, select.POLLIN)
        if not waiting.poll(1000 * _END_S):
            raise SandboxError(f"the processes of a sandbox did not end within {_END_S:g} s")
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self.init_file, os.WEXITED | os.WNOHANG)
        self.pipes.drain()
        return exit_code

    def collected(self, names: Sequence[str], limits: Limits) -> tuple[dict[str, bytes], dict[str, str]]:
        """Contents of the named files, and why others have none; used after `end`."""
        files: dict[str, bytes] = {}
        missing: dict[str, str] = {}
        room = limits.files_mb << 20
        for name in names:
            try:
                content = _regular_file(self.work, PurePosixPath(PurePosixPath(WORK).name, name), room)
            except OSError as error:
                missing[name] = error.strerror or str(error)
            else:
                files[name] = content
                room -= len(content)
        return files, missing

    def _num_files(self) -> int:
        usage = [os.fstatvfs(folder) for folder in (self.work, self.shared)]
        return sum(each.f_files - each.f_ffree for each in usage)

    def _write(self, name: PurePosixPath, content: bytes) -> None:
        for parent in [*name.parents][-2::-1]:
            with suppress(FileExistsError):
                os.mkdir(parent, dir_fd=self.work)
                self._own(parent)
        # The program does not run yet: nobody else changes these names.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(name, flags, 0o644, dir_fd=self.work), "wb") as file:
            file.write(content)
        self._own(name)

    def _own(self, name: str | PurePosixPath) -> None:
        if self.owner is not None:
            os.chown(name, self.owner, self.owner, dir_fd=self.work)


def _start(command: Sequence[str], limits: Limits, readable: Sequence[str], stack: ExitStack) -> _Box:
    owner = _own_uid()
    become = []
    if owner is not None:
        # Root is not counted (RLIMIT_NPROC) and owns files; this user has no file and no other process.
        become = ["setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups", "--"]
    told, tell = os.pipe()
    stack.callback(os.close, told)
    with open(tell, "wb"), memory_file(seccomp_filter(str(machine()))) as filtered:
        arguments = [*_arguments(limits, readable, owner is None), "--info-fd", str(tell)]
        arguments += ["--seccomp", str(filtered)]
        # In a file, so that process 1 of the sandbox does not show them.
        with memory_file(b"".join(word.encode() + b"\0" for word in arguments)) as options:
            words = ["--args", str(options), "--", "/bin/sh", "-c", _SHELL, "sh", *become, *command]
            try:
                monitor = subprocess.Popen(
                    [str(_bwrap()), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=ENVIRONMENT,
                    cwd="/",
                    pass_fds=(tell, options, filtered),
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                raise SandboxError(f"bubblewrap could not be started: {error}") from None
    stack.callback(_end_monitor, monitor)
    pipes = stack.enter_context(Pipes(monitor, limits.output_kb << 10))
    if not pipes.first_byte(time.monotonic() + START_S):
        _end_monitor(monitor)
        pipes.drain()
        said = pipes.stderr.decode(errors="replace").strip()
        raise SandboxError(f"bubblewrap could not start a program: {said or 'it said nothing'}")
    # bwrap has written it before the shell starts. Not to its end: a process that was forked meanwhile may
    # have the other side open.
    init = json.loads(os.read(told, 4096))["child-pid"]
    with _waiting(pipes):
        init_file = os.pidfd_open(init)
        stack.callback(os.close, init_file)
        work = os.open(f"/proc/{init}/root/tmp", os.O_RDONLY)
        stack.callback(os.close, work)
        shared = os.open(f"/proc/{init}/root/dev/shm", os.O_RDONLY)
        stack.callback(os.close, shared)
    return _Box(monitor, init, init_file, work, shared, owner, pipes)


@contextmanager
def _waiting(pipes: Pipes) -> Iterator[None]:
    """Raises SandboxError where the shell that waits turns out to have ended."""
    try:
        yield
    except OSError as error:
        pipes.drain()
        said = pipes.stderr.decode(errors="replace").strip()
        raise SandboxError(
            f"the shell of a sandbox ended before it was a program ({error}); it said {said or 'nothing'}; "
            "if the machine had no memory left, run fewer programs at once"
        ) from None


def _arguments(limits: Limits, readable: Sequence[str], is_user: bool) -> list[str]:
    """The options of bwrap: namespaces, environment and files."""
    bytes_ = str(limits.files_mb << 20)
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent"]
    options += ["--unshare-cgroup-try", "--new-session", "--hostname", "sandbox", "--clearenv"]
    if is_user:
        options += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    else:  # for setpriv
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    options += ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    options += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/dev/shm", "/tmp"):
        options += ["--size", bytes_, "--perms", "1777", "--tmpfs", path]
    # Those below /tmp are in its file system. Else bwrap makes them for the user that it runs as alone.
    for folder in sorted({parent for path in (*_SETTINGS, *readable) for parent in Path(path).parents}):
        if folder != Path("/"):
            options += ["--perms", "0755", "--dir", str(folder)]
    for path in _SETTINGS:
        options += ["--ro-bind-try", path, path]
    for path in readable:
        options += ["--ro-bind", path, path]
    # bwrap makes / and /dev file systems in memory, without a limit on their sizes.
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


def _regular_file(folder: int, name: PurePosixPath, most: int) -> bytes:
    """The content of a file, reached through no symbolic link; raises OSError."""
    with ExitStack() as stack:
        for part in name.parent.parts:
            folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            stack.callback(os.close, folder)
        # Not to wait for who writes into a pipe.
        file = os.open(name.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(0, "not a regular file")
            content = opened.read(most + 1)
    if len(content) > most:
        raise OSError(0, "the files are larger than files_mb together")
    return content


def _end_monitor(monitor: subprocess.Popen[bytes]) -> None:
    monitor.kill()
    with suppress(subprocess.TimeoutExpired):
        monitor.wait(_END_S)
    assert monitor.stdin is not None
    monitor.stdin.close()


def _processes(limits: Limits) -> int:
    """The limit that the kernel gets: process 1 of the namespace counts too where it has the same user."""
    return limits.num_processes + (_own_uid() is None)


@cache
def _bwrap() -> str | None:
    return shutil.which("bwrap")


def _version(text: str) -> tuple[int, ...]:
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _own_uid() -> int | None:
    """A user of its own for a sandbox, if this process may become others."""
    if os.geteuid() != 0:
        return None
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    for uids in (_HIGH_UIDS, _OWN_UIDS):
        for first, _, count in (map(int, line.split()) for line in lines):
            if first <= uids.start and uids.stop <= first + count:
                return random.SystemRandom().choice(uids)
    return None


def _maps_root() -> bool:
    """Whether this process is the machine's root, not one of a namespace."""
    return any(line.split()[:2] == ["0", "0"] for line in Path("/proc/self/uid_map").read_text().splitlines())
