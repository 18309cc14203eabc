"""A reference policy that follows the policy (`update.reference_sync_steps`).

Used by `loop/reference.py` between two training steps: policy, reference -> the new one, for the `Learner`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from quatrain.ops.rounding import round_array
from quatrain.parallel.mesh import copy_if_aliased, reshard, to_memory


def followed(reference: Any, params: Any, mixup: float, draw: Any = None) -> Any:
    """α · `params` + (1 − α) · `reference`, with α = `mixup`, where `reference` lies: devices and memory.

    It is computed in float32, one array at a time, and has the dtypes of `reference`; bfloat16 numbers are
    rounded stochastically with a `draw` (`ops.rounding.round_tree`). No array of `params` is part of the
    result, so that a training step may donate them. Source: TR-DPO, arXiv 2404.09656.
    """

    def follow(place: int, old: jax.Array, new: jax.Array) -> jax.Array:
        new = to_memory("device", new)
        on_device = old.sharding.with_memory_kind(str(new.sharding.memory_kind))
        moved = reshard(new, on_device)
        # Without reading the old reference: with host memory that would bring it to the devices for nothing.
        if mixup == 1:
            mixed = copy_if_aliased(moved.astype(old.dtype), new)
        else:
            mixed = _mixed(reshard(old, on_device), moved, mixup, place, draw)
        return reshard(mixed, old.sharding)

    leaves, structure = jax.tree.flatten(reference)
    pairs = zip(leaves, jax.tree.leaves(params), strict=True)
    return jax.tree.unflatten(structure, [follow(place, *pair) for place, pair in enumerate(pairs)])


@jax.jit
def _mixed(old: jax.Array, new: jax.Array, mixup: float, place: int, draw: Any) -> jax.Array:
    mixed = mixup * new.astype(jnp.float32) + (1 - mixup) * old.astype(jnp.float32)
    # To the nearest number, a part of a small difference would be lost, and the reference would never move.
    return round_array(mixed, old.dtype, place, draw)
