"""Memory for what the forward pass leaves to the backward pass, held from one micro-batch to the next.

Under `gradient.py`, whose program writes it anew each time. On a CPU a program's temporaries are new pages at
every call, which the system finds and clears one by one. What is held stays over the rollout too, which
needs less than the update there; an accelerator's allocator has memory at hand, and its rollout needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


@partial(jax.jit, static_argnames=("like", "where"))
def _zeros(like: tuple[tuple[tuple[int, ...], jnp.dtype], ...], where: NamedSharding) -> Arrays:
    return [lax.with_sharding_constraint(jnp.zeros(*each), where) for each in like]


class ResidualMemory:
    """Lends arrays to be written over, and keeps those that come back in their place."""

    def __init__(self) -> None:
        self._kind: Hashable = None
        self._arrays: Arrays = []

    def lend(self, kind: Hashable, mesh: Mesh, shapes: Callable[[], Any]) -> Arrays:
        """What came back last for this `kind` of micro-batch, else new arrays of `shapes()` on `mesh`.

        They are the borrower's to donate; those of another kind are given up first.
        """
        known, arrays = self._kind, self._arrays
        self._kind, self._arrays = None, []
        if kind == known:
            return arrays
        del arrays
        like = tuple((x.shape, x.dtype) for x in shapes())
        return _zeros(like, NamedSharding(mesh, each_its_own(mesh)))

    def take_back(self, kind: Hashable, arrays: Arrays) -> None:
        """`arrays` in the place of what was lent for this `kind`."""
        self._kind, self._arrays = kind, arrays


def residual_memory() -> ResidualMemory | None:
    """One to hold where holding it is worth it: on a CPU."""
    return ResidualMemory() if jax.default_backend() == "cpu" else None
