"""What a sandbox promises to those who call it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandboxes import needs_bubblewrap

import quatrain
from quatrain.sandbox import bubblewrap
from quatrain.sandbox.limits import (
    LONGEST_WORD,
    Limits,
    Program,
    Result,
    SandboxError,
    SandboxUnavailable,
)
from quatrain.sandbox.sandbox import Sandbox
from quatrain.sandbox.usage import descendants

RUN = """
import signal, sys
from quatrain import Sandbox
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
print("ready", flush=True)
Sandbox("bubblewrap", timeout_s=600).run(["sleep", sys.argv[1]])
"""


def commands():
    """The command lines of this machine's processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().split(b"\0"))
        except OSError:
            continue
    return found


@pytest.fixture
def unchecked():
    """What was found out of this machine is forgotten before and after a test that changes it."""
    caches = (bubblewrap.check, bubblewrap._bwrap)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@needs_bubblewrap
def test_input_output_files_and_exit_codes_come_back():
    """Catches a part of a result that is lost or that belongs to another stream."""
    sandbox = quatrain.Sandbox("bubblewrap")
    source = "import sys; open('a/b', 'a').write(sys.stdin.read()); sys.stderr.write('bad\\n'); print(1)"
    result = sandbox.run_python(source, stdin="x\n", files={"a/b": "y\n"}, collect=["a/b", "c"])
    assert (result.stdout, result.stderr, result.exit_code, result.ended_by) == ("1\n", "bad\n", 0, "exit")
    assert result.files == {"a/b": b"y\nx\n"}
    assert result.not_collected == {"c": "No such file or directory"}
    assert result.succeeded
    assert 0 < result.time_s < 10
    assert str(result) == "1\nbad"
    assert sandbox.run(["sh", "-c", "exit 7"]).exit_code == 7
    assert sandbox.run(["sh", "-c", "kill -SEGV $$"]).exit_code == 128 + signal.SIGSEGV
    assert sandbox.run(["no-such-program"]).exit_code == 127
    assert "1 more bytes" in str(sandbox.run(["head", "-c", str((64 << 10) + 1), "/dev/zero"]))


@needs_bubblewrap
def test_a_program_has_the_packages_of_this_python_and_nothing_else():
    """Catches an interpreter that cannot start, such as one below /root, and folders that nobody named."""
    sandbox = Sandbox("bubblewrap")
    assert sandbox.run_python("import numpy; print(numpy.arange(3).sum())").stdout == "3\n"
    here = str(Path(__file__).parent)
    assert not sandbox.run(["ls", here]).succeeded
    assert "test_sandbox.py" in Sandbox("bubblewrap", readable=[here]).run(["ls", here]).stdout
    assert not Sandbox("bubblewrap", readable=[here]).run(["touch", f"{here}/x"]).succeeded


