"""Every knob of quatrain: typed, frozen, described with its unit and default.

Stands under every room: a stage receives its own section, never the root. Imports no JAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quatrain.config.mesh import axis_sizes, device_numbers

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(min_length=1)]
# Random keys are made of 32 bits: a larger seed would silently equal a smaller one.
LARGEST_SEED = 2**32 - 1


def _has_mesh_form(spec: object) -> object:
    """`spec` where it has the form of a mesh; before its type is looked at, for one error."""
    try:
        if spec != "auto":
            axis_sizes(spec)
    except (ValueError, TypeError):
        raise PydanticCustomError(
            "mesh",
            "must be auto, three numbers dp,fsdp,tp as in 1,-1,1, or a mapping of those axes; each at least "
            "1, one of them -1 for the devices that are left",
        ) from None
    return spec


def _names_devices(spec: object) -> object:
    try:
        if not isinstance(spec, int | str):
            raise ValueError
        device_numbers(spec)
    except ValueError:
        raise PydanticCustomError(
            "devices", "must name devices by their numbers in a process, as 3, 0-3 or 0,2,5"
        ) from None
    return spec


Devices = Annotated[int | str, BeforeValidator(_names_devices)]
Mesh = Annotated[str | dict[str, int], BeforeValidator(_has_mesh_form)]
ADVANTAGE_SCALES = {
    "grpo": ("group", "batch", "none"),
    "dr_grpo": ("none",),
    "rloo": ("none",),
    "reinforce": ("batch", "none"),
}
"""The values of `advantage.scale` each estimator knows, its default first; that of `ops/advantages.py`."""
POLICY_LOSSES = ("ppo_clip",)
"""The built-in values of `update.loss`: those of `ops/losses.py`."""
SHARED_LOSS_ARGUMENTS = ("clip_low", "clip_high", "dual_clip")
"""Keys of `update` that a policy loss takes by naming an argument like them, without a default."""


def _names_function(builtin: Iterable[str]) -> AfterValidator:
    """A validator of text that is one of `builtin`, or names a function of the user's own."""
    names = tuple(builtin)

    def check(value: str) -> str:
        if value not in names and ":" not in value:
            raise PydanticCustomError(
                "function_name",
                "must be {names}, or a function of your own as path/file.py:function",
                {"names": " or ".join(names)},
            )
        return value

    return AfterValidator(check)


