"""One writer for each run's folder.

`RunDir.create` takes the lock before anything in the folder is touched; `open_run` releases it at the end.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

FILES = (".lock", ".lock.json")
"""Names of the lock's files in the folder: the lock itself, and who holds or held it."""


class RunLock:
    """The lock of the folder `path`, taken by the constructor; the system releases that of a dead process.

    Raises ValueError, which names host, process and time of the other holder, if the folder is in use.
    """

    def __init__(self, path: Path):
        self._lock = FileLock(path / FILES[0], thread_local=False)
        owner = path / FILES[1]
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"only one process may write the run in {path}: {_described(owner)} uses it; wait until that "
                "run has ended, or end it"
            ) from error
        except (OSError, NotImplementedError) as error:
            raise ValueError(
                f"run.dir must be on a file system with locks (flock): {path} cannot be locked, "
                f"{getattr(error, 'strerror', None) or error}; choose another folder, or mount it with locks"
            ) from error
        here = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%F %T")}
        owner.write_text(json.dumps(here) + "\n", encoding="utf-8")

    def release(self) -> None:
        """Let others use the folder."""
        self._lock.release()


def _described(owner: Path) -> str:
    try:
        who = json.loads(owner.read_text(encoding="utf-8"))
        return f"process {who['process']} on {who['host']}, since {who['since']},"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
