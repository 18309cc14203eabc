"""The section `lora`: adapters of low rank."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from quatrain.config.fields import MustAgreeOnResume, NonNegative, Section, must

ALL_LINEAR: Final = "all-linear"
"""peft's word for all matrices of `MODULES` that a model has."""
MODULES = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The matrices of a layer, and the modules of a checkpoint that each holds."""
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
        tuple[Literal["all-linear", "qkv", "o", "gate_up", "down", "experts_gate_up", "experts_down"], ...],
        BeforeValidator(_as_matrices),
        must("have at least one entry", len),
        must("name each matrix once", lambda names: len({*names}) == len(names)),
        MustAgreeOnResume(where="lora.rank"),
    ] = Field((ALL_LINEAR,), strict=False)
    """Matrices of each layer that have adapters: `all-linear`, of the first four below those that the model
    has; `qkv` (queries, keys and values, each with adapters of its
    own; in DeltaNet layers all its inputs), `o` (the output of attention), `gate_up` and `down` (the
    MLP, or the expert of all tokens), `experts_gate_up` and `experts_down` or in one word `experts` (adapters
    for each expert of its own).
    peft's names of modules are taken too, such as `o_proj`, those of one matrix together."""
