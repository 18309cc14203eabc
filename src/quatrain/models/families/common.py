"""What a file of a family has, and what the families read and write alike.

Data flow: config.json -> `HFConfig` -> a family's `read` -> `Architecture`; its `write` goes the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quatrain.config.errors import shown
from quatrain.models.architecture import Architecture, LayerKind
from quatrain.models.blocks.attention import Attention
from quatrain.models.blocks.mlp import Dense
from quatrain.models.hf_config import HFConfig, RopeConfig, RopeParameters
from quatrain.models.layers import Norm
from quatrain.models.rope import Rope
from quatrain.models.spec import require

Json = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""The supported kinds of rotary embeddings, and the values that each must have."""


class GGUF(NamedTuple):
    """What is particular to a family's GGUF files."""

    name: str
    """llama.cpp's name of the architecture."""
    permuted: bool = False
    """Whether the rows of queries and keys are in llama.cpp's rotary order (0, H/2, 1, H/2 + 1, ...)."""
    keys: Mapping[str, Any] = {}
    """The metadata that only this family has, and what llama.cpp takes for a missing value."""
    scaled_by_heads: int | None = None
    """Layers of the model whose queries are scaled by hidden size / heads, which llama.cpp knows by them."""


class Family(NamedTuple):
    """One family of models: its names, and how its config.json is read and written."""

    model_type: str
    hf_class: str
    """The name of its class in transformers, which config.json gives under `architectures`."""
    classifier: str
    """The class of a model with a score head."""
    defaults: Json
    """Values of keys that may be missing in config.json."""
    read: Callable[[HFConfig], Architecture]
    write: Callable[[Architecture], Json]
    """The keys of config.json that not all families have, or that differ from `write_common`."""
    gguf: GGUF


def architecture(
    family: str,
    c: HFConfig,
    mixers: Sequence[Attention],
    *,
    bias: bool = False,
    norms: Any = "pre",
    **fields: Any,
) -> Architecture:
    """The architecture with these mixers, an MLP in each layer, and what all families have in config.json."""
    mlp = Dense(c.intermediate_size, c.hidden_activation or c.hidden_act or "silu", bias)
    values: Json = {"norm": Norm(c.rms_norm_eps), "tie_embeddings": bool(c.tie_word_embeddings)} | fields
    return Architecture(
        family,
        c.vocab_size,
        c.hidden_size,
        tuple(LayerKind(mixer, mlp, norms) for mixer in mixers),
        c.max_position_embeddings or 2048,
        eos_token_ids=c.eos_token_id,
        bos_token_id=c.bos_token_id,
        pad_token_id=None if c.pad_token_id == -1 else c.pad_token_id,
        **values,
    )


def read_attention(c: HFConfig, rope: Rope, window: int | None = None, **fields: Any) -> Attention:
    """The mixer with the sizes in config.json, and biases as `attention_bias` says unless `fields` do."""
    heads, bias = c.num_attention_heads, bool(c.attention_bias)
    sizes = heads, c.num_key_value_heads or heads, c.head_dim or c.hidden_size // heads
    return Attention(*sizes, rope, window, **{"qkv_bias": bias, "output_bias": bias} | fields)


def by_layer_type(
    c: HFConfig, types: Sequence[str], mixer: Callable[[int | None], Attention]
) -> list[Attention]:
    """The mixer of each layer: `mixer(sliding window)` where the type is sliding, else `mixer(None)`."""
    typed = len(types) == c.num_hidden_layers and set(types) <= {FULL, SLIDING}
    require(typed, "layer_types", f"{c.num_hidden_layers} entries out of {FULL}, {SLIDING}", tuple(types))
    windows = {FULL: None, SLIDING: c.sliding_window or 0}
    made = {kind: mixer(windows[kind]) for kind in dict.fromkeys(types)}
    return [made[kind] for kind in types]


def read_rope(c: HFConfig, *, by_type: bool = False) -> Rope:
    """The rotary embeddings of all layers, or `by_type` of those with full attention.

    If `rope_scaling` is given, it replaces the scaling in `rope_parameters`, as in transformers.
    """
    written = c.rope_parameters or RopeParameters()
    if not by_type and written.model_fields_set & {FULL, SLIDING}:
        raise ValueError("rope_parameters for each type of layer, which only gemma3_text has: give one set")
    rope = written.full_attention or written
    theta = rope.rope_theta or c.rope_theta
    if c.rope_scaling and c.rope_scaling.model_fields_set:
        rope, theta = c.rope_scaling, c.rope_scaling.rope_theta or c.rope_theta or rope.rope_theta
    return _rope(rope, theta, c)


