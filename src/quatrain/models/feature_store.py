"""What the tower makes of pictures, computed once for each picture and kept on the host.

Data flow: `Picture`s of prompts and of micro-batches -> `FeatureStore` -> `inserts_of`, for the sampler and
for `forward/micro_batch.py`: both read the same numbers. What is kept of a picture depends on what is
trained: its features if the tower is frozen, what the projector reads if that alone is trained, its patches
if all is.

Shapes: F features, L further levels of features, D hidden size of the text model.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal
from weakref import WeakSet, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from quatrain.backend import Backend, this_backend
from quatrain.models.architecture import Architecture
from quatrain.models.params import VISION, partition
from quatrain.models.tower import Patches, features, patches_of, projected, states
from quatrain.models.vision import Inserts, Vision
from quatrain.ops.shape_buckets import round_up_coarsely
from quatrain.parallel.axes import DATA_AXES
from quatrain.parallel.collectives import all_gather_shards, shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.mesh import copy_if_aliased, data_sharding, device_put, mesh_shape, reshard, shardings
from quatrain.types.metrics import Metric
from quatrain.types.pictures import Picture, Pictures
from quatrain.workers.loop_thread import map_in_threads

Kept = Literal["features", "states", "pixels"]
"""Features; what the projector makes them of; or what the whole tower does."""
KEPT: dict[str, Kept] = {"frozen": "features", "projector": "states", "all": "pixels"}
"""What no training step changes, by what is trained (`Vision.trained`)."""
Part = Literal["all", "states", "projector"]
"""Of a tower: from patches to features, from patches to states, or from states to features."""
_NO_STEP = -2
"""The last step that used what no step has used, so that it is not of the first step or the one before."""
AT_ONCE = 16
"""Pictures that are decoded at the same time, each by a thread."""


@dataclass
class FeatureStats:
    """What a store was asked for and has computed."""

    pictures: int = 0
    """Different pictures that were asked for."""
    tower_pictures: int = 0
    """Pictures that went through the tower, as often as they did."""
    patches: int = 0
    """Patches that the tower computed, with padding."""
    padding: int = 0
    """Those of them that are padding."""
    seconds: float = 0.0
    """Time in which features were computed, with the decoding of pictures."""


class FeatureStore:
    """The features of pictures for the model `arch`, by a tower on `mesh` in `dtype`.

    `frozen()` reads the parameters of a tower that is frozen, on `mesh`, when the first picture comes. One
    that is trained is among those of the model (`load`).

    `pixels(picture)` are its patches [patches, values] in the order the tower reads. At most `num_bytes` are
    kept on the host; of a store that follows training steps (`follow_steps`), whatever was used in this one
    and the one before is kept too: the pictures of a batch are computed once for its sampling and its update.
    With several processes all must make the same calls in the same order. Threads may share a store.
    """

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        dtype: str,
        num_bytes: int,
        pixels: Callable[[Picture], np.ndarray],
        *,
        frozen: Callable[[], Any] | None = None,
        backend: Backend | None = None,
    ):
        assert arch.vision is not None, "a store is of a model with a tower"
        self.arch, self.mesh, self.dtype = arch, mesh, jnp.dtype(dtype)
        self.vision: Vision = arch.vision
        self.kept: Kept = KEPT[self.vision.trained]
        """What micro-batches have of a picture (`of_update`)."""
        self.version = 0 if self.kept == "features" else -1
        """The version of the tower that `of` reads; 0 if it is frozen, else -1 before the first `load`."""
        assert frozen is not None or self.kept != "features", "a frozen tower is read from somewhere"
        self.stats = FeatureStats()
        self._num_bytes, self._pixels = num_bytes, pixels
        self._backend = backend or this_backend()
        self._frozen = frozen
        self._given: list[ref[Any]] = []
        self._tower: Any = None
        self._found: OrderedDict[tuple[Kept, int], np.ndarray] = OrderedDict()
        self._last_use: dict[tuple[Kept, int], int] = {}
        self._step, self._asked = 0, set[int]()
        self._follows_steps, self._passing = False, 0
        self._beside = WeakSet[FeatureStore]()
        self._lock = threading.RLock()

    def beside(
        self,
        arch: Architecture,
        mesh: Mesh,
        frozen: Callable[[], Any],
        pixels: Callable[[Picture], np.ndarray],
    ) -> FeatureStore:
        """A store of the same pictures for another model with a tower, which has `pixels` of its own.

        Raises ValueError if that model reads other patches.
        """
        assert arch.vision is not None, "a store is of a model with a tower"
        if arch.vision.kind != self.vision.kind:
            raise ValueError(
                "models of one run must read pictures alike; the policy has a tower of the kind "
                f"{self.vision.kind}, the other model one of {arch.vision.kind}; take one of the same family"
            )
        settings = self.dtype.name, self._num_bytes, pixels
        store = FeatureStore(arch, mesh, *settings, frozen=frozen, backend=self._backend)
        store._follows_steps = self._follows_steps
        self._beside.add(store)
        return store

    def grey(self, params: Any) -> FeatureStore:
        """A store of the tower of `params` in which every picture is grey, and says nothing."""
        settings = self.arch, self.mesh, self.dtype.name, self._num_bytes

        def grey(picture: Picture) -> np.ndarray:
            return np.zeros((self.vision.num_patches(picture.size), self.vision.patch_values), np.float32)

        store = FeatureStore(*settings, grey, frozen=self._on_devices, backend=self._backend)
        store.load(params, 0)
        return store

    def load(self, params: Any, version: int) -> None:
        """Read the tower of the whole tree `params`, weights of so many optimizer steps, if it is trained."""
        if self.kept == "features":
            return
        with self._lock:
            given = jax.tree.leaves(params[VISION])
            # Weakly: held, the copy that a sampler gets would stay beside the one made here.
            before, self._given = self._given, list(map(ref, given))
            if version == self.version and all(a() is b for a, b in zip(before, given, strict=True)):
                return
            self.version = version
            places = shardings(self.mesh, _specs(self.arch, self.mesh))
            # Now, not at the first picture: until then a training step may have taken the arrays over.
            self._tower = jax.tree.map(copy_if_aliased, reshard(params[VISION], places), params[VISION])
            for key in [key for key in self._found if key[0] == "features"]:
                self._forget(key)

    def of(self, pictures: Sequence[Picture]) -> list[np.ndarray]:
        """The features [1 + L, F, D] of each picture in `dtype`, on the host; not to be changed."""
        return self._asked_for("features", pictures)

    def of_update(self, pictures: Sequence[Picture]) -> list[np.ndarray]:
        """What the update makes features of, of each picture: as `kept` says; not to be changed.

        Features [1 + L, F, D], what the projector reads [1 + L, F, ...], or pixels [patches, values].
        """
        return self._asked_for(self.kept, pictures)

    def count_tower(self, num_pictures: int, num_patches: int, num_padding: int) -> None:
        """So many pictures go through the tower outside of this store, in a micro-batch."""
        with self._lock:
            self.stats.tower_pictures += num_pictures
            self.stats.patches += num_patches
            self.stats.padding += num_padding

    def follow_steps(self) -> None:
        """Keep what a training step uses: who calls this also ends the steps. A server has none."""
        for store in (self, *self._beside):
            store._follows_steps = True

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within it nothing that is used is kept for a training step; for evaluations, which may be large."""
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1

    def end_step(self) -> dict[str, Metric]:
        """The metrics of a training step that ends, if it had pictures; of stores `beside` it, it ends too.

        What was last used in a step before it may be dropped from now on.
        """
        for store in self._beside:
            store.end_step()
        with self._lock:
            stats, self.stats = self.stats, FeatureStats()
            self._step, self._asked = self._step + 1, set()
            self._drop()
        if not stats.pictures:
            return {}
        metrics = {
            "vision/pictures": Metric(stats.pictures, reduction="sum"),
            "vision/tower_pictures": Metric(stats.tower_pictures, reduction="sum"),
            "vision/patches": Metric(stats.patches, reduction="sum"),
            "vision/store_bytes": Metric(self.num_bytes, reduction="max"),
            "time/vision_s": Metric(stats.seconds, reduction="sum"),
        }
        if stats.patches:
            metrics["vision/padding_fraction"] = Metric(stats.padding, stats.patches)
        return metrics

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept."""
        return sum(array.nbytes for array in self._found.values())

    def _asked_for(self, kind: Kept, pictures: Sequence[Picture]) -> list[np.ndarray]:
        with self._lock:
            began = time.perf_counter()
            self._asked.update(picture.id for picture in pictures)
            self.stats.pictures = len(self._asked)
            found = self._get(kind, pictures)
            self._drop()
            self.stats.seconds += time.perf_counter() - began
            return found

    def _get(self, kind: Kept, pictures: Sequence[Picture]) -> list[np.ndarray]:
        missing = [picture for picture in dict.fromkeys(pictures) if (kind, picture.id) not in self._found]
        self._make(kind, missing)
        for picture in pictures:
            self._found.move_to_end((kind, picture.id))
            self._note_use((kind, picture.id))
        return [self._found[kind, picture.id] for picture in pictures]

    def _make(self, kind: Kept, missing: Sequence[Picture]) -> None:
        """Computes what is kept of `missing` pictures."""
        if kind == "pixels":
            for some in _parts(missing):
                for picture, array in zip(some, self._decoded(some), strict=True):
                    self._add(kind, picture, array)
            return
        run = self._of_states if self.kept == "states" and kind == "features" else self._of_tower
        for picture, array in run(missing):
            self._add(kind, picture, array)

    def _of_tower(self, missing: Sequence[Picture]) -> Iterator[tuple[Picture, np.ndarray]]:
        """What the tower makes of each picture: features, or states where these are kept."""
        waiting: dict[Any, list[tuple[Picture, Patches]]] = {}
        shards = mesh_shape(self.mesh).num_data_shards
        part: Part = "states" if self.kept == "states" else "all"
        for some in _parts(missing):
            pixels = self._pixels_of(some)
            for picture, array in zip(some, pixels, strict=True):
                # A row of its own: beside others it would be computed by another program, with other
                # rounding, and a resumed run, whose store is empty, would sample other tokens.
                row = patches_of(self.vision, [array], [picture.size])
                shapes = tuple(jax.tree.map(np.shape, jax.tree.leaves(row)))
                alike = waiting.setdefault(shapes, [])
                alike.append((picture, row))
                self.count_tower(1, len(row.pixels), len(row.pixels) - len(array))
                if len(alike) == shards:
                    yield from self._run(waiting.pop(shapes), part)
        for alike in waiting.values():
            yield from self._run(alike, part)

    def _pixels_of(self, pictures: Sequence[Picture]) -> list[np.ndarray]:
        # Where the update reads pixels they are kept: else a picture's features are all that is needed again.
        if self.kept == "pixels":
            return self._get("pixels", pictures)
        return self._decoded(pictures)

    def _decoded(self, pictures: Sequence[Picture]) -> list[np.ndarray]:
        return map_in_threads(self._pixels, pictures, AT_ONCE)

    def _of_states(self, missing: Sequence[Picture]) -> Iterator[tuple[Picture, np.ndarray]]:
        """The features of each picture, by the projector of this version."""
        for picture, array in zip(missing, self._get("states", missing), strict=True):
            padded = round_up_coarsely(array.shape[1])
            row = np.zeros((array.shape[0], padded, *array.shape[2:]), array.dtype)
            row[:, : array.shape[1]] = array
            yield from self._run([(picture, row)], "projector")

    def _run(self, alike: Sequence[tuple[Picture, Any]], part: Part) -> Iterator[tuple[Picture, np.ndarray]]:
        """What the tower makes of pictures with rows of one shape, at most as many as data shards."""
        shards = mesh_shape(self.mesh).num_data_shards
        rows = [row for _, row in alike]
        rows += rows[-1:] * (shards - len(rows))  # every shard computes, also the last of several calls
        place = data_sharding(self.mesh)
        stacked = jax.tree.map(lambda *each: device_put(np.stack(each), place), *rows)
        made = _tower_program(self._backend)(
            self._on_devices(),
            stacked,
            part=part,
            arch=self.arch,
            mesh=self.mesh,
            dtype=self.dtype,
            backend=self._backend,
        )
        for (picture, _), array in zip(alike, np.asarray(jax.device_get(made)), strict=False):
            count = self.vision.num_placeholders(picture.size)
            yield picture, np.ascontiguousarray(array[:, :count])

    def _on_devices(self) -> Any:
        """The parameters of the tower; a frozen one is read when it is first asked for."""
        if self._tower is None:
            assert self._frozen is not None, "load the weights of the tower first"
            self._tower = self._frozen()
        return self._tower

    def _add(self, kind: Kept, picture: Picture, array: np.ndarray) -> None:
        array.flags.writeable = False
        self._found[kind, picture.id] = array
        self._note_use((kind, picture.id))

    def _note_use(self, key: tuple[Kept, int]) -> None:
        used = _NO_STEP if self._passing else self._step
        self._last_use[key] = max(used, self._last_use.get(key, _NO_STEP))

    def _forget(self, key: tuple[Kept, int]) -> None:
        del self._found[key], self._last_use[key]

    def _drop(self) -> None:
        """Drops what was used longest ago, until the rest has room, or is of this step or the one before."""
        kept = self.num_bytes
        for key, array in list(self._found.items()):
            in_use = self._follows_steps and self._last_use[key] >= self._step - 1
            if kept <= self._num_bytes:
                return
            if in_use:
                continue
            kept -= array.nbytes
            self._forget(key)


def _specs(arch: Architecture, mesh: Mesh) -> Any:
    """The partition specs of the tower's parameters."""
    return partition(arch.with_tower, mesh_shape(mesh))[VISION]