EstimatorName = Annotated[str, _names_function(ADVANTAGE_SCALES)]
LossName = Annotated[str, _names_function(POLICY_LOSSES)]
Argument = float | int | bool | str | None
"""A value that the configuration can hand to a function."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors and values are never converted ("16" is no number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class RunConfig(Section):
    """The run as a whole."""

    name: Text | None = Field(
        None,
        description="Name of the run's folder; derived: name of the configuration file and the time (UTC).",
    )
    dir: Text = Field("runs", description="Folder that holds all runs.")
    steps: Count | None = Field(
        None, description="Training steps (rollout batches); derived from `run.epochs` and the data."
    )
    epochs: float = Field(
        1.0, gt=0, description="Passes over the training prompts, when `run.steps` is not set."
    )

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"\w[\w.-]*", name):
            raise PydanticCustomError(
                "run_name", "must be letters, digits, '_', '.' and '-': it names a folder"
            )
        return name


class ModelConfig(Section):
    """The policy and how it computes."""

    path: Text = Field(
        "builtin:tiny",
        description="`builtin:tiny`, a local Hugging Face folder, a hub id (`Qwen/Qwen2.5-0.5B-Instruct`) "
        "or a `.gguf` file.",
    )
    tokenizer: Text | None = Field(None, description="Where the tokenizer comes from; derived: `model.path`.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Dtype of activations and matmuls.")
    param_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Dtype the parameters are kept in."
    )
    remat: Literal["none", "dots", "layer"] = Field(
        "layer",
        description="What the backward pass recomputes: `layer` all of each layer but its input, `dots` all "
        "but products with weights and attention (more memory, less time), `none` nothing.",
    )
    attention: Literal["auto", "xla", "cudnn", "pallas", "splash"] = Field(
        "auto",
        description="Attention of the forward/backward passes: `auto` picks by device and model; a named "
        "kernel that cannot honour the model's mask is an error.",
    )


class DataConfig(Section):
    """Prompts."""

    train: Text = Field(
        "builtin:arithmetic",
        description="Training prompts: `builtin:arithmetic`, a hub data set (`openai/gsm8k:main`), or a "
        ".jsonl, .json, .parquet or .csv file.",
    )
    eval: Text | None = Field(
        None, description="Evaluation prompts, as `data.train`; derived: the held-out part of a builtin."
    )
    batch_size: Count = Field(16, description="Prompts per training step, global.")
    max_prompt_length: Count = Field(512, description="Longest prompt, in tokens.")
    on_long_prompt: Literal["error", "skip", "truncate_left"] = Field(
        "error", description="What to do with a longer prompt; skipped and truncated prompts are counted."
    )
    question_column: Text | None = Field(
        None, description="Column with a plain question, wrapped as a user message; null: a `prompt` column."
    )
    system_prompt: str | None = Field(None, description="System message put before each prompt.")


class SFTConfig(Section):
    """Supervised warm start on demonstrations, before the first training step."""

    steps: NonNegative = Field(0, description="Optimizer steps; 0: no warm start.")
    data: Text | None = Field(
        None, description="Demonstrations with a `completion` column; derived: `data.train`."
    )
    batch_size: Count = Field(64, description="Demonstrations per optimizer step, global.")
    learning_rate: float = Field(
        1e-3, ge=0, description="Peak learning rate; linear warm-up, then cosine to zero."
    )
    warmup_steps: NonNegative = Field(10, description="Optimizer steps of linear warm-up.")


class RolloutConfig(Section):
    """Line 1: sampling completions."""

    n: Count = Field(8, description="Samples per prompt (the group size).")
    max_new_tokens: Count = Field(256, description="Longest completion, in tokens, stop token included.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Nucleus sampling: smallest set of tokens with this probability."
    )
    top_k: NonNegative = Field(0, description="Sample among the k most likely tokens; 0: all.")
    min_p: Fraction = Field(
        0.0, description="Drop tokens less likely than this fraction of the likeliest; 0: none."
    )
    stop: tuple[Text, ...] = Field(
        (), strict=False, description="Strings that end a completion, beside the model's stop tokens."
    )
    max_concurrency: Count | None = Field(
        None,
        description="Sequences that decode at once, on all replicas together; derived from memory where "
        "null: all of a call, as long as their cache fits.",
    )
    mesh: Mesh | None = Field(
        None,
        description="The devices' arrangement in decoding, as `mesh`; derived: that of training with `dp` "
        "x `fsdp` copies of the weights.",
    )
    logprob_diff_warning: float | None = Field(
        0.05,
        gt=0,
        description="Mean difference of a token's log-probability between sampler and trainer above which a "
        "step is warned about, in nats; null: never.",
    )


class PlacementConfig(Section):
    """Which devices each role has: their numbers in a process, the same in every process.

    Roles have the same devices, or none in common.
    """

    train: Devices | None = Field(None, description="Devices of training, as `0-3` or `0,2`; null: all.")
    rollout: Devices | None = Field(None, description="Devices of the rollout; null: those of training.")
    reference: Devices | None = Field(
        None, description="Devices of the reference policy; null: those of training."
    )


class OffloadConfig(Section):
    """What waits in the host's (pinned) memory while it is not in use."""

    reference: bool = Field(False, description="The reference policy, between log-probabilities.")
    optimizer: bool = Field(False, description="The optimizer's state, between optimizer steps.")


class RewardConfig(Section):
    """Line 2: scoring completions."""

    functions: dict[Text, float] = Field(
        {"correct": 1.0, "format": 0.5, "tag_count": 0.5},
        min_length=1,
        description="Reward functions and their weights: a built-in name, `package.module:function` or "
        "`path/file.py:function`. A layer that gives the mapping replaces it whole.",
    )


class AdvantageConfig(Section):
    """Line 3: rewards to advantages."""

    estimator: EstimatorName = Field(
        "grpo",
        description="Advantage estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce`, or a function of your own "
        "as `path/file.py:function` or `package.module:function`.",
    )
    args: dict[Text, Argument] = Field(
        {}, description="Arguments of the estimator beside its inputs, by name; checked at the start."
    )
    scale: Literal["group", "batch", "none"] | None = Field(
        None,
        description="Standard deviation that divides the advantage (`grpo`, `reinforce`); derived: group for "
        "grpo, batch for reinforce, none for `dr_grpo` and `rloo`.",
    )


SHARING_ATTENTIONS = ("auto", "xla")
"""The values of `model.attention` that know shared prompts."""


