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

    `total_steps` counts optimizer steps, applied or not, warm-up included. Step s (from 0) of a warm-up of W
    steps has learning rate peak · (s + 1) / W, so the first step is never spent at 0.
    """
    peak, warmup, final = config.learning_rate, config.warmup_steps, config.final_fraction
    assert peak is not None, "learning rates are derived before they come here"
    decay_steps = max(total_steps - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * final, decay_steps),
        "cosine": optax.cosine_decay_schedule(peak, decay_steps, alpha=final),
    }[config.schedule]
    if not warmup:
        return after
    rising = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rising, after], [warmup])


def build_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformationExtraArgs:
    """Global-norm clipping, then AdamW, Lion or SGD with momentum, at the scheduled learning rate.

    The first moment is stored in `config.state_dtype`; weight decay leaves norms and biases out. `update`
    takes the optimizer step's place in the schedule as `schedule_step` (not given: the step after the last).
    """
    moment, b1, b2 = config.state_dtype, config.beta1, config.beta2
    decay = optax.add_decayed_weights(config.weight_decay, mask=is_decayed)
    steps = {
        "adamw": lambda: (optax.scale_by_adam(b1, b2, config.eps, mu_dtype=moment), decay),
        "lion": lambda: (optax.scale_by_lion(b1, b2, mu_dtype=moment), decay),
        "sgd": lambda: (optax.trace(b1, accumulator_dtype=moment) if b1 else optax.identity(),),
    }[config.name]()
    optimizer = optax.chain(*steps, scale_by_schedule(learning_rate(config, total_steps)))
    if config.max_grad_norm is None:
        return optimizer
    return optax.chain(clip_by_global_norm(config.max_grad_norm), optimizer)


def is_decayed(params: optax.Params) -> Any:
    """Whether weight decay applies to each parameter: to all but norms, biases and the scalars of layers,
    which its name tells.

    The number of dimensions does not tell: biases of matrices that are stored as one have several.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not jax.tree_util.keystr(path[-1:], simple=True).endswith(("norm", "bias", "scalar")),
        params,
    )


def scale_by_schedule(rate: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_learning_rate`, at the place of the schedule that `update` gets as `schedule_step`.

    Without it, the place is the count of the state, which a step that is not applied leaves as it is.
    """
    scale = optax.scale_by_learning_rate(rate)

    def update(updates: Any, state: Any, params: Any = None, *, schedule_step: Any = None, **_: Any) -> Any:
        if schedule_step is not None:
            state = state._replace(count=schedule_step)
        return scale.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(scale.init, update)


def clip_by_global_norm(most: float) -> optax.GradientTransformationExtraArgs:
    """Gradients whose global norm is at most `most`, all scaled by one factor.

    `optax.clip_by_global_norm` divides each element instead, for which XLA makes a second gradient. The norm
    is not computed where `update` is given it as `global_norm`.
    """

    def clip(grads: Any, state: Any, params: Any = None, *, global_norm: Any = None, **_: Any) -> Any:
        norm = optax.tree.norm(grads) if global_norm is None else global_norm
        factor = jnp.minimum(1.0, most / norm)
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), clip)
