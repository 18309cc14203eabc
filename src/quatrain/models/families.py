"""The supported model families: their differences, and the names in their Hugging Face configs and tensors.

Data flow: config.json -> `Architecture` -> parameters and forward pass; export goes the other way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from quatrain.config.errors import shown
from quatrain.config.files import CORRECT, checked
from quatrain.models.architecture import LAYER_TYPES, Architecture, RopeScaling
from quatrain.models.hf_config import HFConfig, RopeConfig

Json = dict[str, Any]
Path = tuple[str | int, ...]

ROPE_TYPES = ("default", "linear", "llama3")


class Family(NamedTuple):
    """How one family of models differs from the others."""

    hf_class: str
    """The name of its class in transformers, which config.json gives under `architectures`."""
    fixed: Json
    """Fields of `Architecture` that all its models have in common and that config.json does not contain."""
    defaults: Json
    """Values of keys that may be missing in config.json."""


_GEMMA: Json = {"norm_offset": 1.0, "post_norms": True, "scale_embeddings": True}
_GEMMA_DEFAULTS: Json = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN_DEFAULTS: Json = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {}, {"bos_token_id": 1, "eos_token_id": 2}),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True, "output_bias": False}, _QWEN_DEFAULTS),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, {**_QWEN_DEFAULTS, "head_dim": 128}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA, "qk_norm": True},
        {
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
    ),
}
"""The supported families, keyed by the `model_type` of config.json."""

_BUILTIN: dict[str, Json] = {
    "tiny": {
        "family": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position": 2048,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
    }
}


def builtin_architecture(name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Architecture:
    """The architecture of the model `builtin:NAME`, for a tokenizer of `vocab_size` tokens.

    `tiny` is a Llama of about 0.8 M parameters, small enough to train on two CPU cores in minutes.
    Raises ValueError for an unknown name.
    """
    if name not in _BUILTIN:
        known = ", ".join(f"builtin:{known}" for known in _BUILTIN)
        raise ValueError(f"unknown builtin model builtin:{name}; the builtin models are: {known}")
    return Architecture(vocab_size=vocab_size, eos_token_ids=eos_token_ids, **_BUILTIN[name])


def architecture_from_hf(config: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """The architecture that the values of a Hugging Face config.json describe; `source` names the file.

    Reads the layout of transformers 5 (`rope_parameters`) and the older one (`rope_theta`,
    `rope_scaling`, `rope_local_base_freq`); a missing key takes the same default as in transformers.
    Raises ValueError for a value of the wrong type or outside its bounds (`hf_config.HFConfig`), and for a
    `model_type`, RoPE type, activation or feature that the decoder does not support.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"unsupported model_type {shown(family)} in {source}; supported: {known}")
    values = {**FAMILIES[family].defaults, **config}
    _refuse_unsupported(family, values, source)
    c = checked(HFConfig, values, source)
    theta, scaling = _rope(c, source)
    window, layer_types = _attention_pattern(family, c)
    gemma = family.startswith("gemma")
    return Architecture(
        family=family,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads or c.num_attention_heads,
        head_dim=c.head_dim or c.hidden_size // c.num_attention_heads,
        max_position=c.max_position_embeddings or 2048,
        norm_eps=c.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=_local_rope_theta(c, source) if family == "gemma3_text" else None,
        tie_embeddings=bool(c.tie_word_embeddings),
        mlp_bias=family == "llama" and bool(c.mlp_bias),
        activation=c.hidden_activation or c.hidden_act or "silu",
        query_pre_attn_scalar=c.query_pre_attn_scalar if gemma else None,
        attention_softcap=c.attn_logit_softcapping if gemma else None,
        final_softcap=c.final_logit_softcapping if gemma else None,
        sliding_window=window,
        layer_types=layer_types,
        eos_token_ids=c.eos_token_id,
        bos_token_id=c.bos_token_id,
        pad_token_id=None if c.pad_token_id == -1 else c.pad_token_id,
        **{
            "qkv_bias": bool(c.attention_bias),
            "output_bias": bool(c.attention_bias),
            **FAMILIES[family].fixed,
        },
    )


def _refuse_unsupported(family: str, c: Json, source: str) -> None:
    """Raises ValueError for config values that the decoder does not support and would otherwise ignore."""
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in required if c.get(key) is None]
    if missing:
        raise ValueError(f"{source} of a {family} model lacks the required keys {', '.join(missing)}")
    unsupported = {
        "quantization_config": "quantised weights are not supported: use the original model or a .gguf file",
        "use_bidirectional_attention": "only causal attention is supported",
    }
    for key, remedy in unsupported.items():
        if c.get(key):
            raise ValueError(f"{source} has {key} = {shown(c[key])}: {remedy}")
    if family == "gemma3_text" and c.get("attn_logit_softcapping") is not None:
        raise ValueError(
            f"{source} has attn_logit_softcapping = {shown(c['attn_logit_softcapping'])}, which gemma3_text "
            "does not have: set it to null"
        )
    rope = c.get("rope_parameters")
    if family != "gemma3_text" and isinstance(rope, Mapping) and set(LAYER_TYPES) & set(rope):
        raise ValueError(
            f"{source} has rope_parameters for each type of layer, which only gemma3_text has: give one set"
        )


