"""The whole configuration: its sections, its two keys without a section, and the keys by their dotted names.

Imported by every package: a stage receives its own section, not the whole configuration. Does not import JAX.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Self, get_args, get_origin

from pydantic import Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from quatrain.config.fields import Mesh, MustAgreeOnResume, Section, value_at
from quatrain.config.rules import broken_rule
from quatrain.config.sections.data import DataConfig
from quatrain.config.sections.given import DPOConfig, GivenConfig, RMConfig, SFTConfig, passes
from quatrain.config.sections.model_on_devices import LoraConfig, ModelConfig, OffloadConfig, PlacementConfig
from quatrain.config.sections.reward import AdvantageConfig, DistillConfig, RewardConfig
from quatrain.config.sections.rollout import RolloutConfig
from quatrain.config.sections.tinker import TinkerConfig
from quatrain.config.sections.update import (
    CriticConfig,
    CriticOptimizerConfig,
    LogprobConfig,
    OptimizerConfig,
    UpdateConfig,
)
from quatrain.config.sections.whole_run import (
    CheckpointConfig,
    DistributedConfig,
    EvalConfig,
    HubConfig,
    LoggingConfig,
    RunConfig,
)
from quatrain.config.tasks import generates

# Random keys are created from 32 bits: a larger seed would silently act like a smaller one.
LARGEST_SEED = 2**32 - 1


_OF_ROLLOUTS = {
    "data": "data.train",
    "eval": "data.eval",
    "steps": "run.steps",
    "epochs": "run.epochs",
    "batch_size": "data.batch_size",
    "max_length": "data.max_prompt_length",
    "learning_rate": "optimizer.learning_rate",
}
"""Key of a section on given data -> what has its place in `quatrain train`."""


class Config(Section):
    """The whole configuration of a run."""

    seed: Annotated[int, MustAgreeOnResume()] = Field(0, ge=0, le=LARGEST_SEED)
    """Seed of all random numbers: order of the data, sampling, initialisation."""
    mesh: Mesh = "auto"
    """Device mesh for training: `dp,fsdp,tp[,cp[,ep]]`, e.g. `1,-1,1`, or a mapping such as
    `{fsdp: -1, ep: 2}`; axes that are left out have size 1. `dp`: copies of the model; `fsdp`: shards of its
    parameters; `tp`: parts of each layer; `cp`: parts of each sequence; `ep`: parts of the experts:
    [scaling.md](scaling.md#the-mesh). At most one size may be -1 (use all remaining devices). `auto`: fsdp
    within each process, dp across processes."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    sft: SFTConfig = SFTConfig()
    dpo: DPOConfig = DPOConfig()
    rm: RMConfig = RMConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    update: UpdateConfig = UpdateConfig()
    distill: DistillConfig = DistillConfig()
    logprob: LogprobConfig = LogprobConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    critic_optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    hub: HubConfig = HubConfig()
    placement: PlacementConfig = PlacementConfig()
    offload: OffloadConfig = OffloadConfig()
    distributed: DistributedConfig = DistributedConfig()
    tinker: TinkerConfig = TinkerConfig()

    @model_validator(mode="after")
    def _keys_agree(self, info: ValidationInfo) -> Self:
        context = info.context or {}
        # Commands that train nothing read what they need of a run's configuration, whatever its task.
        keys = fields() if context.get("trains", True) else ()
        if context.get("rules", True) and (broken := broken_rule(self, keys)):
            key, value, sentence = broken
            context = {"key": key, "value": value, "sentence": sentence}
            raise PydanticCustomError("across_sections", "{sentence}", context)
        return self

    @property
    def given(self) -> GivenConfig:
        """The section of what the run trains on, if that is data that exist; in `quatrain train`, `sft`."""
        sections: dict[str, GivenConfig] = {"dpo": self.dpo, "rm": self.rm}
        return sections.get(self.run.task, self.sft)

    @property
    def generates(self) -> bool:
        """Whether the run completes prompts and scores them: in training, or in evaluations alone."""
        return not self.run.on_given_data or generates(self)

    def key_of(self, name: str) -> str:
        """The key that is `name` in the section of what the run trains on: `dpo.steps`, or `run.steps`."""
        return f"{self.run.task}.{name}" if self.run.on_given_data else _OF_ROLLOUTS[name]

    def steps_of(self, num_rows: int) -> int:
        """Training steps of the run on so many rows: as many as are set, or as its epochs make."""
        steps, epochs, batch_size = (
            value_at(self, self.key_of(k)) for k in ("steps", "epochs", "batch_size")
        )
        if self.run.on_given_data:  # the last batch has the rest, so that every row is seen as often
            return steps or max(1, math.ceil(passes(epochs, num_rows) / batch_size))
        return steps or max(1, passes(epochs, math.ceil(num_rows / batch_size)))

    @property
    def keeps_supervised_steps(self) -> bool:
        """Whether a resumed run must have the same `sft.steps`: its adapters' reference is their outcome."""
        return self.run.task == "sft" or self.lora.rank > 0

    @property
    def needs_reference(self) -> bool:
        """Whether the reference policy is needed: for KL in the loss or in the reward, or as the teacher."""
        teaches = "initial" in self.distill.own
        return self.update.kl_coef > 0 or self.reward.kl_coef > 0 or teaches

    @property
    def copies_reference(self) -> bool:
        """Whether the reference has weights of its own; with adapters, it has those of the frozen base."""
        return self.needs_reference and not self.lora.rank

    @property
    def size_of_mini_batches(self) -> int:
        """Prompts of an optimizer step, with a training step split into `update.num_mini_batches` parts."""
        return math.ceil(self.data.batch_size / (self.update.num_mini_batches or 1))

    @property
    def mini_batches_by_number(self) -> int:
        """Parts of `size_of_mini_batches` in a training step: `update.num_mini_batches`, or fewer."""
        return math.ceil(self.data.batch_size / self.size_of_mini_batches)

    def optimizer_steps(self, sizes: UpdateConfig | CriticConfig) -> int:
        """Optimizer steps of a training step, of the policy or of the critic."""
        return sizes.epochs * math.ceil(self.data.batch_size / sizes.mini_batch_size)

    @property
    def overlong_limit(self) -> int:
        """Tokens of a completion at which the function `overlong` gives -1."""
        return self.reward.overlong_limit or self.rollout.max_new_tokens


@functools.cache
def sections() -> dict[str, type[Section]]:
    """The sections of the configuration by name, in order."""
    kinds = ((name, field.annotation) for name, field in Config.model_fields.items())
    return {name: kind for name, kind in kinds if isinstance(kind, type) and issubclass(kind, Section)}


@functools.cache
def fields() -> dict[str, FieldInfo]:
    """All keys of the schema by their dotted names; a section's name alone is not among them."""
    nested = sections()
    keys = {name: field for name, field in Config.model_fields.items() if name not in nested}
    return keys | {
        f"{name}.{key}": field for name, kind in nested.items() for key, field in kind.model_fields.items()
    }


def valid_keys() -> list[str]:
    """All dotted keys of the schema."""
    return list(fields())


def inner_section(key: str) -> type[Section] | None:
    """The section that is the value of a dotted key (`reward.judge`), if it is one."""
    field = fields().get(key)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def is_mapping(path: tuple[str, ...]) -> bool:
    """Whether the value of the key at `path` has entries that can be set one by one.

    A mapping with arbitrary names (`reward.functions`), or a section (`reward.judge`).
    """
    key = ".".join(path)
    field = fields().get(key)
    return field is not None and (get_origin(field.annotation) is dict or inner_section(key) is not None)
