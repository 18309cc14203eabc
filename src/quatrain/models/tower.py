"""The tower: features of pictures, from their pixels.

Data flow: pixels of each picture on the host -> `Patches`, a row of patches padded to a static shape ->
`states`, the tower's blocks -> `projected`, features for the text model. `features` is both.

Shapes: R rows, P patches, W width of the tower, F features, L further levels of features, D hidden size of
the text model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from quatrain.backend import ACCELERATOR, Backend
from quatrain.models.attention.blockwise import block_attention, block_pattern
from quatrain.models.blocks.layer_run import GatheredLayer
from quatrain.models.blocks.vit import GELU, Attend, activated
from quatrain.models.layers import Layer, linear
from quatrain.models.params import is_spec
from quatrain.models.rope import Angles
from quatrain.models.vision import Cells, Vision
from quatrain.ops.shape_buckets import round_up_coarsely
from quatrain.parallel.axes import partition_spec
from quatrain.parallel.collectives import current_mesh


class Patches(NamedTuple):
    """Pictures as a row of patches for the tower, padded to a static shape; or R such rows, [R, ...]."""

    pixels: Any
    """[P, values of a patch] float32."""
    layout: dict[str, Any]
    """[P, ...] of each patch: the number of its grid in the row, from 1 (`grids`; 0: padding), and of its
    window (`windows`), its row and column (`places` [P, 2]), the entries of the table of learned positions
    that it has (`table` [P, K]), and the weight of each (`weights`). Those that the tower does not read are
    left out."""
    rows: Any
    """[F] int32: where the tower's output has each of the pictures' features, one picture after another."""


def patches_of(vision: Vision, pixels: Sequence[np.ndarray], sizes: Sequence[tuple[int, int]]) -> Patches:
    """One row of patches with these pictures, in order.

    `pixels` [patches, values] are in merge order: block row, block column, row, column within a block of
    `merge` x `merge` patches, one grid after another. F is rounded up to few sizes, and P is F `merge`**2.
    Raises ValueError for pixels that are not those of a picture of this size.
    """
    for values, size in zip(pixels, sizes, strict=True):
        expected = vision.num_patches(size), vision.patch_values
        if values.shape != expected:
            raise ValueError(
                f"pixels of a picture of {size} must be {expected}; got {values.shape}; read it anew"
            )
    grids = [grid for size in sizes for grid in vision.grids(size)]
    m2 = vision.merge**2
    counts = np.array([grid.rows * grid.columns for grid in grids], np.int64)
    starts = np.cumsum(counts) - counts
    parts = [_layout(vision, grid) for grid in grids]
    width = round_up_coarsely(int(counts.sum()) // m2)
    order = np.concatenate([start + part["order"] for start, part in zip(starts, parts, strict=True)])

    def padded(values: np.ndarray, to: int) -> np.ndarray:
        return np.pad(values, [(0, to - len(values)), *[(0, 0)] * (values.ndim - 1)])

    layout = {"grids": np.repeat(np.arange(1, len(grids) + 1, dtype=np.int32), counts)}
    for name in [name for name in parts[0] if name != "order"]:
        layout[name] = np.concatenate([part[name] for part in parts])
    if vision.window:
        # Windows of different grids need different numbers; within one they are neighbours in the row.
        pairs = np.stack([layout["grids"], layout["windows"]])
        new = np.diff(pairs, prepend=0).any(axis=0)
        layout["windows"] = np.cumsum(new, dtype=np.int32)
    rows = np.argsort(order.reshape(-1, m2)[:, 0]).astype(np.int32)
    return Patches(
        padded(np.concatenate(pixels).astype(np.float32)[order], width * m2),
        {name: padded(values, width * m2) for name, values in layout.items()},
        padded(rows, width),
    )


@lru_cache(maxsize=256)  # tiles are alike, and pictures of a data set have few sizes
def _layout(vision: Vision, grid: Cells) -> dict[str, np.ndarray]:
    """What `Patches.layout` has of one grid, in the order of the row, which is `order` of the merge order."""
    m, (rows, columns) = vision.merge, grid
    places = np.moveaxis(np.indices(grid), 0, -1).reshape(rows // m, m, columns // m, m, 2)
    places = places.swapaxes(1, 2).reshape(-1, 2).astype(np.int32)
    found: dict[str, np.ndarray] = {}
    if vision.table_side:
        of_axis = _nearest if vision.kind == "idefics3" else _interpolated
        (row, row_weights), (column, column_weights) = (
            tuple(each[place] for each in of_axis(size, vision.table_side))
            for size, place in zip(grid, places.T, strict=True)
        )
        found["table"] = (row[:, :, None] * vision.table_side + column[:, None]).reshape(len(places), -1)
        found["weights"] = (row_weights[:, :, None] * column_weights[:, None]).reshape(len(places), -1)
    if vision.block.rope_theta is not None:
        found["places"] = places
    order = np.arange(len(places))
    if vision.window:
        window_row, window_column = (places // (m * vision.window)).T
        windows = window_row * -(-columns // (m * vision.window)) + window_column + 1
        order = np.argsort(windows, kind="stable")
        found["windows"] = windows
    return {name: values[order] for name, values in found.items()} | {"order": order}


def _nearest(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """[size, 1]: the learned position of each of `size` patches, the last that begins at i / size or before.

    In float32, as in transformers: with some sides, rounding makes it the one before.
    """
    starts = (np.arange(1, side) / side).astype(np.float32)
    begins = np.arange(size, dtype=np.float32) * (np.float32(1) / np.float32(size))
    found = np.searchsorted(starts, np.minimum(begins, np.float32(1 - 1e-6)), side="right")
    return found.astype(np.int32)[:, None], np.ones((size, 1), np.float32)


def _interpolated(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """[size, 2]: the two learned positions between which each of `size` patches is, and their weights.

    The first and the last patch are at the first and the last position (align_corners).
    """
    at = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    both = np.floor(at).astype(np.int32)[:, None] + np.arange(2, dtype=np.int32)
    weights = np.maximum(1 - np.abs(at[:, None] - both.astype(np.float32)), 0)
    return np.minimum(both, side - 1), weights


def features(
    tower: Any,
    vision: Vision,
    patches: Patches,
    *,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    backend: Backend = ACCELERATOR,
) -> jax.Array:
    """[R, 1 + L, F, D]: what the tower, `params["vision"]`, makes of R rows of patches.

    Level 0 takes the place of embeddings; level 1 + i is added after text layer i. Features of a picture do
    not depend on what else its row has but for rounding: those of a row of its own, with R = 1, are the same
    to the bit. Activations are in `dtype`; norms, rotary embeddings and softmax are in float32. With `remat`
    the backward pass computes each block again.
    """
    hidden = states(tower, vision, patches, dtype=dtype, remat=remat, backend=backend)
    return projected(tower, vision, hidden, patches.rows)


def states(
    tower: Any,
    vision: Vision,
    patches: Patches,
    *,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
    backend: Backend = ACCELERATOR,
) -> jax.Array:
    """[R, 1 + L, P, W]: hidden states that `projected` makes features of, those of level 0 first."""
    block, layout, specs = vision.block, patches.layout, _specs(vision)
    whole = GatheredLayer(tower, specs, dtype)
    x_RPW = linear(patches.pixels.astype(dtype), whole, "patch")
    if vision.table_side:
        # One entry of the table after another: all at once would take as many times the memory.
        table = whole["positions"].astype(jnp.float32)
        entries = range(layout["table"].shape[-1])
        parts = (table[layout["table"][..., k]] * layout["weights"][..., k, None] for k in entries)
        x_RPW = x_RPW + reduce(add, parts).astype(dtype)
    angles = block.angles(layout["places"]) if "places" in layout else None
    scale = vision.lora.scale if vision.lora else 1.0

    def run(attend: Attend, x_RPW: jax.Array, layer: Layer, angles: Angles | None) -> jax.Array:
        return block.run(x_RPW, GatheredLayer(layer, specs["blocks"][0], dtype), angles, attend, scale)

    runs = {}
    for name in ("grids", "windows") if vision.window else ("grids",):
        one = partial(run, _attention(layout[name], backend))
        # Blocks are alike: one jitted function is traced and lowered once, where a tower has dozens of them.
        runs[name] = jax.jit(jax.checkpoint(one) if remat else one)
    levels = []
    for number, layer in enumerate(tower["blocks"]):
        windowed = vision.window and number not in vision.whole
        x_RPW = runs["windows" if windowed else "grids"](x_RPW, layer, angles)
        levels += [x_RPW] * (number in vision.deepstack)
    if "post_norm" in tower:
        x_RPW = block.norm(x_RPW, whole, "post_norm")
    return jnp.stack([x_RPW, *levels], axis=1)


def projected(tower: Any, vision: Vision, states: jax.Array, rows: jax.Array) -> jax.Array:
    """[R, 1 + L, F, D]: features of the hidden `states` [R, 1 + L, P, W], in the order of `rows` [R, F]."""
    specs = _specs(vision)
    layers = [tower["merger"], *tower.get("deepstack", [])]
    layer_specs = [specs["merger"], *specs.get("deepstack", [])]
    found = [
        _merged(vision, states[:, level], GatheredLayer(*layer, states.dtype), norm_last=level > 0)
        for level, layer in enumerate(zip(layers, layer_specs, strict=True))
    ]
    return jax.vmap(lambda features, rows: features[:, rows])(jnp.stack(found, axis=1), rows)


def _merged(vision: Vision, x_RPW: jax.Array, layer: Layer, norm_last: bool) -> jax.Array:
    """[R, P / m**2, D]: the projector of one level; its norm is of each patch, or of the patches in a row."""
    m2 = vision.merge**2
    in_rows = (x_RPW.shape[0], x_RPW.shape[1] // m2, m2 * x_RPW.shape[2])
    if "up" not in layer:
        return linear(x_RPW.reshape(in_rows), layer, "down")
    norm = vision.block.norm
    x = (
        norm(x_RPW.reshape(in_rows), layer, "norm")
        if norm_last
        else norm(x_RPW, layer, "norm").reshape(in_rows)
    )
    return linear(activated(linear(x, layer, "up"), GELU), layer, "down")


def _attention(segments_RP: jax.Array, backend: Backend) -> Attend:
    """Attention of patches to those of the same segment, before and behind them."""
    zeros = jnp.zeros_like(segments_RP)
    pattern = block_pattern(zeros, segments_RP, zeros, None, backend.attention_blocks, causal=False)
    return lambda q, k, v: block_attention(q, k, v, pattern, None, None)


def _specs(vision: Vision) -> Any:
    """The partition specs of the tower's parameters on the current mesh."""
    mesh = current_mesh()
    return jax.tree.map(lambda s: partition_spec(s.shape, s.axes, mesh), vision.params(), is_leaf=is_spec)
