"""The folder of a run: created for a new run, whose name must be unused, located on resume, and locked.

`open_run` creates it first; `report.writer`, the checkpointer and the export write into it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from quatrain.cluster.processes import decided_by_main, gather_objects, is_main_process
from quatrain.config.buckets import check_writable, complete_steps, delete, entries, last_written
from quatrain.config.dump import by_dotted_key
from quatrain.config.errors import ConfigError, disk_is_full, shown
from quatrain.config.places import is_bucket, local_path
from quatrain.config.settings import parse_yaml
from quatrain.run.metrics import MetricsFile

LOCK_FILES = (".lock", ".lock.json")
"""Names of the lock's files in the folder: the lock itself, and who holds or held it."""
STORE_FILE = "checkpoints.txt"
"""The file with the place of the checkpoints and of the reference, if that is not the folder."""
CHECKPOINTS = "checkpoints"
UNBEGUN = ("samples", ".write_probe", "config.draft", STORE_FILE, "checkpoints.draft")
"""Names, beside the lock's, in the folder of a run that has not begun."""


class RunLock:
    """The lock of the folder `path`, taken by the constructor; the system releases that of a dead process.

    Raises ValueError, which names host, process and time of the other holder, if the folder is in use, and
    one that names `key`, by which the folder is chosen, if it cannot be locked.
    """

    def __init__(self, path: Path, key: str = "run.dir"):
        self._lock = FileLock(path / LOCK_FILES[0], thread_local=False)
        owner = path / LOCK_FILES[1]
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"only one process may write the run in {path}: {_described(owner)} uses it; wait until that "
                "run has ended, or end it"
            ) from error
        except (OSError, NotImplementedError) as error:
            raise ValueError(
                f"{key} must be on a file system with locks (flock): {path} cannot be locked, "
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


AUTO = "auto"
_log = logging.getLogger(__name__)


class _Named:
    """A file or folder of a run, by its name."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir] | None = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """The folder `runs/<name>/` with the files of a run."""

    path: Path
    resumed: bool = False
    """True if the run continues from a checkpoint."""
    note: str = ""
    """Log message that says what is resumed; empty without `--resume`."""
    restarted: bool = False
    """True if the folder has files of an attempt without a checkpoint, and the run starts in it again."""
    locks: tuple[RunLock, ...] = field(default=(), compare=False, repr=False)
    """Of the folder, and of `store` if that is a folder. Held by the main process, from before anything in
    them is touched until `close`."""
    store: str = ""
    """The folder or bucket with checkpoints and reference; empty: they are in `path`."""

    @classmethod
    def create(
        cls,
        root: str | Path,
        name: str,
        *,
        resume: str | None = None,
        named: bool = True,
        stores: str | None = None,
    ) -> RunDir:
        """The folder of run `name` under `root`, or of the run to resume.

        `resume`: a run's name or the path of its folder (`find_run`), or `auto`. `auto` selects run `name` if
        its folder exists, else a new run `name`; if nobody chose the name (not `named`), it prefers the run
        under `root` with the newest checkpoint to a new one. Only `auto` accepts a run that ended before its
        first checkpoint, and starts it again from its beginning. The main process selects and creates the
        folder, and locks it. `stores` (`checkpoint.dir`) is the folder, locked too, or bucket with the
        checkpoints of runs, each in a folder of its name; with it, `auto` also resumes run `name` if only
        they are left, and other processes need not see the run's folder. Raises ValueError if the name of a
        new run is already used, there is nothing to resume, another process uses the folder, it is not
        writable, or a run to resume has its checkpoints elsewhere.
        """
        locks: list[RunLock] = []

        def chosen() -> tuple[str, bool, str, bool, str]:
            place = local_path(root).absolute()
            run = cls._chosen(place, name, resume, named, _absolute(stores, place))
            locks.extend(run._make())
            return str(run.path), run.resumed, run.note, run.restarted, run.store

        path, resumed, note, restarted, store = decided_by_main(chosen)
        run = cls(Path(path), resumed, note, restarted, tuple(locks), store)
        key, shared = ("checkpoint.dir", store) if store else ("run.dir", path)
        seen = gather_objects(is_bucket(shared) or Path(shared).is_dir())
        if not all(seen):
            raise ValueError(
                f"{key} must be a folder that all processes share: process {seen.index(False)} does not see "
                f"{shared}, which process 0 has created; set {key} to a folder on a shared file system, or "
                "checkpoint.dir to a bucket"
            )
        return run

    @classmethod
    def _chosen(cls, root: Path, name: str, resume: str | None, named: bool, stores: str) -> RunDir:
        path, store = None, stores and f"{stores}/{name}"
        if resume:
            path = auto_run(root, name, named) if resume == AUTO else _with_checkpoint(find_run(resume, root))
        # The folder may be there without the run: a new volume, or a start that was killed.
        lost = path is None or _holds_nothing(path)
        left = steps_in(_within(store, CHECKPOINTS)) if store and lost else []
        if left and resume == AUTO and named:
            note = (
                f"resuming {name} from step {max(left)} in {store}: its folder {root / name} is not here or "
                "empty, and gets the metrics and samples of later steps alone"
            )
            return cls(path or _fresh(root, name), resumed=True, note=note, store=store)
        if path is not None and resume == AUTO and _can_start_over(path):
            note = f"{path} has no complete checkpoint: starting {name} again from its beginning"
            return cls(path, note=note, restarted=True, store=_unused(store))
        if path is not None and (steps := checkpoint_steps(path)):
            store = _store_of(path)
            if store.rpartition("/")[0] != stores:
                raise ValueError(
                    f"checkpoint.dir of a resumed run must not change: {path} has its checkpoints in "
                    f"{checkpoints_of(path)}; got {stores or 'null'}; set it back, or move them and write "
                    f"their place into {path / STORE_FILE}"
                )
            return cls(path, resumed=True, note=f"resuming {path} from step {max(steps)}", store=store)
        missing = f"there is no run {name} in {root}" if named else f"no run in {root} has a checkpoint"
        note = f"{missing}: starting a new run {name}" if resume else ""
        return cls(_fresh(root, name), note=note, store=_unused(store))

    @property
    def name(self) -> str:
        """The run's name, which is the name of its folder."""
        return self.path.resolve().name

    config = _Named("config.yaml")
    """The resolved configuration (YAML)."""
    metrics = _Named("metrics.jsonl")
    """The metrics: one JSON object per step."""
    hints = _Named("hints.jsonl")
    """What the run was told to be probably wrong: one JSON object per hint."""
    plan = _Named("plan.json")
    """The batch plan (JSON)."""
    description = _Named("run.json")
    """What made the run, each time that it was started (JSON)."""
    code = _Named("code")
    """Folder with copies of users' code."""
    samples = _Named("samples")
    """Folder with the completions of each step."""
    pictures = _Named("pictures")
    """Folder with small copies of the pictures that samples name."""
    reference_logprobs = _Named("reference_logprobs.npz")
    """The reference's log-probabilities of preferences, computed before the first step."""
    final = _Named("final")
    """Folder of the exported model."""
    log = _Named("run.log")
    """The log messages, with times."""
    plot = _Named("plot.png")
    """Plot of reward and accuracy over the steps (PNG)."""
    page = _Named("report.html")
    """The run page: curves, completions and configuration (HTML)."""

    @property
    def checkpoints(self) -> Path | str:
        """Folder of the checkpoints, or its address in a bucket."""
        return _within(self.store or self.path, CHECKPOINTS)

    @property
    def reference(self) -> Path | str:
        """Folder of the reference policy as it was at the start of training, or its address in a bucket."""
        return _within(self.store or self.path, "reference")

    def steps(self) -> list[int]:
        """Training steps of the complete checkpoints, in increasing order."""
        return steps_in(self.checkpoints)

    def write_config(self, text: str) -> None:
        """Write the resolved configuration to `config.yaml`.

        If an existing `config.yaml` has different values, it is kept as `config.1.yaml` (`config.2.yaml`
        and so on), and each key that has changed is told with both values; if it differs in comments only, it
        is not changed.
        """
        if not is_main_process():
            return
        if self.config.exists():
            if self._configured() == _values(text):
                return
            taken = len(list(self.path.glob("config.*.yaml")))
            earlier = self.path / f"config.{taken + 1}.yaml"
            changed = self.changed_keys(text)
            shutil.copyfile(self.config, earlier)  # a copy, so that at no moment there is no config.yaml
            _log.warning("the configuration differs from the previous one, kept in %s", earlier.name)
            for key, values in changed.items():
                _log.warning("%s: %s before, %s now", key, *values)
        write_whole(self.config, text)

    def changed_keys(self, text: str) -> dict[str, list[str]]:
        """[value before, value now] of each key whose value in `config.yaml` is not that in `text`.

        There are none if there is no whole `config.yaml`.
        """
        before, now = self._configured(), _values(text)
        return {
            key: [shown(each[key]) if key in each else "absent" for each in (before, now)]
            for key in (dict.fromkeys((*before, *now)) if before else ())
            if (key in before, before.get(key)) != (key in now, now.get(key))
        }

    def _configured(self) -> dict[str, Any]:
        if not self.config.exists():
            return {}
        return _values(self.config.read_text(encoding="utf-8", errors="replace"))

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write the batch plan to `plan.json`."""
        if is_main_process():
            self.plan.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")

    def rewind(self, step: int) -> int:
        """Move the metrics after `step` to `metrics.discarded.jsonl`; returns the number of moved lines."""
        if not is_main_process():
            return 0
        moved = MetricsFile(self.metrics).rewind(step)
        if moved:
            _log.warning("%d lines of metrics after step %d are now in metrics.discarded.jsonl", moved, step)
        return moved

    def start_over(self) -> None:
        """Remove files of an earlier attempt without a checkpoint from this folder, in the main process.

        Its metrics are moved to `metrics.discarded.jsonl`. Its frozen reference policy (the policy at the
        start of training) is deleted, because this run saves one again. Samples are overwritten step by step.
        """

        def put_aside() -> None:
            place = self.reference
            if entries(str(place)) if is_bucket(place) else Path(place).exists():
                delete(str(place)) if is_bucket(place) else shutil.rmtree(place)
                _log.warning("reference/ of an earlier attempt without a checkpoint is overwritten")
            self.hints.unlink(missing_ok=True)
            self.rewind(-1)

        decided_by_main(put_aside)

    def discard(self) -> None:
        """Delete the folder of a new run that has no results yet, so that its name can be used again."""
        if self.restarted or not is_main_process() or (self.resumed and self.config.exists()):
            return
        created = {self.config.name, self.samples.name, STORE_FILE, *LOCK_FILES}
        if {entry.name for entry in self.path.iterdir()} <= created:
            with suppress(OSError):  # if there are samples or a file was just written, the folder stays
                self.samples.rmdir()
                for name in created - {self.samples.name}:
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()
                if self._locked_store is not None:
                    _remove_unused(self._locked_store)

    def close(self) -> None:
        """Let other processes use the folder."""
        for lock in self.locks:
            lock.release()

    @property
    def _locked_store(self) -> Path | None:
        """The folder with the checkpoints; None if they are in the run's folder, or in a bucket."""
        return Path(self.store) if self.store and not is_bucket(self.store) else None

    def _make(self) -> list[RunLock]:
        """Creates the folder, or takes an existing one; returns its lock, and that of the store."""
        if is_bucket(self.store):
            check_writable(self.store)
        with ExitStack() as held:
            locks = []
            # First that of the store: of a run that is refused for it, no folder is made here.
            if self._locked_store is not None:
                with _writable(self._locked_store, "the checkpoints' folder", "checkpoint.dir"):
                    self._locked_store.mkdir(parents=True, exist_ok=True)
                    locks.append(RunLock(self._locked_store, "checkpoint.dir"))
                held.callback(locks[0].release)
            with _writable(self.path, "the run's folder", "run.dir"):
                self.path.mkdir(parents=True, exist_ok=self.resumed or self.restarted)
                locks.append(RunLock(self.path))
                held.callback(locks[-1].release)
                probe = self.path / ".write_probe"
                probe.write_bytes(b"probe" * 1000)
                probe.unlink()
                self.samples.mkdir(exist_ok=True)
                place = self.path / STORE_FILE
                if self.store:
                    write_whole(place, self.store + "\n")
                else:
                    place.unlink(missing_ok=True)
            held.pop_all()
        return locks


@contextmanager
def _writable(place: Path, what: str, key: str) -> Iterator[None]:
    """An OSError while `place`, which `key` chooses, is made becomes a ValueError with the remedy."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{what} must be writable: {place} is not ({error.strerror or error}); "
            f"{'free space' if disk_is_full(error) else 'fix its permissions'}, or choose another folder "
            f"with `--set {key}=…`"
        ) from error


def _remove_unused(store: Path) -> None:
    """Removes the folder for checkpoints of a run that has not begun, if it has none."""
    if {entry.name for entry in store.iterdir()} <= {*LOCK_FILES}:
        for name in LOCK_FILES:
            (store / name).unlink(missing_ok=True)
        store.rmdir()


def write_whole(path: Path, text: str) -> None:
    """Write a file of a run, which is replaced at once: no reader finds a part of it."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    draft.replace(path)


def checkpoint_steps(path: Path) -> list[int]:
    """Training steps of the complete checkpoints of the run at `path`, in increasing order."""
    return steps_in(checkpoints_of(path))


def checkpoints_of(path: Path) -> Path | str:
    """The folder of the checkpoints of the run at `path`, or its address in a bucket."""
    return _within(_store_of(path) or path, CHECKPOINTS)


def steps_in(folder: Path | str) -> list[int]:
    """Steps of the complete checkpoints in `folder`, which may be in a bucket, in increasing order."""
    if is_bucket(folder):
        return complete_steps(str(folder))
    found = Path(folder).iterdir() if Path(folder).is_dir() else ()
    return sorted(int(entry.name) for entry in found if entry.name.isdigit() and entry.is_dir())


def _store_of(path: Path) -> str:
    file = path / STORE_FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def _within(place: Path | str, name: str) -> Path | str:
    return f"{place}/{name}" if is_bucket(place) else Path(place, name)


def _absolute(stores: str | None, root: Path) -> str:
    """The place of runs' checkpoints; empty if it is none but `root`, which has the runs themselves."""
    if stores is None or is_bucket(stores):
        return (stores or "").rstrip("/")
    folder = local_path(stores).absolute()
    return "" if folder.resolve() == root.resolve() else str(folder)


def _unused(store: str) -> str:
    """`store`, the place of a new run's checkpoints, if it has none."""
    if store and steps_in(_within(store, CHECKPOINTS)):
        raise ValueError(
            f"a new run must have an unused place for its checkpoints: {store} has some; set another "
            "run.name or checkpoint.dir, or continue that run with `--resume auto` and its run.name"
        )
    return store


def auto_run(root: Path, name: str, named: bool) -> Path | None:
    """The run for `--resume auto`: `name` if its folder exists, else None, which begins it.

    If nobody chose the name (not `named`), the run with the newest checkpoint instead of a new one.
    """
    if _is_name(name) and (root / name).is_dir():
        return root / name
    runs = [] if named or not root.is_dir() else [path for path in root.iterdir() if checkpoint_steps(path)]
    return max(runs, key=_newest_checkpoint_time, default=None)


def find_run(run: str, root: Path) -> Path:
    """The folder of `run`, the name of a run under `root` or else the path of a folder.

    A text with a `/` is a path and nothing else. Raises ValueError if there is none, or if it does not look
    like the folder of a run.
    """
    folders = [Path(run)] if "/" in run else [root / run, Path(run)]
    folder = next((path for path in folders if _is_run(path)), None)
    if folder is None:
        names = sorted(path.name for path in root.iterdir() if _is_run(path)) if root.is_dir() else []
        raise ValueError(
            f"RUN must be the name of a run in {root}, or the folder of a run, with metrics.jsonl, "
            f"config.yaml or samples/: got {run!r}; runs in {root}: {', '.join(names) or 'none'}"
        )
    return folder


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("metrics.jsonl", "config.yaml", "samples"))