@needs_bubblewrap
def test_a_python_that_programs_cannot_start_is_refused(unchecked, monkeypatch, tmp_path):
    """Catches a check without Python: each program would fail as if it were wrong, and have reward 0."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho started\n")
    python.chmod(0o644)  # nobody may execute it, not the user of a sandbox that is not root either
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SandboxUnavailable, match=rf"{python} did not start .*chmod -R a\+rX FOLDER"):
        Sandbox("bubblewrap", readable=[tmp_path])


@needs_bubblewrap
def test_folders_below_tmp_are_readable(tmp_path):
    """Catches folders made before the file system of /tmp, or for one user: programs would not see them."""
    for place in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        place.mkdir(exist_ok=True)
        place.chmod(0o755)
    (tmp_path / "a" / "b" / "data").write_text("1\n")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    for place in (tmp_path / "a" / "b", tmp_path / "link"):
        shown = Sandbox("bubblewrap", readable=[place]).run(["cat", f"{place}/data"])
        assert (shown.stdout, shown.stderr) == ("1\n", "")
    for place in ("/tmp", "/dev", "/proc"):
        with pytest.raises(ValueError, match=f"{place} cannot be readable: a sandbox has its own"):
            Sandbox("bubblewrap", readable=[place])


@needs_bubblewrap
def test_a_shell_that_ends_before_its_program_is_an_error_of_the_sandbox(monkeypatch):
    """Catches a sandbox that was killed at its start, and an error that does not say so."""
    sandbox = Sandbox("bubblewrap")
    put = bubblewrap._Box.put

    def killed(box, *given):
        box.kill()
        box.monitor.wait(10)
        put(box, *given)

    monkeypatch.setattr(bubblewrap._Box, "put", killed)
    with pytest.raises(SandboxError, match=r"the shell of a sandbox ended before it was a program \("):
        sandbox.run(["true"])


@needs_bubblewrap
def test_a_crash_starts_no_program_for_core_files():
    """Catches a limit of 0, at which Linux still starts the program of core_pattern, as root."""
    limits = Sandbox("bubblewrap").run(["cat", "/proc/self/limits"]).stdout
    (line,) = [line for line in limits.splitlines() if line.startswith("Max core file size")]
    assert line.split()[4:6] == ["1", "1"]


@needs_bubblewrap
def test_programs_run_at_once_without_zombies():
    """Catches state that programs share, and processes that are never waited for."""
    sandbox = Sandbox("bubblewrap")
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: sandbox.run(["echo", str(number)]), range(24)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(24)]
    files = len(os.listdir("/proc/self/fd"))
    sandbox.run(["true"])
    assert len(os.listdir("/proc/self/fd")) == files
    children = [Path(f"/proc/{number}/stat").read_text() for number in descendants(os.getpid())]
    assert not [line for line in children if line.rpartition(")")[2].split()[0] == "Z" and "(bwrap)" in line]


def test_a_process_that_ends_while_it_is_looked_at_has_no_descendants(monkeypatch):
    """Catches an error of the race, which was the result of the program: `Path.glob` raises it."""

    def ended(path="."):
        raise FileNotFoundError(path)

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, ended)
    assert descendants(os.getpid()) == []


@needs_bubblewrap
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_program_ends_with_its_run(number):
    """Catches a program that goes on after its run was killed, or interrupted."""
    seconds = f"1000.{os.getpid()}{number.value}"
    command = [sys.executable, "-c", RUN, seconds]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while [b"sleep", seconds.encode(), b""] not in commands() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        try:
            process.wait(10)
        finally:
            process.kill()
    while (
        left := [words for words in commands() if seconds.encode() in words]
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


@needs_bubblewrap
def test_input_that_does_not_fit_is_refused():
    """Catches input that is cut, and the limit of files that input could exceed."""
    sandbox = Sandbox("bubblewrap", files_mb=1)
    with pytest.raises(ValueError, match=r"0 files of a program, 2097152 bytes, do not fit into files_mb=1"):
        sandbox.run(["true"], stdin=bytes(2 << 20))
    with pytest.raises(ValueError, match="No space left"):
        sandbox.run(["true"], files={"a": bytes(1 << 20), "b": b"x"})
    with pytest.raises(ValueError, match="cannot be written: File exists"):
        sandbox.run(["true"], files={"a": b"", "./a": b""})
    large = sandbox.run(["sh", "-c", "head -c 600000 /dev/zero > a; cp a /dev/shm"], collect=["a", "./a"])
    assert set(large.files) == {"a"}
    assert large.not_collected == {"./a": "the files are larger than files_mb together"}


def test_without_bubblewrap_there_is_no_sandbox(unchecked, monkeypatch, tmp_path):
    """Catches a program that runs without isolation because a machine has none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"install the distribution's package bubblewrap"):
        Sandbox("bubblewrap")
    with pytest.raises(
        SandboxUnavailable, match=r"bubblewrap: .*; docker: no image is given; podman: no image"
    ):
        Sandbox()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo bubblewrap 0.6.1", "bubblewrap 0.7 or newer is needed"),
        (
            '[ "$1" = --version ] && echo bubblewrap 0.8.0 || { echo "no user namespaces" >&2; exit 1; }',
            "bubblewrap could not start a program: no user namespaces",
        ),
    ],
)
def test_a_bubblewrap_that_cannot_isolate_is_refused(unchecked, monkeypatch, tmp_path, script, reason):
    """Catches a start that fails at every program, rather than once and with the reason."""
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match=reason):
        Sandbox("bubblewrap")


