"""Optimizers and learning-rate schedules from their config section.

Used by `gradient.py`, which applies them to summed gradients. What decides how an optimizer step is compiled,
`OptimizerForm`, is apart from the numbers it computes with, `OptimizerNumbers`: these are data, so that
optimizers of the same form share one program whatever their learning rates, decays and bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from quatrain.config.schema import OptimizerConfig


class OptimizerNumbers(NamedTuple):
    """What one optimizer step computes with: scalars, those of `OptimizerConfig` in float32.

    The complements of the decays, 1 - beta, are rounded from their exact values: computed in float32,
    1 - 0.999 is wrong in the fifth digit.
    """

    schedule_step: Any
    """int32: its place in the schedule."""
    learning_rate: Any
    beta1: Any
    beta1_complement: Any
    beta2: Any
    beta2_complement: Any
    eps: Any
    weight_decay: Any
    max_grad_norm: Any
    """Infinite where gradients are not scaled down."""


@dataclass(frozen=True)
class OptimizerForm:
    """All that the compiled programs of an optimizer depend on; static, and hashed by value.

    Global-norm clipping if `clips`, then AdamW, Lion or SGD (with momentum if `momentum`), times the learning
    rate. The first moment is stored in `state_dtype`; weight decay leaves norms and biases out. Where
    `optax` takes a gradient transformation to map its state, it takes this.
    """

    name: str
    state_dtype: str
    momentum: bool
    clips: bool

    @classmethod
    def of(cls, config: OptimizerConfig) -> Self:
        """The form of the optimizer that `config` describes."""
        return cls(
            config.name, config.state_dtype, config.has_first_moment, clips=config.max_grad_norm is not None
        )

    def init(self, params: Any) -> Any:
        """The state before the first step."""
        return self._transformation.init(params)

    def update(
        self, grads: Any, state: Any, params: Any, numbers: OptimizerNumbers, global_norm: Any = None
    ) -> tuple[Any, Any]:
        """(what is added to `params`, the new state); `global_norm`: that of `grads`, if it is known."""
        return self._transformation.update(grads, state, params, numbers=numbers, global_norm=global_norm)

    @cached_property
    def _transformation(self) -> optax.GradientTransformationExtraArgs:
        steps = {
            "adamw": (scale_by_adam(self.state_dtype), decay_weights()),
            "lion": (scale_by_lion(self.state_dtype), decay_weights()),
            "sgd": (add_momentum(self.state_dtype) if self.momentum else optax.identity(),),
        }[self.name]
        optimizer = optax.chain(*steps, scale_by_learning_rate())
        return optax.chain(clip_by_global_norm(), optimizer) if self.clips else optimizer


@dataclass(frozen=True)
class Optimizer:
    """An optimizer whose learning-rate schedule has `total_steps` optimizer steps, applied or not."""

    config: OptimizerConfig
    total_steps: int

    @cached_property
    def form(self) -> OptimizerForm:
        """What its programs depend on."""
        return OptimizerForm.of(self.config)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up from 0 to the peak, then constant, linear or cosine down to `final_fraction` of it.

        `step` counts from 0, warm-up included. Step s of a warm-up of W steps has learning rate
        peak · (s + 1) / W, so the first step is never spent at 0.
        """
        config, peak = self.config, self.config.learning_rate
        step = max(step, 0)
        if step < config.warmup_steps:
            return peak * (step + 1) / config.warmup_steps
        decay_steps = max(self.total_steps - config.warmup_steps, 1)
        done = min((step - config.warmup_steps) / decay_steps, 1.0)
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        fraction = left[config.schedule]
        return peak * (fraction + (1 - fraction) * config.final_fraction)

    def numbers(self, step: int) -> OptimizerNumbers:
        """What optimizer step `step` of the schedule computes with."""
        config = self.config
        most = math.inf if config.max_grad_norm is None else config.max_grad_norm
        numbers = (
            self.learning_rate(step),
            *(config.beta1, 1 - config.beta1, config.beta2, 1 - config.beta2),
            *(config.eps, config.weight_decay, most),
        )
        return OptimizerNumbers(np.int32(step), *map(np.float32, numbers))


