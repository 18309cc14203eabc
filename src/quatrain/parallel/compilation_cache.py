"""Compiled programs kept on disk, so that a second run of the same shapes does not compile them again.

The command line opens the cache around each command that computes; JAX writes and reads the files. A folder
holds the programs of one kind of machine alone: XLA compiles for the instructions of the CPU it runs on, and
a program with an instruction that another CPU lacks would end that other process.
"""

import glob
import hashlib
import json
import logging
import os
import platform
import re
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from pydantic import BaseModel

from quatrain.backend import CPU, this_backend
from quatrain.config.places import cache_folder, local_path

logger = logging.getLogger(__name__)

MOST_BYTES = 4 * 2**30
"""Where a cache has grown larger than this, the programs unused for longest are deleted at the next start."""
CPU_INFO = Path("/proc/cpuinfo")
_DECIDING = (  # on x86, then on ARM; other fields differ between cores or from moment to moment
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)
_SUFFIX = "-cache"
COUNTS = "programs.json"
"""The file, beside the programs, with how many of them each kind of run compiles."""
MOST_COUNTS = 200
_WITHOUT_SHAPES = (
    *("seed", "run", "checkpoint", "logging", "hub", "distributed"),
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
    *("eval.temperature", "eval.top_p", "sft.steps", "sft.learning_rate"),
    *(
        f"{section}.{key}"
        for section in ("optimizer", "critic_optimizer")
        for key in (
            *("learning_rate", "schedule", "warmup_steps", "final_fraction"),
            *("weight_decay", "beta1", "beta2", "eps"),
        )
    ),
)
"""Keys of a configuration, or its sections, that hardly change which programs a run compiles."""
_FAILURE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)", re.S)


@contextmanager
def compilation_cache(setting: str | None) -> Iterator[Path | None]:
    """Keeps the programs compiled within the block, and reads those kept before.

    `setting` is `run.compilation_cache`: `auto`, a folder, or None, which keeps and reads nothing. The block
    is given the folder in use, or None. Nothing that goes wrong with the cache ends the block: it is told
    once, and the program is compiled. Of several processes only process 0 writes.
    """
    if setting == "auto" and not _is_for_us():
        yield None
        return
    folder, writable = _open(setting) if setting is not None else (None, False)
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": folder and str(folder),
        # Infinity where nothing may be written: JAX then reads programs and writes none.
        "jax_persistent_cache_min_compile_time_secs": 0.0 if writable else float("inf"),
        # XLA's own caches beside it would end a compilation whose disk is full.
        "jax_persistent_cache_enable_xla_caches": "none",
    }
    if setting != "auto" and folder is not None:
        settings["jax_enable_compilation_cache"] = True
    with _configured(settings), _failures_told_once(folder):
        yield folder


def _is_for_us() -> bool:
    """Whether `auto` means a folder of ours: JAX has none by its own variables, and it is safe."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    enabled, folder = (getattr(jax.config, name) for name in names)
    return bool(enabled and not folder and (this_backend() != CPU or sys.platform == "linux"))


def _open(setting: str) -> tuple[Path | None, bool]:
    """The folder for programs of this machine, None where it cannot be used; whether it can be written."""
    root = default_root(os.environ) if setting == "auto" else local_path(setting)
    folder = Path(root, machine_key())
    # One process writes: the programs of all are the same, and would be written over each other.
    if jax.process_index() != 0:
        return folder, False
    open_to_all = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        open_to_all = bool(folder.stat().st_mode & stat.S_IWOTH)
        if open_to_all:
            raise PermissionError("every user may write there, and so decide what this process runs")
        # A real write: a folder may be there and full, over quota or mounted read-only.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"something")
    except OSError as error:
        logger.warning(
            "programs compiled now are not kept for the next run, as %s cannot be written: %s; set "
            "run.compilation_cache to another folder, or to null",
            folder,
            error,
        )
        readable = folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) and not open_to_all
        return folder if readable else None, False
    _prune(root)
    return folder, True


class ProgramCount:
    """How many programs a command compiles: the count that earlier runs left beside the compilation cache.

    `command` is what runs, such as `train`; of `config` counts what decides the shapes of arrays.
    """

    def __init__(self, command: str, config: BaseModel):
        settings: Any = jax.config
        folder = settings.jax_compilation_cache_dir if settings.jax_enable_compilation_cache else None
        self._file = None if folder is None else Path(folder, COUNTS)
        writes = settings.jax_persistent_cache_min_compile_time_secs != float("inf")
        self.next_run_reads = self._file is not None and writes and jax.process_index() == 0
        """Whether the programs compiled now are kept for the next run."""
        decides = {"command": command, **_deciding_shapes(config)}
        self._key = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.former = self._counts().get(self._key)
        """The most that an earlier run of these shapes compiled, or read; None if there was none."""

    def keep(self, count: int) -> None:
        """Leave this run's count for the next one, unless an earlier run had more."""
        if not self.next_run_reads or self._file is None or not count:
            return
        counts = self._counts()
        # Popped and put at the end, so that the counts used last survive MOST_COUNTS.
        most = max(count, counts.pop(self._key, 0))
        kept = dict([*counts.items(), (self._key, most)][-MOST_COUNTS:])
        with suppress(OSError):
            # Runs on one machine share the file: a reader must never find half of it.
            new = self._file.with_name(f"{COUNTS}.{os.getpid()}")
            new.write_text(json.dumps(kept))
            new.replace(self._file)

    def _counts(self) -> dict[str, int]:
        """All counts of the file, those used last at the end; none if it cannot be read."""
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        counts = found.items() if isinstance(found, dict) else ()
        return {key: count for key, count in counts if isinstance(count, int)}


