"""Asynchronous, atomic checkpoints of the state that is needed to resume a run, verified when they are read.

The training loop saves the state after an update and restores it on resume; `export` reads it too.
"""

import gc
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_flatten_with_path

from quatrain.backend import this_backend
from quatrain.cluster.processes import decided_by_main, gather_objects, is_main_process, joined
from quatrain.config import buckets
from quatrain.config.errors import disk_is_full, listed
from quatrain.config.places import is_bucket
from quatrain.config.secrets import redact
from quatrain.ops.fingerprint import describe_fingerprint, fingerprint
from quatrain.parallel.mesh import to_memory
from quatrain.run.orbax_s3 import S3, teach_s3

Array = jax.Array | np.ndarray
Abstract = Array | jax.ShapeDtypeStruct
T = TypeVar("T")
ANSWERS_S = 0.5
"""Time in which a bucket answers most of the other requests of what failed, each of which may warn."""
LONGEST_REASON = 300
"""Characters of an error of the checkpoint library that a message shows."""
UNFINISHED = ocp.utils.TMP_DIR_SUFFIX
"""In the names of subfolders that are not complete, and of those that are being deleted."""
_LIBRARIES = ("aiohttp", "botocore", "gcsfs", "google", "s3fs")
"""Packages whose exceptions are of a bucket's network and rights; missing objects raise Python's own."""
_UNREACHABLE = re.compile(
    "UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED|CURL error"
)
"""In TensorStore's messages of a store that cannot be read now."""

logger = logging.getLogger(__name__)
_one_save = threading.Lock()
"""Orbax numbers the saves of a process: two that begin at once would wait for each other's signals."""
_silencing = threading.Lock()
_num_silent = 0
_before_silence: tuple[Any, bool] = (sys.unraisablehook, False)


class DamagedCheckpoint(ValueError):
    """A checkpoint's files are missing or not those that were saved."""


class NonFiniteState(ValueError):
    """A state is not saved because it has numbers that are not finite."""


class SaveFailed(OSError):
    """A checkpoint could not be written; those before it are unchanged."""


