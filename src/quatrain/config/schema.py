"""All configuration keys of quatrain, with type, default and description.

Imported by every package: a stage receives its own section, not the whole configuration. Does not import JAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quatrain.config.mesh import axis_sizes, device_numbers
from quatrain.config.values import data_sets, evaluation_sets, plain_value, reward_entry

EPISODE_KEYS = ("max_turns", "max_environment_tokens", "environment_timeout_s", "environment_workers")
"""Keys of `rollout` that only episodes of several turns use."""
LARGEST_COUNT = 2**31 - 1
"""Above it, a number does not fit the 32 bits of the arrays that it becomes part of."""


def _fits_32_bits(count: int) -> int:
    if count > LARGEST_COUNT:
        raise PydanticCustomError("count", "must be at most {largest}", {"largest": LARGEST_COUNT})
    return count


def _is_address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if not found or int(found["port"] or 0) > LARGEST_PORT:
        raise PydanticCustomError("address", "must be an address such as http://host:8000")
    return text


_ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^/\s?#@:\[\]]+)(:(?P<port>\d{1,9}))?(/[^\s?#]*)?")
LARGEST_PORT = 65535
Count = Annotated[int, Field(ge=1), AfterValidator(_fits_32_bits)]
NonNegative = Annotated[int, Field(ge=0), AfterValidator(_fits_32_bits)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Text = Annotated[str, Field(min_length=1)]
Url = Annotated[str, AfterValidator(_is_address)]
# Random keys are created from 32 bits: a larger seed would silently act like a smaller one.
LARGEST_SEED = 2**32 - 1
MAX_STALENESS = 64
"""More copies of the weights than any run has memory for; learning breaks down far below."""


def _has_mesh_form(spec: object) -> object:
    """Returns a valid mesh spec; runs before pydantic checks the type, so that there is only one error."""
    try:
        if spec != "auto":
            axis_sizes(spec)
    except (ValueError, TypeError):
        raise PydanticCustomError(
            "mesh",
            "must be auto, three numbers dp,fsdp,tp as in 1,-1,1, or a mapping of those axes; each at least "
            "1, or -1 for one axis, which then uses all remaining devices",
        ) from None
    return spec


def _names_devices(spec: object) -> object:
    try:
        if not isinstance(spec, int | str):
            raise ValueError
        device_numbers(spec)
    except ValueError:
        raise PydanticCustomError(
            "devices",
            "must name devices by their numbers in a process, each once, as 3, 0-3 or 0,2,5, without blanks",
        ) from None
    return spec


EvaluationSets = Annotated[
    str | tuple[str, ...] | dict[str, str | tuple[str, ...]], BeforeValidator(evaluation_sets)
]
Devices = Annotated[int | str, BeforeValidator(_names_devices)]
DataSets = Annotated[Text | tuple[Text, ...], BeforeValidator(data_sets)]
PlainValue = Annotated[Any, BeforeValidator(plain_value), WithJsonSchema({"const": "any value"})]
Mesh = Annotated[str | dict[str, int], BeforeValidator(_has_mesh_form)]
ADVANTAGE_SCALES = {
    "grpo": ("group", "batch", "none"),
    "dr_grpo": ("none",),
    "rloo": ("none",),
    "reinforce": ("batch", "none"),
    "reinforce_pp": ("batch", "none"),
    "reinforce_pp_baseline": ("batch", "none"),
    "opo": ("none",),
    "remax": ("none",),
    "gpg": ("none",),
    "passk": ("group", "none"),
    "gae": ("batch", "none"),
}
"""The values of `advantage.scale` that each estimator of `ops/advantages.py` accepts, its default first."""
AGGREGATION_OF_LOSS = {
    "gspo": "seq_mean_token_mean",
    "gmpo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
}
AGGREGATION_OF_ESTIMATOR = {"dr_grpo": "seq_mean_token_sum_norm"}
"""The aggregation of the paper of a loss or an estimator whose objective is not `token_mean`."""
REWARD_MODEL = "model:"
"""How an entry of `reward.functions` begins if it is the path of a reward model."""
POLICY_LOSSES = (
    "ppo_clip",
    "reinforce",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "gpg",
    "clip_cov",
    "kl_cov",
)
"""The built-in values of `update.loss`, implemented in `ops/losses.py`."""
SHARED_LOSS_ARGUMENTS = ("clip_low", "clip_high", "dual_clip")
"""Keys of `update` that are passed to a policy loss if it has a parameter of that name without a default."""


def _names_function(builtin: Iterable[str]) -> AfterValidator:
    """A validator for text that is a name in `builtin` or the location of a user's function."""
    names = tuple(builtin)

    def check(value: str) -> str:
        if value not in names and ":" not in value:
            raise PydanticCustomError(
                "function_name",
                "must be one of {names}, or a function of your own as path/file.py:function",
                {"names": ", ".join(names)},
            )
        return value

    return AfterValidator(check)


EstimatorName = Annotated[str, _names_function(ADVANTAGE_SCALES)]
LossName = Annotated[str, _names_function(POLICY_LOSSES)]


def _is_argument(value: object) -> object:
    """`value` if it is a scalar; raises one error where the union below would raise one per type."""
    if value is not None and not isinstance(value, float | int | bool | str):
        raise PydanticCustomError("argument", "must be a number, text, true, false or null")
    return value


Argument = Annotated[float | int | bool | str | None, BeforeValidator(_is_argument)]
"""A value that can be given in the configuration as an argument of a function."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys are errors, and types are not converted ("16" is no number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class RunConfig(Section):
    """The run as a whole."""

    name: Text | None = Field(
        None,
        description="Name of the run's folder; derived: the configuration file's name and the time (UTC).",
    )
    dir: Text = Field("runs", description="Folder that holds all runs.")
    steps: Count | None = Field(
        None,
        description="Number of training steps (rollout batches); derived from `run.epochs` and the data.",
    )
    epochs: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="Passes over the training prompts; has no effect if `run.steps` is set.",
    )
    profile_steps: tuple[Count, ...] = Field(
        (),
        strict=False,
        description="Training steps, as `[3, 4]`, of which the main process writes a trace of JAX's profiler "
        "to `profile/` in the run's folder; consecutive steps are one trace.",
    )
    compilation_cache: Text | None = Field(
        "auto",
        description="Folder that keeps compiled programs for later runs; in it, every kind of machine and "
        "every version of JAX has a folder of its own. `auto`: `quatrain/compiled` in `XDG_CACHE_HOME` or "
        "`~/.cache`, on accelerators and, under Linux, on CPUs; where JAX's own variables name a folder or "
        "switch its cache off, they hold. null: nothing is kept or read.",
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
    """The policy: source of its weights, dtypes and kernels."""

    path: Text = Field(
        "builtin:tiny",
        description="The model: `builtin:tiny`, a local Hugging Face folder, a model on the Hub "
        "(`Qwen/Qwen2.5-0.5B-Instruct`) or a `.gguf` file.",
    )
    tokenizer: Text | None = Field(
        None,
        description="The tokenizer: a folder, a model on the Hub or a `.gguf` file; derived: `model.path`.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Dtype of activations, matrix products and the KV cache."
    )
    param_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Dtype in which parameters are stored and exported."
    )
    remat: Literal["none", "dots", "layer"] = Field(
        "layer",
        description="What the backward pass recomputes: `layer`: everything in a layer (only the layer's "
        "input is kept); `dots`: everything but products with weights and attention (more memory, less "
        "time); `none`: nothing.",
    )
    attention: Literal["auto", "xla", "cudnn", "tokamax", "splash"] = Field(
        "auto",
        description="Attention kernel of forward and backward passes: `xla` (any device), `cudnn` (cuDNN "
        "flash attention, GPUs), `tokamax` (Mosaic kernels of the extra `gpu`, GPUs) or `splash` (splash "
        "attention, TPUs). `auto` takes the first kernel of the device that supports the model and computes "
        "a small example as `xla` does, and logs the choice. A named kernel that does not is an error.",
    )


class LoraConfig(Section):
    """Adapters of low rank (LoRA), which are trained in place of the model's weights: [lora.md](lora.md)."""

    rank: NonNegative = Field(
        0,
        description="Rank of the adapters; 0: none, all weights are trained. With 1 or more, the model at "
        "`model.path` is frozen in `model.param_dtype`, and adapters are float32.",
    )
    alpha: float | None = Field(
        None,
        gt=0,
        description="What adapters add to a product is multiplied by `alpha` / `rank`; derived: `lora.rank`.",
    )
    targets: tuple[Literal["qkv", "o", "gate_up", "down"], ...] = Field(
        ("qkv", "o", "gate_up", "down"),
        strict=False,
        description="Matrices of each layer that have adapters: `qkv` (queries, keys and values, each with "
        "adapters of its own), `o` (the output of attention), `gate_up` and `down` (the MLP).",
    )

    @field_validator("targets")
    @classmethod
    def _each_once(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(targets)) != len(targets):
            raise PydanticCustomError("targets", "must name each matrix once")
        if not targets:
            raise PydanticCustomError("targets", "must have at least one entry")
        return targets


