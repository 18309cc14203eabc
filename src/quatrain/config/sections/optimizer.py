"""The section `optimizer`: the policy's optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quatrain.config.fields import NOT_SET, Derived, Fraction, MustAgreeOnResume, NonNegative, Section


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule, which counts optimizer steps, applied or not."""

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    """Optimizer; `sgd` has momentum `beta1`."""
    learning_rate: Derived[float] = Field(NOT_SET, ge=0)
    """Peak learning rate; derived: 1e-6, or 1e-5 with adapters (`lora.rank`), which need about ten times as
    much."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes after the warm-up."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate rises linearly."""
    final_fraction: Fraction = 0.0
    """Final learning rate of `linear` and `cosine`, as a fraction of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of all parameters but norms and biases; must be 0 for sgd."""
    beta1: Fraction = 0.9
    """Decay of the first moment; momentum of sgd."""
    beta2: Fraction = 0.999
    """Decay of the second moment (adamw, lion)."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update (adamw)."""
    state_dtype: Annotated[Literal["float32", "bfloat16"], MustAgreeOnResume()] = "float32"
    """Dtype in which the first moment (momentum of sgd) is stored; the rest is float32."""
    stochastic_rounding: bool = True
    """Round new parameters to bfloat16 (`model.param_dtype`) up or down at random, with the probabilities
    that keep their mean: updates smaller than the resolution of bfloat16 are not lost. false: to the nearest
    number. Parameters in float32 are not rounded."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients with a larger global norm are scaled down to this norm; null: never."""

    @property
    def has_first_moment(self) -> bool:
        """Whether the optimizer's state has a first moment."""
        return self.name != "sgd" or self.beta1 > 0
