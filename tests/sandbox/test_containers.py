"""The client of `docker` and `podman`, against a stand-in (fake_client.py); no container is made."""

import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path

import pytest

from quatrain.sandbox import container
from quatrain.sandbox.limits import SandboxError, SandboxUnavailable
from quatrain.sandbox.sandbox import Sandbox

DOCKER = {
    "MemoryLimit": True,
    "SwapLimit": True,
    "PidsLimit": True,
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin", "name=cgroupns"],
}
PODMAN = {"host": {"cgroupControllers": ["cpu", "memory", "pids"], "security": {"seccompEnabled": True}}}
IMAGE = "python:slim"


@pytest.fixture
def containers(tmp_path, monkeypatch):
    """The folder of containers of the stand-ins, which are all that is in the PATH before the system's."""
    state, programs = tmp_path / "containers", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    for client in ("docker", "podman"):
        script = (
            f'#!/bin/sh\nexec "{sys.executable}" -S -E "{Path(__file__).with_name("fake_client.py")}" "$@"\n'
        )
        (programs / client).write_text(script)
        (programs / client).chmod(0o755)
    (state / "info").write_text(json.dumps(DOCKER))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CONTAINERS", str(state))
    container.check.cache_clear()
    yield state
    container.check.cache_clear()
    assert not [path for path in state.iterdir() if path.is_dir()], "a container is left"


def calls(state):
    return [json.loads(line) for line in (state / "calls").read_text().splitlines()]


@pytest.mark.parametrize("client", ["docker", "podman"])
def test_a_program_runs_in_a_container_of_its_own(containers, client):
    """Catches lost input, files, exit codes or results, and a container that stays."""
    if client == "podman":
        (containers / "info").write_text(json.dumps(PODMAN))
    sandbox = Sandbox(client, image=IMAGE)
    source = "import sys; text = sys.stdin.read() + open('a/in').read(); open('a/out', 'w').write(text)\n"
    source += "print('ok'); sys.exit(3)"
    result = sandbox.run_python(source, stdin="1", files={"a/in": b"2"}, collect=["a/out", "none", "a"])
    assert (result.stdout, result.exit_code, result.ended_by, result.cut_bytes) == ("ok\n", 3, "exit", 0)
    assert result.files == {"a/out": b"12"}
    assert set(result.not_collected) == {"none", "a"}
    *_, last = calls(containers)
    assert last[:2] == ["rm", "--force"]


def test_a_container_has_every_limit(containers):
    """Catches an option that a change of the client loses: no error would say so."""
    sandbox = Sandbox(
        "docker", image=IMAGE, timeout_s=5, memory_mb=100, files_mb=7, num_files=9, num_processes=3
    )
    assert sandbox.run(["true"]).succeeded
    given = json.loads((containers / "last-options").read_text())
    for name, values in {
        "network": ["none"],
        "read-only": [""],
        "cap-drop": ["ALL"],
        "security-opt": ["no-new-privileges"],
        "user": ["65534:65534"],
        "memory": ["100m"],
        "memory-swap": ["100m"],
        "pids-limit": ["5"],
        "tmpfs": ["/tmp:rw,exec,nosuid,nodev,size=7m,nr_inodes=9,mode=1777"],
        "shm-size": ["7m"],
        "pull": ["never"],
        "rm": [""],
        "entrypoint": ["sleep"],
        "seconds": "65",
    }.items():
        assert given[name] == values


def test_limits_of_time_output_and_memory_are_told_apart(containers):
    """Catches a hang or a wrong reason where a container is removed under its program."""
    began = time.monotonic()
    late = Sandbox("docker", image=IMAGE, timeout_s=0.5).run(["sleep", "600"], collect=["x"])
    assert late.ended_by == "time"
    assert late.exit_code is None
    assert set(late.not_collected) == {"x"}
    sandbox = Sandbox("docker", image=IMAGE, timeout_s=100, output_kb=1)
    loud = sandbox.run(["yes"])
    assert (loud.ended_by, len(loud.stdout)) == ("output", 1024)
    assert sandbox.run(["sh", "-c", "touch out-of-memory; kill -9 $$"]).ended_by == "memory"
    assert sandbox.run(["no-such-program"]).exit_code == 127
    assert time.monotonic() - began < 300


def test_input_that_is_too_large_is_refused(containers):
    sandbox = Sandbox("docker", image=IMAGE, files_mb=1)
    with pytest.raises(ValueError, match="1 files of a program, 1048577 bytes, do not fit into files_mb=1"):
        sandbox.run(["true"], files={"large": bytes((1 << 20) + 1)})


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        (DOCKER | {"MemoryLimit": False}, "no limit on memory"),
        (DOCKER | {"PidsLimit": False}, "no limit on processes"),
        (DOCKER | {"SecurityOptions": ["name=seccomp,profile=unconfined"]}, "no filter of system calls"),
        (DOCKER | {"SecurityOptions": None}, "no filter of system calls"),
        ({"host": {"cgroupControllers": [], "security": {"seccompEnabled": True}}}, "no limit on memory"),
        ({"host": {"cgroupControllers": ["memory", "pids"]}}, "no filter of system calls"),
        ("no daemon", "`docker info` failed"),
    ],
)
def test_a_client_without_a_limit_is_refused(containers, about, reason):
    """Catches a container that would run without the limits that were asked for."""
    if about == "no daemon":
        (containers / "info").unlink()
    else:
        (containers / "info").write_text(json.dumps(about))
    with pytest.raises(SandboxUnavailable, match=reason):
        Sandbox("docker", image=IMAGE)


def test_containers_need_an_image_that_is_there(containers):
    with pytest.raises(SandboxUnavailable, match="no image is given"):
        Sandbox("docker")
    with pytest.raises(SandboxUnavailable, match="No such image: other"):
        Sandbox("docker", image="other")
    with pytest.raises(ValueError, match="readable is for bubblewrap"):
        Sandbox("docker", image=IMAGE, readable=["/opt"])


def test_a_client_that_fails_is_not_the_programs_fault(containers):
    """Catches an error of the daemon that would count as a program's exit code."""
    sandbox = Sandbox("docker", image=IMAGE)
    sandbox.image = "removed"
    with pytest.raises(SandboxError, match="`docker run` failed: Error: No such image: removed"):
        sandbox.run(["true"])


def test_an_archive_that_a_program_wrote_costs_no_memory():
    """Catches a sparse file of a terabyte, which tarfile would read as zeros, and a number it cannot read."""
    sparse = tarfile.TarInfo("a")
    sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}
    broken = tarfile.TarInfo("a")
    broken.pax_headers = {"GNU.sparse.map": "x,y", "GNU.sparse.size": "1"}
    for entry in (sparse, broken):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            archive.addfile(entry)
        assert container._unpacked(packed.getvalue(), ["a"]) == {}