class DataConfig(Section):
    """Prompts for training and evaluation."""

    train: DataSets = Field(
        "builtin:arithmetic",
        description="Training prompts: `builtin:arithmetic`, a data set on the Hub (`openai/gsm8k:main`), "
        "or a .jsonl, .json, .parquet or .csv file; all forms: [data.md](data.md#where-rows-come-from). A "
        "list of data sets is read as one, in its order.",
    )
    eval: EvaluationSets | None = Field(
        None,
        description="Evaluation prompts, in the form of `data.train`, or a mapping from names to such forms, "
        "whose results are reported apart: `{gsm8k: gsm8k.jsonl, math: math.jsonl}`; the first is shown "
        "during training. Derived: the held-out part if `data.train` is built in.",
    )
    batch_size: Count = Field(16, description="Prompts per training step, over all devices.")
    max_prompt_length: Count = Field(512, description="Maximum length of a prompt, in tokens.")
    on_long_prompt: Literal["error", "skip", "truncate_left"] = Field(
        "error",
        description="What to do with a prompt longer than `data.max_prompt_length`: end the run, skip the "
        "prompt, or drop its first tokens (not in episodes). Skipped and truncated prompts are counted.",
    )
    pass_rate_column: Text = Field(
        "pass_rate",
        description="Column with the fraction, 0 to 1, of a model's answers to the prompt that were right.",
    )
    min_pass_rate: Fraction | None = Field(
        None,
        description="Train on prompts with at least this pass rate; others of `data.train` are left out and "
        "counted. null: no lower bound.",
    )
    max_pass_rate: Fraction | None = Field(
        None, description="Train on prompts with at most this pass rate; null: no upper bound."
    )
    question_column: Text | None = Field(
        None,
        description="Column with a plain question, which becomes a user message; null: the prompt is in the "
        "column `prompt` or, if there is none, in the column `messages`.",
    )
    answer_column: Text | None = Field(
        None,
        description="Column with the gold answer, which reward functions get as `answer`; null: the column "
        "`answer`, or verl's `reward_model.ground_truth`.",
    )
    system_prompt: str | None = Field(
        None, description="System message added before each prompt; null: none."
    )
    chat_template: Text | None = Field(
        None,
        description="Chat template that replaces the tokenizer's: the path of a file, or the template "
        "itself, "
        "which has `{{` or `{%`. It is exported with the model.",
    )
    chat_template_kwargs: dict[Text, PlainValue] = Field(
        {},
        description="Variables passed to the chat template, as `{enable_thinking: false}`; a variable that "
        "the template does not read is an error.",
    )
    shuffle: bool = Field(
        True,
        description="Draw training prompts and demonstrations in a new order in each epoch, by `seed`; "
        "false: in the order of the files, the same in every epoch.",
    )

    @property
    def eval_sets(self) -> dict[str, str | tuple[str, ...]]:
        """The evaluation sets by name; the name of a single source is empty."""
        if self.eval is None:
            return {}
        return self.eval if isinstance(self.eval, dict) else {"": self.eval}

    @model_validator(mode="after")
    def _pass_rates_are_a_range(self) -> Self:
        low, high = self.min_pass_rate, self.max_pass_rate
        default = type(self).model_fields["pass_rate_column"].default
        if low is None and high is None and self.pass_rate_column != default:
            raise PydanticCustomError(
                "across_sections",
                "has no effect without data.min_pass_rate or data.max_pass_rate; set one of these, or leave "
                "this key at its default",
                {"key": "data.pass_rate_column", "value": self.pass_rate_column},
            )
        if low is not None and high is not None and low > high:
            raise PydanticCustomError(
                "across_sections",
                "must be at most data.max_pass_rate ({high}); lower it, or raise data.max_pass_rate",
                {"key": "data.min_pass_rate", "value": low, "high": high},
            )
        return self


class SFTConfig(Section):
    """Supervised warm start: training on demonstrations before the first training step."""

    steps: NonNegative = Field(0, description="Optimizer steps of the warm start; 0: no warm start.")
    data: DataSets | None = Field(
        None,
        description="Demonstrations: rows with a column `completion`, or with `messages` that end with the "
        "assistant's; a data set or a list of them, as `data.train`; derived: `data.train`.",
    )
    batch_size: Count = Field(64, description="Demonstrations per optimizer step, over all devices.")
    learning_rate: float | None = Field(
        None,
        ge=0,
        description="Peak learning rate, between a linear warm-up and a cosine decay to zero; derived: 1e-3 "
        "for a built-in model, whose weights are random, else 1e-5; ten times that with adapters "
        "(`lora.rank`).",
    )
    warmup_steps: NonNegative = Field(10, description="Optimizer steps of linear warm-up.")