def _states_of_features(tower: Any, vision: Vision, patches: Patches, **settings: Any) -> jax.Array:
    """[R, 1 + L, F, S]: the states of the patches of each feature, one patch behind another."""
    found = states(tower, vision, patches, **settings)
    by_feature = found.reshape(*found.shape[:2], patches.rows.shape[1], -1)
    return jnp.take_along_axis(by_feature, patches.rows[:, None, :, None], axis=2)


def of_states(tower: Any, vision: Vision, kept: jax.Array) -> jax.Array:
    """[R, 1 + L, F, D]: the features that a projector makes of what a store keeps, [R, 1 + L, F, S]."""
    rows, levels, count, size = kept.shape
    of_patches = kept.reshape(rows, levels, count * vision.merge**2, size // vision.merge**2)
    in_order = jnp.broadcast_to(jnp.arange(count), (rows, count))
    return projected(tower, vision, of_patches, in_order)


def _parts(pictures: Sequence[Picture]) -> Iterator[Sequence[Picture]]:
    return (pictures[first : first + AT_ONCE] for first in range(0, len(pictures), AT_ONCE))


def _tower(
    params: Any,
    rows: Any,
    *,
    part: Part,
    arch: Architecture,
    mesh: Mesh,
    dtype: jnp.dtype,
    backend: Backend,
) -> jax.Array:
    """[N, 1 + L, F, ...]: what a part of the tower makes of N rows, one on each data shard."""
    assert arch.vision is not None
    vision = arch.vision

    def on_shard(tower: Any, rows: Any) -> jax.Array:
        if part == "projector":
            found = of_states(tower, vision, rows)
        else:
            run = features if part == "all" else _states_of_features
            found = run(tower, vision, rows, dtype=dtype, backend=backend)
        gathered: jax.Array = all_gather_shards(found.astype(dtype))
        return gathered

    in_specs = _specs(arch, mesh), PartitionSpec(DATA_AXES)
    return shard_mapped(on_shard, mesh, in_specs, PartitionSpec())(params, rows)


_tower_program = jit_for_backend(_tower, static_argnames=("part", "arch", "mesh", "dtype", "backend"))


def feature_rows(
    pictures: Pictures, vision: Vision, numbers: np.ndarray | None = None
) -> tuple[tuple[Picture, ...], np.ndarray]:
    """The different pictures of a row of T tokens, and [T] int32: which of their features a token has.

    Features are numbered one picture after another; -1: the token is text. `numbers` [T] are those of
    placeholders within their pictures; None: the row is one whole sequence (`Vision.numbers_within`).
    """
    used = pictures.used
    if numbers is None:
        numbers = vision.numbers_within(pictures)
    rows, before = np.full(len(pictures), -1, np.int32), 0
    for picture in used:
        here = pictures.ids == picture.id
        rows[here] = before + numbers[here]
        before += vision.num_placeholders(picture.size)
    return used, rows


def inserts_of(
    rows: Sequence[Pictures | None],
    width: int,
    store: FeatureStore,
    numbers: Sequence[np.ndarray | None] | None = None,
) -> Inserts:
    """The inserts of R rows of at most `width` tokens, on the host; a picture stands once in a row.

    `numbers` has those of `feature_rows` for rows that are not one whole sequence each: of several sequences,
    or of a part of one.
    """
    places: Any = np.full((len(rows), width), -1, np.int32)
    used: list[tuple[Picture, ...]] = [()] * len(rows)
    for number, pictures in enumerate(rows):
        if pictures is not None:
            given = None if numbers is None else numbers[number]
            used[number], found = feature_rows(pictures, store.vision, given)
            places[number, : len(found)] = found
    return Inserts(features_in_rows(used, store.of, store), places)


def features_in_rows(
    used: Sequence[Sequence[Picture]],
    get: Callable[[Sequence[Picture]], list[np.ndarray]],
    store: FeatureStore,
) -> Any:
    """[R, 1 + L, F, D], on the host: the features of the pictures of each row, one after another, then zeros.

    F is rounded up. `get` is a method of `store`; it may have other things than features, one for each.
    """
    each = [get(pictures) for pictures in used]
    nothing = 1 + store.vision.levels, 0, store.arch.hidden_size
    shape = next((array.shape for arrays in each for array in arrays), nothing)
    most = max(sum(array.shape[1] for array in arrays) for arrays in each)
    found = np.zeros((len(used), shape[0], round_up_coarsely(most), *shape[2:]), store.dtype)
    for row, arrays in enumerate(each):
        if arrays:
            joined = np.concatenate(arrays, axis=1)
            found[row, :, : joined.shape[1]] = joined
    return found


def patches_in_rows(used: Sequence[Sequence[Picture]], store: FeatureStore) -> Patches:
    """[R, P, ...]: the pictures of each row as one row of patches, for a tower that is trained."""
    each = [store.of_update(pictures) for pictures in used]
    sizes = [[picture.size for picture in pictures] for pictures in used]
    rows = {i: patches_of(store.vision, each[i], sizes[i]) for i in range(len(used)) if used[i]}
    longest = jax.tree.map(lambda *arrays: max(map(len, arrays)), *rows.values())

    def padded(array: np.ndarray, length: int) -> np.ndarray:
        # Zeros are padding in every array of the layout.
        return np.pad(array, [(0, length - len(array)), *[(0, 0)] * (array.ndim - 1)])

    full = {i: jax.tree.map(padded, row, longest) for i, row in rows.items()}
    nothing = jax.tree.map(np.zeros_like, next(iter(full.values())))
    stacked: Patches = jax.tree.map(
        lambda *arrays: np.stack(arrays), *(full.get(i, nothing) for i in range(len(used)))
    )
    num, real = stacked.pixels.shape[0] * stacked.pixels.shape[1], sum(len(x) for x in chain(*each))
    store.count_tower(sum(map(len, used)), num, num - real)
    return stacked
