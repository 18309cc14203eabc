"""Memory for the residuals of the backward pass, held from one micro-batch to the next. For CPUs only.

Data flow: `gradient.sum_gradients` calls its program through `ResidualMemory.reused_by`. The residuals (what
the forward pass leaves to the backward pass) of a micro-batch are written into the arrays of the one before,
and so is the gradient of the output head, an array as large as the residuals of several layers.

On a CPU a program's temporaries are new pages at every call, which the system maps and clears one by one. The
arrays stay allocated during the rollout too, which needs less memory than the update there. An accelerator's
allocator reuses memory by itself, and its rollout needs the memory (`Backend.holds_residuals`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quatrain.backend import Backend
from quatrain.models.families import Architecture
from quatrain.parallel.mesh import full

LEAST_BYTES = 2**17
"""Smaller arrays are not held: the C library has memory for them at hand."""

Arrays = list[jax.Array]


@dataclass(frozen=True)
class HeldGradient:
    """A `gradient.GradientFunction` that returns its large residuals and the gradient of one parameter too.

    To be called in a function mapped over a mesh: each returned array has a first axis of 1, for the device.
    """

    output_head: str | None
    """The name of the parameter; None: only residuals are returned."""

    @classmethod
    def of(cls, arch: Architecture) -> HeldGradient:
        """With the gradient of the largest parameter; none with adapters, whose gradients are small."""
        own_head = arch.head == "lm_head" and not arch.tie_embeddings
        return cls(None if arch.lora else "lm_head" if own_head else "embed")

    def __call__(self, loss: Callable[..., Any], params: Any, known: Any) -> tuple[Any, Any, Arrays]:
        """(gradient, what `loss` returns beside its value, arrays to hold).

        `known` are the other arrays that `loss` reads: they are held already.
        """
        _, vjp, stats = jax.vjp(loss, params, has_aux=True)
        # By identity, which tracing keeps: parameters and inputs are alive anyway, and would be held a second
        # time.
        residuals = residuals_of(vjp, (params, known))
        (grads,) = vjp(jnp.ones((), jnp.float32))
        held = residuals if self.output_head is None else [*residuals, grads[self.output_head]]
        return grads, stats, [x[None] for x in held]


def residuals_of(vjp: Any, known: Any) -> Arrays:
    """The large arrays that a `jax.vjp` function refers to, each once, but for those in the tree `known`."""
    seen = {id(x) for x in jax.tree.leaves(known)}
    found = []
    for x in jax.tree.leaves(vjp):
        if id(x) not in seen and isinstance(x, jax.Array) and x.nbytes >= LEAST_BYTES:
            seen.add(id(x))
            found.append(x)
    return found


def per_device_spec(mesh: Mesh) -> PartitionSpec:
    """The spec of arrays whose first axis is the devices of `mesh`."""
    return PartitionSpec(mesh.axis_names)


class ResidualMemory:
    """Lends arrays to a program that overwrites them, and holds those that it returns for the next call."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Arrays] = {}

    def reused_by(self, program: Any, mesh: Mesh) -> Callable[..., tuple[Any, Arrays]]:
        """`program`, called with the memory held here as its last argument.

        `program` is a jitted function (parameters, total, micro-batch, held, **static) -> (total, arrays to
        hold), which donates `held`. The result takes no `held` and returns no arrays: they stay here.
        """

        def call(params: Any, total: Any, batch: Any, **static: Any) -> tuple[Any, Arrays]:
            leaves, structure = jax.tree.flatten(batch)
            kind = *static.values(), structure, *(x.shape for x in leaves)
            held = self.lend(kind, mesh, lambda: program.eval_shape(params, total, batch, **static)[1])
            total, held = program(params, total, batch, held, **static)
            self.take_back(kind, held)
            return total, []

        return call

    def lend(self, kind: Hashable, mesh: Mesh, shapes: Callable[[], Any]) -> Arrays:
        """The arrays returned last where their micro-batch was of this `kind`; else new ones on `mesh`.

        They are like `shapes()` and the borrower's to donate. Arrays of another kind are released first.
        """
        # Popped, not read: while the program runs its arrays are donated and must not be lent twice.
        held = self._held.pop(kind, None)
        if held is not None:
            return held
        # One kind at a time: held for every shape, the memory would grow with the number of shapes.
        self._held.clear()
        place = NamedSharding(mesh, per_device_spec(mesh))
        return [full(x.shape, 0.0, x.dtype, place) for x in shapes()]

    def take_back(self, kind: Hashable, arrays: Arrays) -> None:
        """Hold `arrays` in place of those that were lent for this `kind`."""
        self._held = {kind: arrays}


def residual_memory(backend: Backend, remat: str) -> ResidualMemory | None:
    """Memory for the devices of `backend`; None where it saves no time: on accelerators, and with
    `model.remat` none, where the weights in the dtype of activations are residuals too.
    """
    return ResidualMemory() if backend.holds_residuals and remat != "none" else None