class UpdateConfig(Section):
    """Line 4: advantages to new weights."""

    mini_batch_size: Count | None = Field(
        None, description="Prompts per optimizer step, global; derived: `data.batch_size`."
    )
    epochs: Count = Field(1, description="Passes over one rollout batch (μ).")
    micro_batch_size: Count | None = Field(
        None,
        description="Sequences per device shard in one forward/backward (fixed mode); null: "
        "`update.max_tokens_per_device` counts instead.",
    )
    max_tokens_per_device: Count | None = Field(
        None,
        description="Tokens per device shard in one forward/backward (token-budget mode); derived, where "
        "`update.micro_batch_size` is not set: 16384, or the longest possible sequence where that is more.",
    )
    share_prompts: Literal["auto", True, False] = Field(
        "auto",
        description="Compute the prompt of a group once for all its samples, and what all prompts begin with "
        "once for each buffer, in the update and for log-probabilities. `auto`: wherever micro-batches have "
        "a token budget and `model.attention` is auto or xla; the result is the same.",
    )
    loss: LossName = Field(
        "ppo_clip",
        description="Policy loss: `ppo_clip`, or a function of your own as `path/file.py:function` or "
        "`package.module:function`.",
    )
    loss_args: dict[Text, Argument] = Field(
        {}, description="Arguments of the loss beside the tokens, by name; checked at the start."
    )
    clip_low: float = Field(0.2, ge=0, description="The ratio is clipped below at 1 - this.")
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped above at 1 + this.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bound on the loss of negative advantages, as a multiple of |A|."
    )
    loss_aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ] = Field("token_mean", description="Weight of each token in the loss.")
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the KL to the frozen reference; 0 loads no reference."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of that KL.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    old_logprobs: Literal["auto", "recompute", "rollout"] = Field(
        "auto",
        description="Log-probabilities the ratio is taken to: `auto` recomputes them only where a step has "
        "several optimizer steps; `rollout` takes the sampler's.",
    )
    max_bad_steps: Count = Field(
        5, description="Optimizer steps in a row with a non-finite gradient before the run stops."
    )

    def shares_prompts(self, attention: str) -> bool:
        """Whether passes with a token budget share prompts, where `model.attention` is `attention`."""
        return self.share_prompts is not False and attention in SHARING_ATTENTIONS


class LogprobConfig(Section):
    """Forward-only passes: old and reference log-probabilities."""

    micro_batch_size: Count | None = Field(
        None,
        description="Sequences per device shard in one forward pass (fixed mode); derived, where the update "
        "is in fixed mode and no mode is set here: 2 x `update.micro_batch_size`.",
    )
    max_tokens_per_device: Count | None = Field(
        None,
        description="Tokens per device shard in one forward pass (token-budget mode); derived, where the "
        "update is in token-budget mode and no mode is set here: 2 x `update.max_tokens_per_device`.",
    )


class OptimizerConfig(Section):
    """The optimizer and its schedule, in optimizer steps."""

    name: Literal["adamw", "lion", "sgd"] = Field("adamw", description="Optimizer.")
    learning_rate: float = Field(1e-6, ge=0, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after the warm-up."
    )
    warmup_steps: NonNegative = Field(0, description="Optimizer steps of linear warm-up from 0.")
    final_fraction: Fraction = Field(
        0.0, description="Last learning rate of linear and cosine, as a fraction of the peak."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay (adamw, lion); sgd has none.")
    beta1: Fraction = Field(0.9, description="First-moment decay; momentum of sgd.")
    beta2: Fraction = Field(0.999, description="Second-moment decay (adamw, lion).")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator (adamw).")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Gradients are scaled down to this global norm; null: never."
    )


class EvalConfig(Section):
    """Evaluation before, during and after training."""

    every_steps: NonNegative = Field(
        10, description="Training steps between evaluations; 0: only before and after."
    )
    num_prompts: Count | None = Field(
        128, description="Prompts of an evaluation before and during training; null: all."
    )
    final_num_prompts: Count | None = Field(None, description="Prompts of the last evaluation; null: all.")
    batch_size: Count = Field(64, description="Sequences decoded at once.")
    n: NonNegative = Field(
        0, description="Sampled completions per prompt for mean@n and pass@n; 0: greedy only."
    )
    temperature: float = Field(1.0, gt=0, description="Temperature of the sampled completions.")


class CheckpointConfig(Section):
    """Checkpoints of everything a run needs to go on."""

    every_steps: NonNegative = Field(
        50, description="Training steps between checkpoints; 0: only the last step."
    )
    keep: Count = Field(3, description="Checkpoints kept; older ones are deleted.")


