"""Micro-batches in, one optimizer step out: the exact gradient of a weighted token loss, however cut.

Stands under `learner.py` (reinforcement learning) and the supervised warm start. Loss = sum over tokens
of weight x token loss; the gradient is the plain sum over micro-batches and nothing is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from quatrain.models.decoder import forward, logits
from quatrain.models.families import Architecture
from quatrain.models.kernels import choose_attention
from quatrain.ops.logprobs import default_chunk, token_logprobs
from quatrain.ops.packing import PackingCost
from quatrain.types import Metric
from quatrain.update.batcher import Cutting, MicroBatch, TokenTable, micro_batches

TokenMetrics = dict[str, jax.Array]
Objective = Callable[[jax.Array, jax.Array, MicroBatch], tuple[jax.Array, TokenMetrics, TokenMetrics]]
"""(logprobs [R, K], entropy [R, K], micro-batch) -> (token loss [R, K], metrics logged as the mean over
tokens, metrics logged as the largest over tokens; each [R, K] under its logged name)."""


@dataclass(frozen=True)
class Policy:
    """How a micro-batch becomes log-probabilities: model, sampling temperature, dtype; static."""

    arch: Architecture
    temperature: float = 1.0
    dtype: str = "float32"
    remat: str = "layer"
    attention: str = "auto"

    @property
    def packing_cost(self) -> PackingCost:
        """Multiplications of a layer for a sequence: what the packer balances over devices."""
        arch = self.arch
        heads = arch.num_heads * arch.head_dim
        linear = arch.hidden_size * (2 * heads + 2 * arch.num_kv_heads * arch.head_dim)
        linear += 3 * arch.hidden_size * arch.intermediate_size
        return PackingCost(linear=float(linear), quadratic=float(heads))

    def logprobs(self, params: Any, batch: MicroBatch) -> tuple[jax.Array, jax.Array]:
        """Log-probability and entropy [R, K] of each scored token at the sampling temperature."""
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
                platform=jax.default_backend(),
                dtype=self.dtype,
                packed=batch.packed,
                shared=batch.shared,
            ),
        )
        # Those the list does not fill go last, where the chunks past the live ones are not computed.
        order = jnp.argsort(~batch.mask.reshape(-1), stable=True)
        lines = jnp.arange(len(hidden))[:, None] * hidden.shape[1]
        scored = (lines + batch.predictors).reshape(-1)[order]
        results = token_logprobs(
            lambda h: logits(params, self.arch, h),
            hidden.reshape(-1, hidden.shape[-1])[scored],
            batch.targets.reshape(-1)[order],
            self.temperature,
            chunk=default_chunk(self.arch.vocab_size, jax.default_backend()),
            num_live=batch.mask.sum(),
        )
        back = jnp.argsort(order)
        logprobs, entropy = (result[back].reshape(batch.mask.shape) for result in results)
        return logprobs, entropy


@partial(jax.jit, static_argnames=("policy",))
def score(params: Any, batch: MicroBatch, *, policy: Policy) -> jax.Array:
    """[R, K] float32 log-probabilities of a micro-batch's scored tokens; forward only."""
    return jnp.where(batch.mask, policy.logprobs(params, batch)[0], 0.0)


def table_logprobs(params: Any, table: TokenTable, *, policy: Policy, cutting: Cutting) -> np.ndarray:
    """[B, T] float32 log-probabilities of every completion token of `table`; 0 elsewhere."""
    result = np.zeros(table.completion_mask.shape, np.float32)
    for sequences, batch in micro_batches(table, cutting):
        scored = np.asarray(score(params, batch, policy=policy))
        part = np.zeros((len(sequences), table.input_ids.shape[1]), np.float32)
        part[table.completion_mask[sequences]] = scored[np.asarray(batch.mask)]
        result[sequences] = part
    return result


