"""The two halves of an optimizer step: micro-batches to an exact gradient, however cut, and that to weights.

Used by `trainer.py` alone. The loss is the sum over tokens of weight x token loss; the gradient is the plain
sum over micro-batches, and nothing is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial, reduce
from operator import add
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from quatrain.forward.micro_batch import MicroBatch
from quatrain.forward.predict import Gathered, gathered
from quatrain.forward.specs import ModelSpec, Predicted
from quatrain.models.blocks.experts import RouterSums
from quatrain.ops.rounding import round_tree
from quatrain.ops.tokens import TokenLoss
from quatrain.parallel.axes import DATA_AXES, DP
from quatrain.parallel.collectives import shard_mapped
from quatrain.parallel.compilations import jit_for_backend
from quatrain.parallel.host_memory import trim_after_compiling
from quatrain.parallel.mesh import full, reshard, shardings, to_memory
from quatrain.types.metrics import Metric, combine
from quatrain.types.routes import live_of
from quatrain.update.optimizer import OptimizerForm, OptimizerNumbers
from quatrain.update.residuals import Arrays, HeldGradient, ResidualMemory, per_device_spec

T = TypeVar("T")
Total = tuple[Any, Any]
"""A gradient of what is trained, and summed metrics."""
Objective = Callable[[Any], TokenLoss]
"""A function of the tokens of a `ModelSpec`; static in compiled functions.

