"""Programs that attack what runs them, as a policy may write them: each says what it attained.

`HOSTILE` has, for each, its source, how it must end, and what it must print, as a pattern. The sources have
the words SECRET_FILE, LISTENER, ABSTRACT, OUTSIDE and RUN, in place of which `with_places` puts a file, a
port, a socket, a folder and a process of the test.
"""

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

TRY = """
import ctypes, errno, fcntl, mmap, os, signal, socket, stat, struct, sys, time

libc = ctypes.CDLL(None, use_errno=True)

def attempt(name, work):
    "Prints whether something could be done."
    try:
        value = work()
    except BaseException as error:
        print(name, "failed", type(error).__name__)
    else:
        print(name, "DONE", str(value)[:200])

def call(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), "failed")
"""


class Hostile(NamedTuple):
    source: str
    ended_by: str = "exit"
    prints: str = r"(\w+ failed \w+\n)+"
    """All attempts fail, unless it says otherwise."""
    collect: tuple[str, ...] = ()


HOSTILE: dict[str, Hostile] = {
    "fork bomb": Hostile(
        """
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        "time",
        "",
    ),
    "processes that stay": Hostile(
        """
        for count in range(1000):
            try:
                if not os.fork():
                    time.sleep(60)
            except OSError:
                print("processes", count)
                break
        """,
        prints=r"processes (29|30|31)\n",
    ),
    "connections": Hostile(
        """
        attempt("tcp", lambda: socket.create_connection(("127.0.0.1", LISTENER), 1))
        attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        attempt("ipv6", lambda: socket.socket(socket.AF_INET6))
        attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
        attempt("name", lambda: socket.getaddrinfo("localhost.localdomain", 80))
        attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
        """
    ),
    "sockets of the machine": Hostile(
        """
        def connect(name):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(name)
        attempt("abstract", lambda: connect("\\0ABSTRACT"))
        attempt("path", lambda: connect("OUTSIDE/socket"))
        attempt("docker", lambda: connect("/var/run/docker.sock"))
        """
    ),
    "writing outside": Hostile(
        """
        for place in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/proc/sys", "OUTSIDE", sys.prefix):
            attempt("write", lambda: open(f"{place}/quatrain-hostile", "w"))
        attempt("link", lambda: os.link("OUTSIDE/secret", "link"))
        """
    ),
    "reading keys": Hostile(
        """
        attempt("secret", lambda: open("SECRET_FILE").read())
        attempt("shadow", lambda: open("/etc/shadow").read())
        attempt("ssh", lambda: os.listdir("/root/.ssh"))
        attempt("variable", lambda: os.environ["QUATRAIN_TEST_TOKEN"])
        attempt("homes", lambda: os.listdir("/home"))
        """
    ),
    "filling the disk": Hostile(
        """
        def fill(folder):
            for number in range(1000):
                with open(f"{folder}/{number}", "wb") as file:
                    file.write(b"x" * (1 << 20))
        attempt("work", lambda: fill("."))
        attempt("shared", lambda: fill("/dev/shm"))
        attempt("memory", lambda: os.memfd_create("m"))
        """
    ),
    "many small files": Hostile(
        """
        for number in range(10_000_000):
            os.mkdir(str(number))
        """,
        "files",
        "",
    ),
    "folders in folders": Hostile(
        """
        for number in range(100_000):
            os.mkdir("d")
            os.chdir("d")
        """,
        "files",
        "",
    ),
    "signals to all": Hostile(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        attempt("run", lambda: os.kill(RUN, signal.SIGKILL))
        for process in {1, os.getppid()}:
            os.kill(process, signal.SIGKILL)
            os.kill(process, signal.SIGSTOP)
        os.kill(-1, signal.SIGTERM)
        """
    ),
    "tracing": Hostile(
        """
        attempt("ptrace", lambda: call(101, 16, 1, 0, 0))
        attempt("attach", lambda: call(101, 16, RUN, 0, 0))
        attempt("memory", lambda: open("/proc/1/mem", "r+b").read(1))
        attempt("writev", lambda: call(311, 1, 0, 0, 0, 0, 0))
        """
    ),
    "one large allocation": Hostile('attempt("bytes", lambda: bytearray(16 << 30))'),
    "memory of many processes": Hostile(
        """
        for _ in range(8):
            if not os.fork():
                break
        kept = bytearray(b"x") * (90 << 20)
        time.sleep(600)
        """,
        "memory",
        "",
    ),
    "memory that no process has mapped": Hostile(
        """
        mapped = mmap.mmap(-1, 1 << 30)
        for first in range(0, 1 << 28, 1 << 24):
            mapped[first : first + (1 << 24)] = b"x" * (1 << 24)
            mapped.madvise(mmap.MADV_DONTNEED, first, 1 << 24)
        time.sleep(60)
        """,
        "memory",
        "",
    ),
    "output without end": Hostile(
        """
        while True:
            os.write(1, b"x" * 65536)
        """,
        "output",
        "x{1024}",
    ),
    "errors without end": Hostile('sys.exit("x" * 10_000_000)', "output", ""),
    "a loop that ignores signals": Hostile(
        """
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            pass
        """,
        "time",
        "",
    ),
    "sleep": Hostile("time.sleep(1000)", "time", ""),
    "stopping itself": Hostile("os.kill(0, signal.SIGSTOP)", "time", ""),
    "a daemon": Hostile(
        """
        if not os.fork():
            os.setsid()
            if not os.fork():
                open("started", "w").close()
                sys.argv[0] = "quatrain-daemon"
                os.execv(sys.executable, ["quatrain-daemon", "-c", "import time; time.sleep(1000)"])
            os._exit(0)
        while not os.path.exists("started"):
            time.sleep(0.01)
        print("left")
        """,
        prints="left\n",
    ),
    "removing its interpreter": Hostile(
        """
        attempt("remove", lambda: os.remove(os.path.realpath(sys.executable)))
        attempt("rename", lambda: os.rename(sys.prefix, "/tmp/prefix"))
        attempt("module", lambda: open(os.__file__, "a"))
        """
    ),
    "links in place of files": Hostile(
        """
        os.symlink("SECRET_FILE", "link")
        os.symlink("/proc/self/environ", "environ")
        os.symlink("/", "root")
        os.mkdir("folder")
        os.symlink("/etc", "folder/etc")
        os.mkfifo("pipe")
        open("good", "w").write("good")
        """,
        prints="",
        collect=(
            "link",
            "environ",
            "root/etc/passwd",
            "folder",
            "folder/etc/hostname",
            "pipe",
            "none",
            "good",
        ),
    ),
    "reading others' environments": Hostile(
        """
        for process in [name for name in os.listdir("/proc") if name.isdigit()]:
            for name in ("environ", "cmdline", "cgroup", "mountinfo"):
                try:
                    text = open(f"/proc/{process}/{name}").read()
                except OSError:
                    continue
                print("QUATRAIN_TEST_TOKEN" in text or "OUTSIDE" in text)
        print(len([name for name in os.listdir("/proc") if name.isdigit()]))
        attempt("run", lambda: open("/proc/RUN/environ").read())
        """,
        prints=r"(False\n)+[23]\nrun failed \w+\n",
    ),
    "mounts and namespaces": Hostile(
        """
        def mount(*arguments):
            if libc.mount(*arguments):
                raise OSError(ctypes.get_errno(), "failed")
        def unshare(flags):
            if libc.unshare(flags):
                raise OSError(ctypes.get_errno(), "failed")
        attempt("tmpfs", lambda: mount(b"t", b"/tmp", b"tmpfs", 0, None))
        attempt("remount", lambda: mount(None, b"/usr", None, 0x1020, None))
        attempt("user", lambda: unshare(0x10000000))
        attempt("mount", lambda: unshare(0x20000))
        attempt("clone", lambda: call(56, 0x10000000 | 17, 0, 0, 0, 0))
        attempt("setns", lambda: call(308, os.open("/proc/1/ns/net", os.O_RDONLY), 0))
        """
    ),
    "leaving the root folder": Hostile(
        """
        attempt("chroot", lambda: os.chroot("/tmp"))
        attempt("handle", lambda: call(304, 3, 0, 0))
        attempt("init", lambda: os.listdir("/proc/1/root/OUTSIDE"))
        attempt("outside", lambda: os.listdir("OUTSIDE"))
        os.chdir("/proc/self/root/../../..")
        attempt("above", lambda: os.listdir(".OUTSIDE"))
        """
    ),
    "becoming root": Hostile(
        """
        attempt("setuid", lambda: os.setuid(0))
        attempt("setgroups", lambda: os.setgroups([0]))
        os.chmod("main.py", 0o6777)
        print("NoNewPrivs:\\t1" in open("/proc/self/status").read())
        """,
        prints=r"setuid failed \w+\nsetgroups failed \w+\nTrue\n",
    ),
    "settings of the kernel": Hostile(
        """
        for name in ("sys/kernel/core_pattern", "sysrq-trigger", "sys/kernel/modprobe", "sys/vm/drop_caches"):
            attempt("write", lambda: open(f"/proc/{name}", "wb", 0).write(b"b"))
        attempt("oom", lambda: open("/proc/self/oom_score_adj", "wb", 0).write(b"-1000"))
        attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20))
        attempt("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
        attempt("kcore", lambda: open("/proc/kcore", "rb").read(1))
        """
    ),
    "many open files": Hostile(
        """
        opened = []
        try:
            while True:
                opened.append(open("/dev/null"))
        except OSError as error:
            print(errno.errorcode[error.errno], len(opened) < 256)
        """,
        prints=r"EMFILE True\n",
    ),
    "the terminal and the input": Hostile(
        """
        attempt("inject", lambda: fcntl.ioctl(0, 0x5412, b"x"))
        attempt("tty", lambda: open("/dev/tty", "w"))
        attempt("console", lambda: open("/dev/console", "w"))
        attempt("input", lambda: os.write(0, b"x"))
        """
    ),
    "keyrings": Hostile(
        """
        attempt("add", lambda: call(248, b"user", b"name", b"x", 1, -3))
        attempt("keyctl", lambda: call(250, 0, -3, 0))
        attempt("request", lambda: call(249, b"user", b"name", 0, 0))
        """
    ),
    "devices": Hostile(
        """
        for name in ("mem", "kmsg", "vda", "sda", "kvm", "fuse", "net/tun", "nvidia0", "core"):
            attempt("open", lambda: open(f"/dev/{name}", "rb").read(1))
        attempt("make", lambda: os.mknod("disk", stat.S_IFBLK | 0o666, os.makedev(8, 0)))
        """
    ),
    "memory that no limit counts": Hostile(
        """
        attempt("shm", lambda: call(29, 0, 1 << 30, 0o1600))
        attempt("queue", lambda: call(68, 0, 0o1600))
        attempt("uring", lambda: call(425, 8, 0))
        kept = ctypes.create_string_buffer(1 << 20)
        attempt("lock", lambda: call(149, kept, 1 << 20))
        attempt("requests", lambda: call(206, 128, ctypes.byref(ctypes.c_long())))
        attempt("bpf", lambda: call(321, 0, 0, 0))
        """
    ),
    "pages in pipes": Hostile(
        """
        mapped = mmap.mmap(-1, 1 << 21)
        class Part(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        part = Part(ctypes.addressof(ctypes.c_char.from_buffer(mapped)), 4096)
        attempt("splice", lambda: call(278, os.pipe()[1], ctypes.byref(part), 1, 0))
        """
    ),
    "descriptors of the run": Hostile(
        """
        print(sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1])
        """,
        prints=r"\[0, 1, 2\]\n",
    ),
    "lists of access that no limit counts": Hostile(
        """
        open("file", "w").close()
        entries = [(1, 6, 0)] + [(2, 7, user) for user in range(8000)] + [(4, 4, 0), (16, 7, 0), (32, 4, 0)]
        accesses = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        for name in ("access", "default"):
            where = "file" if name == "access" else "."
            attempt(name, lambda: os.setxattr(where, "system.posix_acl_" + name, accesses))
        attempt("own", lambda: os.setxattr("file", "user.own", bytes(1000)))
        """
    ),
    "larger files than the limit": Hostile(
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        attempt("sparse", lambda: os.truncate("main.py", 1 << 40))
        with open("sparse", "wb") as file:
            file.truncate(8 << 20)
        os.symlink("/", "../link")
        """,
        collect=("sparse",),
    ),
    "a folder that becomes a link": Hostile(
        """
        os.rename("/tmp/work", "/tmp/other")
        os.symlink("OUTSIDE", "/tmp/work")
        """,
        prints="",
        collect=("secret",),
    ),
    "raising its limits": Hostile(
        """
        import resource
        for name in ("DATA", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "MSGQUEUE", "CPU"):
            which = getattr(resource, "RLIMIT_" + name, 12)
            attempt(name, lambda: resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2))
        """
    ),
    "mappings that take long to read": Hostile(
        """
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        for _ in range(16):
            if not os.fork():
                break
        for number in range(60_000):
            libc.mmap(None, 4096, number % 2, 0x22, -1, 0)
        time.sleep(600)
        """,
        "memory",
        "",
    ),
    "output at its end": Hostile('os.write(1, b"x" * 1025)', "output", "x{1024}"),
}


def with_places(source: str, places: Mapping[str, object]) -> str:
    """The program with the places of a test."""
    source = TRY + textwrap.dedent(source)
    for name, place in places.items():
        source = source.replace(name, str(place))
    return source
