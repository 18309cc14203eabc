"""Checkpoints of everything a run needs to go on, written in the background and all or nothing.

`train` saves the state after an update and restores it on resume; `export` and `evaluate` read it.
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
    """The checkpoints in a folder, one subfolder per step, the newest `keep` of them.

    A checkpoint holds `arrays`, any pytree of arrays, and `host`, a JSON object. It appears under its
    step's name only when it is complete, so an interrupted save leaves nothing that could be restored.
    """

    def __init__(self, directory: str | Path, keep: int = 1):
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        logging.getLogger("absl").setLevel(logging.WARNING)  # where orbax reports each of its inner steps

    def save(self, step: int, arrays: Any, host: Mapping[str, Any]) -> None:
        """Start saving `step`; returns when the arrays are copied, while the files are still being written.

        The buffers of `arrays` may be donated or deleted as soon as this returns. A save still running is
        waited for first, and its failure raised here. Raises ValueError for a leaf that is not an
        array, a `host` that is not JSON, and a step not after the latest.
        """
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"checkpoints are saved in the order of steps: step {step} came, {self.directory} has step "
                f"{latest}; resume from that one, or remove the later checkpoints"
            )
        json.dumps(host, allow_nan=False)
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(_named_leaves(arrays)), host=ocp.args.JsonSave(dict(host))
        )
        self._writer().save(step, args=items, force=True)

    def restore(
        self, arrays: Any, step: int | None = None, *, partial: bool = False
    ) -> tuple[int, Any, dict[str, Any]]:
        """(step, arrays, host) of checkpoint `step`, by default the latest.

        `arrays`: the tree to restore into, of arrays or `jax.ShapeDtypeStruct`; each leaf comes back as a
        `jax.Array` with its sharding, or on the first device where it names none. With `partial`, saved
        leaves that `arrays` lacks are not read (`{"params": ...}` of a whole state). Raises ValueError
        where there is no such checkpoint, or its leaves differ from `arrays` in name, shape or dtype.
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
        """The `host` of checkpoint `step`, by default the latest, without its arrays.

        Raises ValueError where there is no such checkpoint.
        """
        self.wait()
        items = ocp.args.Composite(host=ocp.args.JsonRestore())
        with _reader(self.directory) as reader:
            return dict(reader.restore(self._existing(step), args=items)["host"])

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, lowest first; a save still running is not among them."""
        return sorted(ocp.utils.checkpoint_steps(self.directory)) if self.directory.is_dir() else []

    def latest_step(self) -> int | None:
        """The latest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Return when the last save is on disk; raises what went wrong with it."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the last save, then let go of the threads."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _writer(self) -> ocp.CheckpointManager:
        """Opened by the first save, which also deletes what interrupted saves left behind."""
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
                f"a checkpoint is needed: {self.directory} has none that is complete; "
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
                    "a checkpoint is restored into a state of the same leaves: "
                    f"at {name!r} this run has {expected}, step {step} in {self.directory} has {found}; "
                    "use the model and optimizer of the saved run"
                )


def _reader(directory: Path) -> ocp.CheckpointManager:
    handlers = {"arrays": ocp.PyTreeCheckpointHandler(), "host": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(create=False)
    return ocp.CheckpointManager(directory, item_handlers=handlers, options=options)


def _named_leaves(tree: Any) -> dict[str, Abstract]:
    """The leaves by path (`opt_state.1.mu.embed`): any container comes back from its leaves' names."""
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
                "a checkpoint's arrays are arrays of numbers, not empty: "
                f"{name!r} is {getattr(leaf, 'aval', None) or type(leaf).__name__}; "
                "put Python values into `host` and keys through `jax.random.key_data`"
            )
    return leaves


def _describe(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _abstract(leaf: Abstract) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
