"""What the programs of hostile_programs.py do costs their own results alone, whatever runs beside them."""

import os
import platform
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_programs import HOSTILE, with_places
from sandboxes import needs_bubblewrap

from quatrain.sandbox.sandbox import Sandbox

pytestmark = needs_bubblewrap
SECRET = "quatrain-test-secret"
# Long enough on a busy machine; programs that never end have SHORT_S.
LONG_S, SHORT_S = 60.0, 1.0
SMALL = {
    "memory_mb": 128,
    "files_mb": 8,
    "num_files": 500,
    "num_processes": 32,
    "output_kb": 1,
}
ORDERLY = "import sys; numbers = [int(line) for line in sys.stdin]; print(sum(numbers))"


def processes():
    """Command lines of this machine's processes by their numbers."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of all programs, run beside each other and beside orderly ones, and who connected."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text(SECRET)
    abstract = f"quatrain-{os.getpid()}"
    with (
        pytest.MonkeyPatch.context() as patch,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as by_name,
        socket.socket(socket.AF_UNIX) as by_path,
    ):
        patch.setenv("QUATRAIN_TEST_TOKEN", SECRET)
        by_name.bind("\0" + abstract)
        by_path.bind(str(outside / "socket"))
        servers = (listener, by_name, by_path)
        for server in servers:
            server.listen()
            server.settimeout(0)
        places = {
            "SECRET_FILE": outside / "secret",
            "LISTENER": listener.getsockname()[1],
            "ABSTRACT": abstract,
            "OUTSIDE": outside,
            "RUN": os.getpid(),
        }
        sandbox = Sandbox("bubblewrap", timeout_s=LONG_S, **SMALL)
        short = Sandbox("bubblewrap", timeout_s=SHORT_S, **SMALL)

        def run(name):
            if name not in HOSTILE:
                return sandbox.run_python(ORDERLY, stdin="1\n2\n3\n")
            hostile = HOSTILE[name]
            which = short if hostile.ended_by == "time" else sandbox
            return which.run_python(with_places(hostile.source, places), collect=hostile.collect)

        names = [each for number, name in enumerate(HOSTILE) for each in (name, f"orderly {number}")]
        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(names, pool.map(run, names)))
        connected = []
        for server in servers:
            try:
                connected.append(server.accept())
            except BlockingIOError:
                continue
        left = [
            line for line in processes().values() if line.startswith((b"quatrain-daemon", b"/usr/bin/bwrap"))
        ]
    return found, connected, left, outside


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_nowhere(results, name):
    """Catches each limit and each separation that `bwrap`, the filter or the watch loses."""
    hostile, result = HOSTILE[name], results[0][name]
    if platform.machine() != "x86_64" and "call(" in hostile.source:
        pytest.skip("its numbers of system calls are those of x86_64")
    assert result.ended_by == hostile.ended_by, result
    assert re.fullmatch(hostile.prints, result.stdout), result
    assert SECRET not in result.stdout + result.stderr
    assert (result.cut_bytes > 0) == (hostile.ended_by == "output")
    assert (result.exit_code is None) == (hostile.ended_by != "exit")


def test_programs_beside_hostile_ones_get_their_results(results):
    """Catches a hostile program that slows, ends or writes into those beside it."""
    orderly = [result for name, result in results[0].items() if name.startswith("orderly")]
    assert len(orderly) == len(HOSTILE) >= 20
    assert {(result.stdout, result.stderr, result.exit_code, result.ended_by) for result in orderly} == {
        ("6\n", "", 0, "exit")
    }


def test_nothing_is_left_and_nobody_has_connected(results):
    """Catches daemons that outlive their program, files outside, and sockets of the machine in reach."""
    _, connected, left, outside = results
    assert not connected
    assert not left
    assert sorted(path.name for path in outside.iterdir()) == ["secret", "socket"]


def test_links_and_pipes_are_not_files(results):
    """Catches a link that is followed when files are brought back: it would read this machine's files."""
    result = results[0]["links in place of files"]
    assert result.files == {"good": b"good"}
    assert set(result.not_collected) == set(HOSTILE["links in place of files"].collect) - {"good"}
    assert result.not_collected["pipe"] == "not a regular file"


def test_a_folder_that_became_a_link_is_not_entered(results):
    """Catches results read below a link that the program put in the place of its folder."""
    assert results[0]["a folder that becomes a link"].files == {}
