"""Reads what a program writes, up to a limit, until it ends or exceeds one of its limits."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quatrain.sandbox.limits import EndedBy

LOOK_S = 0.02
"""Seconds between two looks at what a program uses."""
_READ_BYTES = 65536


class Pipes:
    """Standard output and error of `process`; the first `limit` bytes of each are kept.

    Use it as a context: it closes the pipes.
    """

    def __init__(self, process: subprocess.Popen[bytes], limit: int):
        assert process.stdout is not None
        assert process.stderr is not None
        self.stdout, self.stderr = bytearray(), bytearray()
        self.cut_bytes = 0
        self._process, self._limit = process, limit
        self._files = (process.stdout, process.stderr)
        self._selector = selectors.DefaultSelector()
        self._ended = os.pidfd_open(process.pid)
        self._selector.register(self._ended, selectors.EVENT_READ)
        for file, kept in zip(self._files, (self.stdout, self.stderr)):
            os.set_blocking(file.fileno(), False)
            self._selector.register(file, selectors.EVENT_READ, kept)

    def __enter__(self) -> Pipes:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        os.close(self._ended)
        for file in self._files:
            file.close()

    def read(self, until: float, look: Callable[[], EndedBy | None]) -> EndedBy | None:
        """Reads until the process has ended (None), or a limit is exceeded: which.

        `until` is a time of time.monotonic; `look` is asked every LOOK_S seconds.
        """
        next_look = time.monotonic() + LOOK_S
        while True:
            now = time.monotonic()
            if now >= until:
                return "time"
            if now >= next_look:
                if (exceeded := look()) is not None:
                    return exceeded
                next_look = time.monotonic() + LOOK_S
            events = self._selector.select(max(0.0, min(until, next_look) - now))
            for key, _ in events:
                if key.fd != self._ended:
                    self._take(key)
            if self.cut_bytes:
                return "output"
            if any(key.fd == self._ended for key, _ in events):
                return None

    def first_byte(self, until: float) -> bool:
        """Waits for the first byte of standard output, and takes it away; False if it does not come."""
        while not self.stdout and (now := time.monotonic()) < until:
            events = self._selector.select(until - now)
            for key, _ in events:
                if key.fd != self._ended:
                    self._take(key)
            if any(key.fd == self._ended for key, _ in events):
                break
        came = bool(self.stdout)
        del self.stdout[:1]
        return came

    def drain(self) -> None:
        """Reads what is left in the pipes, once nobody writes into them."""
        for key in list(self._selector.get_map().values()):
            while key.fd != self._ended and self._take(key):
                pass

    def _take(self, key: selectors.SelectorKey) -> bool:
        """Reads once; False at the end of the pipe, and if there is nothing to read now."""
        try:
            data = os.read(key.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(key.fileobj)
            return False
        kept: bytearray = key.data
        room = self._limit - len(kept)
        kept += data[:room]
        self.cut_bytes += max(0, len(data) - room)
        return True


@contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """The descriptor of a file in memory with this content, at its beginning."""
    with open(os.memfd_create("sandbox"), "w+b", buffering=0) as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()
