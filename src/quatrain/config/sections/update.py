"""The sections about updating weights: `update`, `logprob`, `optimizer`, `critic`, `critic_optimizer`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from quatrain.config.algorithms import LOSSES
from quatrain.config.errors import shown
from quatrain.config.fields import (
    NOT_SET,
    Argument,
    Count,
    Decay,
    Derived,
    Fraction,
    MustAgreeOnResume,
    NonNegative,
    Section,
    Text,
    function_choice,
    function_name,
    must,
)


class LogprobConfig(Section):
    """Forward-only passes: old and reference log-probabilities."""

    micro_batch_size: Count | None = None
    """Sequences per data shard in one forward-only pass. Derived if `update.micro_batch_size` is set and both
    keys of this section are null: 2 x `update.micro_batch_size`."""
    max_tokens_per_device: Count | None = None
    """Token budget: maximum number of tokens per data shard in one forward-only pass. Derived if
    `update.micro_batch_size` and both keys of this section are null: 2 x `update.max_tokens_per_device`."""


SHARED_LOSS_ARGUMENTS = ("clip_low", "clip_high", "dual_clip")
"""Keys of `update` that are passed to a policy loss if it has a parameter of that name without a default."""
REJECTIONS = {"geometric": [0.99, 1.01], "product": [0.5, 2.0], "k3": 0.01, "negative_kl": 0.5}
"""Rules of `update.reject`, with the form of their bounds."""
MOST_RATIO = math.exp(20)
"""Largest ratio that a rule of `update.reject` sees, and the inverse of the smallest: sums are clamped."""


def _is_bounds(name: str, bounds: Any) -> bool:
    """Whether the rule `name` exists and may have `bounds`: one number, or two around 1, a fresh ratio.

    Numbers are of what the rule can see, so that each bound rejects something and not everything.
    """
    if name not in REJECTIONS:
        return False
    ratios = isinstance(REJECTIONS[name], list)
    numbers = bounds if ratios else [bounds]
    if not isinstance(numbers, list | tuple) or {*map(type, numbers)} - {int, float}:
        return False
    inside = all(1 / MOST_RATIO < number < MOST_RATIO for number in numbers)
    return inside and (not ratios or (len(numbers) == 2 and numbers[0] < 1 < numbers[1]))


def _rule_of_rejections(rules: Mapping[str, Any]) -> str:
    """What is wrong with the first of `rules` that cannot be used."""
    name = next(name for name, bounds in rules.items() if not _is_bounds(name, bounds))
    if name not in REJECTIONS:
        return f"name rules of {', '.join(REJECTIONS)}, and {shown(name)} is none; correct the name"
    ratios, limits = isinstance(REJECTIONS[name], list), f"between {1 / MOST_RATIO:.2g} and {MOST_RATIO:.2g}"
    form = f"bounds [low, high] with low < 1 < high, {limits}" if ratios else f"one bound {limits}"
    return f"have for {name} {form}, as {REJECTIONS[name]}; it has {shown(rules[name])}; correct it"


Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


class UpdateConfig(Section):
    """Stage 4 of a training step: updating the weights."""

    mini_batch_size: Derived[Count] = NOT_SET
    """Prompts per optimizer step, over all devices; derived: `data.batch_size`, or a part of it if
    `update.num_mini_batches` is set."""
    num_mini_batches: Count | None = None
    """Number of parts into which the prompts of a training step are split, each for one optimizer step:
    `update.mini_batch_size` is then derived as `data.batch_size` / this, rounded up. Where so large parts are
    fewer (9 prompts in 4 parts are 3 parts of 3), there are as many steps, and a warning."""
    epochs: Count = 1
    """Passes over the sequences of a training step (μ)."""
    micro_batch_size: Count | None = None
    """Sequences per data shard (one of the `dp` x `fsdp` x `ep` parts of a batch) in one forward/backward
    pass; null: `update.max_tokens_per_device` is used instead."""
    max_tokens_per_device: Count | None = None
    """Token budget: maximum number of tokens per data shard in one forward/backward pass. Derived if
    `update.micro_batch_size` is null: 16384, or the length of the longest possible sequence if that is
    more."""
    share_prompts: Literal["auto", True, False] = "auto"
    """In the update and in log-probability passes, compute a group's prompt once for all its samples, and a
    common prefix of all prompts once per packed row. `auto`: yes, if micro-batches have a token budget. The
    result does not change."""
    loss: Annotated[str, function_name(LOSSES)] = Field(
        "ppo_clip", description=function_choice("Policy loss", LOSSES, "algorithms.md#policy-losses")
    )
    loss_args: dict[Text, Argument] = Field({})
    """Arguments of the loss by name, beside the tokens; checked when a run starts."""
    clip_low: float = Field(0.2, ge=0)
    """The probability ratio is clipped at 1 - `clip_low`."""
    clip_high: float = Field(0.2, ge=0)
    """The probability ratio is clipped at 1 + `clip_high`."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound on the loss of a token with negative advantage A, as a multiple of |A|; null: no bound."""
    loss_aggregation: Derived[Aggregation] = NOT_SET
    """How the token losses are weighted; formulas, and what is derived from `update.loss` and
    `advantage.estimator`: [algorithms.md](algorithms.md#aggregation)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the frozen reference in the loss; 0: no reference is loaded."""
    reference_sync_steps: Annotated[Count | None, MustAgreeOnResume()] = None
    """The reference follows the policy: after every such number of training steps it is moved to the policy's
    weights, by `update.reference_mixup`; null: it stays the policy at the start."""
    reference_mixup: float = Field(1.0, gt=0, le=1)
    """Part α of the policy in a reference that follows: α · policy + (1 − α) · reference; 1: the policy."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_straight"] = "k3"
    """Estimator of the KL to the reference; its value and gradient:
    [algorithms.md](algorithms.md#kl-to-the-reference)."""
    sampler_kl_coef: float = Field(0.0, ge=0)
    """Weight of the quadratic distance from the sampler in the loss: half the square of a token's
    log-probability minus the sampler's; 0: none."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    router_aux_coef: float = Field(0.0, ge=0)
    """For models with experts: weight of the auxiliary loss that balances the load of experts, 1 where it is
    even; formula: [models.md](models.md#auxiliary-loss). Needs recorded routes (`rollout.record_routes`), and
    routers that are trained."""
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """Old log-probabilities, in the denominator of the probability ratio: `recompute`: computed by the
    trainer; `auto`: computed by the trainer only if a training step has several optimizer steps, else the
    ratio is 1; `rollout`: those of the sampler, which are refused at temperature 0, and
    with sampling filters without `rollout.replay_mask`."""
    correction: Derived[Literal["none", "truncate", "mask"]] = NOT_SET
    """Correction for tokens that were not sampled by exactly the policy at the start of the training step,
    but by older weights, another engine or other rounding: the policy loss of a token is multiplied by the
    ratio of the two probabilities, at most `update.correction_cap` (`truncate`), or by 0 where the ratio is
    above the cap or below `update.correction_floor` (`mask`). Derived: `truncate` if `rollout.max_staleness`
    is above 0, `rollout.servers` or `rollout.sampler` is set, or `model.dtype` is bfloat16, but `none` with
    `update.old_logprobs: rollout`, at temperature 0, and with sampling filters without `rollout.replay_mask`;
    else `none`."""
    correction_cap: float = Field(2.0, ge=1)
    """Upper bound of the ratio of probabilities in `update.correction`."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether the ratio in `update.correction` is that of the token, or of its whole sequence, the product
    over its tokens, which all of them then have."""
    correction_floor: Fraction | None = None
    """Lower bound of the ratio in `update.correction: mask`; derived for `mask`: 1 / `update.correction_cap`.
    0: none."""
    reject: Annotated[
        dict[Text, Annotated[Any, WithJsonSchema({"const": "number above 0, or [low, high]"})]],
        must(
            _rule_of_rejections,
            lambda rules: all(_is_bounds(name, bounds) for name, bounds in rules.items()),
        ),
    ] = Field({})
    """Rules that reject whole sequences by how far the policy at the start of the training step (for
    `negative_kl` with `update.rejected: keep`: the current one) is from what sampled them, as
    {geometric: [0.99, 1.01], k3: 0.01, product: [0.5, 2.0], negative_kl: 0.5}; formulas:
    [algorithms.md](algorithms.md#rejected-sequences). Several may stand together."""
    rejected: Literal["keep", "drop"] = "keep"
    """What becomes of a rejected sequence: `keep`: its policy loss has weight 0 and it counts in the
    denominators of the aggregation; `drop`: it is left out as if it had not been sampled, which needs
    `update.old_logprobs: recompute`. The terms of KL, entropy and a `distill.loss` over the vocabulary stay
    with `keep` and go with `drop`."""
    mask_truncated: bool = False
    """Leave completions that were cut at `rollout.max_new_tokens` out of the loss, numerator and denominator;
    `update/masked_sequences` counts them. The critic's loss leaves them out too."""
    mask_zero_signal: bool = False
    """Leave the groups in which every advantage is 0 out of the policy's loss, numerator and denominator, so
    that the other groups weigh more; `update/masked_groups` counts them. KL and entropy terms leave them out
    too. A group of which a sequence has a teacher (`distill.teacher`) has a signal and stays."""
    max_bad_steps: Count = 5
    """The run stops after this many optimizer steps in a row with a non-finite loss or gradient."""

    @property
    def shares_prompts(self) -> bool:
        """Whether passes with a token budget share prompts."""
        return self.share_prompts is not False


HAVE_BETA2, HAVE_EPS = ("adamw", "lion", "muon"), ("adamw", "muon")
"""The optimizers that read `beta2` and `eps`."""
Schedule = Literal["constant", "linear", "cosine"]


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule, which counts optimizer steps, applied or not."""

    name: Literal["adamw", "lion", "sgd", "muon", "adafactor"] = "adamw"
    """Optimizer; `sgd` has momentum `beta1`. `muon` orthogonalises the momentum of the matrices of layers;
    embeddings, heads, norms and biases have AdamW. `adafactor` has a factored second moment."""
    learning_rate: Derived[float] = Field(NOT_SET, ge=0)
    """Peak learning rate; derived: 1e-6, or 1e-5 with adapters (`lora.rank`), which need about ten times as
    much."""
    vision_learning_rate: float | None = Field(None, ge=0)
    """Peak learning rate of the tower (`model.vision`), with the same schedule; null: `learning_rate`.
    Recipes take a fifth to a tenth of it."""
    schedule: Schedule = "constant"
    """How the learning rate changes after the warm-up."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate rises linearly."""
    final_fraction: Fraction = 0.0
    """Final learning rate of `linear` and `cosine`, as a fraction of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices and embeddings, not of norms, biases and the numbers of heads
    (sinks, decays of DeltaNet); must be 0 for sgd."""
    beta1: Decay = 0.9
    """Decay of the first moment; momentum of sgd and of muon, whose authors take 0.95. With 0, sgd and
    adafactor keep no first moment."""
    beta2: Decay = 0.999
    """Decay of the second moment (adamw, lion, and where muon takes AdamW)."""
    eps: float = Field(1e-8, ge=1e-30)
    """Added to the denominator of the update (adamw, and where muon takes AdamW)."""
    state_dtype: Annotated[Literal["float32", "bfloat16"], MustAgreeOnResume()] = "float32"
    """Dtype in which the first moment (momentum of sgd and muon) is stored; the rest is float32."""
    stochastic_rounding: bool = True
    """Round new parameters to bfloat16 (`model.param_dtype`) up or down at random, with the probabilities
    that keep their mean: updates smaller than the resolution of bfloat16 are not lost. false: to the nearest
    number. Parameters in float32 are not rounded."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients with a larger global norm are scaled down to this norm; null: never."""

    @property
    def has_first_moment(self) -> bool:
        """Whether the optimizer's state has a first moment."""
        return self.name not in ("sgd", "adafactor") or self.beta1 > 0


class CriticConfig(Section):
    """The critic, which predicts returns for `advantage.estimator` `gae` or `length_adaptive_gae`."""

    enabled: Derived[bool] = NOT_SET
    """Whether a critic is trained; derived: true for `advantage.estimator` `gae` or `length_adaptive_gae`,
    else false. An estimator of your own that takes `values` needs true."""
    path: Text | None = None
    """The critic's model, in the forms of `model.path`; its tokenizer must be the policy's. null: the
    policy's weights at the start of training, with a new output head of zeros."""
    mini_batch_size: Derived[Count] = NOT_SET
    """Prompts per optimizer step of the critic, over all devices; derived: `update.mini_batch_size`."""
    epochs: Derived[Count] = NOT_SET
    """Passes over the sequences of a training step; derived: `update.epochs`."""
    micro_batch_size: Count | None = None
    """Sequences per data shard in one forward/backward pass of the critic. Derived if both this and
    `critic.max_tokens_per_device` are null: `update.micro_batch_size`."""
    max_tokens_per_device: Count | None = None
    """Token budget of one forward/backward pass of the critic, per data shard. Derived if both this and
    `critic.micro_batch_size` are null: `update.max_tokens_per_device`."""
    forward_micro_batch_size: Count | None = None
    """Sequences per data shard in one forward-only pass, which computes values. Derived if both this and
    `critic.forward_max_tokens_per_device` are null: 2 x `critic.micro_batch_size`."""
    forward_max_tokens_per_device: Count | None = None
    """Token budget of one forward-only pass of the critic, per data shard. Derived if both this and
    `critic.forward_micro_batch_size` are null: 2 x `critic.max_tokens_per_device`."""
    clip_value: float | None = Field(0.5, gt=0)
    """The value loss is that of the value clipped to this distance from the value at the start of the
    training step, if that loss is larger; null: not clipped."""
    warmup_steps: NonNegative = 0
    """Training steps in which only the critic is trained, before the policy is."""

    @property
    def forward_sizes(self) -> LogprobConfig:
        """The sizes of forward-only passes, in the form of the section `logprob`."""
        return LogprobConfig(
            micro_batch_size=self.forward_micro_batch_size,
            max_tokens_per_device=self.forward_max_tokens_per_device,
        )


class CriticOptimizerConfig(OptimizerConfig):
    """The critic's optimizer and its learning-rate schedule, which counts optimizer steps, applied or not."""

    part_of_a_run_with = "critic.enabled"

    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate."""