class LoggingConfig(Section):
    """Where metrics go beside the run's own files."""

    wandb: Literal["disabled", "offline", "online"] | None = Field(
        None,
        description="Weights & Biases (extra `wandb`); derived: WANDB_MODE, or online where WANDB_API_KEY "
        "is set, else disabled.",
    )
    wandb_project: Text = Field("quatrain", description="Weights & Biases project.")
    tensorboard: bool = Field(False, description="Write TensorBoard files (extra `tensorboard`).")
    samples_per_step: NonNegative = Field(16, description="Completions written to samples/ each step.")


class DistributedConfig(Section):
    """Several processes that train together: how long they wait for each other."""

    start_timeout_s: Count = Field(
        300, description="Longest wait at the start for the coordinator and for all processes, in seconds."
    )
    heartbeat_timeout_s: Count = Field(
        60, description="Silence after which a process counts as dead and the others end, in seconds."
    )
    shutdown_timeout_s: Count = Field(
        600,
        description="Longest wait at the end for the other processes, process 0 and its files above all, in "
        "seconds.",
    )


class Config(Section):
    """The whole configuration of a run."""

    seed: int = Field(
        0,
        ge=0,
        le=LARGEST_SEED,
        description="Seed of everything random: data order, sampling, initialisation.",
    )
    mesh: Mesh = Field(
        "auto",
        description="The devices' arrangement in training: `dp,fsdp,tp` as in `1,-1,1`, one number -1 at "
        "most, or a mapping of those; `auto`: parameters sharded over the devices of a process, copied to "
        "each process.",
    )
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: SFTConfig = SFTConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    update: UpdateConfig = UpdateConfig()
    logprob: LogprobConfig = LogprobConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    placement: PlacementConfig = PlacementConfig()
    offload: OffloadConfig = OffloadConfig()
    distributed: DistributedConfig = DistributedConfig()

    @model_validator(mode="after")
    def _mini_batch_within_batch(self) -> Self:
        mini, whole = self.update.mini_batch_size, self.data.batch_size
        if mini is not None and mini > whole:
            raise PydanticCustomError(
                "across_sections",
                "must be at most data.batch_size ({whole}), the prompts there are in a training step; "
                "set a smaller number, or null for all of them",
                {"key": "update.mini_batch_size", "value": mini, "whole": whole},
            )
        return self

    @model_validator(mode="after")
    def _one_micro_batch_mode(self) -> Self:
        for section, stage in (("update", self.update), ("logprob", self.logprob)):
            if stage.micro_batch_size is not None and stage.max_tokens_per_device is not None:
                raise PydanticCustomError(
                    "across_sections",
                    "must be null where {budget_key} ({budget}) is set: micro-batches are cut by sequences "
                    "or by tokens, not both; set one of the two to null",
                    {
                        "key": f"{section}.micro_batch_size",
                        "value": stage.micro_batch_size,
                        "budget_key": f"{section}.max_tokens_per_device",
                        "budget": stage.max_tokens_per_device,
                    },
                )
        return self

    @model_validator(mode="after")
    def _prompts_can_be_shared(self) -> Self:
        update, kernel = self.update, self.model.attention
        asked = {"key": "update.share_prompts", "value": update.share_prompts}
        if update.share_prompts is True and update.micro_batch_size is not None:
            raise PydanticCustomError(
                "across_sections",
                "needs a token budget, and update.micro_batch_size is {rows}: a padded row holds one "
                "sequence; set update.max_tokens_per_device instead, or update.share_prompts to auto",
                {**asked, "rows": update.micro_batch_size},
            )
        if update.share_prompts is True and kernel not in SHARING_ATTENTIONS:
            raise PydanticCustomError(
                "across_sections",
                "needs an attention that knows shared prompts, which model.attention {kernel} does not; set "
                "model.attention to auto or xla, or update.share_prompts to auto",
                {**asked, "kernel": kernel},
            )
        return self

    @model_validator(mode="after")
    def _scale_is_used(self) -> Self:
        scale, estimator = self.advantage.scale, self.advantage.estimator
        known = ADVANTAGE_SCALES.get(estimator)
        if scale is not None and known and scale not in known:
            raise PydanticCustomError(
                "across_sections",
                "must be {known} for advantage.estimator {estimator}; set that, or null to derive it",
                {
                    "key": "advantage.scale",
                    "value": scale,
                    "estimator": estimator,
                    "known": " or ".join(known),
                },
            )
        return self

    @model_validator(mode="after")
    def _weight_decay_is_used(self) -> Self:
        decay = self.optimizer.weight_decay
        if self.optimizer.name == "sgd" and decay > 0:
            raise PydanticCustomError(
                "across_sections",
                "must be 0 for optimizer.name sgd, which has no weight decay; set 0, or take adamw or lion",
                {"key": "optimizer.weight_decay", "value": decay},
            )
        return self
