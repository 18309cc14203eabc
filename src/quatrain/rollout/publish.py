"""Publishes weights for rollout workers: gathered on the host, then stored once for all workers.

Data flow: parameters on the training mesh -> `gathered` -> `Publisher.publish` -> a handle, which each
worker's `load` takes.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from quatrain.cluster.processes import is_main_process
from quatrain.config.errors import disk_is_full
from quatrain.models.architecture import Architecture
from quatrain.models.blocks.layer_run import keeps_dtype
from quatrain.models.lora import adapters_of, has_adapters
from quatrain.parallel.mesh import to_host
from quatrain.servers.pieces import MemoryFolder, Pieces
from quatrain.weights.adapter import adapter_tensors, write_adapter
from quatrain.weights.hf import save_hf
from quatrain.weights.whole import Whole

logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """Stores weights where workers find them. Called in the main process only, one call at a time."""

    def publish(self, weights: Any, version: int) -> Any:
        """Stores host arrays, as `gathered` returns them; the handle, from which `Worker.load` has them."""
        ...

    def discard(self, handle: Any) -> None:
        """Frees what was stored for a handle that no worker loads any more."""
        ...

    def close(self) -> None:
        """Frees everything that is still stored."""
        ...


class InMemory:
    """For workers in the same process: the handle is the tree of host arrays."""

    def publish(self, weights: Any, version: int) -> Any:
        """The weights themselves."""
        return weights

    def discard(self, handle: Any) -> None:
        """Nothing to free: the last reference does it."""

    def close(self) -> None:
        """Nothing to free."""


class Folder:
    """Versions as folders `v000001` in `directory`, which transformers and other engines load too.

    A folder is written under a temporary name, flushed to the disk, and renamed when it is complete, so that
    a reader never sees a part of one. `directory` must be on a file system that the workers share, and is
    this run's alone: another run would overwrite and remove its versions. It is made if it does not exist.
    With the `whole` of a model that sees, folders have its tower too; without, the text model alone. `close`
    removes it, if nothing else is in it, and those of its parents that were made, and calls
    `on_close`. Raises ValueError if it cannot be made.
    """

    _named = "rollout.weights_dir"
    _instead = "set rollout.weights_dir to another folder that all workers share"

    def __init__(
        self,
        directory: str | Path,
        arch: Architecture,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        *,
        whole: Whole | None = None,
        on_close: Callable[[], None] = lambda: None,
    ):
        if whole is None:
            arch = replace(arch, vision=None)
        self._whole = whole
        self._directory, self._arch, self._sampling = Path(directory).absolute(), arch, sampling
        self._on_close = on_close
        self._stored: list[Path] = []
        missing = (each for each in self._directory.parents if not each.exists())
        self._made = [self._directory, *missing]
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                "rollout.weights_dir must be a folder that this run may write, from which rollout workers "
                f"load weights; got {self._directory}: {error}; name another"
            ) from error

    def publish(self, weights: Any, version: int) -> str:
        """The path of the new folder.

        Raises OSError, which names the setting, if it cannot be written; nothing of it is left.
        """
        final = self._directory / f"v{version:06}"
        draft = final.with_name(f".{final.name}.partial")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            self._write(draft, weights)
            for path in (*draft.iterdir(), draft):  # wait until they are on the disk
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            shutil.rmtree(final, ignore_errors=True)  # of a run that was stopped before
            draft.rename(final)
        except Exception as error:  # safetensors raises its own kind for a full disk
            shutil.rmtree(draft, ignore_errors=True)
            remedy = "free space there, or" if disk_is_full(error) else "see that it can be written, or"
            raise OSError(
                f"weights of version {version} must fit into the folder from which rollout workers load "
                f"them ({self._named}, {self._directory}); writing them failed: {error}; {remedy} "
                f"{self._instead}"
            ) from error
        self._stored.append(final)
        return str(final)

    def _write(self, directory: Path, weights: Any) -> None:
        save_hf(directory, self._arch, weights, sampling=self._sampling, whole=self._whole)

    def discard(self, handle: str) -> None:
        """Removes the folder of a version, at once for those who look whether it is there."""
        removed = Path(handle).with_name(f".{Path(handle).name}.removed")
        with suppress(OSError):
            Path(handle).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
        self._stored = [path for path in self._stored if str(path) != handle]

    def close(self) -> None:
        """Removes what this publisher wrote."""
        for path in list(self._stored):
            self.discard(str(path))
        with suppress(OSError):  # others have written into them
            for path in self._made:
                path.rmdir()
        self._on_close()


class Adapted(NamedTuple):
    """A model with adapters: its architecture, the path of its base, and the fingerprint of that."""

    arch: Architecture
    base: str
    fingerprint: str


class _InMemoryFolder(Folder):
    _named = "rollout.stream_weights"
    _instead = "set rollout.stream_weights to false"

    def __init__(self, directory: Path, adapted: Adapted | None, **given: Any):
        super().__init__(directory, **given)
        self._adapted = adapted

    def _write(self, directory: Path, weights: Any) -> None:
        if self._adapted is None or not has_adapters(weights):
            super()._write(directory, weights)
        else:
            arch, base, fingerprint = self._adapted
            tensors = adapter_tensors(arch, weights)
            write_adapter(directory, arch, tensors, base=base, fingerprint=fingerprint)


class Stream:
    """Versions as folders in this machine's memory, the files of which servers are sent in pieces.

    A server that has the version before the newest gets what has changed. Arguments as of `Folder`; of `kept`
    versions the folders stay, as many as the fleet keeps. Adapters alone, which `gathered` returns of a model
    that is `adapted`, become a folder of adapters.
    """

    def __init__(
        self,
        arch: Architecture,
        sampling: Mapping[str, Any],
        *,
        whole: Whole | None = None,
        adapted: Adapted | None = None,
        kept: int,
    ):
        self._make = partial(_InMemoryFolder, arch=arch, sampling=sampling, whole=whole, adapted=adapted)
        self._kept = kept
        self._memory: MemoryFolder | None = None
        self._folder: Folder | None = None
        self._last: Pieces | None = None

    def publish(self, weights: Any, version: int) -> Pieces:
        """The pieces of the new folder; raises OSError as `Folder.publish`."""
        if self._folder is None:
            # While a version is written, those that are kept are still there.
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
            self._memory = MemoryFolder((self._kept + 1) * size)
            self._folder = self._make(self._memory.path / "versions")
        folder = Path(self._folder.publish(weights, version))
        if self._last is not None:
            # They are in the process's memory, and of most use to servers that are a version behind.
            self._last.forget_changes()
        self._last = Pieces.of(folder, self._last)
        logger.info(
            "weights of version %d: %.1f MB, of which %.1f MB are sent to a server with the version before",
            *(version, self._last.num_bytes / 1e6, self._last.num_new_bytes / 1e6),
        )
        return self._last

    def discard(self, handle: Pieces) -> None:
        """Removes the folder of a version."""
        if self._folder is not None:
            self._folder.discard(str(handle.path))

    def close(self) -> None:
        """Removes what this publisher wrote."""
        if self._folder is not None and self._memory is not None:
            self._folder.close()
            self._memory.close()
        self._folder = self._memory = self._last = None


def gathered(params: Any, dtype: DTypeLike) -> Any:
    """`params` as arrays of the host, which training does not overwrite; with adapters, these alone.

    One parameter after another, with matrices in `dtype` except routers (adapters keep theirs, because they
    are merged before the result is rounded). In a run of several processes all must call this, and only the
    main process gets values; others get None.
    """
    adapters = has_adapters(params)
    tree = adapters_of(params) if adapters else params

    def whole(path: Any, array: jax.Array) -> np.ndarray | None:
        keeps = adapters or keeps_dtype(path[-1].key, array.ndim)
        found = to_host(array if keeps else array.astype(dtype))
        return np.array(found) if is_main_process() else None

    return jax.tree_util.tree_map_with_path(whole, tree)
