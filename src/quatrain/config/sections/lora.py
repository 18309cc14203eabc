"""The section `lora`: adapters of low rank."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quatrain.config.fields import MustAgreeOnResume, NonNegative, Section, must


class LoraConfig(Section):
    """Adapters of low rank (LoRA), which are trained in place of the model's weights: [lora.md](lora.md)."""

    rank: Annotated[NonNegative, MustAgreeOnResume()] = 0
    """Rank of the adapters; 0: none, all weights are trained. With 1 or more, the model at `model.path` is
    frozen in `model.param_dtype`, and adapters are float32."""
    alpha: Annotated[float | None, MustAgreeOnResume(where="lora.rank")] = Field(None, gt=0)
    """What adapters add to a product is multiplied by `alpha` / `rank`; derived: `lora.rank`."""
    targets: Annotated[
        tuple[Literal["qkv", "o", "gate_up", "down"], ...],
        must("have at least one entry", len),
        must("name each matrix once", lambda names: len({*names}) == len(names)),
        MustAgreeOnResume(where="lora.rank"),
    ] = Field(("qkv", "o", "gate_up", "down"), strict=False)
    """Matrices of each layer that have adapters: `qkv` (queries, keys and values, each with adapters of its
    own), `o` (the output of attention), `gate_up` and `down` (the MLP)."""