Its metrics have the names they are logged under.
"""


def weighted_loss(
    predicted: Predicted, batch: MicroBatch, model: ModelSpec, objective: Objective
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    """The loss of scored tokens [R, K] and of routers, and what is reported: sums and greatest values."""
    columns, mask = dict(batch.columns), batch.mask
    weights = columns.pop("weights")
    named = dict(zip(model.tokens.predictions, predicted.numbers, strict=True))
    token = objective(model.tokens(**named, mask=mask, sequence_ids=batch.sequence_ids, columns=columns))
    # Masked after the product: padding may have an infinite or NaN loss, and 0 * NaN is NaN.
    loss = jnp.sum(jnp.where(mask, weights * token.loss, 0.0))
    if token.weighted is not None:
        loss += jnp.sum(jnp.where(mask, token.weighted, 0.0))
    sums = {name: jnp.sum(jnp.where(mask, values, 0.0)) for name, values in token.means.items()}
    # A sum over tokens like the loss: `TokenTable.balanced` fixed the loads before the mini-batch was cut.
    of_routers = _router_stats(predicted.routers, batch)
    if "balance_loss" in of_routers:
        loss += of_routers["balance_loss"]
    return loss, {
        # Only reported from here; without the stop their gradient would be kept for nothing.
        "routers": jax.lax.stop_gradient(of_routers),
        "sum": {"loss": loss, "tokens": jnp.sum(mask, dtype=jnp.float32), **sums},
        "max": {name: jnp.max(jnp.where(mask, values, -jnp.inf)) for name, values in token.peaks.items()},
    }


def _router_stats(routers: RouterSums | None, batch: MicroBatch) -> dict[str, jax.Array]:
    """Sums over the tokens and layers of a micro-batch: the auxiliary loss, and what metrics are made of."""
    if routers is None:
        return {}
    stats = {"expert_tokens": routers.tokens, "entropy": routers.entropy.sum()}
    if batch.routes is not None and batch.counts is not None:
        # Tokens whose experts the sampler did not record count neither as replayed nor as changed.
        recorded = (batch.routes != live_of(batch.routes.dtype)).any(axis=-1).sum(axis=-1)
        stats |= {"changed": routers.changed.sum(), "replayed": jnp.sum(recorded * batch.counts)}
    if batch.balance is not None:
        stats["balance_loss"] = jnp.sum(batch.balance[0] * routers.probabilities)
    return stats


GradientFunction = Callable[[Callable[..., Any], Any, Any], tuple[Any, Any, Arrays]]
"""(loss of what is trained, what is trained, other arrays of the loss) -> (gradient, what the loss returns
beside its value, arrays to hold until the next micro-batch); static in compiled functions."""


def plain_gradient(loss: Callable[..., Any], params: Any, known: Any) -> tuple[Any, Any, Arrays]:
    """The gradient of `loss`, and no array to hold: a `GradientFunction`."""
    return *jax.grad(loss, has_aux=True)(params), []


def no_gradient(loss: Callable[..., Any], params: Any, known: Any) -> tuple[Any, Any, Arrays]:
    """No gradient, of a pass that goes forward alone, and no array to hold: a `GradientFunction`."""
    return (), loss(params)[1], []


@partial(jax.jit, static_argnames=("model", "objective", "gradient", "want"))
def _added(
    params: Any,
    total: Total,
    batch: MicroBatch,
    *,
    model: ModelSpec,
    objective: Objective,
    gradient: GradientFunction,
    want: bool,
) -> tuple[tuple[Total, Gathered | None], Arrays]:
    """The sum of `total` and the gradient and metrics of `batch`, what was predicted of it if that is wanted,
    and the arrays that `gradient` returns.

    Compiled as a part of `_accumulate` alone. JAX remembers the trace of a jitted function: `ResidualMemory`
    asks for the shapes of the arrays first, and tracing the layers a second time would take seconds.
    """

    # On each shard by itself: XLA's own partitioning would all-gather parameters and sum gradients where it
    # likes.
    def on_shard(
        params: Any, total: Total, batch: MicroBatch
    ) -> tuple[tuple[Total, Gathered | None], Arrays]:
        def loss(trained: Any) -> Any:
            predicted = model.predict(model.with_trained(params, trained), batch)
            value, stats = weighted_loss(predicted, batch, model, objective)
            return value, (stats, jax.lax.stop_gradient(predicted.numbers[:1]) if want else ())

        grads, (stats, numbers), arrays = gradient(loss, model.trained(params), (params, batch))
        predictions = gathered(numbers, batch.mask) if want else None
        # The metrics of a step are of all data shards; every process must see the same numbers to decide
        # alike.
        peaks = jax.lax.pmax(stats.pop("max"), DATA_AXES)
        # Summed in float32 whatever the weights are: many small micro-batches would vanish in bfloat16.
        grads = jax.tree.map(lambda t, g: t + g[None].astype(jnp.float32), total[0], grads)
        before = dict(total[1])
        peaks = jax.tree.map(jnp.maximum, before.pop("max"), peaks)
        sums = jax.tree.map(jnp.add, before, jax.lax.psum(stats, DATA_AXES))
        return ((grads, {**sums, "max": peaks}), predictions), arrays

    # Summing over `dp` waits for the optimizer step: one all-reduce of a gradient, not one for each micro-
    # batch.
    totals = () if gradient is no_gradient else _copies(model), PartitionSpec()
    in_specs = model.partition, totals, PartitionSpec(DATA_AXES)
    out_specs = (totals, PartitionSpec()), per_device_spec(model.mesh)
    return shard_mapped(on_shard, model.mesh, in_specs, out_specs)(params, total, batch)


def _accumulate(
    params: Any,
    total: Total,
    batch: MicroBatch,
    held: Arrays | None = None,
    *,
    model: ModelSpec,
    objective: Objective,
    gradient: GradientFunction = plain_gradient,
    want: bool = False,
) -> tuple[tuple[Total, Gathered | None], Arrays]:
    """`_added`; its arrays take the memory of `held`, the same arrays of an earlier micro-batch."""
    return _added(params, total, batch, model=model, objective=objective, gradient=gradient, want=want)


def _copies(model: ModelSpec) -> Any:
    """Specs of a gradient's total [dp, ...]: each copy of the model has its own until the step is applied."""
    return jax.tree.map(lambda spec: PartitionSpec(DP, *spec), model.trained(model.partition))