def is_decayed(params: optax.Params) -> Any:
    """Whether weight decay applies to each parameter: to all but norms, biases and the scalars of layers,
    which its name tells.

    The number of dimensions does not tell: biases of matrices that are stored as one have several.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not jax.tree_util.keystr(path[-1:], simple=True).endswith(("norm", "bias", "scalar")),
        params,
    )


# The transformations that follow are those of optax, and have its states, whose paths name the arrays of a
# checkpoint; but their numbers come with each update, as `numbers`.


def scale_by_adam(moment_dtype: str) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`."""
    like = optax.scale_by_adam(mu_dtype=moment_dtype)

    def update(grads: Any, state: Any, params: Any = None, *, numbers: OptimizerNumbers, **_: Any) -> Any:
        b1, b2 = numbers.beta1, numbers.beta2
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: numbers.beta1_complement * g + _times(b1, m), grads, state.mu)
        nu = jax.tree.map(lambda g, v: numbers.beta2_complement * (g * g) + b2 * v, grads, state.nu)
        mean, square = 1 - b1**count, 1 - b2**count
        updates = jax.tree.map(lambda m, v: m / mean / (jnp.sqrt(v / square) + numbers.eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, optax.tree.cast(mu, moment_dtype), nu)

    return optax.GradientTransformationExtraArgs(like.init, update)


def scale_by_lion(moment_dtype: str) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_lion`."""
    like = optax.scale_by_lion(mu_dtype=moment_dtype)

    def update(grads: Any, state: Any, params: Any = None, *, numbers: OptimizerNumbers, **_: Any) -> Any:
        def mixed(decay: Any, complement: Any) -> Any:
            return jax.tree.map(lambda g, m: complement * g + _times(decay, m), grads, state.mu)

        updates = jax.tree.map(jnp.sign, mixed(numbers.beta1, numbers.beta1_complement))
        mu = optax.tree.cast(mixed(numbers.beta2, numbers.beta2_complement), moment_dtype)
        return updates, optax.ScaleByLionState(optax.safe_increment(state.count), mu)

    return optax.GradientTransformationExtraArgs(like.init, update)


def add_momentum(moment_dtype: str) -> optax.GradientTransformationExtraArgs:
    """`optax.trace`."""
    like = optax.trace(0.0, accumulator_dtype=moment_dtype)

    def update(grads: Any, state: Any, params: Any = None, *, numbers: OptimizerNumbers, **_: Any) -> Any:
        updates = jax.tree.map(lambda g, t: g + _times(numbers.beta1, t), grads, state.trace)
        return updates, optax.TraceState(optax.tree.cast(updates, moment_dtype))

    return optax.GradientTransformationExtraArgs(like.init, update)


def _times(decay: jax.Array, moment: jax.Array) -> jax.Array:
    """`moment`, in the dtype it is stored in, times the decay in that dtype."""
    return decay.astype(moment.dtype) * moment


def decay_weights() -> optax.GradientTransformationExtraArgs:
    """`optax.add_decayed_weights` of what `is_decayed` says."""

    def of(decay: Any) -> optax.GradientTransformation:
        return optax.add_decayed_weights(decay, mask=is_decayed)

    def update(updates: Any, state: Any, params: Any = None, *, numbers: OptimizerNumbers, **_: Any) -> Any:
        return of(numbers.weight_decay).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(of(0.0).init, update)


def scale_by_learning_rate() -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_learning_rate` of a schedule, whose state has the place of the next step in it."""
    like = optax.scale_by_schedule(lambda count: 0.0)

    def update(updates: Any, state: Any, params: Any = None, *, numbers: OptimizerNumbers, **_: Any) -> Any:
        updates = jax.tree.map(lambda u: -numbers.learning_rate * u, updates)
        return updates, optax.ScaleByScheduleState(jnp.asarray(numbers.schedule_step + 1, jnp.int32))

    return optax.GradientTransformationExtraArgs(like.init, update)


def clip_by_global_norm() -> optax.GradientTransformationExtraArgs:
    """Gradients whose global norm is at most `max_grad_norm`, all scaled by one factor.

    `optax.clip_by_global_norm` divides each element instead, for which XLA makes a second gradient. The norm
    is not computed where `update` is given it as `global_norm`.
    """

    def clip(
        grads: Any,
        state: Any,
        params: Any = None,
        *,
        numbers: OptimizerNumbers,
        global_norm: Any = None,
        **_: Any,
    ) -> Any:
        norm = optax.tree.norm(grads) if global_norm is None else global_norm
        factor = jnp.minimum(1.0, numbers.max_grad_norm / norm)
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), clip)
