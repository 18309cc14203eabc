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
from jax.sharding import PartitionSpec

from quatrain.config.schema import OptimizerConfig
from quatrain.models.params import VISION
from quatrain.models.spec import LORA_A, LORA_B

MUON_RMS = 0.2
"""What sqrt(max(out, in)) of an orthogonal matrix is multiplied by: the root mean square of Muon's update is
then about that of AdamW's, so that both parts of a model take one learning rate (Liu et al., Muon is Scalable
for LLM Training, arXiv:2502.16982)."""
LEAST_FACTORED = 128
"""Adafactor factors the second moment along the two largest dimensions, if both are at least this large."""
UPDATE_CLIP = 1.0
"""Adafactor scales the update of a parameter down to this root mean square."""


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
    vision_learning_rate: Any = None
    """Of the tower; None: that of all, and no further argument of a program."""

    @classmethod
    def of(
        cls,
        schedule_step: int,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        max_grad_norm: float | None,
        vision_learning_rate: float | None = None,
    ) -> Self:
        """These numbers as they come to a step; `max_grad_norm` None: gradients are not scaled down."""
        most = math.inf if max_grad_norm is None else max_grad_norm
        numbers = learning_rate, beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay, most
        found = cls(np.int32(schedule_step), *map(np.float32, numbers))
        if vision_learning_rate is None:
            return found
        return found._replace(vision_learning_rate=np.float32(vision_learning_rate))