gradient_program = jit_for_backend(
    _accumulate,
    static_argnames=("model", "objective", "gradient", "want"),
    donate_argnames=("total", "held"),
    keep_unused=True,  # `held` is donated for its memory and not read
)
"""`gradient_program(backend)` is the jitted `_accumulate`."""


def _zero_total(
    params: Any, batch: MicroBatch, model: ModelSpec, objective: Objective, grads: Any = None
) -> Total:
    """The total before the first micro-batch, so that the first runs the program of all the others.

    With `grads`, a gradient that is there already, only the metrics are zero.
    """

    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    routers = None
    if batch.counts is not None and (routes := model.arch.routes):
        of_experts, of_layers = floats(routes.layers, routes.num_experts), floats(routes.layers)
        routers = RouterSums(of_experts, of_experts, of_layers, of_layers)
    predicted = Predicted(tuple(floats(*shape) for shape in model.predicted_shapes(batch)), routers)
    summed = partial(weighted_loss, model=model, objective=objective)
    # The names of metrics come from the loss itself, also a user's, and are known without running the model.
    _, stats = jax.eval_shape(summed, predicted, batch)
    everywhere = NamedSharding(model.mesh, PartitionSpec())
    return _zero_gradient(params, model) if grads is None else grads, {
        kind: {
            name: full(x.shape, -jnp.inf if kind == "max" else 0.0, jnp.float32, everywhere)
            for name, x in named.items()
        }
        for kind, named in stats.items()
    }


def _zero_gradient(params: Any, model: ModelSpec) -> Any:
    return jax.tree.map(
        lambda p, sharding: full((model.mesh_shape.dp, *p.shape), 0.0, jnp.float32, sharding),
        model.trained(params),
        shardings(model.mesh, _copies(model)),
    )