def _can_start_over(path: Path) -> bool:
    """Whether `path` is the folder of a run that has neither a checkpoint nor an exported model."""
    names = {entry.name for entry in path.iterdir()}
    begun = "config.yaml" in names or names <= {*UNBEGUN, *LOCK_FILES}
    return begun and "final" not in names and not checkpoint_steps(path)


def _holds_nothing(path: Path) -> bool:
    """Whether the folder `path` has nothing of a run, and does not say where its checkpoints are."""
    return {entry.name for entry in path.iterdir()} <= {*UNBEGUN, *LOCK_FILES} - {STORE_FILE}


def _is_name(name: str) -> bool:
    return bool(name) and name not in (AUTO, ".", "..") and name == Path(name).name and "\\" not in name


def _values(text: str) -> dict[str, Any]:
    """The values of a configuration by dotted key, without comments; none if a crash left it incomplete."""
    try:
        return dict(by_dotted_key(parse_yaml(text, "config.yaml")))
    except ConfigError:
        return {}


def _fresh(root: Path, name: str) -> Path:
    if not _is_name(name):
        raise ValueError(f"run.name must be a folder name other than {AUTO!r}; got {name!r}")
    path = root / name
    if path.exists():
        raise ValueError(
            f"a new run must have an unused name: {path} exists; "
            f"set another with `--set run.name=…`, or continue that run with `--resume {name}`"
        )
    return path


def _with_checkpoint(path: Path) -> Path:
    if not checkpoint_steps(path):
        raise ValueError(
            f"only a run with a checkpoint can be resumed: {path} has none; "
            "start a new run with another `run.name`, or use `--resume auto`"
        )
    return path.absolute()


def _newest_checkpoint_time(path: Path) -> float:
    newest = _within(checkpoints_of(path), str(max(checkpoint_steps(path))))
    return last_written(str(newest)) if is_bucket(newest) else Path(newest).stat().st_mtime