@dataclass(frozen=True)
class OptimizerForm:
    """All that the compiled programs of an optimizer depend on; static, and hashed by value.

    Global-norm clipping if `clips`, then AdamW, Lion, Muon, or SGD or Adafactor (with momentum if
    `momentum`), times the learning rate. The first moment is stored in `state_dtype`; weight decay leaves
    norms and biases out.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the update of a matrix is its momentum
    (Nesterov's), orthogonalised by five Newton-Schulz iterations, times MUON_RMS sqrt(max(out, in)); what is
    no matrix (`is_matrix`) has AdamW. Adafactor (Shazeer and Stern, arXiv:1804.04235): the second moment is
    factored and decays by 1 - t^-0.8, and updates are clipped; as in transformers' `Trainer`, the learning
    rate is not multiplied by the size of the parameter.
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

    @cached_property
    def _like(self) -> optax.GradientTransformation:
        """The transformation of optax that has this state: its paths name the arrays of a checkpoint."""
        momentum = optax.trace(0.0, accumulator_dtype=self.state_dtype)
        moments = {
            "adamw": optax.scale_by_adam(mu_dtype=self.state_dtype),
            "lion": optax.scale_by_lion(mu_dtype=self.state_dtype),
            "sgd": momentum if self.momentum else optax.identity(),
            "adafactor": optax.chain(_factored(), *([self._ema] if self.momentum else [])),
            "muon": _of_matrices(self._muon_of(0.0), optax.scale_by_adam(mu_dtype=self.state_dtype)),
        }[self.name]
        decay = [] if self.name == "sgd" else [optax.add_decayed_weights(0.0, mask=is_decayed)]
        steps = optax.chain(moments, *decay, optax.scale_by_schedule(lambda count: 0.0))
        return optax.chain(optax.clip_by_global_norm(1.0), steps) if self.clips else steps

    def places(self, params: Any, specs: Any) -> Any:
        """The partition spec of each array of the state, of those of `params` (arrays, or shapes and dtypes).

        A moment lies as its parameter, so that no step moves it; a factored one along the dimensions that it
        has of it. Counts are on every device.
        """
        leaves = jax.tree_util.tree_leaves_with_path(params)
        of = {path: (x, spec) for (path, x), spec in zip(leaves, jax.tree.leaves(specs), strict=True)}

        def place(path: Any, leaf: Any) -> PartitionSpec:
            # The path of a moment ends as that of its parameter, whatever optax keeps it in.
            start = next((n for n in range(1, len(path) + 1) if path[n:] in of), None)
            if start is None:
                return PartitionSpec()
            param, spec = of[path[start:]]
            if leaf.shape == param.shape:
                return spec
            factor = jax.tree_util.keystr(path[start - 1 : start], simple=True)
            without = _factored_dims(param.shape).get(factor)
            if without is None:
                return PartitionSpec()  # one number, in place of a moment that this parameter does not have
            return PartitionSpec(*(axes for dim, axes in enumerate(spec) if dim != without))

        return jax.tree_util.tree_map_with_path(place, jax.eval_shape(self.init, params))

    @property
    def _ema(self) -> optax.GradientTransformation:
        return optax.ema(0.0, debias=False, accumulator_dtype=self.state_dtype)

    def _muon_of(self, momentum: Any) -> optax.GradientTransformation:
        """Muon of parameters [..., out, in]: of each matrix in the last two dimensions by itself.

        So the gate and the up projection of `gate_up` [2, F, D] are apart, the experts in [E, 2, F, D] and
        [E, D, F], and in `qkv` [K, G + 2, H, D] the heads: of queries, keys and values, as in Muon Split
        (GLM-5, arXiv:2602.15763), and none is split over `tp`.
        """
        last_two = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
        return optax.contrib.scale_by_muon(
            beta=momentum,
            mu_dtype=self.state_dtype,
            weight_dimension_numbers=lambda params: jax.tree.map(lambda _: last_two, params),
        )

    def init(self, params: Any) -> Any:
        """The state before the first step."""
        return self._like.init(params)

    def update(
        self, grads: Any, state: Any, params: Any, numbers: OptimizerNumbers, global_norm: Any = None
    ) -> tuple[Any, Any]:
        """(what is added to `params`, the new state); `global_norm`: that of `grads`, if it is known.

        Computed as optax does, but with `numbers` that come with each step, where optax compiles them in.
        """
        clipping, state = ((state[0],), state[1]) if self.clips else ((), state)
        if self.clips:
            # One factor for all. optax divides each element instead, for which XLA makes a second gradient.
            norm = optax.tree.norm(grads) if global_norm is None else global_norm
            # A norm of 0 gives infinity, and so the factor 1; one that is not finite never comes here.
            factor = jnp.minimum(1.0, numbers.max_grad_norm / norm)
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        moments, *decay, _ = state
        step = {
            "adamw": self._adamw,
            "lion": self._lion,
            "sgd": self._sgd,
            "adafactor": self._adafactor,
            "muon": self._muon,
        }[self.name]
        updates, moments = step(grads, moments, numbers)
        if decay:
            decayed = optax.add_decayed_weights(numbers.weight_decay, mask=is_decayed)
            updates, decay[0] = decayed.update(updates, decay[0], params)

        def with_rate(path: Any, u: jax.Array) -> jax.Array:
            own = numbers.vision_learning_rate
            return -(numbers.learning_rate if own is None or path[0].key != VISION else own) * u

        updates = jax.tree_util.tree_map_with_path(with_rate, updates)
        schedule = optax.ScaleByScheduleState(jnp.asarray(numbers.schedule_step + 1, jnp.int32))
        state = (moments, *decay, schedule)
        return updates, (*clipping, state) if clipping else state

    def _adamw(self, grads: Any, state: Any, numbers: OptimizerNumbers) -> tuple[Any, Any]:
        b1, b2 = numbers.beta1, numbers.beta2
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: numbers.beta1_complement * g + _times(b1, m), grads, state.mu)
        nu = jax.tree.map(lambda g, v: numbers.beta2_complement * (g * g) + b2 * v, grads, state.nu)
        # `count` is of applied steps: a skipped one leaves the moments, and so their bias, as they were.
        mean, square = 1 - b1**count, 1 - b2**count
        updates = jax.tree.map(lambda m, v: m / mean / (jnp.sqrt(v / square) + numbers.eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, optax.tree.cast(mu, self.state_dtype), nu)

    def _lion(self, grads: Any, state: Any, numbers: OptimizerNumbers) -> tuple[Any, Any]:
        def mixed(decay: Any, complement: Any) -> Any:
            return jax.tree.map(lambda g, m: complement * g + _times(decay, m), grads, state.mu)

        updates = jax.tree.map(jnp.sign, mixed(numbers.beta1, numbers.beta1_complement))
        mu = optax.tree.cast(mixed(numbers.beta2, numbers.beta2_complement), self.state_dtype)
        return updates, optax.ScaleByLionState(optax.safe_increment(state.count), mu)

    def _sgd(self, grads: Any, state: Any, numbers: OptimizerNumbers) -> tuple[Any, Any]:
        if not self.momentum:
            return grads, state
        updates = jax.tree.map(lambda g, m: g + _times(numbers.beta1, m), grads, state.trace)
        return updates, optax.TraceState(optax.tree.cast(updates, self.state_dtype))

    def _adafactor(self, grads: Any, state: Any, numbers: OptimizerNumbers) -> tuple[Any, Any]:
        factored, *first = state
        # In place of the parameters, of which it reads shapes and dtypes alone.
        updates, factored = _factored().update(grads, factored, grads)
        updates, _ = optax.clip_by_block_rms(UPDATE_CLIP).update(updates, optax.EmptyState())
        if first:
            # Not corrected for its beginning at 0, as in optax and transformers: the first steps are small.
            updates = jax.tree.map(
                lambda u, m: numbers.beta1_complement * u + _times(numbers.beta1, m), updates, first[0].ema
            )
            kept = optax.tree.cast(updates, self.state_dtype)
            first = [optax.EmaState(optax.safe_increment(first[0].count), kept)]
        return updates, (factored, *first)

    def _muon(self, grads: Any, state: Any, numbers: OptimizerNumbers) -> tuple[Any, Any]:
        def matrices(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            # XLA gathers what a matrix is sharded over where an iteration needs it whole. Its products are of
            # the precision of the backend's default: the iteration is made for bfloat16.
            updates, state = self._muon_of(numbers.beta1).update(grads, state)
            return jax.tree.map(lambda u: MUON_RMS * math.sqrt(max(u.shape[-2:])) * u, updates), state

        def rest(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return self._adamw(grads, state, numbers)

        parts = (optax.GradientTransformation(optax.init_empty_state, part) for part in (matrices, rest))
        return _of_matrices(*parts).update(grads, state)


def _factored() -> optax.GradientTransformation:
    return optax.scale_by_factored_rms(min_dim_size_to_factor=LEAST_FACTORED)


def _factored_dims(shape: tuple[int, ...]) -> dict[str, int]:
    """The dimension that each factor of optax's second moment does not have; none if it is not factored."""
    *_, second, largest = (0, 0, *np.argsort(shape))
    if len(shape) < 2 or shape[second] < LEAST_FACTORED:
        return {}
    return {"v_row": int(largest), "v_col": int(second)}