@partial(jax.jit, static_argnames=("form",), donate_argnames=("params", "opt_state"))
def _apply(
    params: Any,
    opt_state: Any,
    total: Any,
    loss: jax.Array,
    numbers: OptimizerNumbers,
    draw: np.ndarray | None = None,
    *,
    form: OptimizerForm,
) -> tuple[Any, Any, jax.Array, jax.Array]:
    # Here the copies of the model become one: from this line on gradients are exact and the same on every
    # device.
    grads = jax.tree.map(lambda g: g.sum(axis=0), total)
    norm = optax.tree.norm(grads)
    # Decided on the device: reading the norm first would make the host wait before each step.
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)

    def apply(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        # Added in float32 and rounded once, else steps below half a unit in the last place vanish.
        master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        updates, opt_state = form.update(grads, opt_state, master, numbers, norm)
        return round_tree(jax.tree.map(jnp.add, master, updates), params, draw), opt_state

    def leave(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        return params, opt_state

    # A branch, not a mask on the result: a step that is not applied must leave the moments as they were too.
    return *jax.lax.cond(finite, apply, leave, params, opt_state, grads), norm, finite


class Summed(NamedTuple):
    """What micro-batches come to, on the devices."""

    total: Any
    """float32, like what is trained of the parameters (`ModelSpec.trained`) but for a first axis, over the
    `dp` copies of the model, which is yet to be summed."""
    stats: Any
    predictions: list[Gathered]
    """Of each micro-batch, if they are wanted: the first number that the model predicts of each token."""


def all_at_once(units: Generator[Any, None, T]) -> T:
    """What `units` return, which stop between passes for those who have other work there."""
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value


def sum_gradients(
    params: Any,
    batches: Iterable[MicroBatch],
    *,
    model: ModelSpec,
    objective: Objective,
    residuals: ResidualMemory | None = None,
    total: Any = None,
    want: bool = False,
) -> Summed:
    """Gradient of the summed loss, and summed metrics, over all micro-batches and data shards.

    The gradient is added to `total`, an earlier one, which is donated; the metrics are those of `batches`
    alone. `residuals` is memory that the backward pass of each micro-batch uses again.
    """
    settings: dict[str, Any] = {"residuals": residuals, "total": total, "want": want}
    return all_at_once(passes(params, batches, model=model, objective=objective, **settings))


def passes(
    params: Any,
    batches: Iterable[MicroBatch],
    *,
    model: ModelSpec,
    objective: Objective,
    residuals: ResidualMemory | None = None,
    total: Any = None,
    want: bool = False,
    backward: bool = True,
) -> Generator[Any, None, Summed]:
    """`sum_gradients`, which stops between micro-batches and yields what the last of them computes.

    Without `backward` it has metrics, and what is wanted, alone.
    """
    program = gradient_program(model.backend)
    static: dict[str, Any] = {"model": model, "objective": objective, "want": want}
    if not backward:
        static["gradient"], total = no_gradient, ()
    elif residuals is not None:
        # The same program for every micro-batch of a shape: the memory is lent between calls, not between
        # layers.
        program = residuals.reused_by(program, model.mesh)
        static["gradient"] = HeldGradient.of(model.arch)
    sums: Total | None = None
    predictions: list[Gathered] = []
    # Asked for one at a time: with a teacher over all words, its hidden states are made just before their
    # pass.
    for batch in batches:
        if sums is None:
            # Metrics begin anew in each call: another objective has others.
            sums = _zero_total(params, batch, model, objective, total)
        else:  # not after the last, whose result would wait until the others had their turns
            yield sums
        with trim_after_compiling():
            (sums, predicted), _ = program(params, sums, batch, **static)
        if predicted is not None:
            predictions.append(predicted)
    assert sums is not None, "a mini-batch has at least one micro-batch"
    return Summed(*sums, predictions)


def abstract_optimizer(form: OptimizerForm, params: Any) -> Any:
    """Shapes and dtypes of `init_optimizer`, of arrays or of `ShapeDtypeStruct`s."""
    # Moments are as of float32 parameters: in bfloat16 a second moment would stop changing.
    masters = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    return jax.eval_shape(form.init, masters)


def init_optimizer(form: OptimizerForm, params: Any) -> Any:
    """Optimizer state as for float32 parameters, whatever the dtype of `params`, each where its one lies."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    places = shardings(mesh, form.places(params, jax.tree.map(lambda p: p.sharding.spec, params)))
    return _init(params, form=form, places=tuple(jax.tree.leaves(places)))


@partial(jax.jit, static_argnames=("form", "places"))
def _init(params: Any, form: OptimizerForm, places: tuple[NamedSharding, ...] = ()) -> Any:
    """The state of `form`; its leaves are at `places`, if these are given."""
    state = form.init(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    if not places:
        return state
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, map(jax.lax.with_sharding_constraint, leaves, places))


class Accumulated(NamedTuple):
    """The sums of all calls of `Trainer.forward_backward` since the last optimizer step."""

    total: Any
    """`Summed.total`"""
    stats: tuple[Any, ...]
    """`Summed.stats` of each call."""
    predictions: np.ndarray | None = None
    """[B, T] float32 of the last call, if it wanted them: the log-probability or value of each completion
    token; 0 elsewhere."""
    loss: float = 0.0
    """The sum of the coupled losses, which no program knows; `stats` have the others."""
    metrics: Mapping[str, Metric] = MappingProxyType({})
    """Those of the coupled losses."""


def nothing_accumulated(params: Any, model: ModelSpec) -> Accumulated:
    """The sums of no call: the optimizer step that follows has a gradient of zeros."""
    zero = full((), 0.0, jnp.float32, NamedSharding(model.mesh, PartitionSpec()))
    stats = {"sum": {"loss": zero, "tokens": zero}, "max": {}, "routers": {}}
    return Accumulated(_zero_gradient(params, model), (stats,))


def metrics_of_call(accumulated: Accumulated) -> dict[str, Metric]:
    """What the objective of the last call reports of its tokens, and the sum of their `loss`."""
    stats = jax.device_get(accumulated.stats[-1])
    return {"loss": Metric(float(stats["sum"]["loss"]), reduction="sum"), **_token_metrics(stats)}


class Stepped(NamedTuple):
    """What an optimizer step leaves; `applied`: whether it was."""

    params: Any
    opt_state: Any
    applied: bool
    metrics: dict[str, Metric]
    expert_tokens: np.ndarray | None = None
    """[L, E] tokens of each expert of each layer; None for a model without experts."""


def optimizer_step(
    params: Any,
    opt_state: Any,
    accumulated: Accumulated,
    *,
    model: ModelSpec,
    form: OptimizerForm,
    numbers: OptimizerNumbers,
    draw: np.ndarray | None = None,
) -> Stepped:
    """One optimizer step with `numbers`. Donates what is trained, and the optimizer's state.

    A step whose loss or gradient is not finite is not applied: both come back as they were. State that lies
    in the host's memory is brought to the devices for the step, and back. New bfloat16 parameters are rounded
    stochastically if there is a `draw` (`ops.rounding.round_tree`), else to the nearest number.
    """
    trained = model.trained(params)
    # Read before the step, whose results lie on the devices: they go back to where these were.
    places = jax.tree.map(lambda x: x.sharding, (trained, opt_state))
    with trim_after_compiling():
        trained, opt_state, norm, finite = _apply(
            trained,
            to_memory("device", opt_state),
            accumulated.total,
            reduce(add, (stats["sum"]["loss"] for stats in accumulated.stats)),
            numbers,
            draw,
            form=form,
        )
    # Host memory included; from elsewhere, the next step would be another program.
    trained, opt_state = reshard((trained, opt_state), places)
    params = model.with_trained(params, trained)
    # One transfer: the host waits for the device here, once an optimizer step.
    host = jax.device_get({"stats": accumulated.stats, "norm": norm, "finite": finite})
    loss = sum(float(stats["sum"]["loss"]) for stats in host["stats"]) + accumulated.loss
    metrics = {"loss": Metric(loss), "update/grad_norm": Metric(float(host["norm"]))}
    metrics |= combine(accumulated.metrics, *map(_token_metrics, host["stats"]))
    routers: dict[str, np.ndarray] = {}
    for stats in host["stats"]:
        for name, value in stats["routers"].items():
            routers[name] = value + routers.get(name, 0)
    # None for models without experts, whose programs then have no further outputs.
    if routers:
        assert model.arch.routes is not None
        metrics |= _router_metrics(routers, model.arch.routes.experts_per_token)
    return Stepped(params, opt_state, bool(host["finite"]), metrics, routers.get("expert_tokens"))


def _token_metrics(stats: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Metric]:
    """What the objective of one call reports of its tokens, but the loss, which is summed over the calls."""
    tokens = float(stats["sum"]["tokens"])
    means = {n: Metric(float(x), tokens) for n, x in stats["sum"].items() if n not in ("loss", "tokens")}
    return means | {name: Metric(float(x), reduction="max") for name, x in stats["max"].items()}


def _router_metrics(sums: Mapping[str, np.ndarray], experts_per_token: int) -> dict[str, Metric]:
    """Metrics of the routers of an optimizer step, but of those that need all steps of a batch."""
    choices = float(sums["expert_tokens"].sum(dtype=np.float64)) / experts_per_token
    metrics = {"moe/entropy": Metric(float(sums["entropy"]), choices)}
    if "replayed" in sums:
        metrics["moe/replay_changed"] = Metric(float(sums["changed"]), float(sums["replayed"]))
    if "balance_loss" in sums:
        metrics["update/router_aux_loss"] = Metric(float(sums["balance_loss"]))
    return metrics