def read_sliding_rope(c: HFConfig) -> Rope:
    """The rotary embeddings of sliding-window layers that have their own; they are never scaled."""
    local = (c.rope_parameters and c.rope_parameters.sliding_attention) or RopeConfig()
    rope = _rope(local, local.rope_theta or c.rope_local_base_freq, c)
    if rope.kind != "default":
        raise ValueError(f"{SLIDING} layers must have rope_type default, not {rope.kind}")
    return rope


def _rope(rope: RopeConfig, theta: float | None, c: HFConfig) -> Rope:
    kind: Any = rope.rope_type or rope.type or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"unsupported rope type {shown(kind)}; supported: {', '.join(ROPE_TYPES)}")
    if rope.type not in (None, kind):
        raise ValueError(f"the rope_type {shown(kind)} and type {shown(rope.type)}; remove one")
    partial = rope.partial_rotary_factor or c.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor = {partial}; only 1.0 is supported")
    theta = theta or 10_000.0
    if kind == "default":
        if rope.factor not in (None, 1.0):
            raise ValueError(f"a rope factor ({rope.factor}) needs a rope_type, such as linear; add it")
        return Rope(theta)
    values: Json = {name: getattr(rope, name) for name in ROPE_TYPES[kind]}
    if None in values.values():
        raise ValueError(f"the rope type {kind} needs {', '.join(values)}; add the missing values")
    if kind == "linear":
        return Rope(theta, kind, **values)
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if low >= high:
        raise ValueError(f"low_freq_factor must be below high_freq_factor; got {low} and {high}")
    lengths = c.original_max_position_embeddings, rope.original_max_position_embeddings
    original = next((length for length in (*lengths, c.max_position_embeddings) if length), None)
    if original is None:
        raise ValueError("the rope type llama3 needs original_max_position_embeddings; add it")
    return Rope(theta, kind, **values, original_max_position=original)


def write_common(arch: Architecture) -> Json:
    """The keys of config.json that all families have, with the rotary embeddings of the first layer."""
    layer, eos = arch.layers[0], list(arch.eos_token_ids)
    return {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": layer.mlp.width,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": layer.mixer.num_heads,
        "num_key_value_heads": layer.mixer.num_kv_heads,
        "max_position_embeddings": arch.max_position,
        "rms_norm_eps": arch.norm.eps,
        "tie_word_embeddings": arch.tie_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "bos_token_id": arch.bos_token_id,
        "pad_token_id": arch.pad_token_id,
        **write_rope(layer.mixer.rope),
    }


def write_rope(rope: Rope, sliding: Rope | None = None) -> Json:
    """Rotary embeddings in the layouts of transformers 4 and 5, so that other engines can read either.

    `sliding`: those of sliding-window layers, if they have their own.
    """
    values = {"rope_type": rope.kind, **{name: getattr(rope, name) for name in ROPE_TYPES[rope.kind]}}
    if rope.kind == "llama3":
        values["original_max_position_embeddings"] = rope.original_max_position
    old = {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else values}
    full = {"rope_theta": rope.theta, **values}
    if sliding is None:
        return {**old, "rope_parameters": full}
    local = {"rope_type": "default", "rope_theta": sliding.theta}
    return {**old, "rope_local_base_freq": sliding.theta, "rope_parameters": {FULL: full, SLIDING: local}}


def write_attention(arch: Architecture) -> Json:
    """The size of a head and `attention_bias`, which all families but Qwen 2 have."""
    mixer = arch.layers[0].mixer
    return {"head_dim": mixer.head_dim, "attention_bias": mixer.output_bias}


def write_windows(arch: Architecture) -> Json:
    """The type of each layer, and the sliding window of those that have one."""
    windows = [kind.mixer.window for kind in arch.layers]
    types = [SLIDING if window else FULL for window in windows]
    return {"layer_types": types, "sliding_window": next(filter(None, windows), None)}
