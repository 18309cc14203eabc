"""Publishes weights for rollout workers: gathered on the host, then stored once for all workers.

Data flow: parameters on the training mesh -> `gathered` -> `Publisher.publish` -> a handle, which each
worker's `load` takes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from quatrain.cluster.processes import is_main_process
from quatrain.config.errors import disk_is_full
from quatrain.models.architecture import Architecture
from quatrain.models.blocks.layer_run import keeps_dtype
from quatrain.models.lora import adapters_of, has_adapters
from quatrain.parallel.mesh import to_host
from quatrain.weights.hf import save_hf
from quatrain.weights.whole import Whole


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

        Raises OSError, which names `rollout.weights_dir`, if it cannot be written; nothing of it is left.
        """
        final = self._directory / f"v{version:06}"
        partial = final.with_name(f".{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            save_hf(partial, self._arch, weights, sampling=self._sampling, whole=self._whole)
            for path in (*partial.iterdir(), partial):  # wait until they are on the disk
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            shutil.rmtree(final, ignore_errors=True)  # of a run that was stopped before
            partial.rename(final)
        except Exception as error:  # safetensors raises its own kind for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            remedy = "free space there, or" if disk_is_full(error) else "see that it can be written, or"
            raise OSError(
                f"weights of version {version} must fit into the folder from which rollout workers load "
                f"them (rollout.weights_dir, {self._directory}); writing them failed: {error}; {remedy} "
                "set rollout.weights_dir to another folder that all workers share"
            ) from error
        self._stored.append(final)
        return str(final)

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
