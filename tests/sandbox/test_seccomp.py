"""The filter of system calls, run here as the kernel would run it."""

import errno
import re
import struct
from pathlib import Path

import pytest

from quatrain.sandbox.seccomp import ATTRIBUTES, DENIED, seccomp_filter

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
OTHERS = {
    "x86_64": {"read": 0, "openat": 257, "execve": 59, "fork": 57},
    "aarch64": {"read": 63, "openat": 56, "execve": 221, "futex": 98},
}
CLONE, SOCKET, PAIR, IOCTL = ((56, 220), (41, 198), (53, 199), (16, 29))
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def verdict(architecture, number, first=0, second=0, audit=None):
    """What the filter returns for a system call."""
    audit = ARCHITECTURES[architecture] if audit is None else audit
    data = struct.pack("<IIQQQ4Q", number, audit, 0, first, second, 0, 0, 0, 0)
    code = list(struct.iter_unpack("<HBBI", seccomp_filter(architecture)))
    at = value = 0
    while True:
        operation, then, otherwise, constant = code[at]
        at += 1
        match operation:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, constant)
            case 0x06:
                return constant
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant != 0}
                at += then if holds[operation] else otherwise


@pytest.mark.parametrize("column", [0, 1])
def test_denied_calls_fail_and_others_pass(column):
    """Catches a jump that is off by one, and an entry for the wrong architecture."""
    name = list(ARCHITECTURES)[column]
    for numbers in DENIED.values():
        if numbers[column] is not None:
            assert verdict(name, numbers[column]) == DENY | errno.EPERM
    for numbers in ATTRIBUTES.values():
        assert verdict(name, numbers[column]) == DENY | errno.EOPNOTSUPP
    for number in OTHERS[name].values():
        assert verdict(name, number) == ALLOW
    for call in (SOCKET, PAIR):
        assert verdict(name, call[column], first=1) == ALLOW
        assert {verdict(name, call[column], first=family) for family in (0, 2, 10, 16, 17, 40)} == {
            DENY | errno.EACCES
        }
    assert verdict(name, CLONE[column], first=0x3D0F00) == ALLOW  # a thread of glibc
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(name, CLONE[column], first=flag | 17) == DENY | errno.EPERM
    assert verdict(name, IOCTL[column], second=0x5401) == ALLOW
    assert verdict(name, IOCTL[column], second=0x5412) == DENY | errno.EPERM
    assert verdict(name, 435) == DENY | errno.ENOSYS
    assert verdict(name, 0, audit=0x40000003) == KILL  # the interface of 32 bits
    assert verdict(name, 0x40000000) == KILL


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_are_those_of_the_headers(column):
    """Catches a number with a mistake: it would deny another call, and let this one pass."""
    header = HEADERS[list(ARCHITECTURES)[column]]
    if not header.exists():
        pytest.skip(f"{header} is not here (Debian: linux-libc-dev)")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {name: int(number) for name, number in found}
    denied = DENIED | ATTRIBUTES
    known = {
        name: pair[column] for name, pair in denied.items() if pair[column] is not None and name in numbers
    }
    assert len(known) > 50
    assert known == {name: numbers[name] for name in known}
