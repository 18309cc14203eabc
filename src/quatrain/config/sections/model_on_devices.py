"""The sections about the policy and where arrays lie: `model`, `lora`, `placement`, `offload`."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from quatrain.config.fields import (
    NOT_SET,
    Derived,
    Devices,
    MustAgreeOnResume,
    NonNegative,
    Section,
    Text,
    must,
)


class ModelConfig(Section):
    """The policy: source of its weights, dtypes and kernels."""

    path: Text = "builtin:tiny"
    """The model: `builtin:tiny`, a Hugging Face folder, on this machine or in a bucket (`gs://bucket/model`,
    `s3://…`), a model on the Hub (`Qwen/Qwen2.5-0.5B-Instruct`) or a `.gguf` file."""
    tokenizer: Derived[Text] = NOT_SET
    """The tokenizer: a folder, a model on the Hub or a `.gguf` file; derived: `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations, matrix products and the KV cache."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which parameters are stored and exported."""
    remat: Literal["none", "dots", "layer"] = "layer"
    """What the backward pass recomputes: `layer`: everything in a layer (only the layer's input is kept);
    `dots`: everything but products with weights and attention (more memory, less time); `none`: nothing."""
    attention: Literal["auto", "xla", "cudnn", "tokamax", "splash"] = "auto"
    """Attention kernel of forward and backward passes: `xla` (any device), `cudnn` (cuDNN flash attention,
    GPUs), `tokamax` (Mosaic kernels of the extra `gpu`, GPUs) or `splash` (splash attention, TPUs). `auto`
    takes the first kernel of the device that supports the model and computes a small example as `xla` does,
    and logs the choice. A named kernel that does not is an error."""
    vision: Annotated[Literal["none", "frozen", "projector", "all"] | None, MustAgreeOnResume()] = None
    """What is trained of the tower, the part of the model that sees pictures: `frozen`: nothing; `projector`:
    what fits its states to the text model (merger, connector); `all`: the whole tower; `none`: the model is
    its text part, which is exported alone. null: `frozen` if the model has a tower that is supported (a
    built-in one: `all`), else `none`."""
    vision_cache_bytes: int = Field(2**30, ge=1)
    """Bytes of the host's memory for features of pictures that are not in use; those of the batches that are
    being sampled and trained on are kept beside them."""
    experts: Literal["auto", "blocks", "ragged", "tokamax"] = "auto"
    """How products with experts' matrices are computed: `blocks` (a loop over blocks of rows of one expert,
    any device), `ragged` (XLA's `ragged_dot`, a kernel on TPUs, large and slow elsewhere) or `tokamax` (the
    kernel of the extra `gpu`, GPUs and TPUs). `auto` takes the first of the device that computes a small
    example as `blocks` does, and logs the choice. A named one that does not is an error."""


ALL_LINEAR: Final = "all-linear"
"""peft's word for all matrices of `MODULES` that a model has."""
MODULES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The matrices of a layer, and the modules of a checkpoint that each holds."""
VISION_TARGETS = ("vision.qkv", "vision.o", "vision.gate_up", "vision.down")
"""The matrices of the blocks of a tower."""
_EXPERTS = ("experts_gate_up", "experts_down")
_ROUTERS = ("router", "gate")
"""Their names in checkpoints."""
_ALONE = {"qkv_proj": "qkv", "gate_up_proj": "gate_up"}
"""Modules that some checkpoints have in place of several of these."""


def _as_matrices(value: object) -> object:
    """peft's names of modules as matrices; what `all-linear` has already is left out beside it."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    if routers := [word for word in words if word in _ROUTERS]:
        message = "must not name {router}: routers have no adapters; leave it out"
        raise PydanticCustomError("targets", message, {"router": routers[0]})
    named = [_ALONE.get(word, word) for word in words]
    if ALL_LINEAR in named:
        named = [word for word in named if word not in (*MODULES, *chain(*MODULES.values()))]
    if "experts" in named:
        at = named.index("experts")
        named[at : at + 1] = _EXPERTS
    for matrix, modules in MODULES.items():
        given = [module for module in modules if module in named]
        if missing := [module for module in modules if module not in named] if given else []:
            raise PydanticCustomError(
                "targets",
                "must name {modules} together, which are one matrix here; {missing} is missing",
                {"modules": ", ".join(modules), "missing": ", ".join(missing)},
            )
        if given:
            named = [word for word in named if word not in modules[1:]]
            named[named.index(modules[0])] = matrix
    return named


class LoraConfig(Section):
    """Adapters of low rank (LoRA), which are trained in place of the model's weights: [lora.md](lora.md)."""

    rank: Annotated[NonNegative, MustAgreeOnResume()] = 0
    """Rank of the adapters; 0: none, all weights are trained. With 1 or more, the model at `model.path` is
    frozen in `model.param_dtype`, and adapters are float32."""
    alpha: Annotated[float | None, MustAgreeOnResume(where="lora.rank")] = Field(None, gt=0)
    """What adapters add to a product is multiplied by `alpha` / `rank`; derived: `lora.rank`."""
    targets: Annotated[
        tuple[
            Literal[
                "all-linear",
                "qkv",
                "o",
                "gate_up",
                "down",
                "experts_gate_up",
                "experts_down",
                "lm_head",
                "vision.qkv",
                "vision.o",
                "vision.gate_up",
                "vision.down",
            ],
            ...,
        ],
        BeforeValidator(_as_matrices),
        must("have at least one entry", len),
        must("name each matrix once", lambda names: len({*names}) == len(names)),
        MustAgreeOnResume(where="lora.rank"),
    ] = Field((ALL_LINEAR,), strict=False)
    """Matrices of each layer that have adapters: `all-linear`, of the first four below those that the model
    has; `qkv` (queries, keys and values, each with adapters of its
    own; in DeltaNet layers all its inputs), `o` (the output of attention), `gate_up` and `down` (the
    MLP, or the expert of all tokens), `experts_gate_up` and `experts_down` or in one word `experts` (adapters
    for each expert of its own); `lm_head`, the output head; and `vision.qkv`, `vision.o`, `vision.gate_up`
    and `vision.down`, the matrices of the tower's blocks, with `model.vision: all`.
    peft's names of modules are taken too, such as `o_proj`, those of one matrix together."""


class PlacementConfig(Section):
    """Which devices training, rollout, reference policy, critic, reward models and teacher use.

    Devices are given by their numbers within a process, the same in every process. Two of these roles must
    have either the same devices or none in common.
    """

    train: Devices | None = None
    """Devices of training, e.g. `0-3` or `0,2`; null: all."""
    rollout: Devices | None = None
    """Devices of the rollout; null: the training devices."""
    reference: Devices | None = None
    """Devices of the reference policy; null: the training devices."""
    critic: Devices | None = None
    """Devices of the critic; null: the training devices."""
    reward: Devices | None = None
    """Devices of the reward models; null: the training devices."""
    teacher: Devices | None = None
    """Devices of the teacher; null: the training devices."""


class OffloadConfig(Section):
    """Arrays that are moved to the host's pinned memory while they are not in use."""

    reference: bool = False
    """Offload the reference policy while no reference log-probabilities are computed."""
    optimizer: bool = False
    """Offload the optimizer state between optimizer steps."""
    policy: bool = False
    """Offload the policy's parameters while they are not trained, so that the rollout has their room. It
    needs a rollout with a copy of the weights on the same devices (another dtype, another mesh, or merged
    adapters) and `rollout.max_staleness` 0."""
    critic: bool = False
    """Offload the critic: its weights while no values are computed and it is not trained, its optimizer state
    between its optimizer steps."""
    reward_models: bool = False
    """Offload the reward models while no scores are computed."""
    teacher: bool = False
    """Offload the teacher while no log-probabilities of it are computed."""