def _rope(c: HFConfig, source: str) -> tuple[float, RopeScaling | None]:
    """RoPE theta and scaling of the layers with full attention.

    If `rope_scaling` is given, it replaces the scaling in `rope_parameters`, as in transformers.
    """
    written = c.rope_parameters or {}
    full = written.get("full_attention") or {}
    _require_object(full, "rope_parameters.full_attention", source)
    parameters = full or written
    if c.rope_scaling:
        parameters = {"rope_theta": c.rope_theta or parameters.get("rope_theta"), **c.rope_scaling}
    rope = checked(RopeConfig, parameters, f"{source}, rotary embeddings")
    theta = rope.rope_theta or c.rope_theta or 10_000.0
    kind = _rope_type(rope, c, source)
    if kind == "default" and rope.factor not in (None, 1.0):
        raise ValueError(f"{source}: a rope factor ({rope.factor}) needs a rope_type, such as linear; add it")
    if kind == "default":
        return theta, None
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    missing = [name for name in needed if getattr(rope, name) is None]
    if missing:
        raise ValueError(f"{source}: the rope type {kind} needs {', '.join(missing)}; add the value")
    factor = rope.factor or 1.0
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 1.0
    if low >= high:
        raise ValueError(f"{source}: low_freq_factor must be below high_freq_factor; got {low} and {high}")
    original = (
        c.original_max_position_embeddings
        or rope.original_max_position_embeddings
        or c.max_position_embeddings
    )
    if original is None:
        raise ValueError(f"{source}: the rope type llama3 needs original_max_position_embeddings; add it")
    return theta, RopeScaling("llama3", factor, low, high, original)


def _local_rope_theta(c: HFConfig, source: str) -> float:
    """RoPE theta of sliding-window layers, whose frequencies are never scaled."""
    local = (c.rope_parameters or {}).get("sliding_attention") or {}
    _require_object(local, "rope_parameters.sliding_attention", source)
    rope = checked(RopeConfig, local, f"{source}, rope_parameters.sliding_attention")
    if _rope_type(rope, c, source) != "default":
        raise ValueError(f"sliding_attention layers must have rope_type default; {source} has {shown(local)}")
    return rope.rope_theta or c.rope_local_base_freq or 10_000.0


