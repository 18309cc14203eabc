"""Micro-batches in, one optimizer step out: the exact gradient of a weighted token loss, however cut.

Stands under `learner.py` (reinforcement learning) and the supervised warm start. Loss = sum over tokens
of weight x token loss; the gradient is the plain sum over micro-batches and nothing is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from quatrain.backend import Backend, this_backend
from quatrain.config.mesh import MeshShape
from quatrain.metrics import Metric
from quatrain.models.attention.kernels import choose_attention
from quatrain.models.decoder import forward, output_head, project, vocabulary_axis
from quatrain.models.families import Architecture
from quatrain.models.params import output_head_name, partition
from quatrain.ops.logprobs import token_logprobs
from quatrain.ops.packing import PackingCost
from quatrain.ops.tokens import ScoredTokens, TokenLoss
from quatrain.parallel.collectives import all_gather_shards, psum_backward, shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.host_memory import trim_after_compiling
from quatrain.parallel.mesh import DATA_AXES, full, mesh_shape, one_device, reshard, shardings, to_memory
from quatrain.update.cuts import Cutting
from quatrain.update.micro_batch import MicroBatch, micro_batches
from quatrain.update.residuals import Arrays, HeldGradient, ResidualMemory, per_device_spec
from quatrain.update.table import TokenTable

Total = tuple[Any, Any]
"""A gradient and summed metrics."""
Objective = Callable[[ScoredTokens], TokenLoss]
"""Static in compiled functions; its metrics have the names they are logged under."""


@dataclass(frozen=True)
class PolicySpec:
    """How a micro-batch becomes log-probabilities: model, sampling temperature, dtype, devices; static.

    `backend` holds what depends on the kind of those devices, by default of the devices of this process.
    """

    arch: Architecture
    temperature: float = 1.0
    dtype: str = "float32"
    remat: str = "layer"
    attention: str = "auto"
    mesh: Mesh = field(default_factory=one_device)
    backend: Backend = field(default_factory=this_backend)

    @property
    def mesh_shape(self) -> MeshShape:
        """The sizes of the mesh's axes."""
        return mesh_shape(self.mesh)

    @property
    def partition(self) -> Any:
        """The tree of partition specs of the parameters."""
        return partition(self.arch, self.mesh_shape)

    @property
    def packing_cost(self) -> PackingCost:
        """Multiplications of a layer for a sequence: what the packer balances over devices."""
        arch = self.arch
        heads = arch.num_heads * arch.head_dim
        linear = arch.hidden_size * (2 * heads + 2 * arch.num_kv_heads * arch.head_dim)
        linear += 3 * arch.hidden_size * arch.intermediate_size
        return PackingCost(linear=float(linear), quadratic=float(heads))

    def logprobs(self, params: Any, batch: MicroBatch) -> tuple[jax.Array, jax.Array]:
        """Log-probability and entropy [R, K] of each scored token at the sampling temperature.

        In a function mapped over the mesh: of this data shard's buffers, from this device's parameters.
        """
        hidden = forward(
            params,
            self.arch,
            batch.input_ids,
            batch.positions,
            batch.segment_ids,
            branch_ids=batch.branch_ids if batch.shared else None,
            dtype=jnp.dtype(self.dtype),
            remat=self.remat,
            attention=choose_attention(
                self.attention,
                self.arch,
                platform=self.backend.kind,
                dtype=self.dtype,
                packed=batch.packed,
                shared=batch.shared,
            ),
            backend=self.backend,
        )
        # Those the list does not fill go last, where the tiles past the live ones are not computed.
        order = jnp.argsort(~batch.mask.reshape(-1), stable=True)
        first_positions = jnp.arange(len(hidden))[:, None] * hidden.shape[1]
        scored = (first_positions + batch.predictors).reshape(-1)[order]
        head = output_head(params, self.arch, hidden.dtype)
        axis = vocabulary_axis(self.arch)
        if axis is not None:  # each device has the gradient of its part of the vocabulary
            hidden = psum_backward(hidden, axis)
        results = token_logprobs(
            lambda rows, chunk: project(rows, self.arch, chunk, backend=self.backend),
            head,
            hidden.reshape(-1, hidden.shape[-1])[scored],
            batch.targets.reshape(-1)[order],
            self.temperature,
            tile=self.backend.tile(self.arch.vocab_size),
            num_live=batch.mask.sum(),
            vocabulary_axis=axis,
        )
        back = jnp.argsort(order)
        logprobs, entropy = (result[back].reshape(batch.mask.shape) for result in results)
        return logprobs, entropy


def _score(params: Any, batch: MicroBatch, *, policy: PolicySpec) -> tuple[jax.Array, jax.Array]:
    """[R, K] float32 log-probabilities of a micro-batch's scored tokens, and its mask; forward only.

    Both are on every device.
    """

    def own(params: Any, batch: MicroBatch) -> tuple[jax.Array, jax.Array]:
        logprobs = jnp.where(batch.mask, policy.logprobs(params, batch)[0], 0.0)
        return all_gather_shards((logprobs, batch.mask))

    in_specs = (policy.partition, PartitionSpec(DATA_AXES))
    return shard_mapped(own, policy.mesh, in_specs, PartitionSpec())(params, batch)


