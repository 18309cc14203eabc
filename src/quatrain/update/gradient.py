"""Micro-batches in, one optimizer step out: the exact gradient of a weighted token loss, however cut.

Used by the update of the policy (`learner.py`) and of the critic (`critic.py`) and by the supervised warm
start (`sft.py`). The loss is the sum over tokens of weight x token loss; the gradient is the plain sum over
micro-batches, and nothing is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from quatrain.forward.micro_batch import MicroBatch
from quatrain.forward.specs import ModelSpec
from quatrain.ops.rounding import round_tree
from quatrain.ops.tokens import TokenLoss
from quatrain.parallel.axes import DATA_AXES, DP
from quatrain.parallel.collectives import shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.host_memory import trim_after_compiling
from quatrain.parallel.mesh import full, reshard, shardings, to_memory
from quatrain.types.metrics import Metric
from quatrain.update.residuals import Arrays, HeldGradient, ResidualMemory, per_device_spec

Total = tuple[Any, Any]
"""A gradient of what is trained, and summed metrics."""
Objective = Callable[[Any], TokenLoss]
"""A function of the tokens of a `ModelSpec`; static in compiled functions.

Its metrics have the names they are logged under.
"""


def weighted_loss(
    predictions: tuple[jax.Array, ...], batch: MicroBatch, model: ModelSpec, objective: Objective
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """The loss of scored tokens [R, K], and what is reported of them: sums and greatest values."""
    columns, mask = dict(batch.columns), batch.mask
    weights = columns.pop("weights")
    named = dict(zip(model.tokens.predictions, predictions, strict=True))
    token = objective(model.tokens(**named, mask=mask, sequence_ids=batch.sequence_ids, columns=columns))
    loss = jnp.sum(jnp.where(mask, weights * token.loss, 0.0))
    if token.weighted is not None:
        loss += jnp.sum(jnp.where(mask, token.weighted, 0.0))
    sums = {name: jnp.sum(jnp.where(mask, values, 0.0)) for name, values in token.means.items()}
    return loss, {
        "sum": {"loss": loss, "tokens": jnp.sum(mask, dtype=jnp.float32), **sums},
        "max": {name: jnp.max(jnp.where(mask, values, -jnp.inf)) for name, values in token.peaks.items()},
    }


GradientFunction = Callable[[Callable[..., Any], Any, Any], tuple[Any, Any, Arrays]]
"""(loss of what is trained, what is trained, other arrays of the loss) -> (gradient, what the loss returns
beside its value, arrays to hold until the next micro-batch); static in compiled functions."""


def plain_gradient(loss: Callable[..., Any], params: Any, known: Any) -> tuple[Any, Any, Arrays]:
    """The gradient of `loss`, and no array to hold: a `GradientFunction`."""
    return *jax.grad(loss, has_aux=True)(params), []


@partial(jax.jit, static_argnames=("model", "objective", "gradient"))
def _added(
    params: Any,
    total: Total,
    batch: MicroBatch,
    *,
    model: ModelSpec,
    objective: Objective,
    gradient: GradientFunction,
) -> tuple[Total, Arrays]:
    """The sum of `total` and the gradient and metrics of `batch`, and the arrays that `gradient` returns.

    Compiled as a part of `_accumulate` alone. JAX remembers the trace of a jitted function: `ResidualMemory`
    asks for the shapes of the arrays first, and tracing the layers a second time would take seconds.
    """

    def on_shard(params: Any, total: Total, batch: MicroBatch) -> tuple[Total, Arrays]:
        def loss(trained: Any) -> Any:
            predictions = model.predict(model.with_trained(params, trained), batch)
            return weighted_loss(predictions, batch, model, objective)

        grads, stats, arrays = gradient(loss, model.trained(params), (params, batch))
        sums, peaks = jax.lax.psum(stats["sum"], DATA_AXES), jax.lax.pmax(stats["max"], DATA_AXES)
        grads = jax.tree.map(lambda t, g: t + g[None].astype(jnp.float32), total[0], grads)
        sums = jax.tree.map(jnp.add, total[1]["sum"], sums)
        peaks = jax.tree.map(jnp.maximum, total[1]["max"], peaks)
        return (grads, {"sum": sums, "max": peaks}), arrays

    totals = _copies(model), PartitionSpec()
    in_specs, out_specs = (model.partition, totals, PartitionSpec(DATA_AXES)), per_device_spec(model.mesh)
    return shard_mapped(on_shard, model.mesh, in_specs, (totals, out_specs))(params, total, batch)


def _accumulate(
    params: Any,
    total: Total,
    batch: MicroBatch,
    held: Arrays | None = None,
    *,
    model: ModelSpec,
    objective: Objective,
    gradient: GradientFunction = plain_gradient,
) -> tuple[Total, Arrays]:
    """`_added`; its arrays take the memory of `held`, the same arrays of an earlier micro-batch."""
    return _added(params, total, batch, model=model, objective=objective, gradient=gradient)


def _copies(model: ModelSpec) -> Any:
    """Specs of a gradient's total [dp, ...]: each copy of the model has its own until the step is applied."""
    return jax.tree.map(lambda spec: PartitionSpec(DP, *spec), model.trained(model.partition))