class RolloutConfig(Section):
    """Stage 1 of a training step: sampling completions."""

    n: Count = Field(8, description="Samples per prompt (the group size).")
    max_new_tokens: Count = Field(
        256, description="Maximum length of a completion, in tokens, stop token included."
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0: greedy.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling: sample from the smallest set of tokens with at least this "
        "probability; 1: all tokens.",
    )
    top_k: NonNegative = Field(0, description="Sample from this many most likely tokens; 0: all.")
    min_p: Fraction = Field(
        0.0,
        description="Drop tokens less likely than this fraction of the most likely token's probability; 0: "
        "drop none.",
    )
    stop: tuple[Text, ...] = Field(
        (), strict=False, description="Strings that end a completion, in addition to the model's stop tokens."
    )
    max_concurrency: Count | None = Field(
        None,
        description="Sequences that decode at the same time, on all replicas together; null: all sequences "
        "of a training step, or as many as the KV cache has memory for.",
    )
    greedy_baseline: bool | None = Field(
        None,
        description="Whether a greedy completion of each prompt is drawn too, scored and not trained on; "
        "derived: true for `advantage.estimator: remax`, else false. An estimator of your own that takes "
        "`baseline_rewards` needs true.",
    )
    dynamic_sampling_rounds: Count = Field(
        1,
        description="With 2 or more, dynamic sampling (DAPO): a training step draws further prompts, in at "
        "most this many rounds, until `data.batch_size` groups have samples with different rewards, and "
        "trains on these. 1: the next `data.batch_size` prompts, whatever their rewards.",
    )
    max_staleness: Annotated[int, Field(ge=0, le=MAX_STALENESS)] = Field(
        0,
        description="Training steps by which the weights that sample a batch may be older than those at the "
        "start of its training step. 0: each batch is sampled after the update before it. With 1 or more, "
        "the next batches are sampled while this one is trained on: [async.md](async.md).",
    )
    in_flight: bool = Field(
        False,
        description="With `rollout.max_staleness`: exchange the weights between two decode calls, and begin "
        "samples of the next batch while the last ones of a batch decode. Faster where lengths differ much; "
        "tokens then depend on timing.",
    )
    environment: Text | None = Field(
        None,
        description="Environment that answers each turn of the policy, as `path.py:Class`; null: completions "
        "have one turn, or there are tools: [episodes.md](episodes.md).",
    )
    tools: tuple[Text, ...] = Field(
        (),
        strict=False,
        description="Functions that the policy can call in its turns, each as `path.py:function`.",
    )
    max_turns: Count = Field(
        8, description="Most turns of the policy in an episode with an environment or tools."
    )
    max_environment_tokens: Count | None = Field(
        None,
        description="Most tokens that an environment and the chat template may add to an episode; what would "
        "be more ends it as `length`. Derived: `rollout.max_new_tokens`, which bounds the tokens that the "
        "policy samples in all its turns.",
    )
    environment_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that one call of an environment may take: `reset`, `step` with its tools, or "
        "the end. An episode whose environment takes longer ends with the reward of an error.",
    )
    environment_workers: NonNegative = Field(
        0,
        description="Processes in which environments run; 0: threads of the process that trains. Only a "
        "process can be ended if an environment hangs, and without the run if one crashes.",
    )
    mesh: Mesh | None = Field(
        None,
        description="Device mesh for the rollout, in the form of `mesh`; derived: `-1,1,tp` with `tp` of "
        "`mesh`, so that each replica of the sampler has a complete copy of the weights on `tp` devices. "
        "With `rollout.workers`: that of each worker, over its own devices.",
    )
    workers: NonNegative = Field(
        0,
        description="Rollout workers on Ray (extra `ray`): processes with devices of their own, in which the "
        "engine samples, and whose death costs time and no data. 0: the devices of this run sample: "
        "[fleet.md](fleet.md).",
    )
    servers: tuple[Url, ...] = Field(
        (),
        strict=False,
        description="Addresses of inference servers that sample in place of this run's devices, e.g. "
        "`[http://gpu1:8000]`: `quatrain serve`, vLLM or SGLang: [servers.md](servers.md).",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="With `rollout.workers` or `rollout.servers`: seconds after which a worker that gives "
        "no answer is lost and started anew (three times as many while it starts); also the deadline of "
        "loading weights, the longest time without any worker, and that in which each must start before "
        "training.",
    )
    weights_dir: Text | None = Field(
        None,
        description="Folder on a file system that all rollout workers or servers share, through which they "
        "get the weights of each step, each run in a folder of its own there; null: workers get them through "
        "Ray's object store, servers through `weights/` in the run's folder.",
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="How the sampler computes a model with adapters (`lora.rank`): `merged`: with matrices "
        "into which the adapters are merged, as fast as without adapters and a copy of these matrices, in "
        "bfloat16 rounded stochastically, so that small changes arrive in the mean; "
        "`adapter`: with base and adapters as training does, without a copy of the base, some products more "
        "a layer.",
    )
    logprob_diff_warning: float | None = Field(
        0.05,
        gt=0,
        description="A warning is given if the mean absolute difference between the sampler's and the "
        "trainer's log-probabilities of a training step's tokens exceeds this, in nats; null: no warning. "
        "A server that differs by more than four times as much when a run starts ends it; null: servers are "
        "not compared.",
    )

    @property
    def has_episodes(self) -> bool:
        """Whether samples are episodes of several turns, with an environment or tools."""
        return self.environment is not None or bool(self.tools)

    @property
    def has_fleet(self) -> bool:
        """Whether workers outside this run's processes sample."""
        return self.workers > 0 or bool(self.servers)

    @property
    def samples_the_policy(self) -> bool:
        """Whether tokens are drawn from the policy's whole distribution, at some temperature."""
        return self.top_p == 1 and self.top_k == 0 and self.min_p == 0 and self.temperature > 0

    @property
    def differs_from_trainer(self) -> bool:
        """Whether other weights or another engine sample than those that are trained."""
        return self.max_staleness > 0 or bool(self.servers)


class PlacementConfig(Section):
    """Which devices training, rollout, reference policy, critic and reward models use.

    Devices are given by their numbers within a process, the same in every process. Two of these roles must
    have either the same devices or none in common.
    """

    train: Devices | None = Field(None, description="Devices of training, e.g. `0-3` or `0,2`; null: all.")
    rollout: Devices | None = Field(None, description="Devices of the rollout; null: the training devices.")
    reference: Devices | None = Field(
        None, description="Devices of the reference policy; null: the training devices."
    )
    critic: Devices | None = Field(None, description="Devices of the critic; null: the training devices.")
    reward: Devices | None = Field(
        None, description="Devices of the reward models; null: the training devices."
    )


class OffloadConfig(Section):
    """Arrays that are moved to the host's pinned memory while they are not in use."""

    reference: bool = Field(
        False, description="Offload the reference policy while no reference log-probabilities are computed."
    )
    optimizer: bool = Field(False, description="Offload the optimizer state between optimizer steps.")
    policy: bool = Field(
        False,
        description="Offload the policy's parameters while they are not trained, so that the rollout has "
        "their room. It needs a rollout with a copy of the weights on the same devices (another dtype, "
        "another mesh, or merged adapters) and `rollout.max_staleness` 0.",
    )
    critic: bool = Field(
        False,
        description="Offload the critic: its weights while no values are computed and it is not trained, its "
        "optimizer state between its optimizer steps.",
    )
    reward_models: bool = Field(False, description="Offload the reward models while no scores are computed.")


class RewardEntry(Section):
    """What `reward.functions` says of one function."""

    weight: float = 1.0
    args: dict[Text, PlainValue] = {}
    """Arguments of the function by name, beside those that every call brings."""
    data_source: tuple[Text, ...] | None = Field(None, strict=False)
    """Values of the column `data_source` whose rows the function scores; None: all rows."""

    @field_validator("data_source", mode="before")
    @classmethod
    def _one_is_a_list(cls, sources: object) -> object:
        return [sources] if isinstance(sources, str) else sources


WeightOrEntry = Annotated[
    Annotated[float, Tag("weight")] | Annotated[RewardEntry, Tag("entry")],
    Discriminator(lambda entry: "weight" if isinstance(entry, int | float) else "entry"),
    BeforeValidator(reward_entry),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "{weight: …, args: {…}, data_source: […]}"}]}),
]