score_program = jit_for_backend(_score, static_argnames=("policy",))
"""`score_program(backend)` is the jitted `_score`."""


def table_logprobs(params: Any, table: TokenTable, *, policy: PolicySpec, cutting: Cutting) -> np.ndarray:
    """[B, T] float32 log-probabilities of every completion token of `table`; 0 elsewhere."""
    result = np.zeros(table.completion_mask.shape, np.float32)
    table = replace(table, columns={})  # so that one program scores tables of any columns
    for sequences, batch in micro_batches(table, cutting, policy.mesh):
        with trim_after_compiling():
            results = score_program(policy.backend)(params, batch, policy=policy)
            scored, mask = (np.asarray(x) for x in results)
        part = np.zeros((len(sequences), table.input_ids.shape[1]), np.float32)
        part[table.completion_mask[sequences]] = scored[mask]
        result[sequences] = part
    return result


def _weighted_loss(
    params: Any, batch: MicroBatch, policy: PolicySpec, objective: Objective
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    return _summed(*policy.logprobs(params, batch), batch, objective)


def _summed(
    logprobs: jax.Array, entropy: jax.Array, batch: MicroBatch, objective: Objective
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """The loss of scored tokens [R, K], and what is reported of them: sums and greatest values."""
    columns, mask = dict(batch.columns), batch.mask
    weights = columns.pop("weights")
    token = objective(ScoredTokens(logprobs, entropy, mask, batch.sequence_ids, columns))
    loss = jnp.sum(jnp.where(mask, weights * token.loss, 0.0))
    sums = {name: jnp.sum(jnp.where(mask, values, 0.0)) for name, values in token.means.items()}
    return loss, {
        "sum": {"loss": loss, "tokens": jnp.sum(mask, dtype=jnp.float32), **sums},
        "max": {name: jnp.max(jnp.where(mask, values, -jnp.inf)) for name, values in token.peaks.items()},
    }


GradientFunction = Callable[[Callable[..., Any], Any, MicroBatch], tuple[Any, Any, Arrays]]
"""(loss of parameters, parameters, micro-batch) -> (gradient, what the loss returns beside its value, arrays
to hold until the next micro-batch); static in compiled functions."""


def plain_gradient(loss: Callable[..., Any], params: Any, batch: MicroBatch) -> tuple[Any, Any, Arrays]:
    """The gradient of `loss`, and no array to hold: a `GradientFunction`."""
    return *jax.grad(loss, has_aux=True)(params), []


@partial(jax.jit, static_argnames=("policy", "objective", "gradient"))
def _added(
    params: Any,
    total: Total,
    batch: MicroBatch,
    *,
    policy: PolicySpec,
    objective: Objective,
    gradient: GradientFunction,
) -> tuple[Total, Arrays]:
    """The sum of `total` and the gradient and metrics of `batch`, and the arrays that `gradient` returns.

    Compiled as a part of `_accumulate` alone. JAX remembers the trace of a jitted function: `ResidualMemory`
    asks for the shapes of the arrays first, and tracing the layers a second time would take seconds.
    """

    def own(params: Any, total: Total, batch: MicroBatch) -> tuple[Total, Arrays]:
        loss = partial(_weighted_loss, batch=batch, policy=policy, objective=objective)
        grads, stats, arrays = gradient(loss, params, batch)
        stats = {
            "sum": jax.lax.psum(stats["sum"], DATA_AXES),
            "max": jax.lax.pmax(stats["max"], DATA_AXES),
        }
        return (
            jax.tree.map(lambda t, g: t + g[None].astype(jnp.float32), total[0], grads),
            {
                "sum": jax.tree.map(jnp.add, total[1]["sum"], stats["sum"]),
                "max": jax.tree.map(jnp.maximum, total[1]["max"], stats["max"]),
            },
        ), arrays

    totals = (_copies(policy.partition), PartitionSpec())
    in_specs = (policy.partition, totals, PartitionSpec(DATA_AXES))
    return shard_mapped(own, policy.mesh, in_specs, (totals, per_device_spec(policy.mesh)))(
        params, total, batch
    )


def _accumulate(
    params: Any,
    total: Total,
    batch: MicroBatch,
    held: Arrays | None = None,
    *,
    policy: PolicySpec,
    objective: Objective,
    gradient: GradientFunction = plain_gradient,
) -> tuple[Total, Arrays]:
    """`_added`; its arrays take the memory of `held`, the same arrays of an earlier micro-batch."""
    return _added(params, total, batch, policy=policy, objective=objective, gradient=gradient)


def _copies(specs: Any) -> Any:
    """Specs of a gradient's total [dp, ...]: each copy of the model has its own until the step is applied."""
    return jax.tree.map(lambda spec: PartitionSpec("dp", *spec), specs)


gradient_program = jit_for_backend(
    _accumulate,
    static_argnames=("policy", "objective", "gradient"),
    donate_argnames=("total", "held"),
    keep_unused=True,  # `held` is donated for its memory and not read
)
"""`gradient_program(backend)` is the jitted `_accumulate`."""


def _zero_total(params: Any, batch: MicroBatch, policy: PolicySpec, objective: Objective) -> Total:
    """The total before the first micro-batch, so that the first runs the program of all the others."""
    scored = jax.ShapeDtypeStruct(batch.mask.shape, jnp.float32)
    _, stats = jax.eval_shape(partial(_summed, objective=objective), scored, scored, batch)
    copies = policy.mesh_shape.dp
    everywhere = NamedSharding(policy.mesh, PartitionSpec())
    return jax.tree.map(
        lambda p, sharding: full((copies, *p.shape), 0.0, jnp.float32, sharding),
        params,
        shardings(policy.mesh, _copies(policy.partition)),
    ), {
        "sum": {name: full((), 0.0, jnp.float32, everywhere) for name in stats["sum"]},
        "max": {name: full((), -jnp.inf, jnp.float32, everywhere) for name in stats["max"]},
    }


@partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("params", "opt_state"))
def _apply(
    params: Any, opt_state: Any, total: Any, loss: jax.Array, *, optimizer: optax.GradientTransformation
) -> tuple[Any, Any, jax.Array, jax.Array]:
    grads = jax.tree.map(lambda g: g.sum(axis=0), total)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)

    def apply(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        update = optax.with_extra_args_support(optimizer).update
        updates, opt_state = update(grads, opt_state, master, global_norm=norm)
        new_params = jax.tree.map(lambda p, m, u: (m + u).astype(p.dtype), params, master, updates)
        return new_params, opt_state

    def leave(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        return params, opt_state

    return *jax.lax.cond(finite, apply, leave, params, opt_state, grads), norm, finite


def sum_gradients(
    params: Any,
    batches: Iterable[MicroBatch],
    *,
    policy: PolicySpec,
    objective: Objective,
    residuals: ResidualMemory | None = None,
) -> Total:
    """Gradient of the summed loss, and summed metrics, over all micro-batches and data shards.

    The gradient is float32 and like `params` but for a first axis, over the `dp` copies of the model, which
    is yet to be summed. `residuals` is memory that the backward pass of each micro-batch uses again.
    """
    program = gradient_program(policy.backend)
    static: dict[str, Any] = {"policy": policy, "objective": objective}
    if residuals is not None:
        program = residuals.reused_by(program, policy.mesh)
        static["gradient"] = HeldGradient(output_head_name(policy.arch))
    total: Total | None = None
    for batch in batches:
        if total is None:
            total = _zero_total(params, batch, policy, objective)
        with trim_after_compiling():
            total, _ = program(params, total, batch, **static)
    assert total is not None, "a mini-batch has at least one micro-batch"
    return total


def init_optimizer(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Optimizer state with float32 moments, whatever the dtype of the parameters, each where its one lies."""
    masters = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), params)
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    everywhere = NamedSharding(mesh, PartitionSpec())
    places = optax.tree_map_params(
        optimizer,
        lambda _, like: like.sharding,
        jax.eval_shape(optimizer.init, masters),
        masters,
        transform_non_params=lambda _: everywhere,
    )
    init = jax.jit(
        lambda p: optimizer.init(jax.tree.map(lambda x: x.astype(jnp.float32), p)), out_shardings=places
    )
    return init(params)


def optimizer_step(
    params: Any,
    opt_state: Any,
    batches: Iterable[MicroBatch],
    *,
    policy: PolicySpec,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    residuals: ResidualMemory | None = None,
) -> tuple[Any, Any, bool, dict[str, Metric]]:
    """One optimizer step: (params, optimizer state, applied, metrics). Donates params and state.

    A step whose loss or gradient is not finite is not applied: both come back as they were. State that lies
    in the host's memory is brought to the devices for the step, and back.
    """
    grads, stats = sum_gradients(params, batches, policy=policy, objective=objective, residuals=residuals)
    places = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    with trim_after_compiling():
        params, opt_state, norm, finite = _apply(
            params, to_memory("device", opt_state), grads, stats["sum"]["loss"], optimizer=optimizer
        )
    params, opt_state = reshard((params, opt_state), places)
    host = jax.device_get({"stats": stats, "norm": norm, "finite": finite})
    sums, peaks = dict(host["stats"]["sum"]), host["stats"]["max"]
    tokens = float(sums.pop("tokens"))
    metrics = {"loss": Metric(float(sums.pop("loss"))), "update/grad_norm": Metric(float(host["norm"]))}
    metrics |= {name: Metric(float(value), tokens) for name, value in sums.items()}
    metrics |= {name: Metric(float(value), reduction="max") for name, value in peaks.items()}
    return params, opt_state, bool(host["finite"]), metrics
