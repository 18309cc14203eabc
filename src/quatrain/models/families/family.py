"""What a family file has, and what the families read and write alike.

Data flow: config.json -> `HFConfig` -> a family's `read` -> `Architecture`; its `write` goes the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quatrain.config.errors import shown
from quatrain.config.files import CORRECT, checked
from quatrain.models.architecture import Architecture, LayerKind
from quatrain.models.blocks.attention import Attention
from quatrain.models.blocks.mlp import Dense
from quatrain.models.hf_config import HFConfig, RopeConfig
from quatrain.models.layers import Norm
from quatrain.models.rope import Rope
from quatrain.models.spec import require

Json = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_TYPES = ("default", "linear", "llama3")


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
    read: Callable[[HFConfig, str], Architecture]
    """`read(config, source)`; errors name the file `source`."""
    write: Callable[[Architecture], Json]
    """The keys of config.json that differ between families."""
    gguf: GGUF


def read_common(
    family: str,
    c: HFConfig,
    mixers: Sequence[Attention],
    *,
    mlp_bias: bool = False,
    norms: Any = "pre",
    norm_offset: float = 0.0,
    **fields: Any,
) -> Architecture:
    """The architecture with these mixers, an MLP in each layer, and what all families have in config.json."""
    mlp = Dense(c.intermediate_size, c.hidden_activation or c.hidden_act or "silu", mlp_bias)
    return Architecture(
        family,
        c.vocab_size,
        c.hidden_size,
        tuple(LayerKind(mixer, mlp, norms) for mixer in mixers),
        c.max_position_embeddings or 2048,
        Norm(c.rms_norm_eps, norm_offset),
        tie_embeddings=bool(c.tie_word_embeddings),
        eos_token_ids=c.eos_token_id,
        bos_token_id=c.bos_token_id,
        pad_token_id=None if c.pad_token_id == -1 else c.pad_token_id,
        **fields,
    )


def read_attention(c: HFConfig, rope: Rope, window: int | None = None, **fields: Any) -> Attention:
    """The mixer with the sizes in config.json, and biases as `attention_bias` says unless `fields` do."""
    biases = {"qkv_bias": bool(c.attention_bias), "output_bias": bool(c.attention_bias)}
    return Attention(
        c.num_attention_heads,
        c.num_key_value_heads or c.num_attention_heads,
        c.head_dim or c.hidden_size // c.num_attention_heads,
        rope,
        window,
        **biases | fields,
    )


def by_layer_type(
    c: HFConfig, types: Sequence[str], mixer: Callable[[int | None], Attention]
) -> list[Attention]:
    """The mixer of each layer: `mixer(sliding window)` where the type is sliding, else `mixer(None)`."""
    typed = len(types) == c.num_hidden_layers and set(types) <= {FULL, SLIDING}
    require(typed, "layer_types", f"{c.num_hidden_layers} entries out of {FULL}, {SLIDING}", tuple(types))
    windows = {FULL: None, SLIDING: c.sliding_window or 0}
    made = {kind: mixer(windows[kind]) for kind in dict.fromkeys(types)}
    return [made[kind] for kind in types]


def read_rope(c: HFConfig, source: str, *, by_type: bool = False) -> Rope:
    """The rotary embeddings of all layers, or `by_type` of those with full attention.

    If `rope_scaling` is given, it replaces the scaling in `rope_parameters`, as in transformers.
    """
    written = c.rope_parameters or {}
    if not by_type and {FULL, SLIDING} & set(written):
        raise ValueError(
            f"{source} has rope_parameters for each type of layer, which only gemma3_text has: give one set"
        )
    parameters = _object(written.get(FULL) or {}, f"rope_parameters.{FULL}", source) or written
    if c.rope_scaling:
        parameters = {"rope_theta": c.rope_theta or parameters.get("rope_theta"), **c.rope_scaling}
    rope = checked(RopeConfig, parameters, f"{source}, rotary embeddings")
    theta = rope.rope_theta or c.rope_theta or 10_000.0
    kind = _rope_type(rope, c, source)
    if kind == "default":
        if rope.factor not in (None, 1.0):
            raise ValueError(
                f"{source}: a rope factor ({rope.factor}) needs a rope_type, such as linear; add it"
            )
        return Rope(theta)
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    missing = [name for name in needed if getattr(rope, name) is None]
    if missing:
        raise ValueError(f"{source}: the rope type {kind} needs {', '.join(missing)}; add the value")
    if kind == "linear":
        return Rope(theta, "linear", rope.factor or 1.0)
    low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 1.0
    if low >= high:
        raise ValueError(f"{source}: low_freq_factor must be below high_freq_factor; got {low} and {high}")
    lengths = c.original_max_position_embeddings, rope.original_max_position_embeddings
    original = next((length for length in (*lengths, c.max_position_embeddings) if length), None)
    if original is None:
        raise ValueError(f"{source}: the rope type llama3 needs original_max_position_embeddings; add it")
    return Rope(theta, "llama3", rope.factor or 1.0, low, high, original)


def read_sliding_rope(c: HFConfig, source: str) -> Rope:
    """The rotary embeddings of sliding-window layers that have their own; they are never scaled."""
    where = f"rope_parameters.{SLIDING}"
    local = _object((c.rope_parameters or {}).get(SLIDING) or {}, where, source)
    rope = checked(RopeConfig, local, f"{source}, {where}")
    if _rope_type(rope, c, source) != "default":
        raise ValueError(f"{SLIDING} layers must have rope_type default; {source} has {shown(local)}")
    return Rope(rope.rope_theta or c.rope_local_base_freq or 10_000.0)


def _object(value: Any, key: str, source: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{source}: {key} must be an object, not {shown(value)}; {CORRECT}")
    return value


def _rope_type(rope: RopeConfig, c: HFConfig, source: str) -> str:
    kind = rope.rope_type or rope.type or "default"
    if rope.type not in (None, kind):
        raise ValueError(f"{source} has the rope_type {shown(kind)} and type {shown(rope.type)}; remove one")
    if kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise ValueError(f"unsupported rope type {shown(kind)} in {source}; supported: {known}")
    partial = rope.partial_rotary_factor or c.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise ValueError(f"{source} has partial_rotary_factor = {partial}; only 1.0 is supported")
    return kind


def write_common(arch: Architecture) -> Json:
    """The keys of config.json that all families have."""
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
    }


def write_rope(rope: Rope, sliding: Rope | None = None) -> Json:
    """Rotary embeddings in the layouts of transformers 4 and 5, so that other engines can read either.

    `sliding`: those of sliding-window layers, if they have their own.
    """
    scaling: Json = {} if rope.kind == "default" else {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
    old = {"rope_theta": rope.theta, "rope_scaling": scaling or None}
    full = {"rope_type": "default", "rope_theta": rope.theta, **scaling}
    if sliding is None:
        return {**old, "rope_parameters": full}
    local = {"rope_type": "default", "rope_theta": sliding.theta}
    both = {FULL: full, SLIDING: local}
    return {**old, "rope_local_base_freq": sliding.theta, "rope_parameters": both}


def write_attention(arch: Architecture) -> Json:
    """The size of a head and `attention_bias`, which all families but Qwen 2 have."""
    mixer = arch.layers[0].mixer
    return {"head_dim": mixer.head_dim, "attention_bias": mixer.output_bias}


def layer_types(arch: Architecture) -> list[str]:
    """The attention type of each layer, as config.json names it."""
    return [SLIDING if kind.mixer.window else FULL for kind in arch.layers]


def sliding_window(arch: Architecture) -> int | None:
    """The sliding window of the layers that have one."""
    return next((kind.mixer.window for kind in arch.layers if kind.mixer.window), None)