gradient_program = jit_for_backend(
    _accumulate,
    static_argnames=("model", "objective", "gradient"),
    donate_argnames=("total", "held"),
    keep_unused=True,  # `held` is donated for its memory and not read
)
"""`gradient_program(backend)` is the jitted `_accumulate`."""


def _zero_total(params: Any, batch: MicroBatch, model: ModelSpec, objective: Objective) -> Total:
    """The total before the first micro-batch, so that the first runs the program of all the others."""
    scored = jax.ShapeDtypeStruct(batch.mask.shape, jnp.float32)
    summed = partial(weighted_loss, model=model, objective=objective)
    _, stats = jax.eval_shape(summed, (scored,) * len(model.tokens.predictions), batch)
    grads = jax.tree.map(
        lambda p, sharding: full((model.mesh_shape.dp, *p.shape), 0.0, jnp.float32, sharding),
        model.trained(params),
        shardings(model.mesh, _copies(model)),
    )
    everywhere, least = NamedSharding(model.mesh, PartitionSpec()), {"sum": 0.0, "max": -jnp.inf}
    return grads, {
        kind: {name: full((), least[kind], jnp.float32, everywhere) for name in named}
        for kind, named in stats.items()
    }


@partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("params", "opt_state"))
def _apply(
    params: Any,
    opt_state: Any,
    total: Any,
    loss: jax.Array,
    draw: np.ndarray | None = None,
    schedule_step: np.int32 | None = None,
    *,
    optimizer: optax.GradientTransformation,
) -> tuple[Any, Any, jax.Array, jax.Array]:
    grads = jax.tree.map(lambda g: g.sum(axis=0), total)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)

    def apply(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        update = optax.with_extra_args_support(optimizer).update
        updates, opt_state = update(grads, opt_state, master, global_norm=norm, schedule_step=schedule_step)
        return round_tree(jax.tree.map(jnp.add, master, updates), params, draw), opt_state

    def leave(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        return params, opt_state

    return *jax.lax.cond(finite, apply, leave, params, opt_state, grads), norm, finite


def sum_gradients(
    params: Any,
    batches: Iterable[MicroBatch],
    *,
    model: ModelSpec,
    objective: Objective,
    residuals: ResidualMemory | None = None,
) -> Total:
    """Gradient of the summed loss, and summed metrics, over all micro-batches and data shards.

    The gradient is float32 and like what is trained of `params` (`ModelSpec.trained`) but for a first axis,
    over the `dp` copies of the model, which is yet to be summed. `residuals` is memory that the backward pass
    of each micro-batch uses again.
    """
    program = gradient_program(model.backend)
    static: dict[str, Any] = {"model": model, "objective": objective}
    if residuals is not None:
        program = residuals.reused_by(program, model.mesh)
        static["gradient"] = HeldGradient.of(model.arch)
    total: Total | None = None
    for batch in batches:
        if total is None:
            total = _zero_total(params, batch, model, objective)
        with trim_after_compiling():
            total, _ = program(params, total, batch, **static)
    assert total is not None, "a mini-batch has at least one micro-batch"
    return total


def init_optimizer(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Optimizer state as for float32 parameters, whatever the dtype of `params`, each where its one lies."""
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
    model: ModelSpec,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    residuals: ResidualMemory | None = None,
    draw: np.ndarray | None = None,
    schedule_step: int | None = None,
) -> tuple[Any, Any, bool, dict[str, Metric]]:
    """One optimizer step: (params, optimizer state, applied, metrics). Donates what is trained, and state.

    A step whose loss or gradient is not finite is not applied: both come back as they were. State that lies
    in the host's memory is brought to the devices for the step, and back. New bfloat16 parameters are rounded
    stochastically if there is a `draw` (`ops.rounding.round_tree`), else to the nearest number. The learning
    rate is that of `schedule_step`; None: of the step after the last that was applied.
    """
    grads, stats = sum_gradients(params, batches, model=model, objective=objective, residuals=residuals)
    trained = model.trained(params)
    places = jax.tree.map(lambda x: x.sharding, (trained, opt_state))
    with trim_after_compiling():
        trained, opt_state, norm, finite = _apply(
            trained,
            to_memory("device", opt_state),
            grads,
            stats["sum"]["loss"],
            draw,
            None if schedule_step is None else np.int32(schedule_step),
            optimizer=optimizer,
        )
    trained, opt_state = reshard((trained, opt_state), places)
    params = model.with_trained(params, trained)
    host = jax.device_get({"stats": stats, "norm": norm, "finite": finite})
    sums, peaks = dict(host["stats"]["sum"]), host["stats"]["max"]
    tokens = float(sums.pop("tokens"))
    metrics = {"loss": Metric(float(sums.pop("loss"))), "update/grad_norm": Metric(float(host["norm"]))}
    metrics |= {name: Metric(float(value), tokens) for name, value in sums.items()}
    metrics |= {name: Metric(float(value), reduction="max") for name, value in peaks.items()}
    return params, opt_state, bool(host["finite"]), metrics