def _weighted_loss(
    params: Any, batch: MicroBatch, policy: Policy, objective: Objective
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
    logprobs, entropy = policy.logprobs(params, batch)
    token_loss, means, peaks = objective(logprobs, entropy, batch)
    mask = batch.mask
    loss = jnp.sum(jnp.where(mask, batch.weights * token_loss, 0.0))
    sums = {name: jnp.sum(jnp.where(mask, values, 0.0)) for name, values in means.items()}
    return loss, {
        "sum": {"loss": loss, "tokens": jnp.sum(mask, dtype=jnp.float32), **sums},
        "max": {name: jnp.max(jnp.where(mask, values, -jnp.inf)) for name, values in peaks.items()},
    }


def _accumulate(
    params: Any, total: tuple[Any, Any], batch: MicroBatch, *, policy: Policy, objective: Objective
) -> tuple[Any, Any]:
    grads, stats = jax.grad(_weighted_loss, has_aux=True)(params, batch, policy, objective)
    return (
        jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total[0], grads),
        {
            "sum": jax.tree.map(jnp.add, total[1]["sum"], stats["sum"]),
            "max": jax.tree.map(jnp.maximum, total[1]["max"], stats["max"]),
        },
    )


@cache
def gradient_program() -> Callable[..., tuple[Any, Any]]:
    """`_accumulate`, compiled so that what is to be computed again is.

    On a CPU, XLA would first take away what keeps the two computations apart, and then merge them.
    """
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else None
    return jax.jit(
        _accumulate,
        static_argnames=("policy", "objective"),
        donate_argnames=("total",),
        compiler_options=options,
    )


def _nothing_yet(params: Any, batch: MicroBatch, policy: Policy, objective: Objective) -> tuple[Any, Any]:
    """The total before the first micro-batch, so that the first runs the program of all the others."""
    _, stats = jax.eval_shape(partial(_weighted_loss, policy=policy, objective=objective), params, batch)
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), {
        "sum": {name: jnp.float32(0) for name in stats["sum"]},
        "max": {name: jnp.float32(-jnp.inf) for name in stats["max"]},
    }


@partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("params", "opt_state"))
def _apply(
    params: Any, opt_state: Any, grads: Any, loss: jax.Array, *, optimizer: optax.GradientTransformation
) -> tuple[Any, Any, jax.Array, jax.Array]:
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    updates, new_state = optimizer.update(grads, opt_state, master)
    new_params = jax.tree.map(lambda p, m, u: (m + u).astype(p.dtype), params, master, updates)
    keep = partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
    return keep(new_params, params), keep(new_state, opt_state), norm, finite


def sum_gradients(
    params: Any, batches: Iterable[MicroBatch], *, policy: Policy, objective: Objective
) -> tuple[Any, dict[str, dict[str, jax.Array]]]:
    """Gradient (float32, like `params`) of the summed loss, and summed metrics, over all micro-batches."""
    total: tuple[Any, Any] | None = None
    for batch in batches:
        if total is None:
            total = _nothing_yet(params, batch, policy, objective)
        total = gradient_program()(params, total, batch, policy=policy, objective=objective)
    assert total is not None, "a mini-batch has at least one micro-batch"
    return total


def init_optimizer(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Optimizer state with float32 moments, whatever the dtype the parameters are kept in."""
    return jax.jit(lambda p: optimizer.init(jax.tree.map(lambda x: x.astype(jnp.float32), p)))(params)


def optimizer_step(
    params: Any,
    opt_state: Any,
    batches: Iterable[MicroBatch],
    *,
    policy: Policy,
    objective: Objective,
    optimizer: optax.GradientTransformation,
) -> tuple[Any, Any, bool, dict[str, Metric]]:
    """One optimizer step: (params, optimizer state, applied, metrics). Donates params and state.

    A step whose loss or gradient is not finite is not applied: both come back as they were.
    """
    grads, stats = sum_gradients(params, batches, policy=policy, objective=objective)
    params, opt_state, norm, finite = _apply(
        params, opt_state, grads, stats["sum"]["loss"], optimizer=optimizer
    )
    host = jax.device_get({"stats": stats, "norm": norm, "finite": finite})
    sums, peaks = dict(host["stats"]["sum"]), host["stats"]["max"]
    tokens = float(sums.pop("tokens"))
    metrics = {"loss": Metric(float(sums.pop("loss"))), "update/grad_norm": Metric(float(host["norm"]))}
    metrics |= {name: Metric(float(value), tokens) for name, value in sums.items()}
    metrics |= {name: Metric(float(value), reduction="max") for name, value in peaks.items()}
    return params, opt_state, bool(host["finite"]), metrics
