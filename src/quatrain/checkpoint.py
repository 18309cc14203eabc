"""Asynchronous, atomic checkpoints of the state that is needed to resume a run.

The training loop saves the state after an update and restores it on resume; `export` reads it too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_flatten_with_path

Array = jax.Array | np.ndarray
Abstract = Array | jax.ShapeDtypeStruct


class Checkpointer:
    """The checkpoints in a folder, one subfolder per step; the newest `keep` of them are kept.

    A checkpoint contains `arrays`, any pytree of arrays, and `host`, a JSON object. Its subfolder gets its
    final name only when it is complete, so an interrupted save is never restored.
    """

    def __init__(self, directory: str | Path, keep: int = 1):
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        logging.getLogger("absl").setLevel(logging.WARNING)  # orbax logs internal details at a lower level

    def save(self, step: int, arrays: Any, host: Mapping[str, Any]) -> None:
        """Start saving `step`; returns when the arrays are copied, and writes the files in the background.

        The buffers of `arrays` may be donated or deleted as soon as this returns. If the previous save is
        still running, this waits for it, and raises its error if it failed. Raises ValueError for a leaf
        that is not an array, a `host` that is not JSON-serialisable, and a step not after the latest.
        """
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"checkpoints must be saved in the order of steps: got step {step}, but {self.directory} has "
                f"step {latest}; resume from that step, or remove the later checkpoints"
            )
        json.dumps(host, allow_nan=False)
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(_named_leaves(arrays)), host=ocp.args.JsonSave(dict(host))
        )
        self._writer().save(step, args=items, force=True)

    def restore(
        self, arrays: Any, step: int | None = None, *, partial: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        """(step, arrays, host) of checkpoint `step` (default: the latest).

        `arrays` is a tree of arrays or `jax.ShapeDtypeStruct` with the saved structure; each leaf is
        restored as a `jax.Array` with its sharding, or on the first device if it has none. With `partial`,
        `arrays` may be a part of the saved tree (such as `{"params": ...}`), and other leaves are not read.
        Raises ValueError if there is no such checkpoint, or if leaves differ in name, shape or dtype.
        """
        self.wait()
        step = self._existing(step)
        wanted = {name: _abstract(leaf) for name, leaf in _named_leaves(arrays).items()}
        items = ocp.args.Composite(
            arrays=ocp.args.PyTreeRestore(
                wanted,
                restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                partial_restore=partial,
            ),
            host=ocp.args.JsonRestore(),
        )
        with _reader(self.directory) as reader:
            saved = dict(reader.item_metadata(step)["arrays"])
            self._check(step, wanted, {name: saved[name] for name in saved if not partial or name in wanted})
            restored = reader.restore(step, args=items)
        leaves = [restored["arrays"][name] for name in wanted]
        return step, jax.tree.unflatten(jax.tree.structure(arrays), leaves), restored["host"]

    def read_host(self, step: int | None = None) -> dict[str, Any]:
        """The `host` object of checkpoint `step` (default: the latest), without reading its arrays.

        Raises ValueError if there is no such checkpoint.
        """
        self.wait()
        items = ocp.args.Composite(host=ocp.args.JsonRestore())
        with _reader(self.directory) as reader:
            return dict(reader.restore(self._existing(step), args=items)["host"])

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints in increasing order, without a save that is still running."""
        return sorted(ocp.utils.checkpoint_steps(self.directory)) if self.directory.is_dir() else []

    def latest_step(self) -> int | None:
        """The latest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Wait until the last save is on disk; raises its error if it failed."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the last save, then end the background threads."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _writer(self) -> ocp.CheckpointManager:
        """The manager for writing, created by the first save, which deletes files of interrupted saves."""
        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                create=True,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            )
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        return self._manager

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise ValueError(
                f"{self.directory} must have a complete checkpoint, but has none; "
                "train first, or give another run"
            )
        if step is not None and step not in steps:
            raise ValueError(
                f"there is no checkpoint of step {step} in {self.directory}; choose one of {steps}"
            )
        return steps[-1] if step is None else step

    def _check(self, step: int, wanted: Mapping[str, Abstract], saved: Mapping[str, Any]) -> None:
        for name in [*wanted, *saved]:
            expected, found = (_describe(tree.get(name)) for tree in (wanted, saved))
            if expected != found:
                raise ValueError(
                    "the arrays of a checkpoint must have the names, shapes and dtypes of this run's: "
                    f"at {name!r} this run has {expected}, step {step} in {self.directory} has {found}; "
                    "use the model and optimizer of the saved run"
                )


def _reader(directory: Path) -> ocp.CheckpointManager:
    handlers = {"arrays": ocp.PyTreeCheckpointHandler(), "host": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(create=False)
    return ocp.CheckpointManager(directory, item_handlers=handlers, options=options)


def _named_leaves(tree: Any) -> dict[str, Abstract]:
    """The leaves by path (`opt_state.1.mu.embed`), which makes the files independent of container types."""
    paths = tree_flatten_with_path(tree)[0]
    leaves = {keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    assert len(leaves) == len(paths), "two leaves share one name"
    for name, leaf in leaves.items():
        if (
            not isinstance(leaf, Abstract)
            or not leaf.size
            or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        ):
            raise ValueError(
                "a checkpoint's arrays must be non-empty arrays of numbers: "
                f"{name!r} is {getattr(leaf, 'aval', None) or type(leaf).__name__}; "
                "put Python values into `host` and keys through `jax.random.key_data`"
            )
    return leaves


def _describe(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _abstract(leaf: Abstract) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