class RewardConfig(Section):
    """Stage 2 of a training step: scoring completions."""

    functions: dict[Text, WeightOrEntry] = Field(
        {"correct": 1.0, "format": 0.5, "tag_count": 0.5},
        min_length=1,
        description="Mapping from reward functions to their weights. A function is a built-in name, "
        "`package.module:function`, `path/file.py:function`, or `model:PATH`, the reward model in a local "
        "Hugging Face folder or on the Hub. Instead of a weight, a mapping gives `weight` (default 1.0), "
        "`args` (arguments by name) and `data_source` (the values of this column whose rows are scored): "
        "[reward.md](reward.md#arguments-and-data-sources). A configuration layer that sets the mapping "
        "replaces the whole mapping.",
    )
    overlong_limit: Count | None = Field(
        None,
        description="Tokens of a completion at which the function `overlong` gives -1; derived if "
        "`reward.functions` has `overlong`: `rollout.max_new_tokens`.",
    )
    overlong_buffer: Count | None = Field(
        None,
        description="Tokens before `reward.overlong_limit` over which the function `overlong` falls from 0 "
        "to -1; derived if `reward.functions` has `overlong`: a fifth of the limit.",
    )
    per_call: Literal["batch", "group", "sample"] = Field(
        "batch",
        description="Samples that a reward function gets in one call: the whole batch, the samples of one "
        "prompt, or one. Calls on groups or samples run in parallel, and a function that compares samples "
        "sees those of its call only.",
    )
    workers: NonNegative | None = Field(
        None,
        le=1024,
        description="Processes that call users' reward functions; null: one for each core that the process "
        "may use, at most 8. 0: they are called in the process of the run, for functions that hold a model, "
        "without limits on time and memory.",
    )
    timeout_s: float = Field(
        10.0,
        ge=0.01,
        le=86400,
        description="Seconds that one call of a user's reward function may take, and so the longest time "
        "for one sample. A call that takes longer is ended, and its samples are called again in smaller "
        "parts. Of the function `correct`: seconds that each of its processes may spend on slow comparisons "
        "of expressions in one call.",
    )
    memory_mb: int | None = Field(
        4096,
        ge=64,
        le=2**30,
        description="MiB of private memory that a process that calls users' reward functions may use; null: "
        "not limited.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Coefficient of the KL to the frozen reference that is subtracted from each token's "
        "reward (old log-probability minus reference log-probability); 0: no KL in the reward.",
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="KL, in nats per token, that the coefficient is adapted to from one training step to the "
        "next, starting from `reward.kl_coef`; null: the coefficient is fixed.",
    )
    kl_horizon: Count = Field(
        10000, description="Sequences over which the coefficient adapts to `reward.kl_target`."
    )

    model_max_tokens_per_device: Count | None = Field(
        None,
        description="Token budget of the reward models: maximum number of their tokens per data shard in one "
        "forward pass. Derived if `reward.functions` has a reward model: `logprob.max_tokens_per_device`; if "
        "that is null, 32768, or twice the length of the longest possible sequence if that is more.",
    )

    @property
    def models(self) -> dict[str, str]:
        """The reward models: entry of `functions` -> path of the model."""
        entries = (name for name in self.functions if name.startswith(REWARD_MODEL))
        return {name: name.removeprefix(REWARD_MODEL) for name in entries}

    @property
    def entries(self) -> dict[str, RewardEntry]:
        """`functions` with every entry in its long form."""
        return {
            name: entry if isinstance(entry, RewardEntry) else RewardEntry(weight=entry)
            for name, entry in self.functions.items()
        }

    @field_validator("functions")
    @classmethod
    def _models_have_paths(cls, functions: dict[str, WeightOrEntry]) -> dict[str, WeightOrEntry]:
        if REWARD_MODEL in functions:
            raise PydanticCustomError(
                "reward_model", "must name a reward model with its path, as in model:PATH; one has none"
            )
        for name, entry in functions.items():
            if name.startswith(REWARD_MODEL) and isinstance(entry, RewardEntry) and entry.args:
                raise PydanticCustomError(
                    "reward_model", "must have no args for a reward model; {name} has some", {"name": name}
                )
        return functions


class CriticConfig(Section):
    """The critic, which predicts returns for `advantage.estimator: gae`."""

    enabled: bool | None = Field(
        None,
        description="Whether a critic is trained; derived: true for `advantage.estimator: gae`, else false. "
        "An estimator of your own that takes `values` needs true.",
    )
    path: Text | None = Field(
        None,
        description="The critic's model, in the forms of `model.path`; its tokenizer must be the policy's. "
        "null: the policy's weights at the start of training, with a new output head of zeros.",
    )
    mini_batch_size: Count | None = Field(
        None,
        description="Prompts per optimizer step of the critic, over all devices; derived: "
        "`update.mini_batch_size`.",
    )
    epochs: Count | None = Field(
        None, description="Passes over the sequences of a training step; derived: `update.epochs`."
    )
    micro_batch_size: Count | None = Field(
        None,
        description="Sequences per data shard in one forward/backward pass of the critic. Derived if both "
        "this and `critic.max_tokens_per_device` are null: `update.micro_batch_size`.",
    )
    max_tokens_per_device: Count | None = Field(
        None,
        description="Token budget of one forward/backward pass of the critic, per data shard. Derived if "
        "both this and `critic.micro_batch_size` are null: `update.max_tokens_per_device`.",
    )
    forward_micro_batch_size: Count | None = Field(
        None,
        description="Sequences per data shard in one forward-only pass, which computes values. Derived if "
        "both this and `critic.forward_max_tokens_per_device` are null: 2 x `critic.micro_batch_size`.",
    )
    forward_max_tokens_per_device: Count | None = Field(
        None,
        description="Token budget of one forward-only pass of the critic, per data shard. Derived if both "
        "this and `critic.forward_micro_batch_size` are null: 2 x `critic.max_tokens_per_device`.",
    )
    clip_value: float | None = Field(
        0.5,
        gt=0,
        description="The value loss is that of the value clipped to this distance from the value at the "
        "start of the training step, if that loss is larger; null: not clipped.",
    )
    warmup_steps: NonNegative = Field(
        0, description="Training steps in which only the critic is trained, before the policy is."
    )

    @property
    def forward_sizes(self) -> LogprobConfig:
        """The sizes of forward-only passes, in the form of the section `logprob`."""
        return LogprobConfig(
            micro_batch_size=self.forward_micro_batch_size,
            max_tokens_per_device=self.forward_max_tokens_per_device,
        )


class AdvantageConfig(Section):
    """Stage 3 of a training step: computing advantages from rewards."""

    estimator: EstimatorName = Field(
        "grpo",
        description="Advantage estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce`, `reinforce_pp`, "
        "`reinforce_pp_baseline`, `opo`, `remax`, `gpg`, `passk`, `gae` (formulas: "
        "[algorithms.md](algorithms.md#advantage-estimators)), or a function of your own as "
        "`path/file.py:function` or `package.module:function`.",
    )
    args: dict[Text, Argument] = Field(
        {},
        description="Arguments of the estimator by name, beside its inputs; checked when a run starts.",
    )
    scale: Literal["group", "batch", "none"] | None = Field(
        None,
        description="Standard deviation that divides the advantage: of the group's rewards, of the whole "
        "batch, or none; [algorithms.md](algorithms.md#advantage-estimators) shows which of these an "
        "estimator accepts; derived: `group` for `grpo` and `passk`, `batch` for `reinforce`, "
        "`reinforce_pp`, `reinforce_pp_baseline` and `gae`, `none` for the others.",
    )