def _of_matrices(
    matrices: optax.GradientTransformation, rest: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`matrices` for what `is_matrix`, `rest` for all else."""

    def labels(params: Any) -> Any:
        return jax.tree.map(lambda matrix: "muon" if matrix else "adamw", is_matrix(params))

    return optax.partition({"muon": matrices, "adamw": rest}, labels)


def _times(decay: jax.Array, moment: jax.Array) -> jax.Array:
    """`moment`, in the dtype it is stored in, times the decay in that dtype."""
    return decay.astype(moment.dtype) * moment


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
        return self._scheduled(step, self.config.learning_rate)

    def _scheduled(self, step: int, peak: float) -> float:
        config = self.config
        # Steps below 0 are those in which the policy rests while the critic warms up.
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
        own = config.vision_learning_rate
        return OptimizerNumbers.of(
            step,
            learning_rate=self.learning_rate(step),
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            vision_learning_rate=None if own is None else self._scheduled(step, own),
        )


def is_decayed(params: optax.Params) -> Any:
    """Whether weight decay applies to each parameter: to all but norms, biases, the scalars of layers, sinks
    and the logarithms of DeltaNet's decays, which its name tells.

    The number of dimensions does not tell: biases of matrices that are stored as one have several.
    """

    def decays(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True).rstrip(
            "12"
        )  # norm1 and norm2 of a tower's blocks
        return not name.endswith(("norm", "bias", "scalar", "sinks", "a_log"))

    return jax.tree_util.tree_map_with_path(decays, params)


def is_matrix(params: optax.Params) -> Any:
    """Whether Muon orthogonalises each parameter: those of layers that are matrices [..., out, in].

    Embeddings, output heads and what else stands outside the layers are none, and neither are norms, biases,
    vectors in the form of a matrix, filters of convolutions, and adapters: of B A neither factor is the
    update of a matrix.
    """

    def of(path: Any, x: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        in_layers = jax.tree_util.keystr(path[:1], simple=True) == "layers"
        others = name.endswith(("norm", "bias", "scalar", "conv", LORA_A, LORA_B))
        return in_layers and x.ndim >= 2 and min(x.shape[-2:]) > 1 and not others

    return jax.tree_util.tree_map_with_path(of, params)
