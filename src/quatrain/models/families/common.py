"""What a file of a family has, and what the families read and write alike.

Data flow: config.json -> `HFConfig` -> a family's `read` -> `Architecture`; its `write` goes the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quatrain.models.architecture import PRE, Architecture, LayerKind, Mixer, Norms
from quatrain.models.blocks.attention import Attention
from quatrain.models.blocks.experts import Experts
from quatrain.models.blocks.mlp import Dense
from quatrain.models.families.gguf import GGUF
from quatrain.models.families.ropes import FULL, SLIDING, write_rope
from quatrain.models.hf_config import HFConfig
from quatrain.models.layers import Norm
from quatrain.models.rope import Rope
from quatrain.models.spec import require

Json = dict[str, Any]


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
    gguf: GGUF | None
    """None: its GGUF files are not read."""
    omitted: tuple[str, ...] = ()
    """Keys of `write_common` that its config.json must not have."""


def architecture(
    family: str,
    c: HFConfig,
    mixers: Sequence[Mixer],
    mlps: Sequence[Dense | Experts] = (),
    *,
    bias: bool = False,
    fused: bool = False,
    norms: Norms = PRE,
    residual_scale: float = 1.0,
    **fields: Any,
) -> Architecture:
    """The architecture with these mixers and MLPs, and what all families have in config.json.

    Without `mlps`, every layer has a dense one.
    """
    mlps = mlps or [Dense(c.intermediate_size, activation(c), bias, fused)] * len(mixers)
    values: Json = {"norm": Norm(c.rms_norm_eps), "tie_embeddings": bool(c.tie_word_embeddings)} | fields
    return Architecture(
        family,
        c.vocab_size,
        c.hidden_size,
        tuple(LayerKind(*blocks, norms, residual_scale) for blocks in zip(mixers, mlps, strict=True)),
        c.max_position_embeddings or 2048,
        eos_token_ids=c.eos_token_id,
        bos_token_id=c.bos_token_id,
        pad_token_id=None if c.pad_token_id == -1 else c.pad_token_id,
        **values,
    )


def activation(c: HFConfig) -> str:
    """The activation of MLPs."""
    return c.hidden_activation or c.hidden_act or "silu"


def read_attention(c: HFConfig, rope: Rope | None, window: int | None = None, **fields: Any) -> Attention:
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


def write_common(arch: Architecture) -> Json:
    """The keys of config.json that all families have, with the rotary embeddings of the first layer."""
    layer, mixer, eos = arch.layers[0], arch.attentions[0], list(arch.eos_token_ids)
    return {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": layer.mlp.width,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "max_position_embeddings": arch.max_position,
        "rms_norm_eps": arch.norm.eps,
        "tie_word_embeddings": arch.tie_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "bos_token_id": arch.bos_token_id,
        "pad_token_id": arch.pad_token_id,
        **write_rope(next(filter(None, (kind.mixer.rope for kind in arch.kinds)), Rope())),
    }


def write_attention(arch: Architecture, *, always: bool = True) -> Json:
    """`attention_bias` and the size of a head; unless `always`, only where this is not hidden size /
    heads."""
    mixer = arch.attentions[0]
    return {**write_head_dim(arch, always=always), "attention_bias": mixer.qkv_bias}


def write_head_dim(arch: Architecture, *, always: bool = False) -> Json:
    """The size of a head, which the configurations of some families have only if it is unusual."""
    mixer = arch.attentions[0]
    usual = mixer.head_dim * mixer.num_heads == arch.hidden_size
    return {} if usual and not always else {"head_dim": mixer.head_dim}


def write_windows(arch: Architecture, *, always: bool = False) -> Json:
    """The type of each layer, and the sliding window of those that have one.

    `always`: a size also where none has; transformers makes the mask of such windows for some families
    anyway.
    """
    windows = [kind.mixer.window for kind in arch.layers]
    types = [SLIDING if window else FULL for window in windows]
    size = next(filter(None, windows), arch.max_position if always else None)
    return {"layer_types": types, "sliding_window": size}