class UpdateConfig(Section):
    """Stage 4 of a training step: updating the weights."""

    mini_batch_size: Count | None = Field(
        None,
        description="Prompts per optimizer step, over all devices; derived: `data.batch_size`, or a part "
        "of it "
        "if `update.num_mini_batches` is set.",
    )
    num_mini_batches: Count | None = Field(
        None,
        description="Number of parts into which the prompts of a training step are split, each for one "
        "optimizer step: `update.mini_batch_size` is then derived as `data.batch_size` / this, rounded up.",
    )
    epochs: Count = Field(1, description="Passes over the sequences of a training step (μ).")
    micro_batch_size: Count | None = Field(
        None,
        description="Sequences per data shard (one of the `dp` x `fsdp` parts of a batch) in one "
        "forward/backward pass; null: `update.max_tokens_per_device` is used instead.",
    )
    max_tokens_per_device: Count | None = Field(
        None,
        description="Token budget: maximum number of tokens per data shard in one forward/backward pass. "
        "Derived if `update.micro_batch_size` is null: 16384, or the length of the longest possible "
        "sequence if that is more.",
    )
    share_prompts: Literal["auto", True, False] = Field(
        "auto",
        description="In the update and in log-probability passes, compute a group's prompt once for all its "
        "samples, and a common prefix of all prompts once per packed row. `auto`: yes, if micro-batches "
        "have a token budget. The result does not change.",
    )
    loss: LossName = Field(
        "ppo_clip",
        description="Policy loss: `ppo_clip`, `reinforce`, `gspo`, `cispo`, `sapo`, `gmpo`, `gpg`, "
        "`clip_cov`, `kl_cov` (formulas: [algorithms.md](algorithms.md#policy-losses)), or a "
        "function of your own as `path/file.py:function` or `package.module:function`.",
    )
    loss_args: dict[Text, Argument] = Field(
        {},
        description="Arguments of the loss by name, beside the tokens; checked when a run starts.",
    )
    clip_low: float = Field(0.2, ge=0, description="The probability ratio is clipped at 1 - `clip_low`.")
    clip_high: float = Field(0.2, ge=0, description="The probability ratio is clipped at 1 + `clip_high`.")
    dual_clip: float | None = Field(
        None,
        gt=1,
        description="Upper bound on the loss of a token with negative advantage A, as a multiple of |A|; "
        "null: no bound.",
    )
    loss_aggregation: (
        Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] | None
    ) = Field(
        None,
        description="How the token losses are weighted; formulas: "
        "[algorithms.md](algorithms.md#aggregation); derived: `seq_mean_token_mean` for the losses `gspo`, "
        "`gmpo` and `sapo`, `seq_mean_token_sum_norm` for `advantage.estimator: dr_grpo` with another loss, "
        "as in their papers; else `token_mean`.",
    )
    kl_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL to the frozen reference in the loss; 0: no reference is loaded.",
    )
    reference_sync_steps: Count | None = Field(
        None,
        description="The reference follows the policy: after every such number of training steps it is moved "
        "to the policy's weights, by `update.reference_mixup`; null: it stays the policy at the start.",
    )
    reference_mixup: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Part α of the policy in a reference that follows: α · policy + (1 − α) · reference; 1: "
        "the policy.",
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3_straight"] = Field(
        "k3",
        description="Estimator of the KL to the reference; its value and gradient: "
        "[algorithms.md](algorithms.md#kl-to-the-reference).",
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus in the loss.")
    old_logprobs: Literal["auto", "recompute", "rollout"] = Field(
        "auto",
        description="Old log-probabilities, in the denominator of the probability ratio: `recompute`: "
        "computed by the trainer; `auto`: computed by the trainer only if a training step has several "
        "optimizer steps, else the ratio is 1; `rollout`: those of the sampler, which must draw from the "
        "policy's whole distribution.",
    )
    correction: Literal["none", "truncate", "mask"] | None = Field(
        None,
        description="Correction for tokens that older weights sampled than those at the start of the "
        "training step, another engine, or weights rounded otherwise: the policy loss of a token is "
        "multiplied by the ratio of the two probabilities, at most `update.correction_cap` (`truncate`), "
        "or by 0 where the ratio is above the cap or below `update.correction_floor` (`mask`); derived: "
        "`truncate` if `rollout.max_staleness` is above 0, `rollout.servers` is set or `model.dtype` is "
        "bfloat16, but `none` with `update.old_logprobs: rollout` and with a sampling filter; else `none`.",
    )
    correction_cap: float = Field(
        2.0, ge=1, description="Upper bound of the ratio of probabilities in `update.correction`."
    )
    correction_floor: Fraction | None = Field(
        None,
        description="Lower bound of the ratio in `update.correction: mask`; derived for `mask`: 1 / "
        "`update.correction_cap`. 0: none.",
    )
    mask_truncated: bool = Field(
        False,
        description="Leave completions that were cut at `rollout.max_new_tokens` out of the loss, numerator "
        "and denominator; `update/masked_sequences` counts them. The critic's loss leaves them out too.",
    )
    mask_zero_signal: bool = Field(
        False,
        description="Leave the groups in which every advantage is 0 out of the policy's loss, numerator and "
        "denominator, so that the other groups weigh more; `update/masked_groups` counts them. KL and "
        "entropy terms leave them out too.",
    )
    max_bad_steps: Count = Field(
        5,
        description="The run stops after this many optimizer steps in a row with a non-finite loss or "
        "gradient.",
    )

    @property
    def shares_prompts(self) -> bool:
        """Whether passes with a token budget share prompts."""
        return self.share_prompts is not False


class LogprobConfig(Section):
    """Forward-only passes: old and reference log-probabilities."""

    micro_batch_size: Count | None = Field(
        None,
        description="Sequences per data shard in one forward-only pass. Derived if "
        "`update.micro_batch_size` is set and both keys of this section are null: 2 x "
        "`update.micro_batch_size`.",
    )
    max_tokens_per_device: Count | None = Field(
        None,
        description="Token budget: maximum number of tokens per data shard in one forward-only pass. "
        "Derived if `update.micro_batch_size` and both keys of this section are null: 2 x "
        "`update.max_tokens_per_device`.",
    )


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule, which counts optimizer steps, applied or not."""

    name: Literal["adamw", "lion", "sgd"] = Field(
        "adamw", description="Optimizer; `sgd` has momentum `beta1`."
    )
    learning_rate: float | None = Field(
        None,
        ge=0,
        description="Peak learning rate; derived: 1e-6, or 1e-5 with adapters (`lora.rank`), which need "
        "about ten times as much.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate changes after the warm-up."
    )
    warmup_steps: NonNegative = Field(
        0, description="Optimizer steps over which the learning rate rises linearly."
    )
    final_fraction: Fraction = Field(
        0.0, description="Final learning rate of `linear` and `cosine`, as a fraction of the peak."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Decoupled weight decay of all parameters but norms and biases; must be 0 for sgd.",
    )
    beta1: Fraction = Field(0.9, description="Decay of the first moment; momentum of sgd.")
    beta2: Fraction = Field(0.999, description="Decay of the second moment (adamw, lion).")
    eps: float = Field(1e-8, gt=0, description="Added to the denominator of the update (adamw).")
    state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Dtype in which the first moment (momentum of sgd) is stored; the rest is float32.",
    )
    stochastic_rounding: bool = Field(
        True,
        description="Round new parameters to bfloat16 (`model.param_dtype`) up or down at random, with the "
        "probabilities that keep their mean: updates smaller than the resolution of bfloat16 are not lost. "
        "false: to the nearest number. Parameters in float32 are not rounded.",
    )
    max_grad_norm: float | None = Field(
        1.0,
        gt=0,
        description="Gradients with a larger global norm are scaled down to this norm; null: never.",
    )

    @property
    def has_first_moment(self) -> bool:
        """Whether the optimizer's state has a first moment."""
        return self.name != "sgd" or self.beta1 > 0


class CriticOptimizerConfig(OptimizerConfig):
    """The critic's optimizer and its learning-rate schedule, which counts optimizer steps, applied or not."""

    learning_rate: float = Field(1e-5, ge=0, description="Peak learning rate.")


