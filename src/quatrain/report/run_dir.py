"""The folder of a run: made once, refused when it exists, found again on resume.

Made by `train` before anything else; `sinks`, the checkpointer and the export write into it.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quatrain.cluster.processes import decided_by_main, gather_objects, is_main_process
from quatrain.report.metrics import MetricsFile

AUTO = "auto"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDir:
    """Where a run keeps its files: `runs/<name>/`."""

    path: Path
    resumed: bool = False
    """True where the run goes on from a checkpoint."""
    note: str = ""
    """What was decided about resuming, for the log; empty where nothing was asked."""
    restarted: bool = False
    """True where the folder has files of an attempt without a checkpoint, and the run begins again in it."""

    @classmethod
    def create(cls, root: str | Path, name: str, *, resume: str | None = None) -> RunDir:
        """The folder of run `name` under `root`, or of the run to resume.

        `resume`: a run's name, a path to its folder, or `auto`. `auto` takes run `name` where its folder
        exists, else the run under `root` with the newest checkpoint, else a fresh run `name`. A run that was
        ended before its first checkpoint is started again from its beginning by `auto`, and by `auto` alone.
        The main process decides, makes and probes the folder. Raises ValueError where the name is taken,
        where there is nothing to resume, and where the folder cannot be written.
        """

        def chosen() -> tuple[str, bool, str, bool]:
            run = cls._chosen(Path(root), name, resume)
            run._make()
            return str(run.path), run.resumed, run.note, run.restarted

        path, resumed, note, restarted = decided_by_main(chosen)
        run = cls(Path(path), resumed, note, restarted)
        blind = [process for process, sees in enumerate(gather_objects(run.path.is_dir())) if not sees]
        if blind:
            raise ValueError(
                f"run.dir is a folder that all processes share: process {blind[0]} does not see {run.path}, "
                "which process 0 has made; put run.dir on a file system of all, by its whole path"
            )
        return run

    @classmethod
    def _chosen(cls, root: Path, name: str, resume: str | None) -> RunDir:
        path = auto_run(root, name) if resume == AUTO else _named_run(root, resume) if resume else None
        if path is not None and resume == AUTO and _can_start_over(path):
            note = f"{path} has no complete checkpoint: starting {name} again from its beginning"
            return cls(path, note=note, restarted=True)
        if path is not None and checkpoint_steps(path):
            return cls(path, resumed=True, note=f"resuming {path} from step {max(checkpoint_steps(path))}")
        note = f"no run in {root} has a checkpoint: starting {name} afresh" if resume else ""
        return cls(_fresh(root, name), note=note)

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return self.path.resolve().name

    @property
    def config(self) -> Path:
        """The resolved configuration (YAML)."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Folder with the completions of each step."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpointer."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """Folder of the exported model."""
        return self.path / "final"

    @property
    def log(self) -> Path:
        """What was logged, with times."""
        return self.path / "run.log"

    @property
    def plot(self) -> Path:
        """Reward and accuracy over the steps (PNG)."""
        return self.path / "plot.png"

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration; an earlier one of other values stays as `config.1.yaml` and so on.

        Comments do not count: an earlier one of the same values is left as it is.
        """
        if not is_main_process():
            return
        if self.config.exists():
            if _values(self.config.read_text(encoding="utf-8")) == _values(text):
                return
            taken = len(list(self.path.glob("config.*.yaml")))
            earlier = self.config.rename(self.path / f"config.{taken + 1}.yaml")
            _log.warning(
                "the configuration differs from that of the run so far, which is kept in %s", earlier
            )
        self.config.write_text(text, encoding="utf-8")

    def rewind(self, step: int) -> int:
        """Move the metrics after `step` to `metrics.discarded.jsonl`; returns how many lines were moved."""
        if not is_main_process():
            return 0
        moved = MetricsFile(self.metrics).rewind(step)
        if moved:
            _log.warning(
                "%d lines after step %d removed from metrics.jsonl, kept in metrics.discarded.jsonl",
                moved,
                step,
            )
        return moved

    def start_over(self) -> None:
        """Put aside what an attempt without a checkpoint left in this folder, in the main process.

        Its metrics are moved to `metrics.discarded.jsonl`, and its frozen reference policy, the policy at the
        start of training, is deleted, because this run saves its own. Samples are overwritten step by step.
        """

        def put_aside() -> None:
            if (self.path / "reference").exists():
                shutil.rmtree(self.path / "reference")
                _log.warning("reference/, which an attempt without a checkpoint left, is written again")
            self.rewind(-1)

        decided_by_main(put_aside)

    def discard(self) -> None:
        """Remove the folder of a fresh run that holds no more than its start, so that the name is free."""
        if self.resumed or self.restarted or not is_main_process():
            return
        if {entry.name for entry in self.path.iterdir()} <= {self.config.name, self.samples.name}:
            with suppress(OSError):  # samples in it, or a file just written: the folder stays
                self.samples.rmdir()
                self.config.unlink(missing_ok=True)
                self.path.rmdir()

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=self.resumed or self.restarted)
            probe = self.path / ".write_probe"
            probe.write_bytes(b"probe" * 1000)
            probe.unlink()
            self.samples.mkdir(exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"the run's folder must be writable: {self.path} is not ({error.strerror or error}); "
                "free space, mend its permissions, or choose another place with `--set run.dir=…`"
            ) from error


