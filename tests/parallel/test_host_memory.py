"""What is free is given back to the system, in a process of its own; elsewhere nothing happens."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from quatrain.parallel import host_memory

PROGRAM = """
import ctypes, json, resource
from quatrain.parallel.host_memory import trim_free_memory

def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
pieces = [libc.malloc(2**16) for _ in range(2**10)]
last = libc.malloc(2**16)  # above all the others, and never freed
for piece in (*pieces, last):
    ctypes.memset(piece, 1, 2**16)
for piece in pieces:
    libc.free(piece)
freed = resident_mib()
trim_free_memory()
print(json.dumps(freed - resident_mib()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and glibc is the library that keeps memory")
def test_what_is_free_is_given_back():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) > 50


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    host_memory.trim_free_memory()


def test_another_system_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: pytest.fail("asked for a C library"))
    host_memory.trim_free_memory()


PEAK = """
import numpy as np
from quatrain.parallel.host_memory import peak_bytes
before = peak_bytes()
large = np.ones(2**28, np.uint8)
held = peak_bytes()
del large
print(before, held, peak_bytes())
"""


@pytest.mark.slow
def test_the_peak_of_a_cpu_is_the_largest_resident_set_of_the_process():
    ballast = np.ones(2**29, np.uint8)  # which the process of the test does not inherit
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    before, held, after = map(int, run.stdout.split())
    assert 2**25 < before < ballast.nbytes
    # Linux counts resident pages in batches of each thread, so that a reading may be a little too high.
    assert after + 2**22 >= held >= before + 2**26


def test_the_peak_of_accelerators_is_that_of_the_fullest_device(monkeypatch):
    devices = [SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n}) for n in (5, 7, 6)]
    monkeypatch.setattr(host_memory.jax, "local_devices", lambda: devices)
    assert host_memory.peak_bytes() == 7