class EvalConfig(Section):
    """Evaluation before, during and after training."""

    every_steps: NonNegative = Field(
        10, description="Training steps between evaluations; 0: evaluate only before and after training."
    )
    before: bool = Field(True, description="Whether the model is evaluated before training.")
    num_prompts: Count | None = Field(
        128,
        description="Number of prompts of each evaluation set that every evaluation of a run uses, so that "
        "its results can be compared; null: all. At most `eval.final_num_prompts`.",
    )
    final_num_prompts: Count | None = Field(
        None,
        description="Number of prompts of each evaluation set in the evaluation after training, and in "
        "`quatrain eval`; null: all. If it is more than `eval.num_prompts`, results on all of them are "
        "reported beside those on `eval.num_prompts`.",
    )
    accuracy: Text | None = Field(
        None,
        description="The function that decides whether a completion is right, in the form of an entry of "
        "`reward.functions`: 1 is right, 0 is wrong, values between count in part, None leaves a completion "
        "out. null: `correct`, if the prompts have a column `answer`; else no accuracy is reported.",
    )
    batch_size: Count = Field(64, description="Sequences decoded in one call during evaluation.")
    max_new_tokens: Count | None = Field(
        None,
        description="Maximum length of a completion in evaluations, in tokens; null: that of the rollout, "
        "`rollout.max_new_tokens`.",
    )
    n: NonNegative = Field(
        0, description="Sampled completions per prompt for mean@n and pass@n; 0: greedy completions only."
    )
    temperature: float = Field(
        1.0, gt=0, description="Sampling temperature of the completions for mean@n and pass@n."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling of the completions for mean@n and pass@n; 1: all tokens.",
    )

    @field_validator("accuracy")
    @classmethod
    def _is_a_function(cls, accuracy: str | None) -> str | None:
        if accuracy is not None and accuracy.startswith(REWARD_MODEL):
            raise PydanticCustomError(
                "accuracy", "must be a function: the scores of a reward model are not right or wrong"
            )
        return accuracy

    @model_validator(mode="after")
    def _sampling_is_used(self) -> Self:
        for key in ("temperature", "top_p"):
            value = getattr(self, key)
            if not self.n and value != type(self).model_fields[key].default:
                raise PydanticCustomError(
                    "across_sections",
                    "has no effect with eval.n 0, which evaluates greedy completions only; set eval.n to 1 "
                    "or more, or leave this key at its default",
                    {"key": f"eval.{key}", "value": value},
                )
        return self

    @property
    def usual_num_prompts(self) -> int | None:
        """Prompts of each set that every evaluation uses; None: all."""
        numbers = [n for n in (self.num_prompts, self.final_num_prompts) if n is not None]
        return min(numbers, default=None)


class CheckpointConfig(Section):
    """Checkpoints, which contain everything needed to resume a run."""

    every_steps: NonNegative = Field(
        50, description="Training steps between checkpoints; 0: only after the last step."
    )
    keep: Count = Field(3, description="Number of checkpoints kept; older ones are deleted.")
    best_metric: Text | None = Field(
        None,
        description="Metric of every evaluation, such as `eval/accuracy_lenient` or `eval/reward`. An "
        "evaluation with a new best value saves a checkpoint, which is kept beside the newest "
        "`checkpoint.keep`; `quatrain export RUN OUTPUT --step best` exports it. null: no evaluation does.",
    )
    best_mode: Literal["max", "min"] = Field(
        "max",
        description="Whether the largest or the smallest value of `checkpoint.best_metric` is the best.",
    )


class LoggingConfig(Section):
    """Logging of metrics and samples, in addition to the files that every run writes."""

    wandb: Literal["disabled", "offline", "online"] | None = Field(
        None,
        description="Mode of Weights & Biases (extra `wandb`); derived: the variable WANDB_MODE, or "
        "`online` if WANDB_API_KEY is set, else `disabled`.",
    )
    wandb_project: Text = Field("quatrain", description="Project in Weights & Biases.")
    trackio: Text | None = Field(
        None, description="Project in Trackio (extra `trackio`) that the run is logged to; null: none."
    )
    tensorboard: bool = Field(False, description="Write TensorBoard files (extra `tensorboard`).")
    samples_per_step: NonNegative = Field(
        16, description="Completions written to `samples/` at each training step."
    )
    sample_tokens: bool = Field(
        False,
        description="Write the tokens of these completions too, with the log-probabilities of sampler and "
        "trainer. The trainer's cost one forward pass in each training step.",
    )


class DistributedConfig(Section):
    """How long the processes of a run with several processes wait for each other."""

    start_timeout_s: Count = Field(
        300,
        description="Maximum time, in seconds, that a process waits at the start for the coordinator and "
        "for all other processes.",
    )
    heartbeat_timeout_s: Count = Field(
        60,
        description="Time without a sign of life, in seconds, after which a process counts as dead and the "
        "others end.",
    )
    shutdown_timeout_s: Count = Field(
        600,
        description="Maximum time, in seconds, that a process waits at the end for the other processes, "
        "mainly for process 0 to write its files.",
    )


def _without_critic(key: str, value: Any) -> PydanticCustomError:
    return PydanticCustomError(
        "across_sections",
        "has no effect without a critic; set advantage.estimator to gae, or critic.enabled to true for an "
        "estimator of your own, or leave this key at its default",
        {"key": key, "value": value},
    )


