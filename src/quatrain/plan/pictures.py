"""Estimates the memory that pictures need: a tower, features, and the activations of a tower that is trained.

Data flow: the tower and the tokens of a micro-batch -> the parts of `placement.py`. How many pictures a
micro-batch has depends on the data: these are the most that there can be, if prompts are placeholders alone.

Letters: P patches, F features, L further levels of features, W width of the tower, D hidden size of texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax.numpy as jnp

from quatrain.config.mesh import MeshShape
from quatrain.models.architecture import Architecture
from quatrain.models.params import param_specs, partition
from quatrain.models.vision import Vision
from quatrain.ops.shape_buckets import round_up_coarsely
from quatrain.plan.activations import FLOAT32, sum_on_device
from quatrain.plan.device_memory import MemoryPart, Phase

IF_ANY = "; none without pictures in the data"


def tower_bytes(arch: Architecture, mesh: MeshShape, dtype: str) -> int:
    """Bytes of the tower's parameters on one device, whatever is trained of it; 0 without a tower."""
    if arch.vision is None:
        return 0
    specs, places = (
        tree["vision"] for tree in (param_specs(arch.with_tower), partition(arch.with_tower, mesh))
    )
    return sum_on_device(specs, places, mesh, lambda spec: jnp.dtype(spec.dtype or dtype).itemsize)


def update_parts(vision: Vision, most: int, dtype: str, remat: str, phase: Phase) -> Iterator[MemoryPart]:
    """What a micro-batch with so many placeholders on a data shard has for its pictures.

    - `frozen`: features, (1 + L) F D numbers of `dtype`
    - `projector`: what it reads, (1 + L) P W numbers, and those of its own work; features and their gradient
    - `all`: pixels in float32; of each block its input, P W numbers, and the work of one block, which the
      backward pass computes again; all that a block computes with `remat` none; features and their gradient
    """
    b, features = jnp.dtype(dtype).itemsize, round_up_coarsely(most)
    patches, w, levels = features * vision.merge**2, vision.block.size, 1 + vision.levels
    size = levels * features * vision.out_size * b
    what = f"at most {features} placeholders x {levels} x {vision.out_size} (levels x hidden size), {dtype}"
    if vision.trained == "frozen":
        yield MemoryPart("features", size, what + IF_ANY, (phase,))
        return
    yield MemoryPart("features", 2 * size, f"{what}, and their gradient{IF_ANY}", (phase,))
    if vision.trained == "projector":
        kept, work = levels * patches * w * b, PROJECTOR_COLUMNS * patches * w * b
        why = f"estimate for {patches} patches at most: {levels} x {w} columns (levels x width), and work"
    else:
        # As XLA for CPUs keeps them, counted for towers of both kinds of norms and MLPs.
        norms, gates = 4 * (vision.block.norm.kind == "layer"), 1 + vision.block.gated
        of_block = (14 + norms) * w + 2 * gates * vision.block.width
        work = patches * (3 * w + 3 * vision.block.width + of_block * (remat != "none")) * b
        of_each = of_block if remat == "none" else w
        kept = patches * (FLOAT32 * vision.patch_values + (vision.depth * of_each + w) * b)
        what = "results" if remat == "none" else "inputs"
        why = f"estimate for {patches} patches: {what} of {vision.depth} blocks (model.remat), and work"
    yield MemoryPart("tower_activations", kept + work, why + IF_ANY, (phase,))


PROJECTOR_COLUMNS = 5
"""Arrays of the size of its input that the backward pass of a projector has at once."""


def tower_at_work(vision: Vision, dtype: str, longest: int, phases: tuple[Phase, ...]) -> MemoryPart:
    """The tower's own work on the largest picture that a prompt of `longest` tokens can have."""
    patches = round_up_coarsely(min(_largest_picture(vision), longest * vision.merge**2))
    w, f = vision.block.size, vision.block.width
    columns = max(7 * w, 2 * w + (2 + vision.block.gated) * f)
    size = patches * (FLOAT32 * vision.patch_values + columns * jnp.dtype(dtype).itemsize)
    why = f"estimate for one picture of at most {patches} patches (data.image_max_pixels){IF_ANY}"
    return MemoryPart("tower_at_work", size, why, phases, "rollout")


def _largest_picture(vision: Vision) -> int:
    """Patches of the largest picture after resizing."""
    if vision.has_grid:
        return vision.max_pixels // vision.patch**2
    tiles = math.ceil(vision.longest_edge / vision.tile) ** 2 if vision.splits else 0
    return (tiles + 1) * (vision.tile // vision.patch) ** 2
