"""Memory for what the forward pass leaves to the backward pass, held from one micro-batch to the next.

Under `gradient.py`, whose program writes it anew each time, and beside it the gradient of the output head, an
array as large as the residuals of several layers, which is added up in place. On a CPU a program's
temporaries are new pages at every call, which the system finds and clears one by one. What is held stays over
the rollout too, which needs less than the update there; an accelerator's allocator has memory at hand, and
its rollout needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quatrain.parallel.mesh import filled

LEAST_BYTES = 2**17
"""Smaller arrays are not worth a place of their own: the C library has room for them."""

Arrays = list[jax.Array]


def residuals_of(vjp: Any, known: Any) -> Arrays:
    """The large arrays that a `jax.vjp` function holds on to, each once, without those of the tree `known`.

    In a function mapped over a mesh; with a first axis of one, for the device.
    """
    seen = {id(x) for x in jax.tree.leaves(known)}
    found = []
    for x in jax.tree.leaves(vjp):
        if id(x) not in seen and isinstance(x, jax.Array) and x.nbytes >= LEAST_BYTES:
            seen.add(id(x))
            found.append(x[None])
    return found


def each_its_own(mesh: Mesh) -> PartitionSpec:
    """The spec of arrays of which each device of `mesh` has its own, along a first axis."""
    return PartitionSpec(mesh.axis_names)


class ResidualMemory:
    """Lends arrays to be written over, and keeps those that come back in their place."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Arrays] = {}

    def lend(self, kind: Hashable, mesh: Mesh, shapes: Callable[[], Any]) -> Arrays:
        """What came back last, where it is of this `kind` of micro-batch; else new arrays on `mesh`.

        They are like `shapes()` and the borrower's to donate. Those of another kind are given up first.
        """
        held = self._held.pop(kind, None)
        if held is not None:
            return held
        self._held.clear()
        place = NamedSharding(mesh, each_its_own(mesh))
        return [filled(x.shape, 0.0, x.dtype, place) for x in shapes()]

    def take_back(self, kind: Hashable, arrays: Arrays) -> None:
        """`arrays` in the place of what was lent for this `kind`."""
        self._held = {kind: arrays}


def residual_memory() -> ResidualMemory | None:
    """One to hold where holding it is worth it: on a CPU."""
    return ResidualMemory() if jax.default_backend() == "cpu" else None