def _require_object(value: object, key: str, source: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{source}: {key} must be an object, not {shown(value)}; {CORRECT}")


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


def _attention_pattern(family: str, c: HFConfig) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window and each layer's attention type; (None, ()) if all layers have full attention."""
    full, sliding = LAYER_TYPES
    layers = range(c.num_hidden_layers)
    window = c.sliding_window
    if family == "llama":
        types = [full for _ in layers]
    elif family.startswith("qwen"):
        window = window if c.use_sliding_window else None
        first = c.max_window_layers if window is not None else c.num_hidden_layers
        types = c.layer_types or [sliding if i >= first else full for i in layers]
    else:
        pattern = 2 if family == "gemma2" else c.sliding_window_pattern or 6
        types = c.layer_types or [sliding if (i + 1) % pattern else full for i in layers]
    return (window, tuple(types)) if set(types) != {full} else (None, ())


def architecture_to_hf(arch: Architecture) -> Json:
    """The contents of a config.json, except the dtype, from which transformers 4 and 5 build the same model.

    RoPE settings are written in the layouts of both versions, so that other engines can read either.
    """
    eos = list(arch.eos_token_ids)
    config: Json = {
        "architectures": [_hf_class(arch)],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "max_position_embeddings": arch.max_position,
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tie_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "bos_token_id": arch.bos_token_id,
        "pad_token_id": arch.pad_token_id,
        **_rope_to_hf(arch),
    }
    if arch.head == "score":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if arch.family != "qwen2":
        config |= {"head_dim": arch.head_dim, "attention_bias": arch.output_bias}
    elif arch.head_dim * arch.num_heads != arch.hidden_size:
        config["head_dim"] = arch.head_dim
    if arch.family == "llama":
        return {**config, "hidden_act": arch.activation, "mlp_bias": arch.mlp_bias}
    layer_types = [arch.layer_type(i) for i in range(arch.num_layers)]
    config["layer_types"] = layer_types
    if arch.family.startswith("qwen"):
        full_first = [*layer_types, LAYER_TYPES[1]].index(LAYER_TYPES[1])
        return {
            **config,
            "sliding_window": arch.sliding_window,
            "hidden_act": arch.activation,
            "use_sliding_window": arch.sliding_window is not None,
            "max_window_layers": full_first,
        }
    if arch.family == "gemma3_text" and arch.sliding_window is None:
        config["sliding_window_pattern"] = 1  # for readers that do not know layer_types
    return {
        **config,
        # transformers makes masks of sliding windows for a Gemma model without any, and needs a size.
        "sliding_window": arch.sliding_window or arch.max_position,
        "hidden_activation": arch.activation,
        "query_pre_attn_scalar": arch.query_pre_attn_scalar,
        "attn_logit_softcapping": arch.attention_softcap,
        "final_logit_softcapping": arch.final_softcap,
    }


def _hf_class(arch: Architecture) -> str:
    """The class in transformers: with a score head, the sequence-classification class of the text model."""
    name = FAMILIES[arch.family].hf_class
    if arch.head == "vocabulary":
        return name
    return name.replace("Gemma3", "Gemma3Text").replace("CausalLM", "SequenceClassification")


def _rope_to_hf(arch: Architecture) -> Json:
    scaling = arch.rope_scaling
    stretch: Json = {}
    if scaling is not None:
        stretch = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        stretch |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    full = {"rope_type": "default", "rope_theta": arch.rope_theta, **stretch}
    old = {"rope_theta": arch.rope_theta, "rope_scaling": stretch or None}
    if arch.local_rope_theta is None:
        return {**old, "rope_parameters": full}
    local = {"rope_type": "default", "rope_theta": arch.local_rope_theta}
    return {
        **old,
        "rope_local_base_freq": arch.local_rope_theta,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


class TensorName(NamedTuple):
    """A tensor of a Hugging Face checkpoint: its name, the path of the parameter, and the slice it fills."""

    name: str
    path: Path
    part: Any = ...
    vector: bool = True

    def shape_in(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this tensor, given the shape of its parameter; needs no memory."""
        part = np.broadcast_to(np.empty(()), parameter)[self.part].shape
        return (math.prod(part),) if self.vector else (math.prod(part[:-1]), part[-1])

    def rows(self, parameter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(`parameter` as a list of rows, row numbers that this tensor fills, in the order of the tensor).

        A parameter [*out, in] has prod(out) rows; if the tensor is a vector, each element is a row.
        """
        shape = parameter.shape if self.vector else parameter.shape[:-1]
        own = np.arange(math.prod(shape)).reshape(shape)[self.part].reshape(-1)
        return parameter.reshape(-1, *parameter.shape[len(shape) :]), own

    def of(self, parameter: np.ndarray) -> np.ndarray:
        """This tensor's slice of `parameter`: [out, in], or [out] for a vector."""
        part = parameter[self.part]
        return np.ascontiguousarray(part.reshape(-1) if self.vector else part.reshape(-1, part.shape[-1]))


_LINEAR: dict[str, tuple[str, Any]] = {
    "self_attn.q_proj": ("qkv", np.s_[:, :-2]),
    "self_attn.k_proj": ("qkv", np.s_[:, -2]),
    "self_attn.v_proj": ("qkv", np.s_[:, -1]),
    "self_attn.o_proj": ("o", ...),
    "mlp.gate_proj": ("gate_up", np.s_[0]),
    "mlp.up_proj": ("gate_up", np.s_[1]),
    "mlp.down_proj": ("down", ...),
}
_QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_PRE_AND_POST_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def adapter_names(arch: Architecture) -> list[TensorName]:
    """All tensors of an adapter of `arch.lora` in peft's names: A [r, in] and B [out, r] of each matrix."""
    blocks = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2}
    blocks |= {"mlp.gate_proj": 0, "mlp.up_proj": 1}
    names = []
    for i in range(arch.num_layers):
        for module, (key, part) in _LINEAR.items():
            if arch.lora is None or key not in arch.lora.targets:
                continue
            start, own = f"base_model.model.model.layers.{i}.{module}", blocks.get(module, ...)
            a, b = (("layers", i, f"{key}_lora_{letter}") for letter in "ab")
            names.append(TensorName(f"{start}.lora_A.weight", a, own, vector=False))
            names.append(TensorName(f"{start}.lora_B.weight", b, part, vector=False))
    return names


def tensor_names(arch: Architecture) -> list[TensorName]:
    """All tensors of a Hugging Face checkpoint of `arch`."""
    names = [
        TensorName("model.embed_tokens.weight", ("embed",), vector=False),
        TensorName("model.norm.weight", ("final_norm",)),
    ]
    if arch.head == "score":
        names.append(TensorName("score.weight", ("score",), vector=False))
    elif not arch.tie_embeddings:
        names.append(TensorName("lm_head.weight", ("lm_head",), vector=False))
    norms = {
        **(_PRE_AND_POST_NORMS if arch.post_norms else _PRE_NORMS),
        **(_QK_NORMS if arch.qk_norm else {}),
    }
    biased = {"qkv": arch.qkv_bias, "o": arch.output_bias, "gate_up": arch.mlp_bias, "down": arch.mlp_bias}
    for i in range(arch.num_layers):
        for module, (key, part) in _LINEAR.items():
            names.append(
                TensorName(f"model.layers.{i}.{module}.weight", ("layers", i, key), part, vector=False)
            )
            if biased[key]:
                names.append(
                    TensorName(f"model.layers.{i}.{module}.bias", ("layers", i, f"{key}_bias"), part)
                )
        for key, module in norms.items():
            names.append(TensorName(f"model.layers.{i}.{module}.weight", ("layers", i, key)))
    return names
