"""The filter of system calls of a sandboxed program, as the kernel reads it (classic BPF).

It takes away what namespaces do not separate or what programs of a policy do not need: other namespaces and
mounts, tracing, keyrings, sockets other than Unix ones, memory that no limit counts, and interfaces of the
kernel with a long record of faults. Denied calls fail with an error, so that a program can go on.
"""

from __future__ import annotations

import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24  # offsets in seccomp_data, little endian
_X32 = 0x40000000  # numbers of the x32 interface, which would pass by the table
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET
_AF_UNIX = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # write into the input of a terminal
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers on x86_64 and on aarch64 (linux/asm-generic/unistd.h); None: the architecture has no such call.
DENIED: dict[str, tuple[int, int | None]] = {
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Keyrings.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Memory that the limits do not count: System V, queues, files without a folder. The number of
    # asynchronous requests (io_setup) is limited for the whole machine.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_secret": (447, 447),
    "io_setup": (206, 0),
    # A page in a pipe keeps all of the huge page that it is part of, after its process has given it back.
    "vmsplice": (278, 75),
    # The machine.
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "personality": (135, 92),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "lookup_dcookie": (212, 18),
}
ATTRIBUTES: dict[str, tuple[int, int | None]] = {
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
}
"""Calls that give a file in memory attributes and lists of access, up to 128 KiB each, which count neither as
its size nor as a file. Denied as by a file system without them, for which programs that copy are prepared."""
# Denied as if the kernel had no such call, upon which libraries take another: the arguments of clone3 cannot
# be read by a filter.
_MISSING: dict[str, tuple[int, int | None]] = {"clone3": (435, 435), "memfd_create": (319, 279)}
_BY_ARGUMENT = {"clone": (56, 220), "socket": (41, 198), "socketpair": (53, 199), "ioctl": (16, 29)}


def machine() -> str | None:
    """This machine's architecture, if there is a filter for it."""
    return name if (name := platform.machine()) in _ARCHITECTURES else None


def seccomp_filter(architecture: str) -> bytes:
    """The program for `architecture` (`machine()`), an array of struct sock_filter."""
    column = list(_ARCHITECTURES).index(architecture)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[architecture]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for table, error in (
        (DENIED, errno.EPERM),
        (ATTRIBUTES, errno.EOPNOTSUPP),
        (_MISSING, errno.ENOSYS),
    ):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]
    for name, offset, test, value, denied_if, error in (
        ("clone", _ARGUMENT_0, _ANY_BIT, _NEW_NAMESPACES, True, errno.EPERM),
        ("socket", _ARGUMENT_0, _EQUAL, _AF_UNIX, False, errno.EACCES),
        ("socketpair", _ARGUMENT_0, _EQUAL, _AF_UNIX, False, errno.EACCES),
        ("ioctl", _ARGUMENT_1, _EQUAL, _TIOCSTI, True, errno.EPERM),
        ("ioctl", _ARGUMENT_1, _EQUAL, _TIOCLINUX, True, errno.EPERM),
    ):
        then, otherwise = (0, 1) if denied_if else (1, 0)
        code += [
            (_LOAD, 0, 0, _NUMBER),
            (_EQUAL, 0, 3, _BY_ARGUMENT[name][column]),
            (_LOAD, 0, 0, offset),
            (test, then, otherwise, value),
            (_RETURN, 0, 0, _ERRNO | error),
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
