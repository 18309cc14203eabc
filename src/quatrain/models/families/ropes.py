"""Rotary embeddings in config.json: how each kind is read and written, in the layouts of transformers 4 and
5."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from quatrain.config.errors import listed, shown
from quatrain.models.hf_config import HFConfig, RopeConfig, RopeParameters
from quatrain.models.rope import Rope, longrope_scale, yarn_scale

logger = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
"""The supported kinds of rotary embeddings, and the values that each must have."""
_REMEDIES = {
    "dynamic": "; its frequencies change with the length of a call, so that cached keys become wrong: set "
    "rope_type to yarn with the same factor, or remove the scaling",
}


def read_rope(c: HFConfig, *, by_type: bool = False, partial: bool = False, **fields: Any) -> Rope:
    """The rotary embeddings of all layers, or `by_type` of those with full attention.

    If `rope_scaling` is given, it replaces the scaling in `rope_parameters`, as in transformers. `partial`:
    whether the family may rotate a part of a head alone. `fields` are further ones of the `Rope`.
    """
    written = c.rope_parameters or RopeParameters()
    if not by_type and written.model_fields_set & {FULL, SLIDING}:
        raise ValueError(
            "rope_parameters for each type of layer, which this family does not have: give one set"
        )
    rope = written.full_attention or written
    theta = rope.rope_theta or c.rope_theta
    if c.rope_scaling and c.rope_scaling.model_fields_set:
        rope, theta = c.rope_scaling, c.rope_scaling.rope_theta or c.rope_theta or rope.rope_theta
    share = rope.partial_rotary_factor or written.partial_rotary_factor or c.partial_rotary_factor or 1.0
    if share != 1.0 and not partial:
        raise ValueError(f"partial_rotary_factor = {share}; this family has only 1.0")
    return _rope(rope, theta, c, {"partial": share} | fields)


def with_sections(rope: Rope, c: HFConfig, *, alternating: bool) -> Rope:
    """The rotary embeddings of a model that sees pictures; `alternating` as in transformers, whatever
    `mrope_interleaved` says.

    Others have no sections, which change nothing in text: engines take a text model that is exported with
    them for one that sees.
    """
    given = (each.mrope_section for each in (c.rope_scaling, c.rope_parameters) if each)
    return replace(rope, sections=tuple(next(filter(None, given), ())), alternating=alternating)


def read_sliding_rope(c: HFConfig, theta: float | None) -> Rope:
    """The rotary embeddings of sliding-window layers that have their own; they are never scaled."""
    local = (c.rope_parameters and c.rope_parameters.sliding_attention) or RopeConfig()
    rope = _rope(local, local.rope_theta or theta, c, {})
    if rope.kind != "default":
        raise ValueError(f"{SLIDING} layers must have rope_type default, not {rope.kind}")
    return rope


_WITHOUT_EFFECT = ("finetuned",)
"""Another key of real files, a remark."""
_MROPE = "mrope"
"""What older files of Qwen2.5-VL call the kind `default` with sections."""
_NOT_OF_KIND = {
    "default": ("low_freq_factor", "high_freq_factor", "attention_factor", "attn_factor", "beta_fast"),
    "linear": ("low_freq_factor", "high_freq_factor", "attention_factor", "attn_factor", "beta_fast"),
    "llama3": ("attention_factor", "attn_factor", "beta_fast", "beta_slow", "mscale"),
    "yarn": ("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    "longrope": ("low_freq_factor", "high_freq_factor", "attn_factor", "beta_fast", "beta_slow"),
}
"""Keys that change the numbers of another kind, so that whoever wrote them meant that kind."""


def _refuse_unknown(rope: RopeConfig, kind: str) -> None:
    """Raises ValueError for keys that nothing here reads, by which their writer meant other numbers."""
    unknown = [key for key in rope.model_extra or () if key not in _WITHOUT_EFFECT]
    if unknown:
        known = [key for key in RopeConfig.model_fields if key != "attn_factor"]
        near = [
            f"{key} (did you mean {near}?)" for key in unknown for near in get_close_matches(key, known, 1)
        ]
        raise ValueError(
            f"rope settings (rope_scaling or rope_parameters) that are not known here: "
            f"{', '.join(near) or listed(unknown)}; correct their names, or remove them"
        )
    if unread := [key for key in _NOT_OF_KIND.get(kind, ()) if getattr(rope, key) is not None]:
        raise ValueError(
            f"{listed(unread)} in rope settings of type {kind}, which does not read it; remove it"
        )


def _rope(rope: RopeConfig, theta: float | None, c: HFConfig, fields: dict[str, Any]) -> Rope:
    names = {"default" if name == _MROPE else name for name in (rope.rope_type, rope.type) if name}
    kind: Any = next(iter(names), "default")
    if len(names) > 1:
        raise ValueError(f"the rope_type {shown(rope.rope_type)} and type {shown(rope.type)}; remove one")
    if kind not in ROPE_TYPES:
        remedy = _REMEDIES.get(kind, "")
        raise ValueError(f"unsupported rope type {shown(kind)}; supported: {', '.join(ROPE_TYPES)}{remedy}")
    _refuse_unknown(rope, kind)
    fields = {"theta": theta or 10_000.0, "kind": kind, **fields}
    if kind == "default":
        if rope.factor not in (None, 1.0):
            raise ValueError(f"a rope factor ({rope.factor}) needs a rope_type, such as linear; add it")
        return Rope(**fields)
    if kind == "proportional":
        return Rope(**fields, factor=rope.factor or 1.0)
    values = {name: getattr(rope, name) for name in ROPE_TYPES[kind]}
    if None in values.values():
        raise ValueError(f"the rope type {kind} needs {', '.join(values)}; add the missing values")
    if kind == "linear":
        return Rope(**fields, **values)
    lengths = c.original_max_position_embeddings, rope.original_max_position_embeddings
    original = next((length for length in (*lengths, c.max_position_embeddings) if length), None)
    if original is None:
        raise ValueError(f"the rope type {kind} needs original_max_position_embeddings; add it")
    fields["original_max_position"] = original
    if kind == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        if low >= high:
            raise ValueError(f"low_freq_factor must be below high_freq_factor; got {low} and {high}")
        return Rope(**fields, **values)
    apart = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    apart |= {*(rope.model_extra or ())}
    given = rope.model_dump(exclude_none=True, exclude=apart)
    written = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    fields["written"] = tuple(sorted({**written, "original_max_position_embeddings": original}.items()))
    return _yarn(rope, fields) if kind == "yarn" else _longrope(rope, c, fields)


def _yarn(rope: RopeConfig, fields: dict[str, Any]) -> Rope:
    if fields["theta"] <= 1:
        raise ValueError(f"yarn needs a rope_theta above 1; got {fields['theta']}")
    factor, values = rope.factor or 1.0, dict(fields["written"])
    scale = rope.attention_factor or yarn_scale(factor, values)
    if rope.attn_factor is not None:  # vLLM and llama.cpp multiply by it; transformers does not know it
        product = yarn_scale(factor, values) * rope.attn_factor
        if rope.attention_factor is not None and not math.isclose(scale, product, rel_tol=1e-6):
            raise ValueError(
                f"attention_factor ({scale:g}) and attn_factor ({rope.attn_factor:g}, times yarn's own "
                f"factor {product:g}) in rope settings, which engines read differently; remove one"
            )
        scale = product
        _say_read_as_vllm(rope.attn_factor, product)
        # Exported as attention_factor too, so that transformers computes what was trained.
        fields["written"] = tuple(sorted({**values, "attention_factor": product}.items()))
    return Rope(
        **fields,
        factor=factor,
        scale=scale,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        truncate=rope.truncate is not False,
        query_beta=rope.llama_4_scaling_beta or 0.0,
    )


@functools.lru_cache(maxsize=16)  # once for a model, which is read several times
def _say_read_as_vllm(attn_factor: float, product: float) -> None:
    logger.warning(
        "attn_factor %g in rope settings multiplies yarn's own factor, to %g, as in vLLM and llama.cpp; "
        "transformers ignores it, and gets this product as attention_factor in what is exported",
        attn_factor,
        product,
    )


def _longrope(rope: RopeConfig, c: HFConfig, fields: dict[str, Any]) -> Rope:
    original, short, long = fields["original_max_position"], rope.short_factor or [], rope.long_factor or []
    head_dim = c.head_dim or c.hidden_size // c.num_attention_heads
    expected = Rope(partial=fields["partial"]).rotated(head_dim) // 2
    if original < 2:
        raise ValueError(f"longrope needs an original_max_position_embeddings of 2 or more; got {original}")
    if (len(short), len(long)) != (expected, expected):
        raise ValueError(
            f"short_factor and long_factor of longrope need a number for each of the {expected} frequencies; "
            f"they have {len(short)} and {len(long)}"
        )
    factor = rope.factor or (c.max_position_embeddings or original) / original
    scale = rope.attention_factor or longrope_scale(factor, original)
    return Rope(**fields, factor=factor, scale=scale, short_factors=tuple(short), long_factors=tuple(long))


def write_rope(rope: Rope | None, sliding: Rope | None = None, *, share: bool = False) -> dict[str, Any]:
    """Rotary embeddings in the layouts of transformers 4 and 5, so that other engines can read either.

    `sliding`: those of sliding-window layers, if they have their own. The share of a head that is rotated is
    written where it is not 1, or always with `share`.
    """
    rope = rope or Rope()
    if rope.written:
        written = {name: list(value) if isinstance(value, tuple) else value for name, value in rope.written}
    else:
        written = {name: getattr(rope, name) for name in ROPE_TYPES[rope.kind]}
    if rope.kind == "proportional" and rope.factor != 1.0:
        written["factor"] = rope.factor
    values = {"rope_type": rope.kind, **written}
    if rope.kind == "llama3":
        values["original_max_position_embeddings"] = rope.original_max_position
    old = {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else values}
    full = {"rope_theta": rope.theta, **values}
    if share or rope.partial != 1.0:
        full["partial_rotary_factor"] = old["partial_rotary_factor"] = rope.partial
    if sliding is None:
        return {**old, "rope_parameters": full}
    local = {"rope_type": "default", "rope_theta": sliding.theta}
    return {**old, "rope_parameters": {FULL: full, SLIDING: local}}