@needs_bubblewrap
@pytest.mark.parametrize(
    ("option", "promise"),
    [("--seccomp", "a filter of system calls"), ("--cap-drop", "no capabilities")],
)
def test_a_protection_that_is_not_there_is_noticed(unchecked, monkeypatch, option, promise):
    """Catches a check that believes what was asked for: it must read what the kernel says."""
    if promise == "no capabilities":
        status = "Seccomp:\t2\nNoNewPrivs:\t1\nCapPrm:\t000001ff\nCapEff:\t000001ff\n"
    else:
        status = "Seccomp:\t0\nNoNewPrivs:\t1\n"
    shown = Result("exit", 0, status, "", 0, 0.1)
    monkeypatch.setattr(bubblewrap, "run", lambda *_: shown)
    with pytest.raises(SandboxUnavailable, match=promise):
        Sandbox("bubblewrap")


@pytest.mark.parametrize("place", ["/", Path.home(), "/etc"])
def test_folders_with_secrets_are_not_readable(place):
    """Catches a home folder, with its keys, that programs could read."""
    with pytest.raises(ValueError, match="holds the home folder or the system's settings"):
        Sandbox("bubblewrap", readable=[place])


def test_a_home_folder_behind_a_link_is_not_readable(monkeypatch, tmp_path):
    """Catches a home folder whose keys could be read under the name that the link leads to."""
    (tmp_path / "data" / "me").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "data")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    for place in ("data", "data/me", "home", "home/me"):
        with pytest.raises(ValueError, match="holds the home folder or the system's settings"):
            Sandbox("bubblewrap", readable=[tmp_path / place])


@needs_bubblewrap
def test_a_command_may_be_any_text():
    """Catches a policy's command that ends the caller: with half a surrogate pair, or very long."""
    sandbox = Sandbox("bubblewrap")
    assert sandbox.run(("printf", "%s", "ü\ud800🙂")).stdout == "ü?🙂"
    longest = "x" * LONGEST_WORD
    assert sandbox.run(("sh", "-c", 'printf %s "${#1}"', "sh", longest)).stdout == str(LONGEST_WORD)


@needs_bubblewrap
def test_the_file_of_a_program_is_not_another_one():
    """Catches a file of the caller that is left out in silence, as the program has its name."""
    sandbox = Sandbox("bubblewrap")
    for name in ("main.py", "./main.py"):
        with pytest.raises(ValueError, match="is the program itself"):
            sandbox.run_python("print(1)", files={name: "mine"})


def test_wrong_arguments_are_refused():
    """Catches limits of another type, and names of a policy, that end in an error of Python's own."""
    for changed in (
        {"timeout_s": 0},
        {"timeout_s": "3"},
        {"memory_mb": -1},
        {"memory_mb": 256.0},
        {"memory_mb": True},
        {"files_mb": 1 << 40},
        {"output_kb": 0.5},
        {"num_processes": float("nan")},
    ):
        with pytest.raises(ValueError, match=r"must be a (whole )?number above 0"):
            Limits(**changed)
    for name in ("../x", "/x", "a/../../x", "", "a\0", "a\ud800"):
        with pytest.raises(ValueError, match="files are named relative"):
            Program(("true",), files={name: b""})
        with pytest.raises(ValueError, match="files are named relative"):
            Program(("true",), collect=(name,))
    with pytest.raises(ValueError, match="at least one word"):
        Program(())
    with pytest.raises(ValueError, match=r"at most 131071 bytes.*one of 131072"):
        Program(("sh", "-c", "ü" * 65536))
    with pytest.raises(ValueError, match="kind is one of auto, bubblewrap, docker, podman, not 'none'"):
        Sandbox("none")
