"""Optimizers and learning-rate schedules from their config section; optax does the work.

Used by `gradient.py`, which applies them to summed gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from quatrain.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Linear warm-up from 0 to the peak, then constant, linear or cosine down to `final_fraction` of it.

    `total_steps` counts optimizer steps, warm-up included. Step s (from 0) of a warm-up of W steps has
    learning rate peak · (s + 1) / W, so the first step is never spent at 0.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    decay_steps = max(total_steps - warmup, 1)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, peak * config.final_fraction, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_fraction),
    }[config.schedule]()
    if not warmup:
        return after
    rising = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rising, after], [warmup])


def build_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW, Lion or SGD with momentum, at the scheduled learning rate.

    The first moment is stored in `config.state_dtype`.
    """
    rate, moment, decay = learning_rate(config, total_steps), config.state_dtype, config.weight_decay
    b1, b2 = config.beta1, config.beta2
    build = {
        "adamw": lambda: optax.adamw(rate, b1=b1, b2=b2, eps=config.eps, weight_decay=decay, mu_dtype=moment),
        "lion": lambda: optax.lion(rate, b1=b1, b2=b2, weight_decay=decay, mu_dtype=moment),
        "sgd": lambda: optax.sgd(rate, momentum=b1 or None, accumulator_dtype=moment),
    }[config.name]
    if config.max_grad_norm is None:
        return build()
    return optax.chain(clip_by_global_norm(config.max_grad_norm), build())


def clip_by_global_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """Gradients whose global norm is at most `most`, all scaled by one factor.

    `optax.clip_by_global_norm` divides each element instead, for which XLA makes a second gradient. The norm
    is not computed where `update` is given it as `global_norm`.
    """

    def clip(
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        global_norm: jax.Array | None = None,
        **others: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        norm = optax.tree.norm(grads) if global_norm is None else global_norm
        factor = jnp.minimum(1.0, most / norm)
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), clip)