class Checkpointer:
    """The checkpoints in a folder, one subfolder per step; the newest `keep` of them are kept.

    A checkpoint contains `arrays`, any pytree of arrays, and `host`, a JSON object. Its subfolder gets its
    final name only when it is complete, so an interrupted save is never restored. With it are saved a digest
    of each array's numbers, made before they are written, and one of the JSON; both are compared when the
    checkpoint is read. Digests do not depend on devices or processes. The folder may be in a bucket, which
    cannot rename: there a subfolder is complete when it has the object `buckets.COMPLETE`, which is written
    last and deleted first. `in_background`: whether `save` returns before the files are written; None: as the
    kind of device has it (`Backend.saves_in_background`).
    """

    def __init__(self, directory: str | Path, keep: int = 1, *, in_background: bool | None = None):
        self._in_bucket = is_bucket(directory)
        self.directory = _bucket_folder(str(directory)) if self._in_bucket else Path(directory).absolute()
        self._keep = keep
        self._in_background = this_backend().saves_in_background if in_background is None else in_background
        # Made by the first save: commands that only read start no threads and delete no unfinished files.
        self._writer: ocp.AsyncCheckpointer | None = None
        self.pinned: list[int] = []
        """Steps of which the last one that has a checkpoint is kept beside the newest."""
        self._saving: int | None = None
        """The step of the last save, which may not be on disk."""
        self._damaged: dict[int, str] = {}
        """What is wrong with each checkpoint that was found to be damaged."""
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs its details and, twice, its errors

    def save(self, step: int, arrays: Any, host: Mapping[str, Any]) -> None:
        """Save `step`, or, in the background, start saving it.

        The buffers of `arrays` may be donated or deleted as soon as this returns. If the previous save is
        still running, this waits for it. Damaged checkpoints that were found before are set aside. Raises
        SaveFailed if the files of this or the previous step cannot be written, NonFiniteState if an array has
        numbers that are not finite, and ValueError for a leaf that is not an array, a `host` that is not
        JSON-serialisable, and a step not after the latest.
        """
        # Two saves at once would need room for two copies of the state, and could end in the wrong order.
        self.wait()
        self.set_aside()
        # After the damaged ones are set aside: a run that went back before them saves their steps again.
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"checkpoints must be saved in the order of steps: got step {step}, but {self.directory} has "
                f"step {latest}; resume from that step, or remove the later checkpoints"
            )
        # Before anything is written: what fails here leaves no half checkpoint behind.
        json.dumps(host, allow_nan=False)
        leaves = _named_leaves(arrays)
        # Of the arrays in memory, not of the files: a copy that went wrong on its way to disk is found too.
        checksums, nonfinite = _checksums(leaves)
        if nonfinite:
            raise NonFiniteState(
                f"the state of step {step} is not saved: {listed(nonfinite)} have numbers that are not finite"
            )
        content = {"host": dict(host), "arrays": checksums}
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(leaves),
            host=ocp.args.JsonSave(content | {"sha256": _sha256(content)}),
        )
        self._saving = step
        with _one_save:
            self._written(lambda: self._started().save(self.directory / str(step), args=items))
            if not self._in_background:
                self.wait()

    def restore(
        self, arrays: Any, step: int | None = None, *, partial: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        """(step, arrays, host) of checkpoint `step` (default: the latest that is not damaged).

        `arrays` is a tree of arrays or `jax.ShapeDtypeStruct` with the saved structure; each leaf is
        restored as a `jax.Array` with its sharding, or on the first device if it has none. With `partial`,
        `arrays` may be a part of the saved tree (such as `{"params": ...}`), and other leaves are not read.
        Raises ValueError if there is no such checkpoint, or if leaves differ in name, shape or dtype;
        DamagedCheckpoint if checkpoint `step` is damaged, or all are.
        """
        wanted = {name: abstract(leaf) for name, leaf in _named_leaves(arrays).items()}

        # The JSON first: what has another form is refused before gigabytes are read.
        def read(chosen: int) -> tuple[int, Any, dict[str, Any]]:
            content = self._read_json(chosen)
            self._check(chosen, wanted, content["arrays"], partial=partial)
            restored = self._read_arrays(chosen, wanted, content["arrays"], partial=partial)
            leaves = [restored[name] for name in wanted]
            return chosen, jax.tree.unflatten(jax.tree.structure(arrays), leaves), content["host"]

        return self._newest_whole(step, read)

    def check(self, arrays: Any) -> None:
        """Raises the ValueError with which `restore` refuses `arrays`, without reading those that are saved.

        Of the latest checkpoint whose description is not damaged.
        """
        wanted = {name: abstract(leaf) for name, leaf in _named_leaves(arrays).items()}
        self._newest_whole(
            None, lambda step: self._check(step, wanted, self._read_json(step)["arrays"], partial=False)
        )

    def read_host(self, step: int | None = None) -> dict[str, Any]:
        """The `host` object of checkpoint `step`, without reading its arrays.

        The default is the latest checkpoint whose `host` is not damaged. Raises ValueError if there is no
        such checkpoint.
        """
        return self._newest_whole(step, lambda chosen: dict(self._read_json(chosen)["host"]))

    def set_aside(self) -> None:
        """Move the checkpoints that were found to be damaged to a folder beside `directory`."""

        def move() -> None:
            aside = self.directory.with_name(self.directory.name + ".damaged")
            for step, problem in self._damaged.items():
                if not self._in_bucket:
                    aside.mkdir(exist_ok=True)
                names = itertools.chain([f"{step}"], (f"{step}.{again}" for again in itertools.count(1)))
                moved = next(aside / name for name in names if not (aside / name).exists())
                damaged = self.directory / str(step)
                buckets.move(str(damaged), str(moved)) if self._in_bucket else damaged.rename(moved)
                logger.warning("%s; it was moved to %s", problem, moved)

        decided_by_main(move)
        self._damaged = {}

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints in increasing order, without a save that is still running.

        Those that were found to be damaged are left out. Raises SaveFailed for a bucket that cannot be read.
        """
        if self._in_bucket:
            try:
                found = buckets.complete_steps(str(self.directory))
            except ValueError as error:
                raise SaveFailed(str(error)) from error
        else:
            found = ocp.utils.checkpoint_steps(self.directory) if self.directory.is_dir() else []
        return sorted(set(found) - self._damaged.keys())

    def latest_step(self) -> int | None:
        """The latest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Wait until the last save is on disk; raises SaveFailed if it could not be written.

        If one of several processes cannot write its files, `wait` fails there, and the others wait for it.
        """
        if self._writer is not None:
            self._written(self._writer.wait_until_finished)
            self._delete_old()

    def close(self) -> None:
        """Wait for the last save, then end the background threads; raises SaveFailed as `wait` does."""
        self.wait()
        writer, self._writer = self._writer, None
        if writer is not None:
            self._written(writer.close)

    def _written(self, write: Callable[[], Any]) -> None:
        """Calls `write`; errors of the files become SaveFailed, after which a new writer begins."""
        with _one_message():
            try:
                return write()
            except (jax.errors.JaxRuntimeError, MemoryError, TypeError):
                raise  # not of the files
            except Exception as error:
                reason, full = _reason(error), disk_is_full(error)
            # The next save begins with a new one: what state a failed one is in, the library does not say.
            failed, self._writer = self._writer, None
            if failed is not None and not joined():  # with several processes it would wait for the others
                with suppress(Exception):
                    failed.close()
            self._collect()
        raise SaveFailed(
            f"the checkpoint of step {self._saving} cannot be written to {self.directory}: {reason}; "
            f"{'free space' if full else 'see that the folder can be written'}"
        )

    def _started(self) -> ocp.AsyncCheckpointer:
        """The writer; the first save starts it, and deletes files of interrupted saves and deletions.

        Not orbax's CheckpointManager: with several processes, it does not tell one that could not write its
        files before all have come to a barrier.
        """
        if self._writer is None:
            if is_main_process():
                self._make_directory()
            handlers = {"arrays": ocp.StandardCheckpointHandler(), "host": ocp.JsonCheckpointHandler()}
            # Orbax marks folders so in gs:// alone, and would rename them in other buckets. None: as it does.
            marked = ocp.path.atomicity.CommitFileTemporaryPath if self._in_bucket else None
            options = ocp.CompositeOptions(temporary_path_class=marked)
            handler = ocp.CompositeCheckpointHandler(composite_options=options, **handlers)
            self._writer = ocp.AsyncCheckpointer(handler, temporary_path_class=marked)
        return self._writer

    def _make_directory(self) -> None:
        if self._in_bucket:
            place = str(self.directory)
            for step in {*buckets.numbered(place)} - {*buckets.complete_steps(place)}:
                buckets.delete(f"{place}/{step}")
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _delete_old(self) -> None:
        steps = self.steps()
        # The last pinned one that is there: the save of a newer one may have failed.
        kept = {*steps[-self._keep :], *[step for step in self.pinned if step in steps][-1:]}
        for step in set(steps) - kept if is_main_process() else ():
            path = self.directory / str(step)
            try:
                if self._in_bucket:
                    buckets.delete(str(path))
                else:
                    # Renamed first, which is atomic: who dies then leaves nothing that looks complete.
                    shutil.rmtree(path.rename(path.with_name(f"{step}{UNFINISHED}-deleted")))
            except (OSError, ValueError) as error:
                logger.warning("the old checkpoint %s cannot be deleted: %s", path, error)

    def _newest_whole(self, step: int | None, read: Callable[[int], T]) -> T:
        """`read(step)`; without a step, that of the latest checkpoint that is not damaged."""
        self.wait()
        if step is not None:
            return read(self._existing(step))
        problems = []
        for candidate in reversed(self._existing_steps()):
            try:
                found = read(candidate)
            except DamagedCheckpoint as error:
                self._damaged[candidate] = str(error)
                problems.append(str(error))
            else:
                if problems and is_main_process():
                    logger.warning("%s; the checkpoint of step %d is used", "; ".join(problems), candidate)
                return found
        # None is set aside where none is left: their files may be restored from a copy.
        self._damaged = {}
        raise DamagedCheckpoint(
            f"{'; '.join(problems)}; no other checkpoint is left; restore its files from a copy, or start "
            "another run"
        )

    def _existing_steps(self) -> list[int]:
        # Processes may see a new folder at different times on a shared file system; all must read the same.
        steps: list[int] = decided_by_main(self.steps)
        if not steps:
            raise ValueError(
                f"{self.directory} must have a complete checkpoint, but has none; "
                "train first, or give another run"
            )
        return steps

    def _existing(self, step: int) -> int:
        steps = self._existing_steps()
        if step not in steps:
            raise ValueError(
                f"there is no checkpoint of step {step} in {self.directory}; choose one of {steps}"
            )
        return step

    def _read_json(self, step: int) -> dict[str, Any]:
        """What `save` wrote of checkpoint `step` as JSON; raises DamagedCheckpoint unless it is the same."""
        content = dict(self._read(step, ocp.args.Composite(host=ocp.args.JsonRestore()))["host"])
        digest = content.pop("sha256", None)
        problem = None if digest == _sha256(content) else "its JSON is not what was saved"
        if digest is None:
            problem = "its JSON has no digest; an earlier version of quatrain may have saved it"
        self._agree(step, problem)
        return content

    def _read_arrays(
        self,
        step: int,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        checksums: Mapping[str, str],
        *,
        partial: bool,
    ) -> dict[str, jax.Array]:
        """The arrays `wanted` of checkpoint `step`; raises DamagedCheckpoint unless they have `checksums`."""
        arrays = ocp.args.PyTreeRestore(
            dict(wanted),
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            # Leaves that are not asked for are not read: an export needs no optimizer state.
            partial_restore=partial,
        )
        restored = self._read(step, ocp.args.Composite(arrays=arrays))["arrays"]
        different = [
            name for name, checksum in _checksums(restored)[0].items() if checksum != checksums[name]
        ]
        self._agree(step, f"{listed(different)} are not the numbers that were saved" if different else None)
        return dict(restored)

    def _read(self, step: int, items: ocp.args.Composite) -> Any:
        """The `items` of checkpoint `step`, read by each process for itself."""
        problem, unreachable = None, False
        with _one_message():
            try:
                with _reader() as reader:
                    found = reader.restore(self.directory / str(step), args=items)
            except (jax.errors.JaxRuntimeError, MemoryError, PermissionError):
                raise  # of this machine, not of the files
            except Exception as error:
                problem, unreachable = _reason(error), self._in_bucket and _is_of_the_network(error)
            if problem is not None:
                self._collect()
        if unreachable:
            raise OSError(f"{self.directory}/{step} cannot be read: {problem}")
        self._agree(step, problem)
        return found

    def _collect(self) -> None:
        """Collects what a failed reader or writer left, which warns then."""
        if self._in_bucket:
            time.sleep(ANSWERS_S)
        gc.collect()

    def _agree(self, step: int, problem: str | None) -> None:
        """Raises DamagedCheckpoint in all processes if one has a problem with checkpoint `step`."""
        # Damage that one process finds concerns all: they would wait for it in the next collective.
        problems = [each for each in gather_objects(problem) if each is not None]
        if problems:
            raise DamagedCheckpoint(
                f"the checkpoint of step {step} in {self.directory} is damaged: {problems[0]}"
            )

    def _check(
        self, step: int, wanted: Mapping[str, Abstract], checksums: Mapping[str, str], *, partial: bool
    ) -> None:
        """Raises ValueError if the arrays that a run needs are not those that another run saved."""
        expected = {name: _describe(leaf) for name, leaf in wanted.items()}
        saved = {name: checksum.rpartition(" ")[0] for name, checksum in checksums.items()}
        for name in [*expected, *(() if partial else saved)]:
            if expected.get(name) != saved.get(name):
                raise ValueError(
                    "the arrays of a checkpoint must have the names, shapes and dtypes of this run's: at "
                    f"{name!r} this run has {expected.get(name, 'nothing')}, step {step} in {self.directory} "
                    f"has {saved.get(name, 'nothing')}; use the model and optimizer of the saved run"
                )


def _bucket_folder(url: str) -> Path:
    """The folder at `url` in a bucket: no `Path`, but with its methods."""
    # Else etils reads buckets with TensorFlow wherever it is installed, which need not know them.
    os.environ.setdefault("EPATH_USE_TF", "false")
    from etils import epath

    buckets.keep_no_listings(url.partition("://")[0])
    if url.startswith(S3):
        teach_s3()
    folder: Path = epath.Path(url)
    return folder


def _is_of_the_network(error: Exception) -> bool:
    """Whether a bucket could not be read now, so that nothing is known of what is in it."""
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError)
    return type(error).__module__.partition(".")[0] in _LIBRARIES or bool(_UNREACHABLE.search(str(error)))


def _reader() -> ocp.Checkpointer:
    """A reader in which the processes of a run do not wait for each other, as one may find damage."""
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        arrays=ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        host=ocp.JsonCheckpointHandler(multiprocessing_options=alone),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextmanager
def _one_message() -> Iterator[None]:
    """Silences what asyncio prints of reads that orbax gives up because another read failed."""
    global _num_silent, _before_silence
    asyncio = logging.getLogger("asyncio")
    with _silencing:  # several runs of this process may read at once
        if not _num_silent:
            _before_silence = sys.unraisablehook, asyncio.disabled
        _num_silent += 1
        sys.unraisablehook, asyncio.disabled = lambda unraisable: None, True
    try:
        yield
    finally:
        with _silencing:
            _num_silent -= 1
            if not _num_silent:
                sys.unraisablehook, asyncio.disabled = _before_silence


def _checksums(leaves: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Dtype, shape and digest of each array, as `float32[3, 4] 0123456789abcdef`; names of those not finite.

    One array at a time: those in host memory come to the devices for it.
    """
    checksums, nonfinite = {}, []
    for name, leaf in leaves.items():
        array = to_memory("device", leaf) if isinstance(leaf, jax.Array) else leaf
        digest, finite = jax.device_get(fingerprint(array))
        checksums[name] = f"{_describe(leaf)} {describe_fingerprint(digest)}"
        if not finite:
            nonfinite.append(name)
    return checksums, nonfinite


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    """The first line of an error's message, with the name of its class."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    text = redact(f"{type(error).__name__}: {line.partition('. See full')[0].strip()}", os.environ)
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"


def _named_leaves(tree: Any) -> dict[str, Abstract]:
    """The leaves by path (`opt_state.1.mu.embed`), which makes the files independent of container types."""
    paths = tree_flatten_with_path(tree)[0]
    leaves = {keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    assert len(leaves) == len(paths), "two leaves share one name"
    for name, leaf in leaves.items():
        if (
            not isinstance(leaf, Abstract)
            or not leaf.size
            # The fingerprint has a hash of 32 bits of each element: of wider ones it would miss changes.
            or leaf.dtype.itemsize > 4
            or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ):
            raise ValueError(
                "a checkpoint's arrays must be non-empty arrays of numbers of 32 bits at most: "
                f"{name!r} is {getattr(leaf, 'aval', None) or type(leaf).__name__}; "
                "put Python values into `host` and keys through `jax.random.key_data`"
            )
    return leaves


def form(arrays: Any) -> str:
    """A digest of the names, shapes and dtypes of a tree of arrays or of `ShapeDtypeStruct`s."""
    return _sha256({name: _describe(leaf) for name, leaf in _named_leaves(arrays).items()})


def _describe(leaf: Abstract) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def abstract(leaf: Abstract) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array; without one, on the first device of this process."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