def _deciding_shapes(config: BaseModel) -> dict[str, Any]:
    """The keys of `config` but those without shapes, in sections."""
    kept: dict[str, Any] = config.model_dump(mode="json")
    for name in _WITHOUT_SHAPES:
        *sections, key = name.split(".")
        place = kept
        for section in sections:
            place = place.get(section, {})
        place.pop(key, None)
    return kept


def default_root(environ: Mapping[str, str]) -> Path:
    """The folder that `auto` stands for: `quatrain/compiled` in the user's folder for caches."""
    return cache_folder(environ) / "compiled"


def machine_key() -> str:
    """The name of the folder for all that may run each other's programs.

    Made of the versions of JAX, the platform and its devices, the variables that XLA reads, and, where the
    programs run on a CPU, of that CPU's model and instructions.
    """
    device = jax.local_devices()[0]
    decides = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": f"{device.platform} {device.client.platform_version}",
        "device": device.device_kind,
        **{name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "cpu": cpu_identity() if device.platform == "cpu" else "",
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return f"{device.platform}-jax{jax.__version__}-{digest[:16]}"


def cpu_identity() -> str:
    """The model and the instructions of this machine's CPU; its name where they cannot be read."""
    try:
        first = CPU_INFO.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()} of {platform.node()}"
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): " ".join(sorted(value.split())) for name, _, value in pairs}
    return platform.machine() + json.dumps([(name, fields.get(name)) for name in _DECIDING])


def _prune(root: Path) -> None:
    """Deletes programs of any machine under `root`, those unused for longest first, down to MOST_BYTES."""
    entries = []
    for path in glob.iglob(f"{glob.escape(str(root))}/*-jax*/*{_SUFFIX}"):
        with suppress(OSError):  # another process deletes too
            status = os.lstat(path)
            # Many file systems keep no times of reading; the time of writing is then the best known.
            entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    size = sum(size for _, size, _ in entries)
    for _, num_bytes, path in sorted(entries):
        if size <= MOST_BYTES:
            return
        with suppress(OSError):
            os.unlink(path)
        size -= num_bytes


@contextmanager
def _configured(settings: Mapping[str, Any]) -> Iterator[None]:
    """JAX with `settings`, and as it was after the block."""

    def update(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()  # which has looked at its settings once, at the first program compiled

    before = {name: getattr(jax.config, name) for name in settings}
    try:
        update(settings)
        yield
    finally:
        update(before)


@contextmanager
def _failures_told_once(folder: Path | None) -> Iterator[None]:
    """Of the programs that JAX warns it could not read, or write, the first is told.

    Files that could not be read are deleted, as JAX would compile the program in every run and leave them.
    """
    show, told = warnings.showwarning, set()

    def tell(message: Any, *args: Any, **kwargs: Any) -> None:
        failure = _FAILURE.match(str(message))
        if failure is None or folder is None:
            show(message, *args, **kwargs)
            return
        activity, program, reason = failure.groups()
        if activity == "reading" and jax.process_index() == 0:
            for path in folder.glob(f"{glob.escape(program)}-*{_SUFFIX}"):
                with suppress(OSError):
                    path.unlink()
        if activity not in told:
            told.add(activity)
            text = "the program is compiled instead, and further failures of the kind are not reported"
            logger.warning("%s a compiled program failed in %s (%s); %s", activity, folder, reason, text)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", _FAILURE.pattern)
        warnings.showwarning = tell
        yield
