"""Simulates several hosts: runs one command in several processes on this machine's CPU.

Called by `quatrain launch`. The processes connect to each other as on separate hosts. This module prints
their output, and ends all of them when one fails. It does not import JAX.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from queue import Empty, SimpleQueue
from typing import IO

from quatrain.cluster.launcher import LAUNCHER
from quatrain.cluster.rendezvous import ANOTHER_FAILED, TOKEN
from quatrain.cluster.start_thread import start_thread
from quatrain.cluster.stop import Signals

COMMANDS = ("train", "eval", "sft", "dpo", "rm")
# Options that `launch` adds to the command of each process.
OWN_OPTIONS = ("--coordinator", "--num-processes", "--process-id")
QUATRAIN = (sys.executable, "-m", "quatrain")
# Connected processes end by themselves, with an error message, when another one fails: the time they get.
FAILURE_MESSAGE_S = 3.0
# Exit statuses of such processes, which were ended by `processes.py` or by JAX's runtime (SIGABRT).
FOLLOWED = (ANOTHER_FAILED, 128 + signal.SIGABRT)
GRACE_S = 10.0
POLL_S = 0.1
# Message printed by JAX's CPU collectives when devices connect; no setting turns it off. Several threads
# print it at once, piece by piece, so that a line may hold pieces of several messages, or a number alone.
GLOO_PIECES = (
    r"\[Gloo\] Rank |is connected to|peer ranks\.|Expected number of connected peer|ranks is :|ranks|\d+|\s"
)
GLOO_LINE = re.compile(rf"(?:{GLOO_PIECES})*")
GLOO_WORDS = re.compile("Gloo|connected|ranks")
GLOO_START = "[Gloo] Rank "


def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices_per_process: int,
    port: int | None = None,
    program: Sequence[str] = QUATRAIN,
    grace_s: float = GRACE_S,
) -> int:
    """Runs `command`, one of `COMMANDS` with arguments, in `processes` processes; returns an exit status.

    The status is 0 if all processes end with 0. Otherwise the other processes are ended, and the status is
    that of the process that failed first. SIGTERM, SIGHUP and SIGINT are passed on to all processes, which
    have as long as they need to stop; the status is 128 plus the signal's number. A second signal ends all,
    with SIGKILL those that it has not ended in FAILURE_MESSAGE_S seconds, and so does the end of the launcher
    (`launcher.py`). Raises ValueError for a command that cannot be launched, numbers below 1 and a port in
    use.
    """
    _check(command, processes, devices_per_process)
    coordinator = f"127.0.0.1:{_free_port(port)}"
    environ = _simulated(os.environ, devices_per_process)
    children: list[_Child] = []
    signals: SimpleQueue[int] = SimpleQueue()

    def end_at_once(number: int) -> None:
        _end(children, number, FAILURE_MESSAGE_S)  # the signal is a run's second too: it says how to go on
        _finish_output(children, FAILURE_MESSAGE_S)

    with Signals(signals.put, on_second=end_at_once):
        try:
            for process in range(processes):
                place = zip(OWN_OPTIONS, (coordinator, str(processes), str(process)), strict=True)
                children.append(_Child(process, [*program, *command, *chain(*place)], environ))
            return _watch(children, signals, grace_s)
        finally:
            _end(children, signal.SIGKILL, grace_s)


def _check(command: Sequence[str], processes: int, devices_per_process: int) -> None:
    if not command or command[0] not in COMMANDS:
        raise ValueError(
            f"launch runs the command {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}, given after two dashes; "
            f"got {repr(command[0]) if command else 'no command'}; write quatrain launch --processes 2 -- "
            "train CONFIG.yaml"
        )
    for option, number in (("--processes", processes), ("--devices-per-process", devices_per_process)):
        if number < 1:
            raise ValueError(f"{option} must be at least 1; got {number}")
    for text in command:
        if text.partition("=")[0] in OWN_OPTIONS:
            raise ValueError(
                f"launch itself sets {', '.join(OWN_OPTIONS)} for each process; got {text}; leave it out"
            )


def _free_port(port: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"--port must be a port that is not in use; got {port} ("
                f"{getattr(error, 'strerror', None) or error}); choose another, or leave --port out for any"
            ) from None
        return int(probe.getsockname()[1])


def _simulated(environ: Mapping[str, str], devices: int) -> dict[str, str]:
    """Environment of the processes: `devices` simulated CPU devices, unbuffered output, a secret to share."""
    flags = f"{environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return {
        **environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": flags.strip(),
        LAUNCHER: str(os.getpid()),
        TOKEN: secrets.token_hex(),
    }


class _Child:
    """A child process in a new process group; its output lines are printed with its id in front."""

    def __init__(self, process: int, command: Sequence[str], environ: Mapping[str, str]):
        self.process = process
        self.ended_at = math.inf
        self._popen = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        outputs = ((self._popen.stdout, sys.stdout), (self._popen.stderr, sys.stderr))
        self.readers = [start_thread(self._pass_on, *pair, name="output of a process") for pair in outputs]

        def note_end() -> None:
            self._popen.wait()
            self.ended_at = time.monotonic()

        self._ended = start_thread(note_end, name="end of a process")

    @property
    def running(self) -> bool:
        """Whether the process itself still runs."""
        return self._ended.is_alive()

    @property
    def status(self) -> int:
        """Exit status of a process that has ended; 128 plus the signal's number if a signal ended it."""
        return 128 - self._popen.returncode if self.killed else self._popen.returncode

    @property
    def killed(self) -> bool:
        """Whether a signal ended the process, without anything it could do."""
        return self._popen.wait() < 0

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its child processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    def stop(self, number: int) -> None:
        """Sends a signal to the process alone, which may need its own child processes to stop."""
        if self.running:
            self._popen.send_signal(number)

    def _pass_on(self, source: IO[str], target: IO[str]) -> None:
        unended = 0  # messages of Gloo of which the first piece has come, and not yet the end of the line
        with source:
            for line in source:
                text = line.rstrip()
                if GLOO_LINE.fullmatch(text) and (unended or GLOO_WORDS.search(text)):
                    unended = max(unended + text.count(GLOO_START) - 1, 0)
                    continue
                target.write(f"[{self.process}] {text}\n")
                target.flush()