class Config(Section):
    """The whole configuration of a run."""

    seed: int = Field(
        0,
        ge=0,
        le=LARGEST_SEED,
        description="Seed of all random numbers: order of the data, sampling, initialisation.",
    )
    mesh: Mesh = Field(
        "auto",
        description="Device mesh for training: `dp,fsdp,tp`, e.g. `1,-1,1`, or a mapping of these axes. At "
        "most one size may be -1 (use all remaining devices). `auto`: fsdp within each process, dp across "
        "processes.",
    )
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    sft: SFTConfig = SFTConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    update: UpdateConfig = UpdateConfig()
    logprob: LogprobConfig = LogprobConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    critic_optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
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
                "must be at most data.batch_size ({whole}), the number of prompts in a training step; "
                "set a smaller number, or null for all of them",
                {"key": "update.mini_batch_size", "value": mini, "whole": whole},
            )
        return self

    @model_validator(mode="after")
    def _mini_batches_agree(self) -> Self:
        update, whole = self.update, self.data.batch_size
        mini, number = update.mini_batch_size, update.num_mini_batches
        if mini and number and mini != -(-whole // number):
            raise PydanticCustomError(
                "across_sections",
                "must be null, or {size} as update.num_mini_batches {number} and data.batch_size {whole} "
                "make it; set one of the two to null",
                {
                    "key": "update.mini_batch_size",
                    "value": mini,
                    "size": -(-whole // number),
                    "number": number,
                    "whole": whole,
                },
            )
        return self

    @model_validator(mode="after")
    def _reference_that_follows_is_used(self) -> Self:
        update, default = self.update, UpdateConfig.model_fields["reference_mixup"].default
        if update.reference_sync_steps is not None and not self.needs_reference:
            raise PydanticCustomError(
                "across_sections",
                "has no effect without a reference; set update.kl_coef or reward.kl_coef above 0, or this "
                "key to null",
                {"key": "update.reference_sync_steps", "value": update.reference_sync_steps},
            )
        if update.reference_sync_steps is None and update.reference_mixup != default:
            raise PydanticCustomError(
                "across_sections",
                "has no effect without update.reference_sync_steps; set that, or leave this key at its "
                "default",
                {"key": "update.reference_mixup", "value": update.reference_mixup},
            )
        return self

    @model_validator(mode="after")
    def _best_mode_is_used(self) -> Self:
        if self.checkpoint.best_metric is None and self.checkpoint.best_mode != "max":
            raise PydanticCustomError(
                "across_sections",
                "has no effect without checkpoint.best_metric; set that, or leave this key at its default",
                {"key": "checkpoint.best_mode", "value": self.checkpoint.best_mode},
            )
        return self

    @model_validator(mode="after")
    def _one_micro_batch_mode(self) -> Self:
        for section, stage in (("update", self.update), ("logprob", self.logprob), ("critic", self.critic)):
            if stage.micro_batch_size is not None and stage.max_tokens_per_device is not None:
                raise PydanticCustomError(
                    "across_sections",
                    "must be null if {budget_key} ({budget}) is set: the size of micro-batches is given in "
                    "sequences or in tokens, not both; set one of the two to null",
                    {
                        "key": f"{section}.micro_batch_size",
                        "value": stage.micro_batch_size,
                        "budget_key": f"{section}.max_tokens_per_device",
                        "budget": stage.max_tokens_per_device,
                    },
                )
        return self

    @model_validator(mode="after")
    def _critic_is_used(self) -> Self:
        gae, critic = self.advantage.estimator == "gae", self.critic
        if gae and critic.enabled is False:
            raise PydanticCustomError(
                "across_sections",
                "must not be false for advantage.estimator gae, which needs a critic; set true or null",
                {"key": "critic.enabled", "value": False},
            )
        if gae or critic.enabled:
            return self
        for section, values in (("critic", critic), ("critic_optimizer", self.critic_optimizer)):
            for key, field in type(values).model_fields.items():
                value = getattr(values, key)
                if key != "enabled" and value != field.default:
                    raise _without_critic(f"{section}.{key}", value)
        if self.placement.critic is not None:
            raise _without_critic("placement.critic", self.placement.critic)
        if self.offload.critic:
            raise _without_critic("offload.critic", True)
        return self

    @model_validator(mode="after")
    def _reward_models_are_used(self) -> Self:
        placed, offloaded = self.placement.reward, self.offload.reward_models
        for key, value in (("placement.reward", placed), ("offload.reward_models", offloaded or None)):
            if value is not None and not self.reward.models:
                raise PydanticCustomError(
                    "across_sections",
                    "has no effect without a reward model; add model:PATH to reward.functions, or leave this "
                    "key at its default",
                    {"key": key, "value": value},
                )
        return self

    @model_validator(mode="after")
    def _overlong_is_used(self) -> Self:
        reward = self.reward
        for key in ("overlong_limit", "overlong_buffer"):
            if "overlong" not in reward.functions and getattr(reward, key) is not None:
                raise PydanticCustomError(
                    "across_sections",
                    "has no effect without the function overlong in reward.functions; add it, or set null",
                    {"key": f"reward.{key}", "value": getattr(reward, key)},
                )
        limit, buffer = reward.overlong_limit or self.rollout.max_new_tokens, reward.overlong_buffer
        if buffer is not None and buffer > limit:
            raise PydanticCustomError(
                "across_sections",
                "must be at most reward.overlong_limit ({limit} tokens); set a smaller number",
                {"key": "reward.overlong_buffer", "value": buffer, "limit": limit},
            )
        return self

    @model_validator(mode="after")
    def _greedy_baseline_is_drawn(self) -> Self:
        if self.advantage.estimator == "remax" and self.rollout.greedy_baseline is False:
            raise PydanticCustomError(
                "across_sections",
                "must not be false for advantage.estimator remax, whose baseline it is; set true or null",
                {"key": "rollout.greedy_baseline", "value": False},
            )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_has_groups(self) -> Self:
        rounds = self.rollout.dynamic_sampling_rounds
        if rounds > 1 and self.rollout.n == 1:
            raise PydanticCustomError(
                "across_sections",
                "must be 1 for rollout.n 1: it looks for groups whose samples have different rewards, which "
                "a single sample never has; set 1, or raise rollout.n",
                {"key": "rollout.dynamic_sampling_rounds", "value": rounds},
            )
        return self

    @model_validator(mode="after")
    def _episodes_are_possible(self) -> Self:
        rollout = self.rollout
        if rollout.environment is not None and rollout.tools:
            raise PydanticCustomError(
                "across_sections",
                "must be empty if rollout.environment is set: an environment has its own tools, as methods; "
                "set one of the two",
                {"key": "rollout.tools", "value": list(rollout.tools)},
            )
        if rollout.has_episodes and self.data.on_long_prompt == "truncate_left":
            raise PydanticCustomError(
                "across_sections",
                "must be error or skip with rollout.environment or rollout.tools: the chat template writes "
                "schemas of tools and what follows a prompt from its messages, which must be whole; set one "
                "of the two",
                {"key": "data.on_long_prompt", "value": self.data.on_long_prompt},
            )
        if rollout.has_episodes:
            return self
        if "environment" in self.reward.functions:
            raise PydanticCustomError(
                "across_sections",
                "names the reward of an environment, which there is not; set rollout.environment, or leave "
                "the function out",
                {"key": "reward.functions.environment", "value": self.reward.functions["environment"]},
            )
        for key in EPISODE_KEYS:
            value = getattr(rollout, key)
            if value != type(rollout).model_fields[key].default:
                raise PydanticCustomError(
                    "across_sections",
                    "has no effect without rollout.environment or rollout.tools; set one of these, or leave "
                    "this key at its default",
                    {"key": f"rollout.{key}", "value": value},
                )
        return self

    @model_validator(mode="after")
    def _fleet_is_possible(self) -> Self:
        rollout, servers = self.rollout, list(self.rollout.servers)
        refused: tuple[tuple[object, str, object, str], ...] = (
            (
                rollout.workers and servers,
                "rollout.servers",
                servers,
                "must be empty with rollout.workers: either workers or servers sample; leave one of the two "
                "out",
            ),
            (
                servers and rollout.has_episodes,
                "rollout.servers",
                servers,
                "must be empty with rollout.environment and rollout.tools: quatrain's own engine samples "
                "episodes; set rollout.workers, or sample on devices of this run",
            ),
            (
                len(set(servers)) < len(servers),
                "rollout.servers",
                servers,
                "must name each server once; leave the second one out",
            ),
            (
                servers and rollout.mesh is not None,
                "rollout.mesh",
                rollout.mesh,
                "must be null with rollout.servers: each server decides how it uses its devices; set null, "
                "and start servers with the parallelism that they need",
            ),
            (
                rollout.has_fleet and self.placement.rollout is not None,
                "placement.rollout",
                self.placement.rollout,
                "must be null with rollout.workers and rollout.servers, which have devices of their own; set "
                "null, or sample on devices of this run",
            ),
            (
                rollout.has_fleet and rollout.in_flight,
                "rollout.in_flight",
                True,
                "must be false with rollout.workers and rollout.servers: each of their groups is sampled "
                "from one version of the weights; set false, or sample on devices of this run",
            ),
            (
                rollout.weights_dir is not None and not rollout.has_fleet,
                "rollout.weights_dir",
                rollout.weights_dir,
                "has no effect without rollout.workers or rollout.servers; set one of these, or null",
            ),
            (
                rollout.weights_dir is not None and self.lora.rank and rollout.workers,
                "rollout.weights_dir",
                rollout.weights_dir,
                "must be null with lora.rank: adapters reach rollout workers through Ray's object store",
            ),
        )
        for holds, key, value, sentence in refused:
            if holds:
                raise PydanticCustomError("across_sections", sentence, {"key": key, "value": value})
        return self

    @model_validator(mode="after")
    def _in_flight_is_possible(self) -> Self:
        rollout = self.rollout
        remedies = {
            "rollout.max_staleness of 1 or more": rollout.max_staleness > 0,
            "rollout.dynamic_sampling_rounds 1": rollout.dynamic_sampling_rounds == 1,
            "no greedy baseline": not rollout.greedy_baseline and self.advantage.estimator != "remax",
        }
        for needed, held in remedies.items():
            if rollout.in_flight and not held:
                raise PydanticCustomError(
                    "across_sections",
                    "needs {needed}; set that, or false",
                    {"key": "rollout.in_flight", "value": True, "needed": needed},
                )
        return self

    @model_validator(mode="after")
    def _one_ratio_to_the_sampler(self) -> Self:
        update, rollout = self.update, self.rollout
        corrected = update.correction not in (None, "none")
        asked = {"key": "update.correction", "value": update.correction}
        if corrected and update.old_logprobs == "rollout":
            raise PydanticCustomError(
                "across_sections",
                "must be none for update.old_logprobs rollout, which takes the ratio to the sampler already: "
                "the difference would count twice; set one of the two to its default",
                asked,
            )
        if update.correction_floor is not None and update.correction not in (None, "mask"):
            raise PydanticCustomError(
                "across_sections",
                "has no effect for update.correction {correction}; set update.correction to mask, or null",
                {
                    "key": "update.correction_floor",
                    "value": update.correction_floor,
                    "correction": update.correction,
                },
            )
        if update.old_logprobs == "rollout" and not rollout.samples_the_policy:
            raise PydanticCustomError(
                "across_sections",
                "must not be rollout with rollout.top_p, top_k, min_p or temperature 0: the sampler's "
                "log-probabilities are those of another distribution than the policy's, so that the ratio, "
                "and a KL in the reward, would count the filter; unset these, or set auto or recompute",
                {"key": "update.old_logprobs", "value": update.old_logprobs},
            )
        if corrected and not rollout.samples_the_policy:
            raise PydanticCustomError(
                "across_sections",
                "needs log-probabilities of the policy's own distribution, and rollout.top_p, top_k, min_p "
                "or temperature 0 make the sampler draw from another; unset these, or set none",
                asked,
            )
        if rollout.servers and not rollout.samples_the_policy:
            raise PydanticCustomError(
                "across_sections",
                "must be empty with rollout.top_p, top_k, min_p or temperature 0: what other engines sample "
                "is corrected by the ratio of policy to sampler, which then draws from another distribution; "
                "unset these, or sample on devices of this run",
                {"key": "rollout.servers", "value": list(rollout.servers)},
            )
        if rollout.max_staleness and not rollout.samples_the_policy:
            raise PydanticCustomError(
                "across_sections",
                "must be 0 with rollout.top_p, top_k, min_p or temperature 0: stale tokens are corrected by "
                "the ratio of policy to sampler, which then draws from another distribution; unset these, or "
                "set 0",
                {"key": "rollout.max_staleness", "value": rollout.max_staleness},
            )
        if rollout.max_staleness and update.correction == "none" and update.old_logprobs != "rollout":
            raise PydanticCustomError(
                "across_sections",
                "must not be none for rollout.max_staleness {staleness}: stale tokens would be trained on as "
                "if the current policy had sampled them; set truncate, mask or null, or "
                "update.old_logprobs to rollout",
                {**asked, "staleness": rollout.max_staleness},
            )
        return self

    @model_validator(mode="after")
    def _kl_target_is_used(self) -> Self:
        if self.reward.kl_target is not None and not self.reward.kl_coef:
            raise PydanticCustomError(
                "across_sections",
                "needs reward.kl_coef above 0, the coefficient that is adapted to it; set that, or null",
                {"key": "reward.kl_target", "value": self.reward.kl_target},
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen reference policy is needed: for KL in the loss or in the reward."""
        return self.update.kl_coef > 0 or self.reward.kl_coef > 0

    @property
    def copies_reference(self) -> bool:
        """Whether the reference has weights of its own; with adapters, it has those of the frozen base."""
        return self.needs_reference and not self.lora.rank

    @model_validator(mode="after")
    def _lora_is_used(self) -> Self:
        lora = self.lora
        unused = {
            "lora.alpha": lora.alpha,
            "lora.targets": None if lora.targets == LoraConfig().targets else list(lora.targets),
            "rollout.lora": None if self.rollout.lora == "merged" else self.rollout.lora,
        }
        for key, value in unused.items():
            if not lora.rank and value is not None:
                raise PydanticCustomError(
                    "across_sections",
                    "has no effect with lora.rank 0; set lora.rank to 1 or more, or leave this key at its "
                    "default",
                    {"key": key, "value": value},
                )
        return self

    @model_validator(mode="after")
    def _lora_is_possible(self) -> Self:
        rank, update = self.lora.rank, self.update
        if rank and (self.advantage.estimator == "gae" or self.critic.enabled):
            raise PydanticCustomError(
                "across_sections",
                "must be 0 with a critic, all of whose weights are trained; set 0, or take an "
                "advantage.estimator without a critic",
                {"key": "lora.rank", "value": rank},
            )
        of_reference = {
            "placement.reference": self.placement.reference,
            "offload.reference": self.offload.reference or None,
        }
        for key, value in of_reference.items():
            if rank and value is not None:
                raise PydanticCustomError(
                    "across_sections",
                    "has no effect with lora.rank {rank}, where the reference is the frozen base, which is "
                    "in memory on the devices of training; leave this key at its default",
                    {"key": key, "value": value, "rank": rank},
                )
        if rank and update.reference_mixup != 1:
            raise PydanticCustomError(
                "across_sections",
                "must be 1 with lora.rank {rank}: adapters of that rank cannot hold a mixture of two; set 1, "
                "or lora.rank to 0",
                {"key": "update.reference_mixup", "value": update.reference_mixup, "rank": rank},
            )
        return self

    @model_validator(mode="after")
    def _prompts_can_be_shared(self) -> Self:
        update = self.update
        if update.share_prompts is True and update.micro_batch_size is not None:
            raise PydanticCustomError(
                "across_sections",
                "needs a token budget, and update.micro_batch_size is {rows}: a padded row holds one "
                "sequence; set update.max_tokens_per_device instead, or update.share_prompts to auto",
                {"key": "update.share_prompts", "value": True, "rows": update.micro_batch_size},
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
    def _optimizer_keys_are_used(self) -> Self:
        rounds = self.model.param_dtype == "bfloat16" and not self.lora.rank
        for section, own in (("optimizer", self.optimizer), ("critic_optimizer", self.critic_optimizer)):
            unused = {
                "weight_decay": (
                    own.name == "sgd" and own.weight_decay > 0,
                    "must be 0 for {section}.name sgd, which has no weight decay; set 0, or take adamw or "
                    "lion",
                ),
                "state_dtype": (
                    own.state_dtype != "float32" and not own.has_first_moment,
                    "has no effect for {section}.name sgd with beta1 0, which has no first moment; set "
                    "float32, or beta1 above 0",
                ),
                "stochastic_rounding": (
                    not own.stochastic_rounding and not rounds,
                    "has no effect where what is trained is float32 and not rounded (model.param_dtype "
                    "float32, or adapters); leave this key at its default",
                ),
            }
            for key, (wrong, rule) in unused.items():
                if wrong:
                    asked = {"key": f"{section}.{key}", "value": getattr(own, key), "section": section}
                    raise PydanticCustomError("across_sections", rule, asked)
        return self