def checkpoint_steps(path: Path) -> list[int]:
    """Steps of the complete checkpoints of the run at `path`, lowest first."""
    folder = path / "checkpoints"
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(entry.name) for entry in entries if entry.name.isdigit() and entry.is_dir())


def newest_run(root: Path) -> Path | None:
    """The folder of the run under `root` with the newest checkpoint; None where no run has one."""
    runs = [path for path in (root.iterdir() if root.is_dir() else ()) if checkpoint_steps(path)]
    return max(runs, key=_newest_checkpoint_time, default=None)


def auto_run(root: Path, name: str) -> Path | None:
    """The folder of run `name` where it exists, else the one with the newest checkpoint: `--resume auto`."""
    return root / name if _is_name(name) and (root / name).is_dir() else newest_run(root)


def _can_start_over(path: Path) -> bool:
    """Whether `path` holds the beginning of a run: neither a checkpoint, nor a result, nor something else."""
    entries = {entry.name for entry in path.iterdir()}
    begun = "config.yaml" in entries or entries <= {"samples", ".write_probe"}
    return begun and "final" not in entries and not checkpoint_steps(path)


def _is_name(name: str) -> bool:
    return bool(name) and name not in (AUTO, ".", "..") and name == Path(name).name and "\\" not in name


def _values(text: str) -> Any:
    """What a configuration says, without its comments; the text itself where a crash cut it short."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _fresh(root: Path, name: str) -> Path:
    if not _is_name(name):
        raise ValueError(f"a run's name is one folder name, and not {AUTO!r}; got {name!r}; set `run.name`")
    path = root / name
    if path.exists():
        raise ValueError(
            f"a run's name is used once: {path} exists; "
            f"give another with `--set run.name=…`, or go on with that run with `--resume {name}`"
        )
    return path


def _named_run(root: Path, resume: str) -> Path:
    """The folder of the run to resume, by its name or its path."""
    path = root / resume
    if not path.is_dir() and Path(resume).is_dir():
        path = Path(resume)
    if not path.is_dir():
        names = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
        raise ValueError(
            f"only a run that exists can be resumed: {resume!r} is neither a run in {root} nor a folder; "
            f"runs there: {', '.join(names) or 'none'}; start it without `--resume`"
        )
    if not checkpoint_steps(path):
        raise ValueError(
            f"only a run with a checkpoint can be resumed: {path} has none; "
            "start afresh under another `run.name`, or use `--resume auto`"
        )
    return path


def _newest_checkpoint_time(path: Path) -> float:
    return (path / "checkpoints" / str(max(checkpoint_steps(path)))).stat().st_mtime