def _watch(children: Sequence[_Child], signals: SimpleQueue[int], grace_s: float) -> int:
    """Waits until all processes end with 0 or one fails; the exit status, that of the failed one if any.

    The first number in `signals` is passed on to all.
    """
    while any(child.running for child in children) and not _failed(children):
        try:
            return _stop(children, signals.get(timeout=POLL_S), grace_s)
        except Empty:
            continue
    return _blame(children, grace_s)


def _blame(children: Sequence[_Child], grace_s: float) -> int:
    """Ends the processes that still run, names the one that failed first, and returns its status."""
    if _failed(children):  # the others say what has failed, and end by themselves, if they get the time
        _wait(children, FAILURE_MESSAGE_S)
    failed, silent = _failed(children), [child for child in children if child.running]
    _end(children, signal.SIGTERM, grace_s)
    _finish_output(children, grace_s)
    if not failed:
        return 0
    # One that ended because another had failed comes last; of others the first, because what follows may be
    # its consequence in ways that no status tells.
    first = min(failed, key=lambda child: (child.status in FOLLOWED, child.ended_at))
    what = f"process {first.process} exited with {first.status}"
    if first.status in FOLLOWED and silent:  # which would have ended if they still answered
        what = f"process {', '.join(str(child.process) for child in silent)} no longer answered"
    print(f"error: {what}; the others were ended", file=sys.stderr)
    return first.status


def _stop(children: Sequence[_Child], number: int, grace_s: float) -> int:
    """Passes signal `number` on, and waits until all processes have saved what they save and ended."""
    name = signal.Signals(number).name
    print(f"{name}: all processes are stopped; a second signal ends them at once", file=sys.stderr)
    for child in children:
        child.stop(number)
    while any(child.running for child in children):
        if any(child.status != 128 + number for child in _failed(children)):
            return _blame(children, grace_s)
        if any(child.killed for child in _failed(children)):  # it did not handle signals yet
            _wait(children, FAILURE_MESSAGE_S)
            _end(children, signal.SIGKILL, grace_s)
        time.sleep(POLL_S)
    _finish_output(children, grace_s)
    return 128 + number if any(child.status for child in children) else 0


def _failed(children: Sequence[_Child]) -> list[_Child]:
    return [child for child in children if not child.running and child.status]


def _end(children: Sequence[_Child], number: int, grace_s: float) -> None:
    """Sends a signal to all running processes, and SIGKILL to those still running after `grace_s` seconds."""
    for child in children:
        if child.running:
            child.signal(number)
    _wait(children, grace_s)
    for child in children:  # also those that have ended: what they have started may not have
        child.signal(signal.SIGKILL)
    _wait(children, grace_s)


def _wait(children: Sequence[_Child], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(child.running for child in children):
        time.sleep(POLL_S)


def _finish_output(children: Sequence[_Child], timeout_s: float) -> None:
    """Waits until all output of `children` is printed."""
    deadline = time.monotonic() + timeout_s
    for child in children:
        for reader in child.readers:
            reader.join(max(deadline - time.monotonic(), 0))
